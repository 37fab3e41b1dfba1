"""The scores of answers: a record of numbers for each question."""

from __future__ import annotations

import re
from collections import Counter

from mtsql.agent.env import NO_TOOL, Answered, Environment
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.data.datasets import Example
from mtsql.recipes.mtsql_r1_rewards import RewardWeights
from mtsql.recipes.mtsql_r1_rewards import reward as process_reward
from mtsql.recipes.rewards import Decode, RewardFunction
from mtsql.sql.match import string_match
from mtsql.sql.score import FURTHER_METRICS, Scorer

THOUGHT = re.compile(
    r"(?:<(?:think|reasoning)>|\A)((?:(?!<think>|<reasoning>).)*?)</(?:think|reasoning)>", re.DOTALL
)

# The long-horizon abilities of MTSQL-R1, section 4.3, and what a report calls them.
ABILITIES = {
    "call_execution": "calls EXECUTE",
    "call_memory": "calls MEMORY-VERIFY",
    "e_verify": "execution verification",
    "e_verify_called": "E-VERIFY where called",
    "m_verify": "memory verification",
    "m_verify_called": "M-VERIFY where called",
    "generation": "generation, self-correction",
}


def thought_characters(trajectory: Trajectory, decode: Decode) -> int:
    """Characters of the thoughts in all messages; the prompt may have opened a message's first one."""
    said = (decode(segment.ids) for segment in trajectory.segments if segment.role == "model")
    return sum(len(thought) for text in said for thought in THOUGHT.findall(text))


def abilities(
    trajectory: Trajectory, example: Example, scorer: Scorer, verifies: bool = True
) -> dict[str, float | None]:
    """Each of ABILITIES from 0 to 1: a prescribed tool was called or not; the process rewards for the others.

    A verification is 0 where its tool was not called, and so says as much about calling as about judging:
    "..._called" leaves such answers out (None). The memory's abilities are None for a first question, which
    has nothing to check against. Of recipes that do not verify only the first is measured.
    """
    called = {observation.tool for observation in trajectory.observations}
    measured: dict[str, float | None] = dict.fromkeys(ABILITIES)
    measured["call_execution"] = float(EXEC_SQL in called)
    if not verifies:
        return measured
    parts = process_reward(trajectory, example, scorer, RewardWeights(1, 1, 1, 1)).parts
    measured["generation"] = parts["proposal"]
    measured["e_verify"] = parts["e_verify"]
    measured["e_verify_called"] = parts["e_verify"] if EXEC_SQL in called else None
    if example.history:
        measured["call_memory"] = float(MEMORY_RETRIEVE in called)
        measured["m_verify"] = parts["m_verify"]
        measured["m_verify_called"] = parts["m_verify"] if MEMORY_RETRIEVE in called else None
    return measured


def score_records(
    answered: Answered, scorer: Scorer, environment: Environment, reward: RewardFunction
) -> list[dict]:
    """One record a question for `mtsql.report.metrics.summarise`.

    A question whose gold SQL does not run counts as wrong and has the hardness "unscored".
    """
    verifies, decode = environment.recipe.verifies, environment.tokens.tokenizer.decode
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
                "reward_parts": {} if problem else reward(trajectory, example).parts,
                "thought_characters": thought_characters(trajectory, decode),
                "off_protocol": trajectory.off_protocol,
                "tool_calls": dict(Counter(o.tool for o in trajectory.observations if o.tool != NO_TOOL)),
                "sampled_tokens": trajectory.sampled_length,
                "response_tokens": trajectory.response_length,
                "abilities": measured,
            }
        )
    return records
