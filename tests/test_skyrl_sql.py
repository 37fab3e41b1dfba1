"""SkyRL-SQL: its prompt, reading, episodes and reward. SQL-Trail inherits all but prompt, table and tags."""

from __future__ import annotations

import pytest
from conftest import GOLD, QUESTION

from mtsql.agent.env import Environment, Limits
from mtsql.agent.tools import EXEC_SQL, make_tools
from mtsql.agent.trajectory import Status, Stop
from mtsql.data.datasets import Example, HistoryTurn
from mtsql.recipes import skyrl_sql, sql_trail
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.sql.execute import ExecutionResult
from mtsql.sql.score import Scorer

LONG = dict(max_prompt_tokens=20_000, max_response_tokens=20_000, max_tool_tokens=10_000)
RECIPES = {"skyrl": skyrl_sql, "trail": sql_trail}
PAPER, COMPACT, NATIVE = PromptOptions(), PromptOptions(compact=True), PromptOptions(native_thinking=True)
THINK = "<think>First I look.</think>\n"
BLANK = "<think> \n</think>"
WRONG = "SELECT name FROM singer WHERE country = 'italy'"


def example_of(history=False, knowledge="", gold=GOLD):
    earlier = (HistoryTurn("How many singers are there?", "SELECT count(*) FROM singer"),) if history else ()
    return Example("00000/1", "00000", "music", 1, QUESTION, gold, earlier, knowledge)


def begin(tiny, module=skyrl_sql, options=PAPER, tools="no_memory", turns=5, example=None):
    limits = Limits(max_interactions=turns - 1, **LONG)
    environment = Environment(
        {"music": tiny.schema},
        module.make_recipe(options),
        tiny.tokens,
        tiny.executor,
        limits,
        make_tools(tools),
    )
    return environment.episodes(example or example_of(), [0])[0]


def say(episode, text, stop=Stop.STOP_STRING):
    """One message that ends with a stop string; the text that the environment appended, None at the end."""
    ids = episode.tokens.message_ids(text)
    ids = ids[:-1] if stop is Stop.STOP_STRING else ids
    suffix = episode.step(ids, [-0.5] * len(ids), stop)
    return None if suffix is None else episode.tokens.decode(suffix)


def play(tiny, *messages, **options):
    episode = begin(tiny, **options)
    for message in messages:
        say(episode, message)
    return episode


def reward_of(tiny, episode, module=skyrl_sql, rewards="", turns=5):
    scorer = Scorer({"music": tiny.schema}, tiny.executor)
    reward = module.make_reward(rewards, scorer, tiny.tokens.decode, turns)
    return reward(episode.trajectory, episode.example)


def prompt_text(tiny, module, options, tools="no_memory", **given):
    messages, schemas = module.make_recipe(options).prompt(
        example_of(**given), tiny.schema, make_tools(tools)
    )
    assert schemas is None and [m["role"] for m in messages] == ["user"]
    return messages[0]["content"]


# The prompt


def test_prompt_of_appendix_a(tiny):
    text = prompt_text(tiny, skyrl_sql, PAPER, knowledge="Nobody is from Spain.")
    schema = tiny.schema.text(compact=False)
    assert f"Database Schema:\n{schema}\nThis schema describes the database's structure, including" in text
    assert f"External Knowledge:\nNobody is from Spain.\n\nQuestion: {QUESTION}\n\nInstructions:\n- " in text
    assert "answer the question within limited turns. You should breakdown the problem, draft" in text
    assert "- Conduct thinking inside <think>...</think> blocks every time you get new obs" in text
    assert "</observation>. Based on this observation, you can think again and refine.\n- The ret" in text
    assert "reaches max turns, you MUST directly provide the final SQL query solution inside <sol" in text
    assert text.endswith("<solution>SELECT COUNT(*) FROM animals WHERE species = 'pig';</solution>\n" + END)
    assert skyrl_sql.frame([["COUNT(*)"], ["12"]]) in text  # the example shows what the environment shows


END = "-" * 24 + " END OF EXAMPLE " + "-" * 24


@pytest.mark.parametrize("module", RECIPES.values(), ids=RECIPES)
def test_prompt_of_a_model_that_thinks_by_itself(tiny, module):
    text = prompt_text(tiny, module, NATIVE)
    assert "think>" not in text and "reasoning>" not in text
    assert "</observation>\n<solution>" in text


