"""What Algorithm 1 keeps and selects, why it rejects the rest, and what a checkpoint remembers of it."""

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import GOLD, environment_of, make_episode, say
from decoders import random_model
from peft import LoraConfig, get_peft_model

import train_sft
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Observation, Segment, Status, Stop, Trajectory
from mtsql.learn import warm_start
from mtsql.learn.parallel import Processes
from mtsql.recipes.mtsql_r1 import MtsqlR1, final_answer, make_reward, tool_call, verdict
from mtsql.recipes.skyrl_sql import SkyrlSql

REWRITTEN = GOLD.replace("SELECT", "select")  # another string, the same clauses
OTHER_CLAUSES = "SELECT name FROM singer WHERE country IN ('france')"  # the same result
WRONG = "SELECT name FROM singer"


FILTERED = [
    (GOLD, "none", "", MtsqlR1, None),
    (GOLD, "both", "", MtsqlR1, "off_protocol"),  # answered without executing
    (None, "none", "", MtsqlR1, "no_answer"),  # out of tokens
    (WRONG, "none", "", MtsqlR1, "wrong_ex"),
    (OTHER_CLAUSES, "none", "", MtsqlR1, "wrong_em"),
    (OTHER_CLAUSES, "none", "", SkyrlSql, None),
    (REWRITTEN, "none", "", MtsqlR1, None),
    (REWRITTEN, "none", "paper", MtsqlR1, "wrong_em"),  # the paper's text compares strings
    (GOLD, "none", "paper", MtsqlR1, None),
]


@pytest.mark.parametrize(("sql", "tools", "preset", "recipe", "expected"), FILTERED)
def test_the_first_filter_that_rejects_is_named(tiny, sql, tools, preset, recipe, expected):
    episode = make_episode(tiny, tools=tools)
    if sql is None:
        episode.step([1, 2], [0.0, 0.0], Stop.LIMIT)
    else:
        say(episode, final_answer(sql))
    rewards = make_reward(preset, tiny.scorer, tiny.tokens.decode, 5)(episode.trajectory, episode.example)
    assert warm_start.rejection(episode.trajectory, rewards, recipe) == expected


def test_rounds_are_counted_solved_questions_leave_and_a_checkpoint_remembers(tiny):
    episode, rejected = make_episode(tiny, tools="none"), Counter(wrong_ex=2, not_selected=1)
    say(episode, final_answer(GOLD))
    pool = [episode.example, replace(episode.example, id="00000/2")]
    progress, rng = warm_start.Progress(list(pool), list(pool)), random.Random(0)
    progress.add([warm_start.Collected(pool[0].id, 4, 2, [episode.trajectory], rejected)], rng)
    (round_1,) = progress.coverage
    assert round_1["rejected"] == {"not_selected": 1, "wrong_ex": 2} and round_1["questions_solved"] == 1
    progress.index, progress.step = 3, 7
    plain = json.loads(json.dumps(progress.to_plain()))
    again = warm_start.Progress.from_plain(plain | {"rng_state": progress.rng_state}, pool)
    assert again.kept == progress.kept and isinstance(again.kept[0].status, Status)
    assert (again.round, again.index, again.step, again.collected) == (0, 3, 7, True)
    assert (again.remaining, again.solved, again.coverage) == (pool, {pool[0].id}, progress.coverage)
    again.drop_solved()
    assert again.remaining == pool[1:] and not again.collected and again.index == 0


