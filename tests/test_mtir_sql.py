"""MTIR-SQL: what it asks and reads, its rewards on numbers worked out by hand, and whole episodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import GOLD, QUESTION, say
from transformers import AutoTokenizer

from mtsql.agent.env import NO_TOOL, UNAVAILABLE, Environment, Limits
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, make_tools
from mtsql.agent.trajectory import Status
from mtsql.data.datasets import Example, HistoryTurn
from mtsql.learn.samples import Sample, group_metrics
from mtsql.recipes.mtir_sql import MAX_CHARACTERS, RETHINK, TOOL, make_recipe, make_reward
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.sql.score import Scorer

QWEN3 = Path(__file__).parents[2] / "shared" / "data" / "tokenizer_qwen3"
LONG = Limits(max_interactions=5, max_prompt_tokens=20_000, max_response_tokens=40_000)
EXAMPLE = Example("00000/0", "00000", "music", 0, QUESTION, GOLD, ())
WRONG = "SELECT name FROM singer WHERE country = 'italy'"
BROKEN = "SELECT nam FROM singer"
THINK = "<think>\nIn {braces} I think of <tool_call>.\n</think>\n\n"
PAPER, COMPACT, NATIVE = PromptOptions(), PromptOptions(compact=True), PromptOptions(native_thinking=True)
RECIPE = make_recipe(PAPER)


def call(sql: str, name: str = TOOL, **arguments) -> str:
    content = json.dumps({"name": name, "arguments": {"sql": sql, **arguments}})
    return f"<tool_call>\n{content}\n</tool_call>"


def answer(sql: str) -> str:
    return f"<answer>\n```sql\n{sql}\n```\n</answer>"


def play(tiny, *messages, tools="no_memory", limits=LONG, options=PAPER, example=EXAMPLE):
    """An episode after the messages; all but the last leave it open."""
    recipe = make_recipe(options)
    environment = Environment(
        {"music": tiny.schema}, recipe, tiny.tokens, tiny.executor, limits, make_tools(tools)
    )
    episode = environment.episodes(example, [0])[0]
    open_after = [say(episode, message) for message in messages]
    assert all(open_after[:-1])
    return episode


def rewards(tiny, episode, named=""):
    scorer = Scorer({"music": tiny.schema}, tiny.executor)
    return make_reward(named, scorer, tiny.tokens.decode, 6)(episode.trajectory, episode.example)


# Equations 5 to 7: R_f, R_e, R_r, then their sum.
@pytest.mark.parametrize(
    ("message", "parts", "total", "ex"),
    [
        (THINK + answer(GOLD), (0.1, 0.1, 1), 1.2, 1),
        (THINK + answer(WRONG), (0.1, 0.1, -1), -0.8, 0),
        (THINK + answer(BROKEN), (0.1, -0.1, 0), 0.0, 0),
        (THINK + answer("DROP TABLE singer"), (0.1, -0.1, 0), 0.0, 0),
        (answer(GOLD), (-0.1, 0, 0), -0.1, 1),  # right, but without the thought
        (THINK + f"<answer>{GOLD}</answer>", (-0.1, 0, 0), -0.1, 1),
        (THINK + "no idea", (-0.1, 0, 0), -0.1, 0),  # never answered
    ],
)
def test_equations_5_to_7(tiny, message, parts, total, ex):
    r = rewards(tiny, play(tiny, message))
    assert tuple(r.parts[name] for name in ("format", "execution", "result")) == parts
    assert r.total == pytest.approx(total, abs=1e-12)
    assert r.ex == ex


def test_filter_drops_what_is_invalid_and_keeps_wrong_answers(tiny):
    messages = (THINK + answer(GOLD), THINK + answer(WRONG), THINK + answer(BROKEN), answer(GOLD))
    assert [rewards(tiny, play(tiny, m)).kept for m in messages] == [True, True, False, False]
    assert all(rewards(tiny, play(tiny, m), "unfiltered").kept for m in messages)


def test_the_log_says_how_much_the_filter_leaves_out(tiny):
    episodes = [play(tiny, THINK + answer(GOLD)), play(tiny, answer(GOLD))]  # the second has no thought
    samples = [Sample(e.trajectory, e.example, rewards(tiny, e)) for e in episodes]
    row = group_metrics([samples], torch.tensor([True]), 0, 1.0, tiny.tokens.decode)
    assert row["left_out"] == 0.5


def test_weights_leave_parts_and_filter_alone(tiny):
    episode = play(tiny, THINK + answer(WRONG))
    r = rewards(tiny, episode, "format=0,result=2")
    assert r.total == pytest.approx(0.1 - 2)
    assert (r.parts, r.kept) == (rewards(tiny, episode).parts, rewards(tiny, episode).kept)
    with pytest.raises(ValueError, match="one of format, execution, result, tau"):
        rewards(tiny, episode, "ex=1")


def test_a_call_then_the_answer(tiny):
    episode = play(tiny, THINK + call(GOLD, db_name="../other"), THINK + answer(GOLD))  # db_name is not read
    t = episode.trajectory
    assert (t.status, t.answer_sql, t.off_protocol) == (Status.ANSWERED, GOLD, 0)
    (seen,) = t.observations
    assert (seen.tool, seen.outcome) == (EXEC_SQL, "ok")
    assert json.loads(seen.text) == {"columns": ["name"], "data": [["Bruno"]]}
    assert rewards(tiny, episode).total == pytest.approx(1.2)


@pytest.mark.parametrize("bad", [THINK + "It is Bruno.", "<tool_call>\nnot json\n</tool_call>", "<think>and"])
def test_rethink_then_answered(tiny, bad):
    episode = play(tiny, bad, THINK + answer(GOLD))
    t = episode.trajectory
    assert [(o.tool, o.text) for o in t.observations] == [(NO_TOOL, RETHINK)]
    assert RETHINK in tiny.tokens.decode(list(t.segments[2].ids))
    assert (t.status, t.answer_sql) == (Status.ANSWERED, GOLD)
    r = rewards(tiny, episode)
    assert (r.ex, r.total) == (1, -0.1)  # the format was lost on the way


def test_rethink_until_the_interactions_are_spent(tiny):
    episode = play(tiny, *["no idea"] * 6)
    t = episode.trajectory
    assert (t.status, t.messages, t.answer_sql) == (Status.NO_ACTION, 6, None)
    assert len(t.observations) == 5
    assert rewards(tiny, episode).total == -0.1


@pytest.mark.parametrize("name", ["drop_everything", MEMORY_RETRIEVE])
def test_a_tool_that_is_not_there_costs_the_format(tiny, name):
    episode = play(tiny, THINK + call(GOLD, name), THINK + answer(GOLD), tools="both")
    t = episode.trajectory
    assert [(o.tool, o.text) for o in t.observations] == [(UNAVAILABLE, RETHINK)]
    assert t.status is Status.ANSWERED
    assert rewards(tiny, episode).parts["format"] == -0.1


def test_single_turn(tiny):
    episode = play(tiny, THINK + answer(GOLD), tools="none")
    prompt = tiny.tokens.decode(list(episode.trajectory.segments[0].ids))
    assert "tool" not in prompt.lower() and "Option" not in prompt
    assert prompt.count("<think>\nYour final analysis...\n</think>\n<answer>") == 1
    assert rewards(tiny, episode).total == pytest.approx(1.2)
    episode = play(tiny, THINK + call(GOLD), THINK + answer(GOLD), tools="none")
    assert [o.tool for o in episode.trajectory.observations] == [UNAVAILABLE]
    assert rewards(tiny, episode).total == -0.1


def test_result_has_ten_records_errors_their_message(tiny):
    twelve = (
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 12) SELECT i, i AS i FROM n"
    )
    blob = "SELECT x'00ff', null, 'Zoë <|im_end|>'"
    episode = play(tiny, *(THINK + call(sql) for sql in (twelve, blob, BROKEN)))
    ten, cells, error = (o.text for o in episode.trajectory.observations)
    assert json.loads(ten) == {"columns": ["i", "i"], "data": [[i, i] for i in range(1, 11)]}
    assert json.loads(cells)["data"] == [["b'\\x00\\xff'", None, "Zoë <|im_end|>"]]
    assert error == "Error: no such column: nam"
    long = tiny.executor.execute(tiny.schema.path, "SELECT printf('%.9999c', 'a') AS a, * FROM singer")
    assert sum(len(row[0]) for row in long.rows) == 3 * 9999
    shown = RECIPE.observe_execution(QUESTION, "", long, False, 5)
    assert shown.startswith('{"columns": ["a", "id", ') and len(shown) == MAX_CHARACTERS + len("...")


@pytest.mark.parametrize(
    ("text", "tool", "sql", "well_formed"),
    [
        (THINK + call("SELECT 1"), EXEC_SQL, "SELECT 1", True),
        (THINK + call("SELECT 1") + "\n" + call("SELECT 2"), EXEC_SQL, "SELECT 1", True),
        (THINK + call("SELECT 1", "eval"), UNAVAILABLE, "SELECT 1", False),
        (THINK + call("SELECT 1", EXEC_SQL), UNAVAILABLE, "SELECT 1", False),
        (call("SELECT 1"), EXEC_SQL, "SELECT 1", False),
        (THINK + THINK + call("SELECT 1"), EXEC_SQL, "SELECT 1", False),
        (THINK + "So: " + call("SELECT 1"), EXEC_SQL, "SELECT 1", False),
        (THINK + call("SELECT 1") + answer("SELECT 2"), EXEC_SQL, "SELECT 1", False),
        (THINK + answer("SELECT 2") + call("SELECT 1"), EXEC_SQL, "SELECT 1", False),
        (THINK + call("SELECT 1") + "<tool_response>1</tool_response>", EXEC_SQL, "SELECT 1", False),
    ],
)
def test_calls_are_read(text, tool, sql, well_formed):
    message = RECIPE.parse(text)
    assert (message.tool, message.sql, message.well_formed) == (tool, sql, well_formed)
    assert message.answer is None and message.problem is None


@pytest.mark.parametrize(
    ("text", "sql", "well_formed"),
    [
        (THINK + answer("SELECT 1\nFROM t"), "SELECT 1\nFROM t", True),
        (THINK + "<answer>SELECT 1</answer>", "SELECT 1", False),
        (THINK + "<answer>\n```sql\nSELECT 1\n</answer>", "SELECT 1", False),  # as C.2 shows it
        (THINK + "<answer>```SQLite\nSELECT 1```</answer>", "SELECT 1", False),
        (THINK + "<answer>Here: ```sql\nSELECT 1\n```</answer>", "SELECT 1", False),
        (THINK + answer("SELECT 1") + answer("SELECT 2"), "SELECT 2", False),
        (THINK + "In <answer>: " + answer("SELECT 1"), "SELECT 1", False),
        ("I am sure.</think>" + answer("SELECT 1"), "SELECT 1", False),
    ],
)
def test_answers_are_read(text, sql, well_formed):
    message = RECIPE.parse(text)
    assert (message.answer, message.well_formed, message.tool) == (sql, well_formed, None)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", Status.NO_ACTION),
        ("```sql\nSELECT 1\n```", Status.NO_ACTION),
        ("<answer>```sql\n```</answer>", Status.NO_ACTION),
        ("<answer>SELECT 1", Status.NO_ACTION),
        ("</answer><answer>", Status.NO_ACTION),
        (f"<think>{answer('SELECT 1')}{call('SELECT 1')}", Status.NO_ACTION),
        (f"<think>{answer('SELECT 1')}</think>", Status.NO_ACTION),
        ("<tool_call>SELECT 1</tool_call>", Status.MALFORMED_CALL),
        (call("SELECT 1").removesuffix("</tool_call>"), Status.MALFORMED_CALL),
        (call("SELECT 1").replace('"sql"', '"code"'), Status.MALFORMED_CALL),
        (call("SELECT 1").replace('"SELECT 1"', "7"), Status.MALFORMED_CALL),
        ('<tool_call>{"name": "a", "arguments": "SELECT 1"}</tool_call>', Status.MALFORMED_CALL),
        ("<tool_call>null</tool_call>", Status.MALFORMED_CALL),
        (call("\ud800"), Status.MALFORMED_CALL),
        (f"<tool_call>{DEEP}</tool_call>", Status.MALFORMED_CALL),
        (f"<tool_call>{'1' * 5000}</tool_call>", Status.MALFORMED_CALL),
    ],
)
@pytest.mark.parametrize("options", [PAPER, COMPACT])
def test_messages_without_an_action(text, problem, options):
    message = make_recipe(options).parse(text)
    assert (message.problem, message.tool, message.sql, message.answer) == (problem, None, None, None)
    assert not message.well_formed


@pytest.mark.parametrize("options", [COMPACT, NATIVE])
@pytest.mark.parametrize("thought", ["", THINK, "opened by the template</think>"])
@pytest.mark.parametrize("action", [call("SELECT 1"), answer("SELECT 1")])
def test_thought_is_optional_in_compact_wording_and_with_native_thinking(options, thought, action):
    parse = make_recipe(options).parse
    assert parse(thought + action).well_formed
    assert not parse(thought + "So: " + action).well_formed


@pytest.mark.parametrize("sql", [GOLD, 'SELECT "a\\"\nFROM t -- ü {x}'])
def test_what_the_recipe_writes_it_reads(sql):
    assert (m := RECIPE.parse(THINK + RECIPE.call(sql))).sql == sql and m.well_formed
    assert (m := RECIPE.parse(THINK + RECIPE.answer(sql))).answer == sql and m.well_formed


def test_paper_prompt(tiny):
    earlier = HistoryTurn("How many {singers}?", "SELECT count(*) FROM singer")
    example = replace(EXAMPLE, history=(earlier,), knowledge="France is 'france'")
    ((message,), tools) = RECIPE.prompt(example, tiny.schema, make_tools("no_memory"))
    assert message["role"] == "user" and [t["function"]["name"] for t in tools] == [TOOL]
    content = message["content"]
    assert content.startswith("You are a helpful SQL expert assistant.\nYou should first think about how to")
    assert f"Database: music\nDatabase Schema:\n{tiny.schema.text(compact=False)}\n" in content
    order = [
        "Database Schema:",
        "1. How many {singers}?",
        "SQL: SELECT count(*)",
        "User Question:\nFrance is",
    ]
    places = [content.index(part) for part in [*order, f"'france'\n{QUESTION}\n\nRequirements\n1. Precision"]]
    assert places == sorted(places)
    assert "external knowledge, then validate your SQL with the tool until it is correct. Finally" in content
    assert content.endswith(
        "Option A (when validation needed):\n<think>\nYour analysis...\n</think>\n[Tool calls for validation]"
        "\n\nOption B (final answer):\n<think>\nYour final analysis...\n</think>\n<answer>\n```sql\n"
        "YOUR_SQL_QUERY\n```\n</answer>"
    )
    ((native,), _) = make_recipe(NATIVE).prompt(example, tiny.schema, make_tools("no_memory"))
    assert "<think>" not in native["content"] and "[Tool calls for validation]" in native["content"]


def test_compact_episode(tiny):
    earlier = HistoryTurn("How many singers?", "SELECT 1")
    example = replace(EXAMPLE, history=(earlier,), knowledge="no cities")
    episode = play(tiny, call(GOLD), answer(GOLD), options=COMPACT, example=example)
    prompt = tiny.tokens.decode(list(episode.trajectory.segments[0].ids))
    lines = ["1. How many singers?", "SELECT 1", "no cities", f"now: {QUESTION}", "calls: sql"]
    assert "\n".join([tiny.schema.text(compact=True), *lines]) in prompt
    assert [o.text for o in episode.trajectory.observations] == ["Bruno"]
    assert rewards(tiny, episode).total == pytest.approx(1.2)
    (alone, _) = make_recipe(COMPACT).prompt(EXAMPLE, tiny.schema, {})
    assert alone[0]["content"].endswith(f"\nnow: {QUESTION}\ncalls: none")


def test_qwen3_template_writes_the_tools_of_c1(tiny):
    if not QWEN3.exists():
        pytest.skip(f"needs the real Qwen3 tokenizer in {QWEN3}")
    tokens = ChatTokens(AutoTokenizer.from_pretrained(QWEN3))
    prompt = tokens.decode(tokens.prompt_ids(*RECIPE.prompt(EXAMPLE, tiny.schema, make_tools("no_memory"))))
    system, _, user = prompt.partition("<|im_end|>\n<|im_start|>user\n")
    # Appendix C.1, but for "##Tools", "JSON object", and the broken last tag.
    for sentence in (
        "# Tools\n\nYou may call one or more functions to assist with the user query.",
        "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
        '"name": "sql-execute_sql_query", "description": "Execute SQL query and return partial results '
        "containing column names (maximum 10 records).",
        '"parameters": {"type": "object", "properties": {"db_name": {"title": "Db Name", "type": "string"}, '
        '"sql": {"title": "Sql", "type": "string"}}, "required": ["db_name", "sql"]}',
        "For each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n"
        '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    ):
        assert sentence in system
    assert user.startswith("You are a helpful SQL expert assistant.")
    # Section 3.2: results go into the user's turn.
    suffix = tokens.decode(tokens.observation_suffix("[]", True, RECIPE.observation_role))
    assert "<|im_start|>user\n<tool_response>\n[]\n</tool_response>" in suffix
