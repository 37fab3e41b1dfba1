"""Warm start from a teacher's trajectories (SQL-Trail, sections 3.2, 4.2 and A.6), for every recipe.

A teacher's file has chat messages, one JSON object a line, as mtsql.report.chat and other programs write
it: `messages` with `role` and `content` (and perhaps `tool_calls`), and `example_id` or `db_id` where known.
Only what the assistant wrote is taken from it. It is played again in our own environment, so that prompt,
observations, token ids and loss mask are ours: nothing that the source shows as an observation is learned.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tqdm import tqdm

from mtsql.agent.env import Environment, Episode, Recipe
from mtsql.agent.trajectory import Status, Stop, Trajectory
from mtsql.data.datasets import Example
from mtsql.errors import UserError
from mtsql.recipes.rewards import RewardFunction, is_right
from mtsql.sql.score import Scorer

CLOSING_TAG = re.compile(r"</\w+>")


class Outcome(StrEnum):
    """What became of a line of a teacher's file; all but KEPT are dropped."""

    KEPT = "kept"
    WRONG = "wrong answer"
    FORMAT = "not in the recipe's format or off its protocol"
    UNFINISHED = "without an answer"
    TOO_LONG = "beyond a token limit"
    UNKNOWN = "question not in play"
    UNREADABLE = "unreadable line"


@dataclass(frozen=True)
class TeacherLine:
    """One conversation: what was asked, what the teacher wrote, and what it was told after each message."""

    example_id: str | None
    db_id: str | None
    asked: str  # the first message of the user
    messages: tuple[str, ...]
    observed: tuple[str, ...]  # as many as `messages`; "" where nothing follows


@dataclass(frozen=True)
class Replay:
    """What became of one line; `question` and `trajectory` only where they were found and kept.

    `other_observation`: the environment answered otherwise than the source says.
    """

    outcome: Outcome
    question: Example | None = None
    trajectory: Trajectory | None = None
    other_observation: bool = False


def read_teacher(path: Path) -> list[TeacherLine | None]:
    """The lines of a teacher's file, None for each that is not a conversation; empty lines are skipped.

    Raises UserError without the file.
    """
    if not path.is_file():
        raise UserError(f"--teacher {path} is not there; give a JSONL file of chat messages")
    # Split as bytes: str.splitlines also breaks at characters that JSON strings may hold.
    return [_read_line(line) for line in path.read_bytes().split(b"\n") if line.strip()]


def _read_line(line: bytes) -> TeacherLine | None:
    try:
        item = json.loads(line)
        asked = next(_text(m) for m in item["messages"] if m["role"] == "user")
        said, observed = [], []
        for message in item["messages"]:
            text = _text(message)
            if message["role"] == "assistant":
                said.append(text)
                observed.append("")
            elif said:
                observed[-1] = observed[-1] or text
        "".join((asked, *said, *observed)).encode()  # a lone surrogate cannot be tokenised
        names = [item[k] if isinstance(item.get(k), str) else None for k in ("example_id", "db_id")]
    except (ValueError, TypeError, KeyError, AttributeError, StopIteration, RecursionError):
        return None
    return TeacherLine(*names, asked, tuple(said), tuple(observed)) if said else None


def _text(message: dict) -> str:
    """A message as text, its `tool_calls` behind its content as Qwen3's chat template writes them.

    A content in parts is joined. Raises TypeError, KeyError or AttributeError for what is neither text nor
    calls, ValueError for arguments that are not JSON.
    """
    content = message.get("content") or ""
    parts = [part["text"] for part in content] if isinstance(content, list) else [content] * bool(content)
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        rendered = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{rendered}\n</tool_call>")
    return "\n".join(parts)


