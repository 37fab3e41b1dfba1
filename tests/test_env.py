"""The MDP: Equation 1, the tools, every way to end, and what counts as what."""

import pytest
from conftest import GOLD, answer_to, make_episode, say

from mtsql.agent.env import UNAVAILABLE, Limits
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS, make_tools
from mtsql.agent.trajectory import Action, ActionType, Status, Stop
from mtsql.recipes.mtsql_r1 import final_answer, next_action, tool_call, verdict
from mtsql.sql.text import same_query

BOTH = make_tools("both")
WIDE = Limits(max_prompt_tokens=20_000, max_response_tokens=40_000, max_tool_tokens=10_000)
A = ActionType


EQUATION_1 = [  # a missing verdict is not a pass
    (None, None, A.PROPOSE), (A.PROPOSE, None, A.EXECUTE), (A.SELF_CORRECT, None, A.EXECUTE),
    (A.EXECUTE, None, A.E_VERIFY),
    (A.E_VERIFY, True, A.M_VERIFY), (A.E_VERIFY, False, A.SELF_CORRECT), (A.E_VERIFY, None, A.SELF_CORRECT),
    (A.M_VERIFY, True, A.FINALIZE), (A.M_VERIFY, False, A.SELF_CORRECT), (A.M_VERIFY, None, A.SELF_CORRECT),
]  # fmt: skip


@pytest.mark.parametrize(("previous", "passed", "expected"), EQUATION_1)
def test_equation_1(previous, passed, expected):
    assert next_action(previous and Action(previous, 0, None, passed), BOTH, True) is expected


def test_equation_1_without_tools_or_history():
    assert next_action(Action(A.E_VERIFY, 0, None, True), BOTH, False) is A.FINALIZE
    assert next_action(Action(A.E_VERIFY, 0, None, True), make_tools("no_memory"), True) is A.FINALIZE
    assert next_action(Action(A.PROPOSE, 0), make_tools("no_execution"), True) is A.M_VERIFY
    assert next_action(Action(A.PROPOSE, 0), make_tools("none"), True) is A.FINALIZE
    with pytest.raises(ValueError, match="FINALIZE ends"):
        next_action(Action(A.FINALIZE, 0), BOTH, True)


def test_a_whole_episode_follows_the_protocol(tiny):
    """Its four interactions are enough to check a query again that was corrected after the memory."""
    wrong = "SELECT name FROM singer WHERE country = 'italy'"
    episode = make_episode(tiny, history=True)
    assert say(episode, tool_call(EXEC_SQL, wrong))
    assert say(episode, verdict(EXEC_SQL, True) + tool_call(MEMORY_RETRIEVE, wrong))
    assert say(episode, verdict(MEMORY_RETRIEVE, False) + "\n" + tool_call(EXEC_SQL, GOLD))
    assert say(episode, verdict(EXEC_SQL, True) + "\n" + tool_call(MEMORY_RETRIEVE, GOLD))
    assert not say(episode, verdict(MEMORY_RETRIEVE, True) + final_answer(GOLD))
    t = episode.trajectory
    assert (t.status, t.answer_sql, t.off_protocol) == (Status.ANSWERED, GOLD, 0)
    checks = [A.EXECUTE, A.E_VERIFY, A.M_VERIFY]
    assert [a.type for a in t.actions] == [A.PROPOSE, *checks, A.SELF_CORRECT, *checks, A.FINALIZE]
    assert "SELECT count(*) FROM singer" in t.observations[1].text
    assert [s.role for s in t.segments] == ["prompt", *["model", "environment"] * 4, "model"]
    for segment in t.segments:
        assert set(segment.loss_mask) == ({1} if segment.role == "model" else {0})
    assert len(t.ids) == len(t.loss_mask) == len(t.logprobs)
    # The sampled end of turn is trained on; what follows it belongs to the environment.
    assert all(s.ids[-1] == tiny.tokens.end_of_turn_ids[0] for s in t.segments if s.role == "model")


@pytest.mark.parametrize("tool", [EXEC_SQL, "drop_everything", "<|im_end|>"])
def test_a_tool_that_is_not_there_says_so_and_the_episode_goes_on(tiny, tool):
    episode = make_episode(tiny, tools="no_execution")
    assert say(episode, tool_call(tool, GOLD))
    trajectory = episode.trajectory
    (observation,) = trajectory.observations
    assert (observation.tool, observation.text) == (UNAVAILABLE, f"{tool} is not available")
    assert [a.type for a in trajectory.actions] == [A.PROPOSE] and trajectory.off_protocol == 1
    end = tiny.tokens.end_of_turn_ids[0]
    assert list(trajectory.segments[-1].ids).count(end) == 1  # no name of a tool becomes a control token
    assert not say(episode, verdict(EXEC_SQL, True) + final_answer(GOLD))
    assert [a.type for a in trajectory.actions] == [A.PROPOSE, A.FINALIZE]
    assert (trajectory.status, trajectory.answer_sql) == (Status.ANSWERED, GOLD)