@pytest.mark.parametrize("module", RECIPES.values(), ids=RECIPES)
def test_single_pass_prompt_has_no_tool(tiny, module):
    text = prompt_text(tiny, module, PAPER, "none")
    assert "<sql>" not in text and "<observation>" not in text and "turns" not in text
    assert "<solution>...</solution>" in text


@pytest.mark.parametrize("module", RECIPES.values(), ids=RECIPES)
def test_prompt_shows_the_dialogue(tiny, module):
    text = prompt_text(tiny, module, PAPER, history=True)
    earlier = "1. How many singers are there?\n   SQL: SELECT count(*) FROM singer"
    assert f"Earlier questions of this dialogue:\n{earlier}\n\nQuestion: {QUESTION}\n" in text


def test_compact_prompt(tiny):
    text = prompt_text(tiny, skyrl_sql, COMPACT, "both", history=True, knowledge="Use names.")
    assert text.splitlines() == [
        *tiny.schema.text(compact=True).splitlines(),
        "1. How many singers are there?",
        "SELECT count(*) FROM singer",
        "Use names.",
        f"now: {QUESTION}",
        "tags: sql solution",
    ]
    assert prompt_text(tiny, skyrl_sql, COMPACT, "none").endswith("tags: solution")


# Reading


@pytest.mark.parametrize(
    ("text", "sql", "answer", "well_formed"),
    [
        (f"{THINK}<sql>SELECT 1</sql>", "SELECT 1", None, True),
        (f"{THINK}<solution>SELECT 1</solution>", None, "SELECT 1", True),
        (f"Well. {THINK}{THINK}So: <sql>SELECT 1</sql>", "SELECT 1", None, True),
        (f"{BLANK}{THINK}<sql>SELECT 1</sql>", "SELECT 1", None, True),
        ("<sql>SELECT 1</sql>", "SELECT 1", None, False),
        (f"{BLANK}<sql>SELECT 1</sql>", "SELECT 1", None, False),
        (f"{THINK}<sql>SELECT 1</sql> done", "SELECT 1", None, False),
        (f"{THINK}<sql>SELECT 1</sql><solution>SELECT 2</solution>", "SELECT 1", None, False),
        (f"{THINK}<solution>SELECT 2</solution><sql>SELECT 1</sql>", None, "SELECT 2", False),
        (f"{THINK}<sql><sql>SELECT 1</sql>", "<sql>SELECT 1", None, False),
        ("<think>I could <sql>DROP TABLE t</sql></think><sql>SELECT 1</sql>", "SELECT 1", None, True),
    ],
)
def test_reading_of_an_action(text, sql, answer, well_formed):
    message = skyrl_sql.make_recipe(PAPER).parse(text)
    assert (message.sql, message.answer, message.problem) == (sql, answer, None)
    assert message.tool == (EXEC_SQL if sql else None)
    assert message.well_formed is well_formed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "SELECT 1",
        THINK,
        f"{THINK}<sql></sql>",
        f"{THINK}<solution> \n</solution>",
        f"{THINK}<sql>SELECT 1",
        f"{THINK}<sql>SELECT 1</solution>",
        "<think>I could write <sql>SELECT 1</sql>",  # the stop string ended a thought
        "<think>" * 1000 + "<sql>SELECT 1</sql>",
        "<SQL>SELECT 1</SQL>",
    ],
)
def test_message_without_an_action(text):
    for options in (PAPER, COMPACT):
        message = skyrl_sql.make_recipe(options).parse(text)
        assert (message.problem, message.well_formed) == (Status.NO_ACTION, False)
        assert message.tool is message.sql is message.answer is None


def test_thoughts_are_not_asked_for_in_the_compact_wording():
    recipe = skyrl_sql.make_recipe(COMPACT)
    for text in (recipe.call("SELECT 1"), THINK + recipe.call("SELECT 1")):
        assert recipe.parse(text).sql == "SELECT 1" and recipe.parse(text).well_formed
    assert not recipe.parse(recipe.answer("SELECT 1") + "!").well_formed


def test_native_thinking_is_not_read():
    recipe = skyrl_sql.make_recipe(NATIVE)
    for text in (
        "<think>a <sql>SELECT 2</sql> b</think><sql>SELECT 1</sql>",
        "a <sql>SELECT 2</sql> b</think>\n\n<sql>SELECT 1</sql>",  # the template opened the thought
        "<sql>SELECT 1</sql>",
    ):
        assert recipe.parse(text).sql == "SELECT 1" and recipe.parse(text).well_formed
    for text in ("<think>a <sql>SELECT 2</sql>", "I might run <sql>SELECT 1</sql>"):  # a thought without end
        assert recipe.parse(text).problem is Status.NO_ACTION


