"""The evaluation protocol: answer every question of a split once, and score the answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from mtsql.agent.env import NO_TOOL, Environment, Episode
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.data.datasets import Dialogue, Example, example_after, examples
from mtsql.recipes.rewards import Decode, RewardFunction
from mtsql.report.abilities import ABILITIES, abilities
from mtsql.report.answer_log import AnswerLog, play_unanswered
from mtsql.report.errors import error_kinds
from mtsql.sql.match import string_match
from mtsql.sql.score import FURTHER_METRICS, Scorer

THOUGHT = re.compile(
    r"(?:<(?:think|reasoning)>|\A)((?:(?!<think>|<reasoning>).)*?)</(?:think|reasoning)>", re.DOTALL
)


def answer_dialogues(
    play: Callable[[Sequence[Episode]], object],
    environment: Environment,
    dialogues: Sequence[Dialogue],
    history: str,
    seed: int,
    log: AnswerLog | None = None,
) -> list[tuple[Example, Trajectory]]:
    """One trajectory a question, ordered by dialogue and turn; `play` plays episodes to their ends.

    With gold or question-only history all questions are independent; with predicted history all
    first turns are answered together, then all second turns with the first answers in memory. What `log`
    holds is not played again.
    """
    if history != "predicted":
        batches = [[(d.id, e) for d in dialogues for e in examples([d], history)]]
    else:
        batches = [[] for _ in range(max((len(d.turns) for d in dialogues), default=0))]
        for dialogue in dialogues:
            for turn in dialogue.turns:
                batches[turn.index].append((dialogue.id, dialogue))
    answers: dict[str, list[str | None]] = {d.id: [] for d in dialogues}
    done: list[tuple[Example, Trajectory]] = []
    for batch in batches:
        asked = [
            example_after(item, answers[name]) if isinstance(item, Dialogue) else item for name, item in batch
        ]
        episodes = [environment.episodes(example, [_seed(seed, example)])[0] for example in asked]
        unanswered, trajectories = play_unanswered(episodes, log)
        play([e for e in unanswered if e.trajectory.status is None])
        for (name, _), example, trajectory in zip(batch, asked, trajectories, strict=True):
            answers[name].append(trajectory.answer_sql)
            done.append((example, trajectory))
    return sorted(done, key=lambda pair: (pair[0].dialogue_id, pair[0].turn_index))


def _seed(seed: int, example: Example) -> int:
    dialogue, turn = example.id.split("/")
    return int(np.random.SeedSequence((seed, int(dialogue), int(turn))).generate_state(1, np.uint64)[0])


def thought_characters(trajectory: Trajectory, decode: Decode) -> int:
    """Characters of the thoughts in all messages; the prompt may have opened a message's first one."""
    said = (decode(segment.ids) for segment in trajectory.segments if segment.role == "model")
    return sum(len(thought) for text in said for thought in THOUGHT.findall(text))


def score_records(
    answered: Sequence[tuple[Example, Trajectory]],
    scorer: Scorer,
    verifies: bool = True,
    reward: RewardFunction | None = None,
    decode: Decode | None = None,
) -> list[dict]:
    """One record a question for `mtsql.report.metrics.summarise`; with `reward` its parts, with `decode` the
    length of the thoughts (SQL-Trail, A.8).

    A question whose gold SQL does not run counts as wrong and has the hardness "unscored". `verifies` is
    the recipe's: whether all five abilities are measured.
    """
    records = []
    for example, trajectory in answered:
        problem = scorer.gold_problem(example.db_id, example.gold_sql)
        right = trajectory.status is Status.ANSWERED and problem is None
        answer = trajectory.answer_sql
        further = {}
        if right:
            further = scorer.further_ex([scorer.paths[example.db_id]], example.gold_sql, answer)
            further["em_string"] = int(string_match(example.gold_sql, answer))
        ex = int(right and scorer.ex(example.db_id, example.gold_sql, answer))
        measured = dict.fromkeys(ABILITIES)
        if problem is None:
            measured = abilities(trajectory, example, scorer, verifies)
        errors: tuple[str, ...] = ()
        if not ex and problem is None:
            errors = error_kinds(
                example.gold_sql, answer, scorer.schemas[example.db_id], scorer.runs(example.db_id, answer)
            )
        records.append(
            {
                "example_id": example.id,
                "dialogue_id": example.dialogue_id,
                "turn_index": example.turn_index,
                "db_id": example.db_id,
                "hardness": "unscored" if problem else scorer.hardness(example.db_id, example.gold_sql),
                "difficulty": example.difficulty,
                "gold_problem": problem,
                "gold": example.gold_sql,
                "predicted": answer,
                "ex": ex,
                "em": int(right and scorer.em(example.db_id, example.gold_sql, answer)),
                **{metric: further.get(metric, 0) for metric in FURTHER_METRICS},
                "pred_parses": scorer.readable(example.db_id, answer),
                "status": str(trajectory.status),
                "interactions": trajectory.interactions,
                "turns": trajectory.messages,
                **({"reward_parts": reward(trajectory, example).parts} if reward and not problem else {}),
                **({"thought_characters": thought_characters(trajectory, decode)} if decode else {}),
                "off_protocol": trajectory.off_protocol,
                "tool_calls": dict(Counter(o.tool for o in trajectory.observations if o.tool != NO_TOOL)),
                "sampled_tokens": trajectory.sampled_length,
                "response_tokens": trajectory.response_length,
                "abilities": measured,
                "errors": list(errors),
            }
        )
    return records