def test_the_same_query_in_another_layout_is_no_new_candidate(tiny):
    layout = "/* all */ select name\nfrom singer where country = 'france' ; -- done"
    episode = make_episode(tiny)
    assert say(episode, tool_call(EXEC_SQL, GOLD))
    assert not say(episode, verdict(EXEC_SQL, True) + final_answer(layout))
    assert [a.type for a in episode.trajectory.actions] == [A.PROPOSE, A.EXECUTE, A.E_VERIFY, A.FINALIZE]
    assert (episode.trajectory.off_protocol, episode.trajectory.answer_sql) == (0, layout)
    split, joined = (f"SELECT name FROM singer WHERE id {sign} 2" for sign in ("> =", ">="))
    corrected = make_episode(tiny)
    assert "error" in answer_to(corrected, tool_call(EXEC_SQL, split))
    assert say(corrected, verdict(EXEC_SQL, False) + tool_call(EXEC_SQL, joined))
    assert [a.type for a in corrected.trajectory.actions][-2:] == [A.SELF_CORRECT, A.EXECUTE]
    assert corrected.trajectory.off_protocol == 0


QUERIES = [
    ("SELECT a FROM t", "select  A\nfrom T ;", True),
    ("SELECT a FROM t", "SELECT a FROM t;;\n; -- end", True),
    ("SELECT a>=1", "SELECT a >= 1", True),
    ("SELECT a>=1", "SELECT a> =1", False),  # which does not run
    ("SELECT a<>-1", "SELECT a <> - 1", True),
    ("SELECT 'a b'", "SELECT 'a  b'", False),
    ("SELECT '--'", "SELECT ''", False),
    ('SELECT "A" FROM t', 'SELECT "a" FROM t', False),
    ("SELECT [A b]", "SELECT [A  b]", False),
    ("SELECT 'it''s A'", "SELECT 'it''s a'", False),
    ("SELECT 1; SELECT 2", "SELECT 1", False),
    ("SELECT É", "SELECT é", False),  # SQLite folds ASCII only
    ("SELECT -- 'a\n1", "SELECT 1", True),
    ("'" * 99_999, "'" * 99_998, False),
    ("/* " * 50_000, "", True),
]


@pytest.mark.parametrize(("a", "b", "same"), QUERIES)
def test_same_query(a, b, same):
    assert same_query(a, b) is same_query(b, a) is same
    assert same_query(a, a) and same_query(b, b)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("history", [False, True])
@pytest.mark.parametrize("tools", TOOL_SETS)
def test_prompts_and_observations_name_the_tools_that_there_are(tiny, tools, history, compact):
    episode = make_episode(tiny, history=history, tools=tools, compact=compact, limits=WIDE)
    said = [tiny.tokens.decode(episode.trajectory.segments[0].ids)]
    for tool in episode.tools:
        say(episode, tool_call(tool, GOLD))
        said.append(episode.trajectory.observations[-1].text)
    for name, tag in ((EXEC_SQL, "exec_verify"), (MEMORY_RETRIEVE, "memory_verify")):
        if name not in episode.tools:
            assert not any(name in text or tag in text for text in said)
    assert ("memory_retrieve" in said[0]) is (MEMORY_RETRIEVE in episode.tools)
    if not compact and EXEC_SQL in episode.tools:
        assert ("You have to call 'memory_retrieve'" in said[1]) is (history and tools == "both")
    if not compact:
        assert ("execution results" in "".join(said)) is (EXEC_SQL in episode.tools)


def test_out_of_tokens_in_a_message_in_an_observation_and_in_the_prompt(tiny):
    episode = make_episode(tiny)
    ids = tiny.tokens.message_ids("SELECT")[:-1]
    assert episode.step(ids, [0.0] * len(ids), stop=Stop.LIMIT) is None
    assert episode.trajectory.status is Status.OUT_OF_TOKENS
    call = tool_call(EXEC_SQL, GOLD)
    room = len(tiny.tokens.message_ids(call)) + 5
    episode = make_episode(tiny, limits=Limits(max_response_tokens=room))
    assert not say(episode, call)
    assert episode.trajectory.status is Status.OUT_OF_TOKENS
    assert episode.trajectory.response_length <= room
    episode = make_episode(tiny, limits=Limits(max_prompt_tokens=3))
    assert episode.trajectory.status is Status.OUT_OF_TOKENS


def test_memory_holds_the_history_that_was_chosen(tiny):
    for gold in (True, False):
        episode = make_episode(tiny, history=True, gold_history=gold)
        say(episode, tool_call(MEMORY_RETRIEVE, GOLD))
        assert ("SELECT count(*) FROM singer" in episode.trajectory.observations[0].text) is gold


def test_result_is_cut_to_the_characters_asked_for(tiny):
    episode = make_episode(tiny, compact=False, result_characters=20)
    say(episode, tool_call(EXEC_SQL, "SELECT name, country FROM singer"))
    line = next(x for x in episode.trajectory.observations[0].text.splitlines() if "truncated" in x)
    assert len(line.split(": ", 1)[1]) == 20