def test_reading_takes_time_in_proportion_to_length():
    text = "<think>x</think>" * 50_000 + "<sql>SELECT 1</sql>" + "<sql>" * 50_000
    assert skyrl_sql.make_recipe(PAPER).parse(text).sql == "SELECT 1"


# Episodes


def test_whole_episode_keeps_the_sampled_ids(tiny):
    episode = begin(tiny)
    first, last = f"{THINK}<sql>{WRONG}</sql>", f"{THINK}<solution>{GOLD}</solution>"
    shown = say(episode, first)
    assert say(episode, last) is None
    trajectory, tokens = episode.trajectory, tiny.tokens
    assert (trajectory.status, trajectory.answer_sql) == (Status.ANSWERED, GOLD)
    assert (trajectory.messages, trajectory.interactions, trajectory.off_protocol) == (2, 1, 0)
    prompt, sampled, environment, answer = trajectory.segments
    assert list(sampled.ids) == tokens.message_ids(first)[:-1] and set(sampled.loss_mask) == {1}
    assert list(answer.ids) == tokens.message_ids(last)[:-1] and set(answer.loss_mask) == {1}
    assert environment.ids[0] == tokens.message_ids("")[0] and set(environment.loss_mask) == {0}
    assert "<|im_start|>user\n<observation>\n" in shown and "<|im_start|>assistant" in shown
    assert "You have 4 turns left to complete the task.\n</observation>" in shown and "Carla" in shown
    assert prompt.role == "prompt" and environment.role == "environment"


@pytest.mark.parametrize("module", RECIPES.values(), ids=RECIPES)
def test_invalid_action_lets_the_episode_go_on_but_breaks_the_format(tiny, module):
    episode = begin(tiny, module)
    shown = say(episode, "I do not know.", Stop.END_OF_TURN)
    assert module.make_recipe(PAPER).invalid + "\nYou have 4 turns left" in shown
    say(episode, f"{THINK}<solution>{GOLD}</solution>")
    assert (episode.trajectory.status, episode.trajectory.off_protocol) == (Status.ANSWERED, 1)


def test_episode_ends_out_of_turns(tiny):
    episode = begin(tiny, turns=2)
    assert "You have 1 turns left" in say(episode, f"{THINK}<sql>{GOLD}</sql>")
    assert say(episode, f"{THINK}<sql>{GOLD}</sql>") is None
    assert episode.trajectory.status is Status.OUT_OF_INTERACTIONS
    assert reward_of(tiny, episode).ex == 0
    episode = begin(tiny, turns=1)
    assert say(episode, "nothing") is None
    assert episode.trajectory.status is Status.NO_ACTION


def test_single_pass_answers_at_once(tiny):
    episode = play(tiny, f"{THINK}<solution>{GOLD}</solution>", tools="none", turns=1)
    assert reward_of(tiny, episode).parts["format"] == 1
    episode = begin(tiny, tools="none", turns=2)
    assert "invalid" in say(episode, f"{THINK}<sql>{GOLD}</sql>")
    say(episode, f"{THINK}<solution>{GOLD}</solution>")
    assert reward_of(tiny, episode).parts["format"] == 0


def test_schema_can_be_explored(tiny):
    episode = begin(tiny)
    tables = say(episode, f"{THINK}<sql>SELECT name FROM sqlite_master WHERE type = 'table'</sql>")
    columns = say(episode, f"{THINK}<sql>PRAGMA table_info(singer);</sql>")
    assert "label" in tables and "singer" in tables
    assert all(word in columns for word in ("dflt_value", "country", "label_id", "INTEGER"))
    assert [o.outcome for o in episode.trajectory.observations] == ["ok", "ok"]
    say(episode, f"{THINK}<solution>{GOLD}</solution>")
    assert reward_of(tiny, episode).ex == 1


