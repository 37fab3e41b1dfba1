"""Exercises on random words that teach the embedded model what a pre-trained one brings along.

To copy from its context, and to do what a verdict asks for: the same again, or one thing changed. Real
demonstrations show both too seldom for a model that learns from nothing in minutes; an exercise is short.
"""

from __future__ import annotations

import random

from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.recipes.mtsql_r1_prompts import final_answer, tool_call, verdict


def copying_exercise(ids: list[int], length: int, rng: random.Random) -> Trajectory:
    """`length` random ids, then as many again in pieces copied from them.

    The loss mask leaves out the first token of each piece, which nothing foretells.
    """
    source = rng.choices(ids, k=length)
    copied: list[int] = []
    loss_mask: list[int] = []
    while len(copied) < length:
        size = min(rng.randint(2, 10), length - len(copied))
        start = rng.randint(0, length - size)
        copied += source[start : start + size]
        loss_mask += [0] + [1] * (size - 1)
    prompt = Segment.given("prompt", source)
    response = Segment("model", tuple(copied), tuple(loss_mask), (0.0,) * length)
    return Trajectory("copying", 0, [prompt, response])


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
    answers = [tool_call(EXEC_SQL, again)] + [final_answer(again)] * (not fault)
    after = tokens.message_ids(rng.choice(answers))
    response = Segment.sampled(after, [0.0] * len(after))
    return Trajectory("repair", 0, [Segment.given("prompt", before), response])
