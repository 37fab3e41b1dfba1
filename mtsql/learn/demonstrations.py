"""Demonstrations of the protocol whose mistakes are the model's own.

A model too small to follow instructions never calls the tools, and is shown how: a scripted
agent proposes what that model sampled, runs it, judges it by what the tools show, and repairs what it has
found wrong to that model's nearest right sample, or to the gold SQL where no sample is right: what the model
has yet to learn (docs/results/real_trials.md has each kind alone). It finds nothing that cannot be seen in
the question, the SQL, its result and the memory; mistakes of another kind are no demonstration. SQL that is
repaired later has loss mask 0: the model learns to run, to judge and to repair what it wrote, not to make
its mistakes.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher

from mtsql.agent.env import Environment, outcome_of
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS
from mtsql.agent.trajectory import Status, Stop, Trajectory
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.recipes.mtsql_r1_prompts import tool_call, verdict
from mtsql.sql.execute import ExecutionResult, as_executed
from mtsql.sql.text import query_words, same_query, single_quoted

RIGHT, UNSEEN, CUT = "right", "wrong, and nothing shows it", "beyond a limit of the episode"
UNREPAIRED = "wrong, and no repair looks right"
SECOND_FAILURES = 0.25  # share of repairs of which a first one fails as well
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
    or UNSEEN, UNREPAIRED or CUT, which have no trajectory.

    `tool_set` is one of TOOL_SETS. A proposal that was not `sampled` is the gold SQL.
    """

    question: Example
    right: bool
    first: str
    trajectory: Trajectory | None
    tool_set: str = "both"
    sampled: bool = True


def draw_tool_set(rng: random.Random) -> str:
    """The tools of a demonstration: mostly both, else fewer, so that the model knows Table 4's prompts."""
    return rng.choices(list(TOOL_SETS), [0.7 if name == "both" else 0.1 for name in TOOL_SETS])[0]


def demonstrate_samples(
    environment: Environment,
    example: Example,
    samples: Sequence[str],
    right: Sequence[bool],
    rng: random.Random,
) -> list[Demonstration]:
    """One demonstration of each sampled answer to a question, as first proposal; `right` are so by EX.

    A wrong one is repaired to the right sample that is most like it, or to gold where there is none, in a
    quarter of cases after another. What is right and looks wrong, such as an empty result, repairs nothing.
    """

    def looks_right(sql: str) -> bool:
        result = environment.executor.execute(environment.schemas[example.db_id].path, as_shown(sql))
        return execution_problem(example.question, result) is None

    solved = [sql for sql, is_right in zip(samples, right, strict=True) if is_right] or [example.gold_sql]
    repairs = [sql for sql in solved if looks_right(sql)]
    missed = [sql for sql, is_right in zip(samples, right, strict=True) if not is_right]
    schema = environment.schemas[example.db_id]
    found = []
    for sql, is_right in zip(samples, right, strict=True):
        wrong = [] if is_right else [sql]
        others = [o for o in missed if not same_query(as_written(o, schema), as_written(sql, schema))]
        if wrong and others and rng.random() < SECOND_FAILURES:
            wrong.append(rng.choice(others))
        end = sql if is_right else most_like(wrong[-1], repairs)
        shown = demonstrate(environment, example, wrong, end)
        if shown.first == UNSEEN and len(wrong) > 1:  # perhaps of the second alone
            shown = demonstrate(environment, example, wrong[:1], most_like(sql, repairs))
        found.append(shown)
    return found


def demonstrate_gold(environment: Environment, example: Example) -> Demonstration:
    """The gold SQL, which nobody sampled, as first and only proposal."""
    return replace(demonstrate(environment, example, [], example.gold_sql), sampled=False)


def most_like(sql: str, others: Sequence[str]) -> str | None:
    """The one of `others` that shares most words with `sql`, in their order; None without any."""
    words = query_words(sql)
    return max(others, key=lambda o: SequenceMatcher(None, words, query_words(o)).ratio(), default=None)