def test_compact_observations(tiny):
    recipe = skyrl_sql.make_recipe(COMPACT)
    result = tiny.executor.execute(tiny.schema.path, "SELECT id, country FROM singer")
    shown = recipe.observe_execution("", "", result, False, 3)
    assert shown == "<observation>\n1|null ; 2|france ; 3|italy\n3\n</observation>"
    assert recipe.observe_problem(Status.NO_ACTION, 2) == "<observation>\ninvalid\n2\n</observation>"


def test_error_is_shown_as_in_appendix_c(tiny):
    result = tiny.executor.execute(tiny.schema.path, "SELECT nam FROM singer")
    shown = skyrl_sql.make_recipe(PAPER).observe_execution("", "", result, False, 3)
    assert shown.startswith("<observation>\nOperationalError: no such column: nam\nYou have 3 turns left")


def test_fifty_rows_are_shown_and_no_endless_text():
    recipe = skyrl_sql.make_recipe(PAPER)

    def shown(rows, columns=("n",), truncated=False):
        result = ExecutionResult("rows", columns, tuple(rows), truncated)
        return recipe.observe_execution("", "", result, False, 3)

    assert "Truncated" not in shown((f"r{i}.",) for i in range(50))
    text = shown((f"r{i}.",) for i in range(51))
    assert "r49." in text and "r50." not in text and "\nTruncated to the first 50 rows.\nYou" in text
    assert "Truncated to the first 2 rows." in shown([(1,), (2,)], truncated=True)
    assert len(shown([("x" * 150_000,)])) < 1_000
    assert len(shown([("x" * 150_000,) * 2_000], ("c" * 150_000,) * 2_000)) < 21_000
    assert "a\\nb" in shown([("a\nb",)])  # the frame is not broken


def test_frame():
    cells = [["name", "age"], ["Anna", "31"], ["Jo", "None"]]
    assert skyrl_sql.frame(cells).splitlines() == [
        "+------+------+",
        "| name | age  |",
        "+------+------+",
        "| Anna | 31   |",
        "| Jo   | None |",
        "+------+------+",
    ]
    assert skyrl_sql.frame([["name"]]).splitlines() == ["+------+", "| name |", "+------+"]


# The reward (section 4.1)


@pytest.mark.parametrize(
    ("messages", "total"),
    [
        ([f"{THINK}<sql>{WRONG}</sql>", f"{THINK}<solution>{GOLD}</solution>"], 1),
        ([f"{THINK}<solution>{WRONG}</solution>"], 0),
        ([f"{THINK}<solution>no SQL at all</solution>"], 0),
        ([f"<solution>{GOLD}</solution>"], -1),
        (["what?", f"{THINK}<solution>{GOLD}</solution>"], -1),
        ([f"{THINK}<solution>{GOLD}</solution> as you wished"], -1),
        ([f"{THINK}<sql>{GOLD}</sql>"] * 5, -1),
        ([f"{THINK}<sql>{GOLD}</sql>"], -1),  # unfinished
    ],
)
def test_reward_is_minus_one_zero_or_one(tiny, messages, total):
    episode = play(tiny, *messages)
    rewards = reward_of(tiny, episode)
    assert rewards.total == total
    assert rewards.parts == {"format": float(total >= 0)}


def test_out_of_tokens_is_an_invalid_format(tiny):
    episode = begin(tiny)
    say(episode, f"{THINK}<solution>{GOLD}</solution>", Stop.LIMIT)
    assert reward_of(tiny, episode).total == -1


def test_weights_and_presets(tiny):
    right, broken = (play(tiny, f"{t}<solution>{GOLD}</solution>") for t in (THINK, ""))
    assert reward_of(tiny, broken).ex == 1
    assert reward_of(tiny, right, rewards="ex=3,invalid=-0.5").total == 3
    assert reward_of(tiny, broken, rewards="paper,ex=3,invalid=-0.5").total == -0.5
    with pytest.raises(ValueError, match="--rewards outcome is unknown; choose from paper"):
        reward_of(tiny, right, rewards="outcome")
    with pytest.raises(ValueError, match="'turns=1' should be one of invalid, ex"):
        reward_of(tiny, right, rewards="turns=1")


def test_an_invented_observation_costs_the_format():
    recipe = skyrl_sql.make_recipe(PAPER)
    for text in (
        f"<think>a</think><observation>MADE UP</observation><think>b</think><solution>{GOLD}</solution>",
        f"<think>a <observation>MADE UP</observation></think><solution>{GOLD}</solution>",
    ):
        message = recipe.parse(text)
        assert message.answer == GOLD and not message.well_formed