def test_collection_keeps_what_is_right_and_calls_questions_simple_if_easy_or_always_right(tiny, monkeypatch):
    first, environment = make_episode(tiny).example, environment_of(tiny)
    hard = "SELECT name FROM singer WHERE country = 'france' GROUP BY name HAVING count(*) < 2 ORDER BY name"
    assert tiny.scorer.hardness("music", GOLD) == "easy" != tiny.scorer.hardness("music", hard)

    def played(gold: str, *answers: str) -> tuple:
        """A question with an answer of each kind: "right", "wrong", or right and "unchecked"."""
        trajectories, example = [], replace(first, gold_sql=gold)
        for kind in answers:
            (episode,) = environment.episodes(example, [0])
            sql = WRONG if kind == "wrong" else gold
            if kind != "unchecked":
                say(episode, tool_call(EXEC_SQL, sql))
            say(episode, verdict(EXEC_SQL, True) * (kind != "unchecked") + final_answer(sql))
            trajectories.append(episode.trajectory)
        return example, trajectories

    kinds = ((GOLD, "right wrong"), (hard, "right wrong right"), (hard, "right unchecked"), (hard, "wrong"))
    sampled = [played(gold, *answers.split()) for gold, answers in kinds]
    chosen = []

    def select(valid: list[Trajectory], simple: bool, *_: object) -> list[Trajectory]:
        chosen.append((valid, simple))
        return valid[:1]

    monkeypatch.setattr(train_sft, "select_trajectories", select)
    of = {"environment": environment, "scorer": tiny.scorer, "sample": lambda *_: sampled}
    task = SimpleNamespace(processes=Processes(0, 1), policy=None, **of)
    config = train_sft.Args(model="m", data=("d",), out="o")
    reward = make_reward("", tiny.scorer, tiny.tokens.decode, 5)
    found = train_sft.collect(config, task, reward, warm_start.Progress([], []))
    right = [trajectories for _, trajectories in sampled]
    assert chosen == [(right[0][:1], True), (right[1][::2], False), (right[2][:1], True)]
    assert [(c.sampled, c.right, len(c.kept)) for c in found] == [(2, 1, 1), (3, 2, 1), (2, 2, 1), (1, 0, 0)]
    assert [c.rejected for c in found[1:3]] == [{"wrong_ex": 1, "not_selected": 1}, {"off_protocol": 1}]


# S2: bounds, clusters and the embeddings behind them


OBSERVATION = Observation(EXEC_SQL, "SELECT 1", "ok", "[(1,)]")


def make(interactions: int, written: int) -> Trajectory:
    """A trajectory with so many tool interactions; `written` is its one sampled token."""
    segments = [Segment.given("prompt", [1, 2]), Segment.sampled([written], [-1.0])]
    return Trajectory("1/0", 0, segments, observations=[OBSERVATION] * interactions)


def never(trajectories: list[Trajectory]) -> np.ndarray:
    raise AssertionError("there is nothing to choose, so nothing to embed")


def on_axes(trajectories: list[Trajectory]) -> np.ndarray:
    """Three tight bundles of vectors of unlike length, by the sampled token modulo 3."""
    written = [t.ids[-1] for t in trajectories]
    return np.array([np.eye(3)[token % 3] * token + 0.01 for token in written], np.float32)


def chosen(valid: list[Trajectory], simple: bool, embed: Callable, seed: int = 0) -> list[tuple[int, int]]:
    """(interactions, sampled token) of what is selected."""
    picked = warm_start.select_trajectories(valid, simple, embed, random.Random(seed))
    return [(t.interactions, t.ids[-1]) for t in picked]


def test_simple_questions_keep_two_short_trajectories():
    valid = [make(count, 10 + i) for i, count in enumerate([3, 0, 2, 1, 4, 3, 2])]
    seen = set()
    for seed in range(60):
        picked = set(chosen(valid, True, never, seed))
        assert len(picked) == 2
        seen |= picked
    assert seen == {(0, 11), (2, 12), (1, 13), (2, 16)}
    assert chosen(valid[:2], True, never) == [(0, 11)]


def test_other_questions_keep_one_long_trajectory_of_each_cluster():
    valid = [make(1, 3), make(0, 4)] + [make(2 + i % 3, 10 + i) for i in range(12)]
    seen = set()
    for seed in range(60):
        picked = chosen(valid, False, on_axes, seed)
        assert sorted(token % 3 for _, token in picked) == [0, 1, 2]
        assert all(count >= 2 for count, _ in picked)
        seen.update(token for _, token in picked)
    assert seen == set(range(10, 22))  # any of a cluster may be drawn
    assert chosen(valid, False, on_axes, 5) == chosen(valid, False, on_axes, 5)
    assert chosen(valid[:5], False, never) == [(2, 10), (3, 11), (4, 12)]


def test_solved_questions_are_never_left_without_a_trajectory():
    too_long = [make(5, 1), make(3, 2), make(4, 3), make(3, 4), make(3, 5)]
    for seed in range(20):
        assert set(chosen(too_long, True, never, seed)) < {(3, 2), (3, 4), (3, 5)}
    too_short = [make(0, 1), make(1, 2), make(0, 3), make(1, 4)]
    assert chosen(too_short, False, never) == [(1, 2), (1, 4)]
    for simple in (True, False):
        assert chosen([make(0, 1)], simple, never) == [(0, 1)]


