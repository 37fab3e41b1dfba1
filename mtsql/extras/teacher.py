"""Warm start from a teacher's trajectories (SQL-Trail, sections 3.2, 4.2 and A.6), for every recipe.

A teacher's file holds one conversation a line, a JSON object as mtsql.report.records and other programs write
it: `messages` with `role` and `content` (and perhaps `tool_calls`), `example_id` or `db_id` where known, and
`tool_set` if the conversation has other tools than the run. An assistant's message with `weight` 0 is played
but not learned, one with a text `unlearned` is learned but for that part of it.
Only the assistant's messages are used. They are played again in our own environment, so that prompt,
observations, token ids and loss mask are ours, and no observation in the file is ever learned.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mtsql.agent.env import Environment, Episode, Recipe
from mtsql.agent.tokens import message_text
from mtsql.agent.tools import TOOL_SETS, make_tools
from mtsql.agent.trajectory import Status, Stop, Trajectory
from mtsql.config import Training
from mtsql.data.datasets import Example, examples
from mtsql.errors import UserError
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
    NOTHING = "with nothing that is to be learned"
    UNKNOWN = "question not in play"
    UNREADABLE = "unreadable line"


@dataclass(frozen=True)
class TeacherLine:
    """One conversation: the question, the teacher's messages, and what came back after each of them."""

    example_id: str | None
    db_id: str | None
    asked: str  # the first message of the user
    messages: tuple[str, ...]
    observed: tuple[str, ...]  # one for each of `messages`; "" where nothing came back
    tool_set: str | None = None  # of TOOL_SETS, where it is another than the run's
    unlearned: tuple[str | None, ...] = ()  # of each of `messages`, what of it is not to be learned


@dataclass(frozen=True)
class Replay:
    """What became of one line.

    `question` is None where none was found, `trajectory` is None where it is not kept. `other_observation`
    says that our environment answered something else than the file shows.
    """

    outcome: Outcome
    question: Example | None = None
    trajectory: Trajectory | None = None
    other_observation: bool = False


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
        said, observed, unlearned = [], [], []
        for message in item["messages"]:
            text = message_text(message)
            if message["role"] == "assistant":
                part = text if message.get("weight") == 0 else message.get("unlearned")
                unlearned.append(part if isinstance(part, str) else None)
                said.append(text)
                observed.append("")
            elif said:
                observed[-1] = observed[-1] or text
        "".join((asked, *said, *observed)).encode()  # arguments are JSON in JSON: half of a character again
        names = [item[k] if isinstance(item.get(k), str) else None for k in ("example_id", "db_id")]
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError):
        return None
    tool_set = item.get("tool_set")
    tool_set = tool_set if isinstance(tool_set, str) and tool_set in TOOL_SETS else None
    if not said:
        return None
    return TeacherLine(*names, asked, tuple(said), tuple(observed), tool_set, tuple(unlearned))


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


def replay_lines(
    lines: Sequence[TeacherLine | None],
    questions: Sequence[Example],
    in_play: Collection[str],
    environment: Environment,
    reward: RewardFunction,
    correct: str,
    progress: bool,
) -> list[Replay]:
    """What becomes of each line.

    A line may be about any of `questions`, but only those with an id in `in_play` are kept. The others are
    needed all the same: a prompt holds the earlier questions of its dialogue too, and has to be told from
    theirs.
    """
    match = make_matcher(questions)
    replays = []
    for line in tqdm(lines, desc="replay the teacher", unit="line", disable=not progress):
        if line is None:
            replays.append(Replay(Outcome.UNREADABLE))
            continue
        question = match(line)
        known = question is not None and question.id in in_play
        replay = _replay(line, question, environment, reward, correct) if known else Replay(Outcome.UNKNOWN)
        replays.append(replay)
    return replays


