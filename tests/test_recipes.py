"""What the recipes read and show, whole episodes, and the rewards of all but MTSQL-R1.

Their prompts are in test_paper_prompts.py, Equation 1 in test_env.py, MTSQL-R1's rewards in test_rewards.py.
"""

import json
from dataclasses import replace

import pytest
import torch
from conftest import EXAMPLE, GOLD, answer_to, environment_of
from hostile import STATEMENTS

from evaluate import Args as EvaluateArgs
from mtsql.agent.env import NO_TOOL, UNAVAILABLE, Limits
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Status, Stop
from mtsql.config import read_options
from mtsql.learn.samples import Sample, group_metrics
from mtsql.recipes import RECIPES, load_recipe
from mtsql.recipes.mtir_sql import MAX_CHARACTERS, TOOL
from mtsql.recipes.prompt_options import PromptOptions, write_call
from mtsql.recipes.sql_trail import bigrams, jaccard, schema_items, turns_reward
from mtsql.sql.execute import ExecutionResult
from mtsql.sql.grammar import SqlSchema
from train_grpo import Args as GrpoArgs
from train_sft import Args as SftArgs

R1, SKYRL, TRAIL, MTIR = RECIPES
OTHERS = (SKYRL, TRAIL, MTIR)  # whose messages are a thought and an action each
PAPER, COMPACT, NATIVE = PromptOptions(), PromptOptions(compact=True), PromptOptions(native_thinking=True)
WRONG = "SELECT name FROM singer WHERE country = 'italy'"
BROKEN = "SELECT nam FROM singer"
THINK = "<think>\nI think of {braces} and of <tool_call>.\n</think>\n\n"
BLANK = "<think> \n</think>"
DEEP = "[" * 100_000


def recipe_of(name, options=PAPER):
    return load_recipe(name).make_recipe(options)


def query(name, sql=GOLD):
    return THINK + recipe_of(name).call(sql)


def answer(name, sql=GOLD):
    return THINK + recipe_of(name).answer(sql)


def begin(tiny, name, *, options=PAPER, tools="no_memory", interactions=4, example=EXAMPLE):
    limits = Limits(interactions, 20_000, max_response_tokens=40_000, max_tool_tokens=10_000)
    environment = environment_of(tiny, tools, limits, recipe=recipe_of(name, options))
    return environment.episodes(example, [0])[0]


def play(tiny, name, *messages, **how):
    episode = begin(tiny, name, **how)
    said = [answer_to(episode, message) for message in messages]
    assert None not in said[:-1]
    return episode


def rewards_of(tiny, name, episode, given="", turns=5):
    reward = load_recipe(name).make_reward(given, tiny.scorer, tiny.tokens.decode, turns)
    return reward(episode.trajectory, episode.example)


# Reading


def call(sql, name=TOOL):
    return write_call(name, "sql", sql)


def block(sql):
    return f"<answer>\n```sql\n{sql}\n```\n</answer>"


ONE, TWO = (call(f"SELECT {i}") for i in (1, 2))


ACTIONS = [
    (MTIR, THINK + ONE, EXEC_SQL, True),
    (MTIR, f"{THINK}{ONE}\n{TWO}", EXEC_SQL, True),
    (MTIR, THINK + call("SELECT 1", EXEC_SQL), UNAVAILABLE, False),  # the environment's own name
    (MTIR, ONE, EXEC_SQL, False),
    (MTIR, THINK + THINK + ONE, EXEC_SQL, False),
    (MTIR, f"{THINK}So: {ONE}", EXEC_SQL, False),
    (MTIR, THINK + block("SELECT 2") + ONE, EXEC_SQL, False),
    (MTIR, f"<think><tool_response>1</tool_response></think>{ONE}", EXEC_SQL, False),
    (MTIR, THINK + block("SELECT 1"), None, True),
    (MTIR, f"{THINK}<answer>SELECT 1</answer>", None, False),
    (MTIR, f"{THINK}<answer>\n```sql\nSELECT 1\n</answer>", None, False),  # as C.2 shows it
    (MTIR, f"{THINK}<answer>Here: ```SQLite\nSELECT 1```</answer>", None, False),
    (MTIR, f"{THINK}In <answer>: {block('SELECT 2')}{block('SELECT 1')}", None, False),
    (MTIR, "I am sure.</think>" + block("SELECT 1"), None, False),
    (SKYRL, f"{THINK}<sql>SELECT 1</sql>", EXEC_SQL, True),
    (SKYRL, f"{THINK}<solution>SELECT 1</solution>", None, True),
    (SKYRL, f"Well. {BLANK}{THINK}{THINK}So: <sql>SELECT 1</sql>", EXEC_SQL, True),
    (SKYRL, "<think>or <sql>DROP TABLE t</sql></think><sql>SELECT 1</sql>", EXEC_SQL, True),
    (SKYRL, "<sql>SELECT 1</sql>", EXEC_SQL, False),
    (SKYRL, f"{BLANK}<sql>SELECT 1</sql>", EXEC_SQL, False),
    (SKYRL, f"{THINK}<sql>SELECT 1</sql> done", EXEC_SQL, False),
    (SKYRL, f"{THINK}<solution>SELECT 1</solution><sql>SELECT 2</sql>", None, False),
    (SKYRL, "<think><observation>2</observation></think><sql>SELECT 1</sql>", EXEC_SQL, False),
    (SKYRL, "<reasoning>singer</reasoning>\n<sql>SELECT 1</sql>", EXEC_SQL, False),
    (TRAIL, "<reasoning>or <sql>SELECT 2</sql></reasoning>\n<sql>SELECT 1</sql>", EXEC_SQL, True),
    (TRAIL, "<think>or <sql>SELECT 2</sql></think>\n<sql>SELECT 1</sql>", EXEC_SQL, True),
]


