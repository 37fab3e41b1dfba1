"""Warm start from a teacher's trajectories (SQL-Trail, sections 3.2, 4.2 and A.6), for every recipe.

A teacher's file holds one conversation a line, a JSON object as mtsql.report.records and other programs write
it: `messages` with `role` and `content` (and perhaps `tool_calls`), `example_id`, `db_id` where known, and
`tool_set` if the conversation has other tools than the run. An assistant's message with `weight` 0 is played
but not learned.
Only the assistant's messages are used. They are played again in our own environment, so that prompt,
observations, token ids and loss mask are ours, and no observation in the file is ever learned.

Departure from the paper: all answers that are right and well formed are kept, of any number and hardness. A.6
keeps 1,000 of 3,000 questions, moderate to hard ones first; that choice is whoever's who makes the file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mtsql.agent.env import Environment, Recipe
from mtsql.agent.tools import TOOL_SETS, make_tools
from mtsql.agent.trajectory import Stop, Trajectory
from mtsql.data.datasets import Example
from mtsql.extras.demonstrations import say
from mtsql.extras.served import message_text
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
    messages: list[tuple[str, bool]]


def read_teacher(path: Path) -> list[TeacherLine | None]:
    """The lines of a teacher's file, None for each that is not a conversation; empty lines are skipped."""
    return [_read_line(item) for _, item in load_json_lines(path, errors="strict")]


def _read_line(item: Any) -> TeacherLine | None:
    try:
        messages = []
        for message in item["messages"]:
            if message["role"] == "assistant":
                messages.append((message_text(message), message.get("weight") != 0))
        "".join(text for text, _ in messages).encode()  # arguments may hold half of a character
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    names = (item.get(name) for name in ("example_id", "db_id", "tool_set"))
    example_id, db_id, tool_set = (name if isinstance(name, str) else None for name in names)
    readable = messages and tool_set in (None, *TOOL_SETS)
    return TeacherLine(example_id, db_id, tool_set, messages) if readable else None


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
    line: TeacherLine | None, in_play: Mapping[str, Example], environment: Environment, reward: RewardFunction
) -> Collected:
    """What one line gives: a trajectory if it is right and follows the recipe throughout, else why not.

    Its `example_id` names the question of `in_play` (by id), if its `db_id`, where it has one, agrees.
    """
    question = in_play.get(line.example_id) if line else None
    if question is None or line.db_id not in (None, question.db_id):
        return Collected("", 1, 0, [], Counter(["unreadable" if line is None else "unknown_question"]))
    trajectory = replay(line, question, environment)
    reason = rejection(trajectory, reward(trajectory, question), environment.recipe)
    if reason is None and trajectory.trained_length:
        return Collected(question.id, 1, 1, [trajectory])
    why = str(trajectory.status) if reason == "no_answer" else reason or "nothing_learned"
    return Collected(question.id, 1, int(reason in ("off_protocol", None)), [], Counter([why]))


def taught_answers(
    task: Task, reward: RewardFunction, lines: Sequence[TeacherLine | None], pool: Sequence[Example]
) -> list[Collected]:
    """What a process finds in its share of a teacher's lines, about the questions of `pool`."""
    in_play, hidden = {example.id: example for example in pool}, not task.processes.is_main
    share = tqdm(task.processes.share(lines), "replay the teacher", unit="line", disable=hidden)
    return [taught(line, in_play, task.environment, reward) for line in share]
