"""Demonstrations of the protocol whose mistakes are the model's own.

A model too small to follow instructions never calls the tools, and is shown how: a scripted
agent proposes what that model sampled, runs it, judges it by what the tools show, and repairs what it has
found wrong to the gold SQL. It finds nothing that cannot be seen in the question, the SQL, its result and the
memory; mistakes of another kind are no demonstration. Gold only tells false alarms from real ones.
SQL that is repaired later has loss mask 0: the model learns to run, to judge and to repair what it wrote, not
to make its mistakes. So each such conversation has another beside it whose first proposal is the gold SQL: a
model that learned the call around it alone would not know what to write there.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mtsql.agent.env import Episode, outcome_of
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS
from mtsql.agent.trajectory import Status, Stop, Trajectory
from mtsql.data.datasets import Example
from mtsql.recipes.mtsql_r1_prompts import tool_call, verdict
from mtsql.sql.execute import ExecutionResult, as_executed

RIGHT, UNSEEN, CUT = "right", "wrong, and nothing shows it", "beyond a limit of the episode"
GOLD = "gold, beside a repaired one"
GOLD_ALONE = "gold, of a question that was not sampled"
GOLD_CUT = "gold, beyond a limit of the episode"
ASKS_FOR_NUMBER = re.compile(r"\b(how many|how much|number|count|total|sum|average|mean)\b", re.IGNORECASE)
ASKS_FOR_ONE = re.compile(r"\b(the (most|least|fewest)|the (?!(?:lat|for|t)est)\w+est)\b", re.IGNORECASE)
REFERS_BACK = re.compile(
    r"\b(those|these|them|they|their|it|its|that|this|ones?|also|instead|above|same|(?:what|how) about)\b",
    re.IGNORECASE,
)
CONDITIONS = re.compile(r"\b(where|having)\b", re.IGNORECASE)
LITERAL = re.compile(r"'[^']*'|\"[^\"]*\"|\b\d+(?:\.\d+)?\b")


@dataclass(frozen=True)
class Demonstration:
    """A first proposal, whether it was `right`, and what came `first`: RIGHT, what showed that it was wrong,
    GOLD or GOLD_ALONE if nobody sampled it, or UNSEEN, CUT or GOLD_CUT, which have no trajectory.

    `tool_set` is one of TOOL_SETS.
    """

    question: Example
    right: bool
    first: str
    trajectory: Trajectory | None
    tool_set: str = "both"

    @property
    def sampled(self) -> bool:
        """Whether the first proposal is the model's own."""
        return self.tool_set != "none" and self.first not in (GOLD, GOLD_ALONE, GOLD_CUT)


def draw_tool_set(rng: random.Random) -> str:
    """The tools of a demonstration: mostly both, else fewer, so that the model knows Table 4's prompts."""
    return rng.choices(list(TOOL_SETS), [0.7 if name == "both" else 0.1 for name in TOOL_SETS])[0]


def demonstrate(episode: Episode, proposal: str, right: bool) -> Demonstration:
    """Play an episode that starts with `proposal`, as it runs; it is `right` or wrong by EX."""
    tools, recipe, example = episode.tools, episode.recipe, episode.example
    sql, wrong, first, verdicts = as_shown(proposal), not right, RIGHT, ""
    checks = [EXEC_SQL] if EXEC_SQL in tools else []
    checks += [MEMORY_RETRIEVE] if MEMORY_RETRIEVE in tools and example.history else []

    def say(text: str) -> None:
        ids = episode.tokens.message_ids(text)
        written = json.dumps(sql, ensure_ascii=False)[1:-1]  # as it stands in a call
        loss_mask = episode.tokens.loss_mask_without(ids, written) if wrong else None
        episode.step(ids, [0.0] * len(ids), Stop.END_OF_TURN, loss_mask)

    step = 0  # of the checks
    while episode.trajectory.status is None:
        if step == len(checks) and wrong:
            return Demonstration(example, right, UNSEEN, None)
        if step == len(checks):
            say(verdicts + recipe.answer(sql))
            break
        tool = checks[step]
        say(verdicts + (recipe.call(sql) if tool == EXEC_SQL else tool_call(tool, sql)))
        if episode.trajectory.status is not None:
            break
        found = (
            execution_problem(example.question, episode.result)
            if tool == EXEC_SQL
            else memory_problem(example, sql)
        )
        failed = wrong and found is not None
        verdicts = verdict(tool, not failed) + "\n"
        step += 1
        if failed:  # repaired, and checked from the beginning
            sql, wrong, first, step = as_shown(example.gold_sql), False, found, 0
    if episode.trajectory.status is not Status.ANSWERED:
        return Demonstration(example, right, CUT, None)
    return Demonstration(example, right, first, episode.trajectory)


def as_shown(sql: str) -> str:
    """SQL with EX's repairs, for a tool and a user run what is written: SQLite refuses "> ="."""
    return as_executed(sql, keep_distinct=True)


def execution_problem(question: str, result: ExecutionResult) -> str | None:
    """What is wrong with a result, as far as the question and the result show it; None if nothing."""
    outcome = outcome_of(result)
    if outcome != "ok":
        return {"error": "error", "null": "empty result"}[outcome]
    cells = [value for row in result.rows for value in row]
    number = any(isinstance(value, int | float) for value in cells)
    if re.search(r"\bhow many\b", question, re.IGNORECASE) and not number:
        return "no number where one is asked for"
    if len(cells) == 1 and number and not ASKS_FOR_NUMBER.search(question) and "?" not in question:
        return "a number where none is asked for"
    if ASKS_FOR_ONE.search(question) and len(result.rows) > 1:
        return "several rows where one is asked for"
    return None


def memory_problem(example: Example, sql: str) -> str | None:
    """What is wrong if a question that refers back has lost a value that the SQL before it compares with."""
    before = example.history[-1].sql if example.history else None
    if before is None or not REFERS_BACK.search(example.question):
        return None
    lost = {_plain(value) for value in LITERAL.findall(_conditions(before))}
    lost -= {_plain(value) for value in LITERAL.findall(sql)}
    return "a constraint of an earlier turn is gone" if lost else None


def _conditions(sql: str) -> str:
    """What stands behind the first WHERE or HAVING, "" without any."""
    found = CONDITIONS.search(sql)
    return sql[found.end() :] if found else ""


def _plain(value: str) -> str:
    return value.strip("'\"").lower()


def keep_share_of_wrong(found: Sequence[Demonstration], rng: random.Random) -> list[Demonstration]:
    """The usable demonstrations, with as many right first proposals left out as keep the share of wrong ones.

    Wrong ones whose mistake nothing shows, and what a limit cut, are not usable; without leaving out right
    ones the model would learn that it errs less than it does. Direct answers without tools and what nobody
    sampled all stay.
    """
    sampled = [d for d in found if d.sampled]
    usable = [d for d in found if d.first not in (UNSEEN, CUT, GOLD_CUT)]
    right = [d for d in usable if d.first == RIGHT and d.tool_set != "none"]
    repaired, wrong = sum(not d.right for d in usable), sum(not d.right for d in sampled)
    count = len(right)
    if wrong:
        count = min(count, round(repaired * (len(sampled) - wrong) / wrong))
    left_out = {id(d) for d in rng.sample(right, len(right) - count)}
    return [d for d in usable if id(d) not in left_out]