@pytest.mark.parametrize(("name", "text", "tool", "well_formed"), ACTIONS)
def test_a_query_or_an_answer_is_read(name, text, tool, well_formed):
    """All are of SELECT 1."""
    message = recipe_of(name).parse(text)
    assert (message.problem, message.tool, message.well_formed) == (None, tool, well_formed)
    assert (message.sql, message.answer) == (("SELECT 1", None) if tool else (None, "SELECT 1"))


MALFORMED, NO_ACTION = Status.MALFORMED_CALL, Status.NO_ACTION
NO_ACTIONS = {
    (R1, NO_ACTION): [
        "", "I do not know.", "<answer_sql> </answer_sql>", "<think>hm <answer_sql>SELECT 1</answer_sql>",
    ],
    (R1, MALFORMED): [
        "<tool_call>not JSON</tool_call>", write_call(EXEC_SQL, "code", 3),
        write_call(EXEC_SQL, "code", "SELECT 1").removesuffix("</tool_call>"),
    ],
    (MTIR, NO_ACTION): [
        "", "```sql\nSELECT 1\n```", "<answer>```sql\n```</answer>", "<answer>SELECT 1", "</answer><answer>",
        f"<think>{ONE}", f"<think>{block('SELECT 1')}</think>",
    ],
    (MTIR, MALFORMED): [
        '<tool_call>{"name": "a", "arguments": "SELECT 1"}</tool_call>', write_call(TOOL, "code", "SELECT 1"),
        "<tool_call>SELECT 1</tool_call>", f"<tool_call>{DEEP}</tool_call>", ONE.removesuffix("</tool_call>"),
        "<tool_call>null</tool_call>", f"<tool_call>{'1' * 5000}</tool_call>", call(7), call("\ud800"),
    ],
    (SKYRL, NO_ACTION): [
        "", "SELECT 1", THINK, "<SQL>SELECT 1</SQL>", "<think>or <sql>SELECT 1</sql>", f"{THINK}<sql></sql>",
        f"{THINK}<solution> \n</solution>", f"{THINK}<sql>SELECT 1", f"{THINK}<sql>SELECT 1</solution>",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("name", "problem"), NO_ACTIONS)
def test_a_message_without_an_action_says_why(name, problem):
    for text in NO_ACTIONS[name, problem]:
        for options in (PAPER, COMPACT):
            message = recipe_of(name, options).parse(text)
            found = (message.problem, message.tool, message.sql, message.answer)
            assert found == (problem, None, None, None), text
            assert name == R1 or not message.well_formed


@pytest.mark.parametrize("options", [COMPACT, NATIVE])
@pytest.mark.parametrize("name", OTHERS)
def test_no_thought_is_asked_for_in_compact_wording_and_with_native_thinking(name, options):
    recipe = recipe_of(name, options)
    for action in (recipe.call("SELECT 1"), recipe.answer("SELECT 1")):
        for thought in ("", THINK, "opened by the template</think>\n\n"):
            assert recipe.parse(thought + action).well_formed
        assert not recipe.parse(action + "!").well_formed


@pytest.mark.parametrize("name", OTHERS)
def test_native_thinking_is_not_read(name):
    recipe = recipe_of(name, NATIVE)
    one, two = (recipe.call(f"SELECT {i}") for i in (1, 2))
    for text in (f"<think>a {two} b</think>{one}", f"a {two} b</think>\n\n{one}"):
        assert recipe.parse(text).sql == "SELECT 1" and recipe.parse(text).well_formed
    assert recipe.parse(f"<think>a {two}").problem is Status.NO_ACTION
    assert not recipe.parse(f"I might run {one}").well_formed


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_recipe_writes_it_reads(name):
    sql = 'SELECT "a\\"\nFROM t -- ü {x}'
    called, answered = (recipe_of(name).parse(text) for text in (query(name, sql), answer(name, sql)))
    assert (called.tool, called.sql, answered.answer) == (EXEC_SQL, sql, sql)
    assert called.well_formed and answered.well_formed


# Observations

TABLE = "SELECT id, country FROM singer WHERE id < 3"
NOTHING = "SELECT id, country FROM singer WHERE id > 3"
RULE = "+----+---------+"
FRAME = f"{RULE}\n| id | country |\n{RULE}"
ROWS = f"\n| 1  | None    |\n| 2  | france  |\n{RULE}"
LEFT = "You have 3 turns left to complete the task."


SHOWN = [
    (SKYRL, PAPER, TABLE, f"{FRAME}{ROWS}\n{LEFT}"),
    (SKYRL, PAPER, NOTHING, f"{FRAME}\n{LEFT}"),
    (SKYRL, PAPER, BROKEN, f"OperationalError: no such column: nam\n{LEFT}"),
    (SKYRL, COMPACT, TABLE, "1|null ; 2|france\n3"),
    (TRAIL, PAPER, TABLE, f"   id  country\n0   1     None\n1   2   france\n{LEFT}"),
    (TRAIL, PAPER, NOTHING, f"Empty DataFrame\nColumns: [id, country]\nIndex: []\n{LEFT}"),
    (MTIR, PAPER, TABLE, '{"columns": ["id", "country"], "data": [[1, null], [2, "france"]]}'),
    (MTIR, PAPER, BROKEN, "Error: no such column: nam"),
    (MTIR, COMPACT, TABLE, "1|null ; 2|france"),
]


@pytest.mark.parametrize(("name", "options", "sql", "shown"), SHOWN)
def test_a_result_is_shown_as_in_the_paper(tiny, name, options, sql, shown):
    result = tiny.executor.execute(tiny.schema.path, sql)
    text = recipe_of(name, options).observe_execution("", sql, result, False, 3)
    assert text == (shown if name == MTIR else f"<observation>\n{shown}\n</observation>")


def test_fifty_rows_are_shown_and_no_endless_text():
    def shown(rows, columns=("n",), truncated=False):
        result = ExecutionResult("rows", columns, tuple(rows), truncated)
        return recipe_of(SKYRL).observe_execution("", "", result, False, 3)

    assert "Truncated" not in shown((f"r{i}.",) for i in range(50))
    text = shown((f"r{i}.",) for i in range(51))
    assert "r49." in text and "r50." not in text and "\nTruncated to the first 50 rows.\nYou" in text
    assert "Truncated to the first 2 rows." in shown([(1,), (2,)], truncated=True)
    assert len(shown([("x" * 150_000,)])) < 1_000
    assert len(shown([("x" * 150_000,) * 2_000], ("c" * 150_000,) * 2_000)) < 21_000
    assert "a\\nb c d e" in shown([("a\nb\rc\td\u2028e",)])  # the frame is not broken


def test_mtir_shows_ten_records_columns_of_one_name_and_bytes_and_no_endless_text(tiny):
    def shown(sql):
        result = tiny.executor.execute(tiny.schema.path, sql)
        return recipe_of(MTIR).observe_execution("", sql, result, False, 3)

    twelve = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i+1 FROM n LIMIT 12) SELECT i, i AS i FROM n"
    assert json.loads(shown(twelve)) == {"columns": ["i", "i"], "data": [[i, i] for i in range(1, 11)]}
    assert json.loads(shown("SELECT x'00ff', 'Zoë'"))["data"] == [["b'\\x00\\xff'", "Zoë"]]
    assert len(shown("SELECT printf('%.9999c', 'a'), * FROM singer")) == MAX_CHARACTERS + len("...")


