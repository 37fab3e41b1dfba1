"""Warm start from a teacher's trajectories (SQL-Trail, sections 3.2, 4.2 and A.6), for every recipe.

A teacher's file holds one conversation a line, a JSON object as mtsql.report.records and other programs write
it: `messages` with `role` and `content` (and perhaps `tool_calls`), `example_id` or `db_id` where known, and
`tool_set` if the conversation has other tools than the run. An assistant's message with `weight` 0 is played
but not learned.
Only the assistant's messages are used. They are played again in our own environment, so that prompt,
observations, token ids and loss mask are ours, and no observation in the file is ever learned.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mtsql.agent.env import Environment, Recipe
from mtsql.agent.tokens import message_text
from mtsql.agent.tools import TOOL_SETS, make_tools
from mtsql.agent.trajectory import Stop, Trajectory
from mtsql.config import Training
from mtsql.data.datasets import Example, examples
from mtsql.extras.demonstrations import say
from mtsql.files import load_json_lines
from mtsql.learn.warm_start import Collected, rejection
from mtsql.recipes.rewards import RewardFunction
from mtsql.task import Task

OPENING_TAG, CLOSING_TAG = re.compile(r"<(\w+)>"), re.compile(r"</(\w+)>")


@dataclass(frozen=True)
class TeacherLine:
    """One conversation: the question, and the teacher's messages, each with whether it is to be learned."""

    example_id: str | None
    db_id: str | None
    tool_set: str | None  # of TOOL_SETS, where it is another than the run's
    asked: str  # the first message of the user
    messages: list[tuple[str, bool]]


def read_teacher(path: Path) -> list[TeacherLine | None]:
    """The lines of a teacher's file, None for each that is not a conversation; empty lines are skipped."""
    return [_read_line(item) for _, item in load_json_lines(path, errors="strict")]


def _read_line(item: Any) -> TeacherLine | None:
    try:
        asked = next(message_text(m) for m in item["messages"] if m["role"] == "user")
        messages = []
        for message in item["messages"]:
            text = message_text(message)
            if message["role"] == "assistant":
                messages.append((text, message.get("weight") != 0))
        "".join((asked, *(text for text, _ in messages))).encode()  # arguments may hold half of a character
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError):
        return None
    names = (item.get(name) for name in ("example_id", "db_id", "tool_set"))
    example_id, db_id, tool_set = (name if isinstance(name, str) else None for name in names)
    tool_set = tool_set if tool_set in TOOL_SETS else None
    return TeacherLine(example_id, db_id, tool_set, asked, messages) if messages else None


def make_matcher(questions: Sequence[Example]) -> Callable[[TeacherLine], Example | None]:
    """The function from a line to its question, None if there is none.

    A line's `example_id` counts if its `db_id` agrees, or without `db_id` if its text does: the ids of
    different datasets may be equal. Otherwise the question is looked for by text, in the line's database
    if it names one: the first message of the user has to hold the question and all earlier ones of its
    dialogue. Of several such questions the one with the most text counts, and none if equally long ones are
    over different databases.
    """
    by_id = {question.id: question for question in questions}
    known = [
        (question, [_flat(asked.question) for asked in (question, *question.history)])
        for question in questions
    ]

    def match(line: TeacherLine) -> Example | None:
        asked, named = _flat(line.asked), by_id.get(line.example_id)
        if named and (line.db_id == named.db_id or (not line.db_id and _flat(named.question) in asked)):
            return named
        found = [
            (sum(map(len, texts)), question)
            for question, texts in known
            if line.db_id in (None, question.db_id) and all(text and text in asked for text in texts)
        ]
        most = max((length for length, _ in found), default=0)
        best = [question for length, question in found if length == most]
        return best[0] if len({question.db_id for question in best}) == 1 else None

    return match


def _flat(text: str) -> str:
    return " ".join(text.split())


def replay(line: TeacherLine, question: Example, environment: Environment) -> Trajectory:
    """A teacher's messages, played on a question; given up where they end early or hold control tokens."""
    if line.tool_set is not None:
        environment = replace(environment, tools=make_tools(line.tool_set))
    added = environment.tokens.tokenizer.added_tokens_decoder.values()
    framing = [token.content for token in added if token.special]  # control tokens around messages
    (episode,) = environment.episodes(question, [0])
    for written, learned in line.messages:
        text, stop = message_of(written, environment.recipe)
        if any(token in text for token in framing):
            break
        say(episode, text, stop, learned)
    if episode.trajectory.status is None:
        episode.give_up()
    return episode.trajectory


def message_of(text: str, recipe: Recipe) -> tuple[str, Stop]:
    """The first message in what a teacher wrote, and why it ends where it does.

    It ends with the recipe's first stop string or, without any, with its action, since what a teacher
    wrote may go on with an observation, or further turns, that it made up. Without an action it is all of
    the text.
    """
    ends = [text.index(string) + len(string) for string in recipe.stop_strings if string in text]
    if ends:
        return text[: min(ends)], Stop.STOP_STRING
    whole, at = recipe.parse(text), 0
    last = {tag[1]: tag.start() for tag in CLOSING_TAG.finditer(text)}
    for tag in OPENING_TAG.finditer(text) if whole.problem is None else ():
        if tag.start() < at or last.get(tag[1], 0) < tag.end():
            continue  # within the last block, or never closed
        at = text.index(f"</{tag[1]}>", tag.end()) + len(tag[0]) + 1
        block = recipe.parse(text[tag.start() : at])  # alone: with all before it the time were square
        if (block.tool, block.sql, block.answer) == (whole.tool, whole.sql, whole.answer):
            return text[:at], Stop.END_OF_TURN
    return text, Stop.END_OF_TURN


def taught(
    line: TeacherLine | None, question: Example | None, environment: Environment, reward: RewardFunction
) -> Collected:
    """What one line gives: a trajectory if it is right and follows the recipe throughout, else why not."""
    if line is None or question is None:
        return Collected("", 1, 0, [], Counter(["unreadable" if line is None else "unknown_question"]))
    trajectory = replay(line, question, environment)
    reason = rejection(trajectory, reward(trajectory, question), environment.recipe)
    if reason is None:
        return Collected(question.id, 1, 1, [trajectory])
    why = str(trajectory.status) if reason == "no_answer" else reason
    return Collected(question.id, 1, int(reason == "off_protocol"), [], Counter([why]))


def taught_answers(
    config: Training,
    task: Task,
    reward: RewardFunction,
    lines: Sequence[TeacherLine | None],
    pool: Sequence[Example],
) -> list[Collected]:
    """What a process finds in its share of a teacher's lines.

    A line may be about any question of the data, but only those in `pool` are kept. The others are needed all
    the same: a prompt holds the earlier questions of its dialogue too, and has to be told from theirs.
    """
    match = make_matcher(examples(task.dataset.dialogues))
    in_play, found = {example.id: example for example in pool}, []
    hidden = not task.processes.is_main
    for line in tqdm(task.processes.share(lines), "replay the teacher", unit="line", disable=hidden):
        named = match(line) if line else None
        question = in_play.get(named.id) if named else None
        found.append(taught(line, question, task.environment, reward))
    return found