def test_what_was_written_twice_counts_once():
    """Two of the same ids are one, whatever the environment answered and whoever sampled it."""
    twice = [make(2, 7), make(2, 7), make(2, 8)]
    twice[1].segments.append(Segment.given("environment", [9]))
    assert len(chosen(twice, False, never)) == 2
    assert len(chosen([make(0, 7)] * 20, True, never)) == 1
    # The same ids cut into other messages are not the same.
    one, two = make(2, 7), make(2, 7)
    one.segments[1:] = [Segment.sampled([7, 8], [0, 0])]
    two.segments[1:] = [Segment.sampled([7], [0]), Segment.sampled([8], [0])]
    assert len(warm_start.select_trajectories([one, two], False, never, random.Random(0))) == 2


def test_lloyd_moves_what_the_start_put_wrong():
    """The start is 0 and 100 degrees, of which 45 is nearer to 0; but the mean of nine at 0 and one at 45 is
    at 4.5 degrees, that of 60 and 100 at 80."""
    angles = np.radians([0] * 9 + [45, 60, 100])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    seed = next(seed for seed in range(99) if random.Random(seed).randrange(12) < 9)
    assert warm_start.cluster(vectors, 2, random.Random(seed)).tolist() == [0] * 9 + [1] * 3


@pytest.mark.parametrize("k", [1, 3, 6])
def test_clusters_are_nearest_never_empty_and_repeat(k):
    draw = np.random.default_rng(0)
    for seed in range(100):
        distinct = draw.normal(size=(int(draw.integers(1, 10)), int(draw.integers(2, 5))))
        # Many copies of a few pull the means about.
        vectors = np.repeat(distinct, draw.choice([1, 2, 30], len(distinct)), axis=0)
        labels = warm_start.cluster(vectors, k, random.Random(seed))
        assert sorted(set(labels)) == list(range(min(k, len(distinct))))
        assert (labels == warm_start.cluster(vectors, k, random.Random(seed))).all()
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        means = np.stack([unit[labels == c].mean(0) for c in range(labels.max() + 1)])
        distances = np.linalg.norm(unit[:, None] - means, axis=2)
        own = distances[np.arange(len(unit)), labels]
        np.testing.assert_allclose(own, distances.min(1), atol=1e-12)


def test_vectors_without_a_direction_are_refused():
    for bad in (0.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="zero or not finite"):
            warm_start.cluster(np.array([[1.0], [bad]]), 2, random.Random(0))


@pytest.fixture(scope="module")
def played(tiny) -> list[Trajectory]:
    """Trajectories of 0 to 3 tool interactions, some of prompts of their own."""
    trajectories = []
    for number in (2, 0, 3, 1, 2):
        episode = make_episode(tiny, history=number == 2)
        for tool in (EXEC_SQL, MEMORY_RETRIEVE, EXEC_SQL)[:number]:
            say(episode, f"{len(trajectories)} {tool_call(tool, GOLD)}")
        say(episode, f"<answer_sql>{GOLD}</answer_sql>")
        trajectories.append(episode.trajectory)
    return trajectories


@pytest.mark.parametrize("lora", [False, True])
def test_policy_embedding_is_the_mean_of_what_it_wrote(tiny, played, lora):
    torch.manual_seed(1)
    policy = random_model("qwen3", vocab_size=len(tiny.tokens.tokenizer))
    if lora:
        config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.5)
        policy = get_peft_model(policy, config)
    vectors = warm_start.embed_with_policy(policy.train(), played)
    assert policy.training and vectors.dtype == np.float32
    policy.eval()
    for trajectory, vector in zip(played, vectors, strict=True):
        with torch.no_grad():
            outputs = policy(torch.tensor([trajectory.ids]), output_hidden_states=True)
        hidden = outputs.hidden_states[-1][0]  # (positions, d)
        expected = hidden[torch.tensor(trajectory.loss_mask).bool()].mean(0)
        np.testing.assert_allclose(vector, expected.numpy(), rtol=0, atol=1e-5)
    warm_start.embed_with_policy(policy, played[:1])
    assert not policy.training