# Episodes


def test_a_whole_episode_keeps_the_sampled_ids(tiny):
    episode, messages = begin(tiny, SKYRL), (query(SKYRL, WRONG), answer(SKYRL))
    shown = answer_to(episode, messages[0])
    assert answer_to(episode, messages[1]) is None
    trajectory, sampled = episode.trajectory, [tiny.tokens.message_ids(text)[:-1] for text in messages]
    assert (trajectory.status, trajectory.answer_sql, trajectory.off_protocol) == (Status.ANSWERED, GOLD, 0)
    assert (trajectory.messages, trajectory.interactions) == (2, 1)
    _, first, environment, last = trajectory.segments
    assert [list(first.ids), list(last.ids)] == sampled
    assert [set(s.loss_mask) for s in trajectory.segments] == [{0}, {1}, {0}, {1}]
    assert environment.ids[0] == tiny.tokens.end_of_turn_ids[0]  # none was sampled
    assert "<|im_start|>user\n<observation>\n" in shown and "<|im_start|>assistant" in shown
    assert "Carla" in shown and "You have 4 turns left to complete the task.\n</observation>" in shown


NOT_USABLE = [
    *((name, text, NO_TOOL) for name in OTHERS for text in ("I do not know.", "<think>and")),
    *((MTIR, THINK + call(GOLD, name), UNAVAILABLE) for name in ("drop_everything", MEMORY_RETRIEVE)),
]


