"""Demonstrations: what is played and learned, that repairs need the observation; a probe of what is used."""

import json
import random
import re
from dataclasses import replace
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
from conftest import GOLD, SAMPLE, data_of, environment_of, json_lines, make_episode, run, write_lines

from evaluate import Args as EvaluateArgs
from mtsql.agent.env import Environment, Limits, outcome_of
from mtsql.agent.tools import EXEC_SQL, make_tools
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.config import read_options
from mtsql.data.datasets import Dialogue, Example, examples, load_dataset
from mtsql.errors import UserError
from mtsql.extras.demonstrations import COMPARED, KINDS, OWN_KINDS, Mistake, Question, gold_trajectories, play
from mtsql.extras.probe import Args, judged_failure, main, own_failures, probe, said_first
from mtsql.learn.batches import alike
from mtsql.recipes.mtsql_r1 import MtsqlR1, verdict
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.sql.execute import Executor, error_hint
from mtsql.sql.text import PIECE, normal_form
from mtsql.task import begin_task

WIDE = Limits(max_prompt_tokens=10**5, max_response_tokens=10**5)


@pytest.fixture(scope="module")
def real(tiny) -> tuple[Environment, list]:
    """Questions of SParC over ten real databases, and their environment with hints."""
    dataset = load_dataset([(SAMPLE / "dev.json", SAMPLE / "tables.json", SAMPLE / "database")])
    recipe = MtsqlR1(PromptOptions(True, 200))
    tools = make_tools("both")
    environment = Environment(dataset.schemas, recipe, tiny.tokens, Executor(), WIDE, tools, error_hints=True)
    return environment, examples(dataset.dialogues)


def mistakes_of(real, kind: str) -> list[tuple]:
    environment, asked = real
    made = [(e, KINDS[kind](Question(environment, e), random.Random(e.id))) for e in asked]
    return [(example, mistake) for example, mistake in made if mistake is not None]


def actions(trajectory: Trajectory) -> list[str]:
    verdicts = {None: "", True: " pass", False: " no_pass"}
    return [f"{action.type}{verdicts[action.passed]}" for action in trajectory.actions]


def learned(trajectory: Trajectory) -> list[set[int]]:
    """The loss mask of each message."""
    return [set(s.loss_mask) for s in trajectory.segments if s.role == "model"]


def test_gold_sql_passes_both_checks(tiny):
    shown = play(environment_of(tiny), make_episode(tiny, history=True).example)
    assert actions(shown) == ["propose", "execute", "e_verify pass", "m_verify pass", "finalize"]
    assert shown.off_protocol == 0 and shown.answer_sql == GOLD and learned(shown) == [{1}] * 3
    alone = play(environment_of(tiny), make_episode(tiny).example)  # no memory to ask
    assert actions(alone) == ["propose", "execute", "e_verify pass", "finalize"]


@pytest.mark.parametrize("told", [False, True])
def test_what_fails_is_repaired_and_learned_only_if_the_prompt_tells_it(told, tiny):
    example = make_episode(tiny, history=True).example
    wrong = "SELECT nme FROM singer"
    shown = play(environment_of(tiny), example, [Mistake(wrong, (example, tiny.schema), told)])
    assert actions(shown)[1:4] == ["execute", "e_verify no_pass", "self_correct"]
    assert shown.answer_sql == GOLD and shown.status is Status.ANSWERED and shown.off_protocol == 0
    assert learned(shown) == [{int(told)}, {1}, {1}, {1}]


@pytest.mark.parametrize("again", ["SELECT nme FROM singer", "SELECT name FROM singr"])
def test_what_fails_again_is_judged_again(again, tiny):
    example, wrong = make_episode(tiny, history=True).example, "SELECT nme FROM singer"
    mistakes = [Mistake(sql, (example, tiny.schema)) for sql in (wrong, again)]
    shown = play(environment_of(tiny), example, mistakes)
    failed = ["execute", "e_verify no_pass"]
    corrected = ["self_correct"] if again != wrong else []
    assert actions(shown)[1:-4] == [*failed, *corrected, *failed, "self_correct"]
    assert actions(shown)[-4:] == ["execute", "e_verify pass", "m_verify pass", "finalize"]
    assert shown.answer_sql == GOLD and learned(shown) == [{0}, {0}, {1}, {1}, {1}]


