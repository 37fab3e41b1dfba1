"""The scripted agent that the embedded model imitates.

It knows the SQL and uses its tools unevenly: its first query is often wrong, in a way that the database or
the memory reveals, it often skips a tool, and notices only sometimes what a tool shows. It plays in the real
environment: observations, tokens and loss masks are those of the recipe.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from mtsql.agent.env import Environment, Episode
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import ActionType, Stop, Trajectory
from mtsql.data.datasets import Example
from mtsql.recipes.mtsql_r1_prompts import tool_call, verdict


@dataclass(frozen=True)
class Habits:
    """Probabilities of the scripted agent."""

    wrong_first: float = 0.9
    wrong_name: float = 0.4  # where the only mistakes at hand are wrong columns
    notices_execution: float = 0.4
    notices_memory: float = 0.35
    false_alarm: float = 0.03
    right_repair: float = 0.8
    skips_execution: float = 0.0  # of a query without conditions, of which the agent is too sure
    skips_memory: float = 0.0


ATTENTIVE = Habits(wrong_first=1, wrong_name=1, notices_execution=1, notices_memory=1, false_alarm=0)


# Mistakes that a tool reveals and a careful second look repairs; wrong columns come where there is none.
CARELESS = ("lost_constraint", "stale_value", "value_form")


def demonstrate(episode: Episode, wrong: list[dict], habits: Habits, rng: random.Random) -> Trajectory:
    """Play one episode as the scripted agent; `wrong` are the question's mistakes ({kind, query}).

    Without any tool the agent answers with what it knows, the gold SQL.
    """
    gold, tools, recipe = episode.example.gold_sql, episode.tools, episode.recipe
    careless = [m for m in wrong if m["kind"] in CARELESS]
    kind = rng.choice(sorted({m["kind"] for m in careless or wrong}) or [""])
    likely = [m["query"] for m in wrong if m["kind"] == kind]
    sql = gold
    if tools and likely and rng.random() < (habits.wrong_first if careless else habits.wrong_name):
        sql = rng.choice(likely)

    def repair() -> str:
        others = [q for q in likely if q != sql]
        return gold if not others or rng.random() < habits.right_repair else rng.choice(others)

    def say(text: str) -> None:
        ids = episode.tokens.message_ids(text)
        episode.step(ids, [0.0] * len(ids), stop=Stop.END_OF_TURN)

    has_memory = recipe.verifies and MEMORY_RETRIEVE in tools and bool(episode.example.history)
    verdicts = ""
    executed = " WHERE " not in sql and rng.random() < habits.skips_execution
    checked_memory = rng.random() < habits.skips_memory
    while True:
        last = episode.trajectory.interactions == episode.limits.max_interactions
        if last or ((executed or EXEC_SQL not in tools) and (checked_memory or not has_memory)):
            say(verdicts + recipe.answer(sql))
            return episode.trajectory
        if not executed and EXEC_SQL in tools:
            say(verdicts + recipe.call(sql))
            suspicious = _suspicious(episode)
            alarm = rng.random() < (habits.notices_execution if suspicious else habits.false_alarm)
            verdicts = verdict(EXEC_SQL, not alarm) + "\n" if recipe.verifies else ""
            if alarm and suspicious:
                sql = repair()
            executed = not alarm
        else:
            say(verdicts + tool_call(MEMORY_RETRIEVE, sql))
            alarm = rng.random() < (habits.notices_memory if sql != gold else habits.false_alarm)
            verdicts = verdict(MEMORY_RETRIEVE, not alarm) + "\n"
            checked_memory = not alarm or rng.random() < habits.skips_memory
            if alarm:
                sql = repair() if sql != gold else sql
                executed = False


def _suspicious(episode: Episode) -> bool:
    """Whether the last result looks wrong: an error, nothing, or a lone zero."""
    observation = episode.trajectory.observations[-1]
    return observation.outcome != "ok" or episode.result.rows == ((0,),)


def repair_lesson(
    environments: dict[str, Environment], example: Example, wrong: list[dict], rng: random.Random
) -> list[Trajectory]:
    """A demonstration up to its first repair, with loss mask 1 on the repair alone, behind the verdict.

    Empty where there is nothing to repair.
    """
    episode = environments["both"].episodes(example, [0])[0]
    verifies = episode.recipe.verifies
    kind = rng.choice(sorted({m["kind"] for m in wrong}) or [""])
    demonstration = demonstrate(episode, [m for m in wrong if m["kind"] == kind], ATTENTIVE, rng)
    repairs = [
        a.message
        for a in demonstration.actions
        if (a.passed is False if verifies else a.type is ActionType.SELF_CORRECT)
    ]
    if not repairs:
        return []
    last = 2 * min(repairs) + 1  # segments: prompt, message, observation, message, ...
    segments = [
        replace(segment, loss_mask=(0,) * len(segment.ids)) for segment in demonstration.segments[: last + 1]
    ]
    ids = segments[last].ids
    seen = verdict(demonstration.observations[min(repairs)].tool, False) + "\n" if verifies else ""
    behind = episode.tokens.count(seen)
    segments[last] = replace(segments[last], loss_mask=tuple(int(i >= behind) for i in range(len(ids))))
    return [replace(demonstration, segments=segments)]


def demonstrations(
    phase: str,
    environments: dict[str, Environment],
    example: Example,
    wrong: list[dict],
    habits: Habits,
    rng: random.Random,
) -> list[Trajectory]:
    """What one question gives to one phase.

    "answers": a direct answer without tools. "agent": a demonstration with all tools, and at times
    without any or, where there are two, with a single one, so that the model knows every set of Table 4.
    A repair lesson goes with it.
    """

    def show(tools: str) -> Trajectory:
        return demonstrate(environments[tools].episodes(example, [0])[0], wrong, habits, rng)

    if phase == "answers":
        return [show("none")]
    single = ("no_execution", "no_memory", None, None) if environments["both"].recipe.verifies else (None,)
    others = filter(None, (rng.choice(("none", None)), rng.choice(single)))
    lessons = repair_lesson(environments, example, wrong, rng)
    return [show("both"), *map(show, others), *lessons]