@pytest.mark.parametrize(("name", "bad", "tool"), NOT_USABLE)
def test_what_is_no_action_is_answered_and_costs_the_format(tiny, name, bad, tool):
    episode = begin(tiny, name, tools="both")
    reply = {MTIR: "My action is not correct. Let me rethink."}.get(name, "Your previous action is invalid.")
    assert reply in answer_to(episode, bad)
    assert answer_to(episode, answer(name)) is None
    trajectory = episode.trajectory
    assert (trajectory.status, trajectory.observations[0].tool) == (Status.ANSWERED, tool)
    assert trajectory.off_protocol > 0
    rewards = rewards_of(tiny, name, episode)
    assert rewards.ex == 1 and rewards.parts["format"] <= 0


@pytest.mark.parametrize("name", OTHERS)
def test_without_the_tool_a_query_is_no_action(tiny, name):
    episode = play(tiny, name, query(name), answer(name), tools="none")
    assert [seen.tool for seen in episode.trajectory.observations] == [UNAVAILABLE]
    assert rewards_of(tiny, name, episode).parts["format"] <= 0
    episode = play(tiny, name, answer(name), tools="none", interactions=0)
    assert rewards_of(tiny, name, episode).parts["format"] > 0


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("calls", [0, 2])
def test_the_message_after_the_last_interaction_has_to_be_the_answer(tiny, name, calls):
    for last, status in (
        (query(name), Status.OUT_OF_INTERACTIONS),
        ("no idea", Status.NO_ACTION),
        (answer(name), Status.ANSWERED),
    ):
        episode = play(tiny, name, *[query(name)] * calls, last, interactions=calls)
        trajectory = episode.trajectory
        assert (trajectory.status, trajectory.interactions) == (status, calls)
        assert trajectory.messages == calls + 1
        rewards = rewards_of(tiny, name, episode)
        assert rewards.ex == (status is Status.ANSWERED)
        if name != R1:
            assert (rewards.parts["format"] > 0) is (status is Status.ANSWERED)
    episode = begin(tiny, name)  # an answer that is cut by the limit on tokens is none
    ids = tiny.tokens.message_ids(answer(name))
    assert episode.step(ids, [-0.5] * len(ids), Stop.LIMIT) is None
    assert rewards_of(tiny, name, episode).ex == 0


SETTINGS = [
    (SKYRL, GrpoArgs, {"max_interactions": 4, "temperature": 0.6}),
    (MTIR, GrpoArgs, {"max_interactions": 5, "prompts_per_step": 64, "samples_per_prompt": 5}),
    (TRAIL, GrpoArgs, {"max_interactions": 9, "clip_high": 0.28, "samples_per_prompt": 6}),
    (TRAIL, GrpoArgs, {"learning_rate": 1e-6}),  # appendix A.5's is that of SFT alone
    (SKYRL, EvaluateArgs, {"temperature": 0}),  # that above is of training alone
    (TRAIL, SftArgs, {"learning_rate": 1e-5, "epochs": 2, "trajectories_per_step": 128}),
]