def test_a_repair_begins_with_what_was_missing(real):
    environment, said = real[0], []
    for kind in ("wrong table", "lost join", "stale column"):
        for example, mistake in mistakes_of(real, kind):
            question = Question(environment, example)
            needed, named = question.needed(mistake.wrong), set(PIECE.findall(question.gold))
            repair = environment.tokens.decode(play(environment, example, [mistake]).segments[3].ids)
            assert repair.startswith(f"{verdict(EXEC_SQL, False)}\n{needed}")
            for column, table in re.findall(r"(\w+) is in (\w+)", needed):
                assert column in question.columns[table] and {column, table} <= named
            hint = error_hint(question.execute(mistake.wrong).message, mistake.wrong, question.schema)
            if needed.startswith("FROM "):  # how the gold SQL joins
                assert needed in question.gold and needed not in mistake.wrong
            elif kind == "wrong table":
                said.append(any(part in hint for part in needed.split("; ")))
            else:
                assert needed and kind == "stale column"
            assert question.needed(question.gold) == ""
    assert len(said) > 5 and fmean(said) > 0.8


def test_what_does_not_fit_is_no_demonstration(tiny):
    example = make_episode(tiny).example
    assert play(environment_of(tiny, limits=Limits(max_turn_tokens=5)), example) is None
    assert play(environment_of(tiny, limits=Limits(max_interactions=0)), example) is None
    short = Limits(max_interactions=0)  # a direct answer is left
    ((shown,),) = gold_trajectories(environment_of(tiny, limits=short), [example], 0)
    assert shown.answer_sql == GOLD and not shown.observations


@pytest.mark.parametrize("kind", KINDS)
def test_each_mistake_fails_and_the_gold_sql_does_not(kind, real):
    environment, _ = real
    found = mistakes_of(real, kind)
    assert len(found) >= 2, "no question of the sample has this mistake"
    for example, mistake in found:
        path = environment.schemas[example.db_id].path
        outcome = outcome_of(environment.executor.execute(path, mistake.wrong))
        assert outcome == ("null" if mistake.look else "error")
        trajectory = play(environment, example, [mistake])
        assert trajectory.status is Status.ANSWERED and trajectory.off_protocol == 0
        assert trajectory.answer_sql == normal_form(example.gold_sql, environment.schemas[example.db_id])
        failed = [action for action in trajectory.actions if action.passed is False]
        assert len(failed) == 1 + bool(mistake.look)


@pytest.mark.parametrize("kind", ["stale column", "stale table"])
def test_a_stale_name_stands_in_the_prompt_and_todays_only_in_the_error(kind, real, tiny):
    environment, _ = real
    for example, mistake in mistakes_of(real, kind):
        asked, schema = mistake.shown
        prompt = " ".join([schema.text(True), *(turn.sql for turn in asked.history)])
        gold = normal_form(example.gold_sql, environment.schemas[example.db_id])
        todays = set(PIECE.findall(gold)) - set(PIECE.findall(mistake.wrong))
        assert todays and not todays & set(PIECE.findall(prompt))
        trajectory = play(environment, example, [mistake])
        assert todays <= set(PIECE.findall(trajectory.observations[0].text))  # the only place to read it
        assert schema.text(True) in tiny.tokens.decode(trajectory.segments[0].ids)


def test_own_mistakes_stand_under_the_true_schema_and_are_not_learned(real):
    environment, _ = real
    for kind in OWN_KINDS:
        for example, mistake in mistakes_of(real, kind):
            gold = normal_form(example.gold_sql, environment.schemas[example.db_id])
            assert mistake.shown[1] == environment.schemas[example.db_id] and not mistake.learned
            joins = [sql.count(" JOIN ") for sql in (mistake.wrong, gold)]
            assert joins[0] == 0 < joins[1] if kind == "lost join" else joins[0] == joins[1] > 0