def make_matcher(questions: Sequence[Example]) -> Callable[[TeacherLine], Example | None]:
    """The function from a line to its question: by `example_id`, if its database, or else its text, agrees
    (ids are places in a file, which every dataset has), else by database and text.

    By text it is the question that stands, with all earlier ones of its dialogue, in the first message of
    the user; of several the one that explains most of it. Without `db_id`, a text that is equally a
    question over two databases is nobody's.
    """
    by_id = {question.id: question for question in questions}
    by_database: dict[str, list[tuple[Example, list[str]]]] = defaultdict(list)
    for question in questions:
        texts = [_flat(question.question), *(_flat(turn.question) for turn in question.history)]
        by_database[question.db_id].append((question, texts))

    def match(line: TeacherLine) -> Example | None:
        asked, named = _flat(line.asked), by_id.get(line.example_id)
        if named and (line.db_id == named.db_id or (not line.db_id and _flat(named.question) in asked)):
            return named
        databases = by_database if line.db_id is None else [line.db_id]
        found = [
            (sum(map(len, texts)), question)
            for db_id in databases
            for question, texts in by_database.get(db_id, ())
            if all(text and text in asked for text in texts)
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
    """What becomes of each line; `questions` are all that a line may be about, `in_play` the ids to keep.

    All are needed to tell a question from an earlier one of its dialogue that its prompt also holds.
    """
    match = make_matcher(questions)
    replays = []
    for line in tqdm(lines, desc="replay the teacher", unit="line", disable=not progress):
        question = None if line is None else match(line)
        if line is None:
            replays.append(Replay(Outcome.UNREADABLE))
        elif question is None or question.id not in in_play:
            replays.append(Replay(Outcome.UNKNOWN))
        else:
            replays.append(replay_line(line, question, environment, reward, correct))
    return replays


def replay_line(
    line: TeacherLine, question: Example, environment: Environment, reward: RewardFunction, correct: str
) -> Replay:
    """Play the teacher's messages on a question; kept is what is right and follows the recipe throughout."""
    messages = [message_of(text, environment.recipe) for text in line.messages]
    added = environment.tokens.tokenizer.added_tokens_decoder.values()
    framing = [token.content for token in added if token.special]  # control tokens around messages
    if any(token in text for token in framing for text, _ in messages):
        return Replay(Outcome.FORMAT, question)
    episode = environment.episodes(question, [0])[0]
    play(episode, messages)
    trajectory = episode.trajectory
    if trajectory.status is Status.OUT_OF_TOKENS:
        outcome = Outcome.TOO_LONG
    elif trajectory.status in (None, Status.OUT_OF_INTERACTIONS):
        outcome = Outcome.UNFINISHED
    elif trajectory.status is not Status.ANSWERED or trajectory.off_protocol:
        outcome = Outcome.FORMAT
    elif not is_right(reward(trajectory, question), correct):
        outcome = Outcome.WRONG
    else:
        pairs = zip(trajectory.observations, line.observed, strict=False)  # none follows the answer
        other = any(told and _flat(ours.text) not in _flat(told) for ours, told in pairs)
        return Replay(Outcome.KEPT, question, trajectory, other)
    return Replay(outcome, question)


def message_of(text: str, recipe: Recipe) -> tuple[str, Stop]:
    """The start of what a teacher wrote that is one message, and why it ends there.

    It ends behind the recipe's first stop string or, without one, behind its action: a teacher may have made
    up an observation, or further turns, in the same message. Without an action it is all of the text.
    """
    ends = [text.index(string) + len(string) for string in recipe.stop_strings if string in text]
    if ends:
        return text[: min(ends)], Stop.STOP_STRING
    whole = recipe.parse(text)
    for tag in CLOSING_TAG.finditer(text) if whole.problem is None else ():
        start = recipe.parse(text[: tag.end()])
        if (start.tool, start.sql, start.answer) == (whole.tool, whole.sql, whole.answer):
            return text[: tag.end()], Stop.END_OF_TURN
    return text, Stop.END_OF_TURN


def play(episode: Episode, messages: Sequence[tuple[str, Stop]]) -> None:
    """Send messages until the episode is over or none is left, within the limits of a rollout.

    The loss mask is 1 on their words and on the end of turn of those that end with it, as on a policy's own.
    """
    for text, stop in messages:
        if episode.trajectory.status is not None:
            return
        ids = episode.tokens.message_ids(text)
        if stop is Stop.STOP_STRING:
            ids = ids[:-1]
        if len(ids) > min(episode.limits.max_turn_tokens, episode.remaining_tokens()):
            stop = Stop.LIMIT
        episode.step(ids, [0.0] * len(ids), stop)


def prefer_harder(
    replays: Sequence[Replay], count: int, scorer: Scorer, rng: random.Random
) -> list[Trajectory]:
    """The trajectories of `count` of the kept (0: of all), at random but those of easy questions last.

    SQL-Trail (A.6) keeps 1,000, "prioritizing examples with moderate to high difficulty".
    """
    kept = [replay for replay in replays if replay.trajectory is not None]
    if count:
        rng.shuffle(kept)
        kept.sort(key=lambda r: scorer.hardness(r.question.db_id, r.question.gold_sql) == "easy")
        kept = kept[:count]
    return [replay.trajectory for replay in kept]


def format_replays(replays: Sequence[Replay]) -> str:
    """How many lines were kept, and why the others were dropped."""
    counts = Counter(replay.outcome for replay in replays)
    lines = [f"{'lines of the teacher':<52}{len(replays):>8,}"]
    lines += [f"  {outcome:<50}{counts[outcome]:>8,}" for outcome in Outcome if counts[outcome]]
    other = sum(replay.other_observation for replay in replays)
    if other:
        lines.append(f"{'kept that saw another observation than the source':<52}{other:>8,}")
    return "\n".join(lines)