@pytest.mark.parametrize(("name", "stage", "expected"), SETTINGS)
def test_settings_of_the_papers(name, stage, expected):
    words = ["--config", f"configs/{name}.toml", "--data=d", "--model=m", "--out=o"]
    given = read_options(stage, "", words)
    assert {field: getattr(given, field) for field in expected} == expected and given.recipe == name


# Rewards on numbers worked out by hand

HARD = "SELECT name FROM singer WHERE age = (SELECT max(age) FROM singer)"
R, W = answer(MTIR), answer(MTIR, WRONG)
BARE = recipe_of(SKYRL).answer(GOLD)
Q = query(SKYRL, WRONG)
S = answer(SKYRL)


EARNED = [
    # MTIR-SQL, Equations 5 to 7: R_f, R_e, R_r, then their sum.
    (MTIR, [query(MTIR, WRONG), R], (0.1, 0.1, 1), 1, 1.2),
    (MTIR, [W], (0.1, 0.1, -1), 0, -0.8),
    (MTIR, [answer(MTIR, BROKEN)], (0.1, -0.1, 0), 0, 0),
    (MTIR, [answer(MTIR, "DROP TABLE singer")], (0.1, -0.1, 0), 0, 0),
    (MTIR, [block(GOLD)], (-0.1, 0, 0), 1, -0.1),  # right, but without the thought
    (MTIR, [THINK + "no idea"], (-0.1, 0, 0), 0, -0.1),
    # SkyRL-SQL, section 4.1: -1 for a broken format, else EX.
    (SKYRL, [Q, S], (1,), 1, 1),
    (SKYRL, [answer(SKYRL, WRONG)], (1,), 0, 0),
    (SKYRL, [answer(SKYRL, "no SQL at all")], (1,), 0, 0),
    (SKYRL, [BARE], (0,), 1, -1),
    (SKYRL, [S + " as you wished"], (0,), 1, -1),
    (SKYRL, [Q] * 5, (0,), 0, -1),
    (SKYRL, [Q], (0,), 0, -1),  # unfinished
    # SQL-Trail, Equations 7 to 12: turns, schema, bigram, syntax, format; then 5 EX + 2 turns + the rest.
    (TRAIL, [Q, S], (1, 1, 1, 1, 1), 1, 5 + 2 + 4),
    # select name from singer where country = 'france': 7 pairs; two answers differ in the last of them.
    (TRAIL, [Q, answer(TRAIL, WRONG)], (1, 1, 6 / 8, 1, 1), 0, 2 + 3.75),
    # Gold: singer, name, country; the answer: singer, nam. Of its 3 pairs "from singer" is shared.
    (TRAIL, [answer(TRAIL, BROKEN)], (1, 1 / 4, 1 / 9, 0, 1), 0, 2 + 1 / 4 + 1 / 9 + 1),
    (TRAIL, [recipe_of(TRAIL).call(WRONG), S], (1, 1, 1, 1, 0), 1, 5 + 2 + 3),
    *((TRAIL, messages, (0,) * 5, 0, 0) for messages in ([], [query(TRAIL)], [Q] * 5, ["what?"])),
]


@pytest.mark.parametrize(("name", "messages", "parts", "ex", "total"), EARNED)
def test_rewards_by_hand(tiny, name, messages, parts, ex, total):
    rewards = rewards_of(tiny, name, play(tiny, name, *messages))
    assert (tuple(rewards.parts.values()), rewards.ex) == (pytest.approx(parts), ex)
    assert rewards.total == pytest.approx(total, abs=1e-12)


CHANGED = [
    (MTIR, "format=0,result=2", W, 0.1 - 2),
    (SKYRL, "ex=3,invalid=-0.5", S, 3),
    (SKYRL, "paper,ex=3,invalid=-0.5", BARE, -0.5),
    (TRAIL, "execution", S, 5),
    (TRAIL, "execution", answer(TRAIL, WRONG), 0),
    (TRAIL, "turns=0,ex=1,bigram=0.5", S, 1 + 1 + 0.5 + 1 + 1),
]


@pytest.mark.parametrize(("name", "given", "message", "total"), CHANGED)
def test_presets_and_weights(tiny, name, given, message, total):
    episode = play(tiny, name, message)
    rewards, plain = (rewards_of(tiny, name, episode, how) for how in (given, ""))
    assert rewards.total == pytest.approx(total)
    assert (rewards.parts, rewards.kept) == (plain.parts, plain.kept)