def test_the_right_form_of_a_value_is_looked_up(real):
    for example, mistake in mistakes_of(real, "other value"):
        trajectory = play(real[0], example, [mistake])
        seen = trajectory.observations[1].text
        values = {value for _, _, value in COMPARED.findall(trajectory.answer_sql) if value in seen}
        assert any(f"'{value}'" not in mistake.wrong for value in values)
        assert mistake.look.startswith("SELECT DISTINCT")


def test_the_shares_are_kept_and_every_draw_is_the_questions_own(real):
    environment, asked = real
    found = [t for of in gold_trajectories(environment, asked, 0) for t in of]
    assert [t.example_id for t in found] == [e.id for e in asked]
    repaired = sum(any(a.passed is False for a in t.actions) for t in found) / len(found)
    direct = sum(not t.tools for t in found) / len(found)
    twice = sum(sum(a.passed is False for a in t.actions) > 1 for t in found) / len(found)
    assert 0.05 < repaired < 0.4 and 0.2 < twice / repaired < 0.6 and 0.35 < direct < 0.65
    again = [t for of in gold_trajectories(environment, asked[7:20], 0) for t in of]
    assert [t.ids for t in again] == [t.ids for t in found[7:20]]
    (short,) = gold_trajectories(replace(environment, tools={}), asked[:1], 0)
    assert not short[0].observations and short[0].tools == ()
    for name in ("no_memory", "no_execution"):
        own = make_tools(name)
        fewer = [t for of in gold_trajectories(replace(environment, tools=own), asked, 0) for t in of]
        assert {t.tools for t in fewer} == {(), tuple(own)}


def test_prompts_over_a_stale_schema_do_not_cost_the_others_their_shared_prefix(real):
    environment, asked = real
    asked = [e for e in asked if e.db_id == asked[0].db_id]
    plain = [play(environment, example) for example in asked]
    made = [(e, KINDS["stale column"](Question(environment, e), random.Random(0))) for e in asked]
    stale = [play(environment, example, [mistake]) for example, mistake in made if mistake]
    assert len(alike(plain)) == 1 and stale
    groups = alike([*plain, *stale])
    assert max(map(len, groups)) >= len(plain) and sum(map(len, groups)) == len(plain) + len(stale)


# The probe of what the policy says after a query that failed


KEYS = {"failures", "gold_seen", "gold_blind", "gap", "copy_seen", "copy_blind"}


def test_the_probe_reads_what_the_policy_says_after_an_error(work, tmp_path):
    asked = json.loads((work / "benchmark" / "train.json").read_text())
    lines = [
        {"example_id": f"{number:05d}/0", "predicted": sql, "gold": dialogue["interaction"][0]["query"]}
        for number, dialogue in enumerate(asked)
        for sql in ("SELECT absent FROM nowhere", "SELECT 1", None)
    ]
    wrong = write_lines(tmp_path / "predictions.jsonl", lines)
    options = ["--held-out", 1, "--error-hints", "--questions", 3, "--failures", wrong]
    out = run("-m", "mtsql.extras.probe", *data_of(work), *options, "--out", tmp_path / "probe")
    means = json.loads((tmp_path / "probe" / "probe.json").read_text())
    rows = json_lines(tmp_path / "probe" / "probe.jsonl")
    assert "gold_seen" in out and {"own", "stale column", "stale table"} <= set(means)
    assert all(set(row) == KEYS for row in means.values())
    own = [row for row in rows if row["kind"] == "own"]
    assert own and {row["failed"] for row in own} == {"SELECT absent FROM nowhere"}  # what fails, alone
    assert means["stale table"]["failures"] == 3
    for row in rows:
        assert abs(row["gap"] - (row["gold_seen"] - row["gold_blind"])) < 1e-6
        assert 0 < row["gold_seen"] + row["copy_seen"] <= 1.001 and 0 < row["gold_blind"] < 1