def _replay(
    line: TeacherLine, question: Example, environment: Environment, reward: RewardFunction, correct: str
) -> Replay:
    """Play the teacher's messages on a question; kept is what is right and follows the recipe throughout."""
    if line.tool_set is not None:
        environment = replace(environment, tools=make_tools(line.tool_set))
    messages = [message_of(text, environment.recipe) for text in line.messages]
    added = environment.tokens.tokenizer.added_tokens_decoder.values()
    framing = [token.content for token in added if token.special]  # control tokens around messages
    if any(token in text for token in framing for text, _ in messages):
        return Replay(Outcome.FORMAT, question)
    trajectory = _play(environment.episodes(question, [0])[0], messages, line.unlearned)
    if trajectory.status is Status.OUT_OF_TOKENS:
        outcome = Outcome.TOO_LONG
    elif trajectory.status in (None, Status.OUT_OF_INTERACTIONS):
        outcome = Outcome.UNFINISHED
    elif trajectory.status is not Status.ANSWERED or trajectory.off_protocol:
        outcome = Outcome.FORMAT
    elif not is_right(reward(trajectory, question), correct):
        outcome = Outcome.WRONG
    elif not any(trajectory.loss_mask):
        outcome = Outcome.NOTHING
    else:
        pairs = zip(trajectory.observations, line.observed, strict=False)  # none follows the answer
        other = any(told and _flat(ours.text) not in _flat(told) for ours, told in pairs)
        return Replay(Outcome.KEPT, question, trajectory, other)
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


def _play(
    episode: Episode, messages: Sequence[tuple[str, Stop]], unlearned: Sequence[str | None]
) -> Trajectory:
    """Send messages until the episode is over or none is left, within the limits of a rollout.

    As for a policy's own messages, the loss mask is 1 on all their tokens, an end of turn included, but for
    those of the message's text in `unlearned`.
    """
    for (text, stop), left_out in zip(messages, unlearned, strict=True):
        if episode.trajectory.status is not None:
            break
        ids = episode.tokens.message_ids(text)
        if stop is Stop.STOP_STRING:
            ids = ids[:-1]
        if len(ids) > min(episode.limits.max_turn_tokens, episode.remaining_tokens()):
            stop = Stop.LIMIT
        loss_mask = None
        if left_out and stop is not Stop.LIMIT:  # such a trajectory is dropped, however long
            loss_mask = [0] * len(ids)
            if left_out in text and left_out != text:
                loss_mask = episode.tokens.loss_mask_without(ids, left_out)
        episode.step(ids, [0.0] * len(ids), stop, loss_mask)
    return episode.trajectory


def prefer_harder(
    replays: Sequence[Replay], count: int, scorer: Scorer, rng: random.Random
) -> list[Trajectory]:
    """`count` of the kept trajectories, drawn at random, easy questions only if there are no others left.

    `count` 0 gives all. SQL-Trail (A.6) keeps 1,000, "prioritizing examples with moderate to high
    difficulty".
    """
    kept = [replay for replay in replays if replay.trajectory is not None]
    if count:
        rng.shuffle(kept)
        kept.sort(key=lambda r: scorer.hardness(r.question.db_id, r.question.gold_sql) == "easy")
        kept = kept[:count]
    return [replay.trajectory for replay in kept]


def format_replays(replays: Sequence[Replay]) -> str:
    """A small table: how many lines were kept, and why the others were dropped."""
    counts = {f"  {outcome}": sum(r.outcome is outcome for r in replays) for outcome in Outcome}
    counts["kept that saw another observation than the source"] = sum(r.other_observation for r in replays)
    lines = [("lines of the teacher", len(replays)), *(line for line in counts.items() if line[1])]
    return "\n".join(f"{name:<52}{count:>8,}" for name, count in lines)


def taught_answers(
    config: Training,
    task: Task,
    reward: RewardFunction,
    taught: Sequence[TeacherLine | None],
    pool: Sequence[Example],
) -> list[Collected]:
    """What a process finds in its share of a teacher's lines; the questions in `pool` are in play."""
    questions, in_play = examples(task.dataset.dialogues, config.history), {example.id for example in pool}
    replays = replay_lines(
        task.processes.share(taught),
        questions,
        in_play,
        task.environment,
        reward,
        config.correct,
        task.processes.is_main,
    )
    replays = task.processes.gather(replays)
    if task.processes.is_main:
        print(format_replays(replays))
    chosen = prefer_harder(replays, config.teacher_kept, task.scorer, random.Random(config.seed))
    found = []
    for replay in replays:
        if replay.question is not None:
            keep = [replay.trajectory] if any(replay.trajectory is t for t in chosen) else []
            found.append(Collected(replay.question.id, 1, replay.outcome is Outcome.KEPT, keep))
    return task.processes.share(found)