def test_mtirs_filter_drops_what_is_invalid_and_keeps_wrong_answers(tiny):
    episodes = [play(tiny, MTIR, message) for message in (R, W, answer(MTIR, BROKEN), block(GOLD))]
    rewards = [rewards_of(tiny, MTIR, episode) for episode in episodes]
    assert [r.kept for r in rewards] == [True, True, False, False]
    assert all(rewards_of(tiny, MTIR, episode, "unfiltered").kept for episode in episodes)
    samples = [Sample(e.trajectory, e.example, r) for e, r in zip(episodes, rewards, strict=True)]
    assert group_metrics([samples], torch.tensor([True]), 1.0, tiny.tokens.decode)["left_out"] == 0.5


def test_trails_hard_question_pays_for_a_right_answer_before_the_last_turn(tiny):
    hard = replace(EXAMPLE, gold_sql=HARD)
    right = play(tiny, TRAIL, Q, Q, answer(TRAIL, HARD), example=hard)
    wrong = play(tiny, TRAIL, answer(TRAIL, WRONG), example=hard)
    assert [rewards_of(tiny, TRAIL, right, turns=turns).parts["turns"] for turns in (4, 3)] == [1, 0]
    assert rewards_of(tiny, TRAIL, wrong, turns=4).parts["turns"] == 0
    table = {"easy": [1, 1, 0, 0, 0], "medium": [1, 1, 1, 0, 0], "hard": [0] * 5, "extra": [0] * 5}
    turns = (1, 2, 3, 4, 10)
    assert {level: [turns_reward(level, turn, 10, 0) for turn in turns] for level in table} == table
    assert [turns_reward("extra", turn, 10, 1) for turn in turns] == [1, 1, 1, 1, 0]


# SQL-Trail's measures of SQL, in its rewards

STAFF = SqlSchema({"employees": ("id", "salary"), "offices": ("id", "city")})


def test_bigrams():
    gold, predicted = bigrams("SELECT name FROM student"), bigrams("SELECT name FROM teacher")
    assert gold == {("select", "name"), ("name", "from"), ("from", "student")}  # the paper's example
    assert jaccard(predicted, gold) == 0.5
    spaced = "select  Name\nfrom student /* all */ where a >= 1; SELECT 2 -- x"
    assert bigrams(spaced) == bigrams("SELECT name FROM student WHERE a>=1")
    assert bigrams("") == bigrams("SELECT") == bigrams("x" * 200_000) == set()
    assert jaccard(set(), set()) == 0 and jaccard(set(), gold) == 0


ITEMS = [
    ("SELECT Salary FROM Employees", "employees", "salary"),  # the paper's example
    ("SELECT Wages FROM Employees", "employees", "wages"),
    ("SELECT e.salary FROM employees AS e", "employees", "salary"),
    ("SELECT count(*), e.* FROM employees e", "employees", ""),
    ("SELECT salary AS s FROM employees ORDER BY s", "employees", "salary"),
    ('SELECT salary FROM employees WHERE id = "x"', "employees", "salary id"),
    ("SELECT city FROM employees JOIN offices USING (id)", "employees offices", "city id"),
    ("WITH top AS (SELECT salary FROM employees) SELECT salary FROM top", "employees", "salary"),
    *((sql, "", "") for sql in ("SELECT salary FROM", "PRAGMA table_info(employees)", "")),
]


@pytest.mark.parametrize(("sql", "tables", "columns"), ITEMS)
def test_schema_items(sql, tables, columns):
    named = {("table", table) for table in tables.split()} | {("column", c) for c in columns.split()}
    assert schema_items(sql, STAFF) == named


def test_hostile_sql_raises_nowhere(tiny):
    schema = SqlSchema({"singer": ("singer_id", "name", "country", "age"), "number": ("n",)})
    gold_items, gold_bigrams = schema_items("SELECT n FROM number", schema), bigrams("SELECT n FROM number")
    hostile = [sql for _, sql, _ in STATEMENTS if len(sql) < 10_000]
    hostile += ["SELECT " + "(" * 3_000 + "1" + ")" * 3_000, "'" * 99_999, "\x00", "a " * 200_000]
    for sql in hostile:
        assert 0 <= jaccard(schema_items(sql, schema), gold_items) <= 1
        assert 0 <= jaccard(bigrams(sql), gold_bigrams) <= 1
    for sql in ("'", "DROP TABLE singer", "PRAGMA table_info(singer)", "SELECT (" * 2_000, "\x00", ";"):
        rewards = rewards_of(tiny, TRAIL, play(tiny, TRAIL, answer(TRAIL, sql)))
        assert (rewards.ex, rewards.parts["schema"]) == (0, 0)