@pytest.mark.parametrize("options", ["--tools no_execution", "--recipe sql_trail --tools no_memory"])
def test_a_protocol_without_verdicts_on_results_is_not_probed(work, tmp_path, options):
    line = [*data_of(work), *options.split(), "--held-out", "1", "--out", tmp_path / "probe"]
    with pytest.raises(UserError, match="a probe needs --recipe mtsql_r1"):
        main(read_options(Args, None, list(map(str, line))))


@pytest.mark.parametrize("line", ["[1]", "{", "{}", '{"example_id": [], "predicted": "x"}'])
def test_failures_from_another_file_are_one_sentence(tmp_path, line):
    config = Args(model="m", data=("d",), out="", failures=str(tmp_path / "predictions.jsonl"))
    asked = Example("7/0", "7", "d", 0, "How many?", "SELECT 1")
    run_ = SimpleNamespace(dataset=SimpleNamespace(dialogues=(Dialogue("7", "d", (asked,)),)))
    with pytest.raises(UserError, match=r"predictions\.jsonl: No such file"):
        list(own_failures(config, run_))
    row = {"example_id": "7/0", "predicted": "SELECT", "gold": "SELECT 2"}
    write_lines(tmp_path / "predictions.jsonl", [row])
    with pytest.raises(UserError, match=r"predictions\.jsonl, line 1: another question"):
        list(own_failures(config, run_))
    (tmp_path / "predictions.jsonl").write_text(f"\n{line}\n")
    with pytest.raises(UserError, match=r"predictions\.jsonl, line 2: give an evaluation's"):
        list(own_failures(config, run_))


def test_its_probabilities_are_of_the_token_where_repair_and_copy_part(work):
    options = EvaluateArgs(
        model=str(work / "imitation"), data=(str(work / "benchmark"),), out="", split="train",
        wording="compact", error_hints=True, max_prompt_tokens=2000,
    )  # fmt: skip
    task, asked = begin_task(options, "train"), []
    example, policy, text = examples(task.dataset.dialogues)[1], task.policy.eval(), task.tokens.decode
    shown = (example, task.environment.schemas[example.db_id])

    def watched(ids, **how):
        asked.append(ids)
        return policy(ids, **how)

    watched.device = policy.device
    said, copied = "name is in singer\n", "SELECT absent FROM nowhere"  # between verdict and call
    before = judged_failure(task, example, Mistake(copied, shown))
    found = probe(replace(task, policy=watched), before, [said] * 2, example.gold_sql, copied)
    judged, call = verdict(EXEC_SQL, False) + "\n", task.environment.recipe.call
    gold, copy = (task.tokens.message_ids(said + call(sql)) for sql in (example.gold_sql, copied))
    assert list(before) == ["seen", "blind"] and all(text(ids).endswith(judged) for ids in before.values())
    place = next(i for i, (a, b) in enumerate(zip(gold, copy, strict=False)) if a != b)
    for ids, name in zip(asked, ("seen", "blind"), strict=True):
        given = text(ids[0].tolist())
        assert ("error: the query fails" in given) == (name == "blind")
        assert ("tables" in given) == (name == "seen")  # the hint
        assert ids[0, -place:].tolist() == gold[:place]
        with torch.no_grad():
            expected = torch.softmax(policy(ids).logits[0, -1], -1)  # (vocabulary,)
        assert abs(expected[gold[place]].item() - found[f"gold_{name}"]) < 1e-4
        assert abs(expected[copy[place]].item() - found[f"copy_{name}"]) < 1e-4
    assert judged_failure(task, example, Mistake(example.gold_sql, shown)) is None  # it does not fail
    for ids, words in zip(before.values(), said_first(task, list(before.values())), strict=True):
        seen = torch.tensor([ids])  # (1, T)
        out = policy.generate(seen, attention_mask=torch.ones_like(seen), do_sample=False, max_new_tokens=60)
        expected, call, _ = text(out[0, len(ids) :].tolist()).partition("<tool_call>")
        assert words == (expected if call else "")