def demonstrate(
    environment: Environment, example: Example, wrong: Sequence[str], end: str | None
) -> Demonstration:
    """Play an episode that proposes all `wrong` SQL, which it has to find wrong, and then `end`, as they run.

    Without an `end` there is nothing to repair to.
    """
    (episode,) = environment.episodes(example, [0])
    tools, recipe, right = episode.tools, episode.recipe, not wrong
    attempts = [as_written(sql, episode.schema) for sql in (*wrong, end) if sql is not None]
    checks = [EXEC_SQL] if EXEC_SQL in tools else []
    checks += [MEMORY_RETRIEVE] if MEMORY_RETRIEVE in tools and example.history else []
    first, verdicts = RIGHT, ""

    def say(text: str, sql: str, learned: bool) -> bool:
        """Whether the episode goes on."""
        ids = episode.tokens.message_ids(text)
        written = json.dumps(sql, ensure_ascii=False)[1:-1]  # as it stands in a call
        loss_mask = None if learned else episode.tokens.loss_mask_without(ids, written)
        cut = len(ids) > min(episode.limits.max_turn_tokens, episode.remaining_tokens())
        episode.step(ids, [0.0] * len(ids), Stop.LIMIT if cut else Stop.END_OF_TURN, loss_mask)
        return episode.trajectory.status is None

    for number, sql in enumerate(attempts):
        is_wrong = number < len(wrong)
        problem = None
        for tool in checks:
            call = recipe.call(sql) if tool == EXEC_SQL else tool_call(tool, sql)
            if episode.trajectory.status is not None or not say(verdicts + call, sql, not is_wrong):
                return Demonstration(example, right, CUT, None)
            if is_wrong and tool == EXEC_SQL:
                problem = execution_problem(example.question, episode.result)
            elif is_wrong:
                problem = memory_problem(example, sql)
            verdicts = verdict(tool, problem is None) + "\n"
            if problem is not None:
                break
        if is_wrong and problem is None:
            return Demonstration(example, right, UNSEEN, None)
        if is_wrong and number == 0:
            first = problem
    if end is None:
        return Demonstration(example, right, UNREPAIRED, None)
    if episode.trajectory.status is None:  # the prompt was not too long
        say(verdicts + recipe.answer(attempts[-1]), attempts[-1], True)
    if episode.trajectory.status is not Status.ANSWERED:
        return Demonstration(example, right, CUT, None)
    return Demonstration(example, right, first, episode.trajectory)


def as_shown(sql: str) -> str:
    """SQL with EX's repairs, for a tool and a user run what is written: SQLite refuses "> ="."""
    return as_executed(sql, keep_distinct=True)


def as_written(sql: str, schema: Schema) -> str:
    """In single quotes: double ones need escapes within the JSON of a call, which a small model forgets."""
    names = {name.lower() for table in schema.tables for name in (table.name, *dict(table.columns))}
    return single_quoted(as_shown(sql), names)


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


def choose_demonstrations(
    found: Sequence[Sequence[Demonstration]], per_question: int, rng: random.Random
) -> list[Demonstration]:
    """Of each question's demonstrations at most so many of each kind, right and repaired, no two the same.

    Then as many right ones are left out as keep the share of wrong first proposals among all that were
    sampled: else the model would learn that it errs less than it does, for what nothing shows, and what no
    sample repairs, cannot be shown. Gold SQL that nobody sampled all stays.
    """
    sampled = [d for of in found for d in of if d.sampled]
    unsampled = [d for of in found for d in of if not d.sampled and d.trajectory is not None]
    usable: dict[bool, list[Demonstration]] = {True: [], False: []}
    for of in found:
        for right, kept in usable.items():
            played = [d for d in of if d.trajectory and d.right is right and d.sampled]
            different = list({tuple(d.trajectory.ids): d for d in played}.values())
            kept += rng.sample(different, min(per_question, len(different)))
    wrong, count = sum(not d.right for d in sampled), len(usable[True])
    if wrong:
        count = min(count, round(len(usable[False]) * (len(sampled) - wrong) / wrong))
    return [*rng.sample(usable[True], count), *usable[False], *unsampled]
