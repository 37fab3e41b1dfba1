"""What the embedded model imitates: a scripted agent, and exercises on random words.

The agent knows the SQL and uses its tools unevenly: its first query is often wrong, in a way that the
database or the memory reveals, it often skips a tool, and notices only sometimes what a tool shows. It plays
in the real environment: observations, tokens and loss masks are those of the recipe.

The exercises teach what a pre-trained model brings along: to copy from its context, and to do what a verdict
asks for, the same again or one thing changed. Real demonstrations show both too seldom for a model that
learns from nothing in minutes; an exercise is short.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from mtsql.agent.env import Environment, Episode
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import ActionType, Segment, Stop, Trajectory
from mtsql.data.datasets import Example
from mtsql.recipes.mtsql_r1 import final_answer, tool_call, verdict


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
Played: TypeAlias = Mapping[str, Environment]  # a recipe's environments by set of tools


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

    def say(text: str) -> None:
        ids = episode.tokens.message_ids(text)
        episode.step(ids, [0.0] * len(ids), stop=Stop.END_OF_TURN)

    verdicts = ""
    has_memory = recipe.verifies and MEMORY_RETRIEVE in tools and episode.example.history
    executed = (" WHERE " not in sql and rng.random() < habits.skips_execution) or EXEC_SQL not in tools
    recalled = rng.random() < habits.skips_memory or not has_memory
    trajectory = episode.trajectory
    while not (executed and recalled) and trajectory.interactions < episode.limits.max_interactions:
        if executed:
            tool, notices = MEMORY_RETRIEVE, habits.notices_memory
            say(verdicts + tool_call(tool, sql))
            fault = sql != gold
        else:  # an error, nothing, or a lone zero looks wrong
            tool, notices = EXEC_SQL, habits.notices_execution
            say(verdicts + recipe.call(sql))
            fault = trajectory.observations[-1].outcome != "ok" or episode.result.rows == ((0,),)
        alarm = rng.random() < (notices if fault else habits.false_alarm)
        verdicts = verdict(tool, not alarm) + "\n" if recipe.verifies else ""
        if executed:
            recalled = not alarm or rng.random() < habits.skips_memory
        if alarm and fault:
            others = [q for q in likely if q != sql]
            sql = gold if not others or rng.random() < habits.right_repair else rng.choice(others)
        executed = EXEC_SQL not in tools or not alarm
    say(verdicts + recipe.answer(sql))
    return trajectory


def repair_lesson(
    environment: Environment, example: Example, wrong: list[dict], rng: random.Random
) -> list[Trajectory]:
    """A demonstration up to its first repair, with loss mask 1 on the repair alone, behind the verdict.

    Empty where there is nothing to repair.
    """
    episode = environment.episodes(example, [0])[0]
    verifies = episode.recipe.verifies
    kind = rng.choice(sorted({m["kind"] for m in wrong}) or [""])
    shown = demonstrate(episode, [m for m in wrong if m["kind"] == kind], ATTENTIVE, rng)
    repairs = [a.message for a in shown.actions if a.passed is False or a.type is ActionType.SELF_CORRECT]
    if not repairs:
        return []
    message = min(repairs)
    *before, repair = shown.segments[: 2 * message + 2]  # prompt, message, observation, message, ...
    seen = verdict(shown.observations[message - 1].tool, False) + "\n" if verifies else ""
    behind = episode.tokens.count(seen)
    segments = [replace(segment, loss_mask=(0,) * len(segment.ids)) for segment in before]
    loss_mask = (0,) * behind + (1,) * (len(repair.ids) - behind)
    return [replace(shown, segments=[*segments, replace(repair, loss_mask=loss_mask)])]


def lessons(
    phase: str, played: Played, example: Example, wrong: list[dict], habits: Habits, rng: random.Random
) -> list[Trajectory]:
    """What one question gives to a phase of the imitation.

    "answers" is without tools. "agent" has a demonstration with all tools, and at times one without any or,
    where there are two, with a single one, so that the model knows every set of Table 4; and a repair lesson.
    """
    sets, repairs = ["none"], []
    if phase == "agent":
        single = ("no_execution", "no_memory", None, None) if played["both"].recipe.verifies else (None,)
        sets = ["both", *filter(None, (rng.choice(("none", None)), rng.choice(single)))]
        repairs = repair_lesson(played["both"], example, wrong, rng)
    episodes = [played[tools].episodes(example, [0])[0] for tools in sets]
    return [*(demonstrate(episode, wrong, habits, rng) for episode in episodes), *repairs]


def copying_exercise(ids: list[int], length: int, rng: random.Random) -> Trajectory:
    """`length` random ids, then as many again in pieces copied from them.

    The loss mask leaves out the first token of each piece, which nothing foretells.
    """
    source = rng.choices(ids, k=length)
    copied, loss_mask = [], []
    while len(copied) < length:
        size = min(rng.randint(2, 10), length - len(copied))
        start = rng.randint(0, length - size)
        copied += source[start : start + size]
        loss_mask += [0] + [1] * (size - 1)
    response = Segment.sampled(copied, [0.0] * length, loss_mask)
    return Trajectory("copying", 0, [Segment.given("prompt", source), response])


def repair_exercise(tokens: ChatTokens, words: list[int], length: int, rng: random.Random) -> Trajectory:
    """A query of random words with one quoted value, a verdict on it, and what a verdict asks for.

    After "pass" the query comes again as it was. After "no_pass" on an empty result it comes with the
    value in the other form, capital or not; on an error, with the word that the error names changed to
    the one that stands there in the question. The loss mask is 1 on that second query. `words` are ids
    of single words.
    """

    def some(least: int, most: int) -> list[str]:
        return [tokens.tokenizer.decode([i]).strip() for i in rng.choices(words, k=rng.randint(least, most))]

    query, (value,) = some(3, length // 2), some(1, 1)
    place = rng.randint(2, len(query))  # where the value comes
    capital = rng.random() < 0.5
    fault = rng.choice(("", "", "form", "name"))
    wrong, (named,) = list(query), some(1, 1)
    if fault == "name":
        wrong[rng.randint(1, len(query) - 1)] = named

    def sql(words: list[str], capital: bool) -> str:
        quoted = f"= '{value.capitalize() if capital else value}'"
        return " ".join([*words[:place], quoted, *words[place:]])

    asked = [*some(0, length // 2), *query, *some(0, length // 2)]
    tool = rng.choice((EXEC_SQL, MEMORY_RETRIEVE)) if not fault else EXEC_SQL
    found = {
        "": " ".join(some(1, 6)),
        "form": rng.choice(("empty", "0", "null")),
        "name": f"error: no such column: {rng.choice(('', 't1.', 't2.'))}{named}",
    }[fault]
    before = [
        *tokens.message_ids(" ".join(asked) + tool_call(tool, sql(wrong, capital))),
        *tokens.observation_suffix(found, True),
        *tokens.message_ids(verdict(tool, not fault) + "\n")[:-1],
    ]
    again = sql(query, capital != (fault == "form"))
    after = tokens.message_ids(rng.choice([tool_call(EXEC_SQL, again)] + [final_answer(again)] * (not fault)))
    response = Segment.sampled(after, [0.0] * len(after))
    return Trajectory("repair", 0, [Segment.given("prompt", before), response])
