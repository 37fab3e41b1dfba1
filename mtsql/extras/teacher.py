"""Warm start from a teacher's trajectories (SQL-Trail, sections 3.2, 4.2 and A.6), for every recipe.

A teacher's file holds one conversation a line, a JSON object as mtsql.report.records and other programs write
it: `messages` with `role` and `content` (and perhaps `tool_calls`), `example_id` or `db_id` where known, and
`tool_set` if the conversation has other tools than the run. An assistant's message with `weight` 0 is played
but not learned.
Only the assistant's messages are used. They are played again in our own environment, so that prompt,
observations, token ids and loss mask are ours, and no observation in the file is ever learned.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mtsql.agent.env import Environment, Recipe
from mtsql.agent.tokens import message_text
from mtsql.agent.tools import TOOL_SETS, make_tools
from mtsql.agent.trajectory import Status, Stop, Trajectory
from mtsql.config import Training
from mtsql.data.datasets import Example, examples
from mtsql.errors import UserError
from mtsql.extras.demonstrations import say
from mtsql.files import load_json_lines
from mtsql.learn.warm_start import Collected
from mtsql.recipes.rewards import RewardFunction, is_right
from mtsql.sql.score import Scorer
from mtsql.task import Task

OPENING_TAG, CLOSING_TAG = re.compile(r"<(\w+)>"), re.compile(r"</(\w+)>")


class Outcome(StrEnum):
    """What became of one line of a teacher's file; all lines but the KEPT ones are dropped."""

    KEPT = "kept"
    WRONG = "wrong answer"
    FORMAT = "not in the recipe's format or off its protocol"
    UNFINISHED = "without an answer"
    TOO_LONG = "beyond a token limit"
    UNKNOWN = "question not in play"
    UNREADABLE = "unreadable line"


@dataclass(frozen=True)
class TeacherLine:
    """One conversation: the question, and the teacher's messages, each with whether it is to be learned."""

    example_id: str | None
    db_id: str | None
    tool_set: str | None  # of TOOL_SETS, where it is another than the run's
    asked: str  # the first message of the user
    messages: list[tuple[str, bool]]


@dataclass(frozen=True)
class Replay:
    """What became of one line, its question where one was found, its trajectory where it is kept."""

    outcome: Outcome
    question: Example | None = None
    trajectory: Trajectory | None = None


def read_teacher(path: Path) -> list[TeacherLine | None]:
    """The lines of a teacher's file, None for each that is not a conversation; empty lines are skipped.

    Raises UserError if there is no such file.
    """
    if not path.is_file():
        raise UserError(f"--teacher {path} is not there; give a JSONL file of chat messages")
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


def replay_line(
    line: TeacherLine | None,
    question: Example | None,
    environment: Environment,
    right: Callable[[Trajectory, Example], bool],
) -> Replay:
    """Play a teacher's messages on a question; kept is what is right and follows the recipe throughout."""
    if line is None:
        return Replay(Outcome.UNREADABLE)
    if question is None:
        return Replay(Outcome.UNKNOWN)
    if line.tool_set is not None:
        environment = replace(environment, tools=make_tools(line.tool_set))
    added = environment.tokens.tokenizer.added_tokens_decoder.values()
    framing = [token.content for token in added if token.special]  # control tokens around messages
    (episode,) = environment.episodes(question, [0])
    for written, learned in line.messages:
        text, stop = message_of(written, environment.recipe)
        if any(token in text for token in framing):
            return Replay(Outcome.FORMAT, question)
        say(episode, text, stop, learned)
    trajectory = episode.trajectory
    if trajectory.status is Status.OUT_OF_TOKENS:
        outcome = Outcome.TOO_LONG
    elif trajectory.status in (None, Status.OUT_OF_INTERACTIONS):
        outcome = Outcome.UNFINISHED
    elif trajectory.status is not Status.ANSWERED or trajectory.off_protocol:
        outcome = Outcome.FORMAT
    elif not right(trajectory, question):
        outcome = Outcome.WRONG
    else:
        return Replay(Outcome.KEPT, question, trajectory)
    return Replay(outcome, question)


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


def prefer_harder(replays: Sequence[Replay], count: int, scorer: Scorer, rng: random.Random) -> list[Replay]:
    """`count` of the kept, drawn at random, easy questions only if there are no others left; 0 gives all.

    SQL-Trail (A.6) keeps 1,000, "prioritizing examples with moderate to high difficulty".
    """
    kept = [replay for replay in replays if replay.outcome is Outcome.KEPT]
    if count:
        rng.shuffle(kept)
        kept.sort(key=lambda r: scorer.hardness(r.question.db_id, r.question.gold_sql) == "easy")
        kept = kept[:count]
    return kept


def format_replays(replays: Sequence[Replay]) -> str:
    """A small table: how many lines were kept, and why the others were dropped."""
    counts = Counter(replay.outcome for replay in replays)
    rows = [("lines of the teacher", len(replays))]
    rows += [(f"  {outcome}", counts[outcome]) for outcome in Outcome if counts[outcome]]
    return "\n".join(f"{name:<52}{count:>8,}" for name, count in rows)


def taught_answers(
    config: Training,
    task: Task,
    reward: RewardFunction,
    taught: Sequence[TeacherLine | None],
    pool: Sequence[Example],
) -> list[Collected]:
    """What a process finds in its share of a teacher's lines.

    A line may be about any question of the data, but only those in `pool` are kept. The others are needed all
    the same: a prompt holds the earlier questions of its dialogue too, and has to be told from theirs.
    """
    match = make_matcher(examples(task.dataset.dialogues, config.history))
    in_play, replays = {example.id for example in pool}, []

    def right(trajectory: Trajectory, question: Example) -> bool:
        return is_right(reward(trajectory, question), config.correct)

    hidden = not task.processes.is_main
    for line in tqdm(task.processes.share(taught), "replay the teacher", unit="line", disable=hidden):
        question = match(line) if line else None
        question = question if question and question.id in in_play else None
        replays.append(replay_line(line, question, task.environment, right))
    replays = task.processes.gather(replays)
    if task.processes.is_main:
        print(format_replays(replays))
    learned = set(
        map(id, prefer_harder(replays, config.teacher_kept, task.scorer, random.Random(config.seed)))
    )
    found = [
        Collected(r.question.id, 1, r.outcome is Outcome.KEPT, [r.trajectory] if id(r) in learned else [])
        for r in replays
        if r.question
    ]
    return task.processes.share(found)
