"""One dialogue: questions to an agent over a database, with the agent's own answers as its memory.

The schema is read from the SQLite file itself; where it is too long, the part that a question is about.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from mtsql.agent.env import Environment, Episode
from mtsql.agent.rollout import trajectory_seed
from mtsql.agent.tools import MEMORY_RETRIEVE
from mtsql.agent.trajectory import Status, Trajectory, trajectory_record
from mtsql.data.datasets import Example, HistoryTurn
from mtsql.data.sandbox import Reader
from mtsql.data.schema import Schema, SchemaTable, example_row, folded
from mtsql.data.sql_worker import quoted
from mtsql.errors import UserError
from mtsql.recipes.prompt_options import compact_result
from mtsql.report.records import RESULT_CHARACTERS
from mtsql.report.voting import majority_vote
from mtsql.sql.execute import ExecutionResult

KINDS = (("INT", "number"), ("REAL", "number"), ("FLOA", "number"), ("DOUB", "number"), ("NUM", "number"))
KINDS += (("DEC", "number"), ("DATE", "time"), ("TIME", "time"), ("BOOL", "boolean"))
INDEX_PARTS = (  # tables of FTS3 to FTS5 and of R-trees
    "content", "data", "idx", "docsize", "config", "segments", "segdir", "stat", "node", "parent", "rowid",
)  # fmt: skip
SMALL = r"[^\W\d_A-Z]"  # any letter but ASCII's capitals
TAGGED = re.compile(r"<(\w+)>.*?</\1>", re.DOTALL)  # a verdict, a call, an answer; the rest is said freely
NAME_WORD = re.compile(rf"[A-Z]+(?!{SMALL})|[A-Z]?{SMALL}+|\d+")
SHORT_WORDS = frozenset(
    "a an and are as at by do for from in is it of on or that the their to was what".split()
)


def read_schema(path: Path) -> Schema:
    """The tables and views of a SQLite file: columns, keys, one example row each. The file is only read.

    A view of what is no longer there is left out.

    `entry` stays empty. Raises UserError for what is no file, no SQLite file, locked, damaged, or has no
    table; an encrypted one looks like no SQLite file.
    """
    if not path.is_file():
        raise UserError(f"--database {path} is not a file; give a SQLite database")
    reader, tables = Reader(path), []
    names = _names(reader)
    for of_views in (False, True):  # what a view does may take all the time there is
        found = [_read_table(reader, name, plain) for name, view, plain in names if view == of_views]
        found = [table for table in found if table.columns]
        tables += [replace(t, example_row=example_row(reader, "*", t.name)) for t in found]
    if not tables:
        raise UserError(f"--database {path} has no table")
    return Schema(path.stem, path, tuple(tables), {})


def _names(reader: Reader) -> list[tuple[str, int, int]]:
    """Tables and views: name, whether it is a view, or an ordinary table.

    Left out are SQLite's own, and those in which an index keeps its data.
    """
    made = reader.rows(
        "select name, type = 'view', sql like 'create table%' from sqlite_master "
        "where type in ('table', 'view') and name not like 'sqlite^_%' escape '^' order by rowid"
    )
    virtual = [name for name, view, plain in made if not view and not plain]
    inner = {folded(f"{name}_{part}") for name in virtual for part in INDEX_PARTS}
    return [row for row in made if folded(row[0]) not in inner]


def _read_table(reader: Reader, name: str, plain: int) -> SchemaTable:
    found = reader.columns(name, bool(plain))
    columns = {folded(column): column for column, _, _ in found}
    foreign, keys_of = [], f"pragma foreign_key_list({quoted(name)})"
    for _, place, other, column, key, *_ in reader.rows(keys_of, needed=False):
        if key is None:  # without a column it is the other table's primary key
            keys = {index: column for column, _, index in reader.columns(other, needed=False)}
            key = keys.get(place + 1)
        if key and folded(column) in columns:
            foreign.append((columns[folded(column)], other, key))
    typed = tuple((column, _kind(declared)) for column, declared, _ in found)
    primary = tuple(column for column, _, place in sorted(found, key=lambda row: row[2]) if place)
    return SchemaTable(name, typed, primary, tuple(foreign), None)


def _kind(declared: str) -> str:
    """Spider's word for a declared type."""
    return next((kind for start, kind in KINDS if start in declared.upper()), "text")


def relevant_part(schema: Schema, questions: Sequence[str], fits: Callable[[Schema], bool]) -> Schema:
    """The schema, or the most of its tables that fit; `fits` says whether a schema is short enough.

    Tables come in the order of how much the words of `questions`, the last of which counts most, name them,
    their columns and their example values; one that a foreign key joins to a named one stands before
    others. They keep the file's order. At least one is kept.
    """
    if fits(schema):
        return schema
    relevance = {table.name: _relevance(table, questions) for table in schema.tables}
    named = [table for table in schema.tables if relevance[table.name]]
    joined = {folded(other) for table in named for _, other, _ in table.foreign_keys}
    ranked = sorted(schema.tables, key=lambda t: (-relevance[t.name], folded(t.name) not in joined))

    def part(count: int) -> Schema:
        kept = set(ranked[:count])
        return replace(schema, tables=tuple(table for table in schema.tables if table in kept))

    counts = range(2, len(ranked))
    return part(1 + bisect_left(counts, True, key=lambda count: not fits(part(count))))


def _relevance(table: SchemaTable, questions: Sequence[str]) -> float:
    """Words that questions share with a table: its name's count thrice, the last question's twice."""
    own, columns = _stems(table.name), [_stems(column) for column, _ in table.columns]
    values = _stems(" ".join(str(value) for value in table.example_row or () if isinstance(value, str)))
    total = 0.0
    for place, question in enumerate(questions):
        asked, weight = _stems(question), 2.0 if place == len(questions) - 1 else 1.0
        total += weight * 3 * len(asked & own) / max(1, len(own))
        total += weight * sum(len(asked & words) / len(words) for words in columns if words)
        total += weight * 0.5 * len(asked & values)
    return total


def _stems(name: str) -> set[str]:
    """The words in a question, or in a name such as order_items, OrderItems or "order items"."""
    return {_stem(word.lower()) for word in NAME_WORD.findall(name)} - SHORT_WORDS


def _stem(word: str) -> str:
    """A word without its plural."""
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


Play = Callable[[Sequence[Episode], float], object]  # plays episodes to their ends at a temperature
ENDINGS = {
    Status.OUT_OF_INTERACTIONS: "it used up its interactions without an answer",
    Status.OUT_OF_TOKENS: "its response was cut by a token limit",
    Status.MALFORMED_CALL: "it called a tool in a form that cannot be read",
    Status.NO_ACTION: "it wrote no SQL",
}


@dataclass(frozen=True)
class Event:
    """Something that the agent did (an ActionType), saw or recalled, or a `note` about the question.

    `passed` is the verdict of a check; its text is what the agent says of it.
    """

    kind: str
    text: str = ""
    passed: bool | None = None


Show = Callable[[Event], None]


def show_step(trajectory: Trajectory, decode: Callable[[list[int]], str], show: Show) -> None:
    """Show what the last message did and said, an SQL once, and what came back."""
    before, written = "", [segment.ids for segment in trajectory.segments if segment.role == "model"]
    said = TAGGED.sub("", decode(written[-1]).rpartition("</think>")[2]).strip() if written else ""
    for action in trajectory.actions:
        sql = action.sql or ""
        if action.message == trajectory.messages - 1:
            text = said if action.passed is not None else sql if sql != before else ""
            show(Event(str(action.type), text, action.passed))
        before = sql
    if trajectory.segments[-1].role == "environment":
        seen = trajectory.observations[-1]
        show(Event("recall" if seen.tool == MEMORY_RETRIEVE else "observe", seen.text))


@dataclass(frozen=True)
class Answer:
    """What came of a question; `result` is that of `sql`, which is None if there is no answer: `problem`."""

    question: str
    sql: str | None
    result: ExecutionResult | None
    problem: str
    trajectory: Trajectory


@dataclass
class Conversation:
    """A dialogue. `play` runs episodes; `environment` has the database's schema under its name.

    Where the answer ends without SQL, `fallback` more are sampled, and the steps of the one whose rows most
    have are shown, once all are there.
    """

    environment: Environment
    schema: Schema
    play: Play
    seed: int = 0
    temperature: float = 0.0
    fallback: int = 0
    answers: list[Answer] = field(default_factory=list)

    @property
    def history(self) -> tuple[HistoryTurn, ...]:
        """The questions so far with the agent's own SQL."""
        return tuple(HistoryTurn(answer.question, answer.sql) for answer in self.answers)

    def ask(self, question: str, show: Show) -> Answer:
        """Answer a question, showing each step; raises UserError, and forgets it, if it does not fit."""
        number = len(self.answers)
        example = Example(f"00000/{number}", "00000", self.schema.db_id, number, question, "", self.history)
        asked = [turn.question for turn in self.history] + [question]
        schema = relevant_part(self.schema, asked, lambda part: bool(self._episodes(example, part)))
        episodes = self._episodes(example, schema)
        if not episodes:
            raise UserError(
                f"the question is too long with the dialogue so far and table {schema.tables[0].name} alone; "
                "take questions back, or raise --max-prompt-tokens"
            )
        if schema is not self.schema:
            shown = f"{len(schema.tables)} of {len(self.schema.tables)} tables fit into the prompt"
            names = ", ".join(table.name for table in schema.tables)
            show(Event("note", f"{shown}, those that the question seems to be about: {names}"))
        decode = self.environment.tokens.decode
        for episode in episodes:
            episode.told = partial(show_step, decode=decode, show=show)
        try:
            self.play(episodes, self.temperature)
            trajectory = episodes[0].trajectory
            if trajectory.answer_sql is None and self.fallback:
                problem = ENDINGS.get(trajectory.status, "it has no answer")
                show(Event("note", f"{problem}; {self.fallback} more are sampled"))
                trajectory = self._elected(self._episodes(example, schema, range(1, 1 + self.fallback)), show)
            sql = trajectory.answer_sql
            result = None if sql is None else self.environment.executor.execute(self.schema.path, sql)
        except FileNotFoundError:
            raise UserError(f"{self.schema.path} is gone; put it back, and ask again") from None
        problem = ENDINGS.get(trajectory.status, "")
        self.answers.append(Answer(question, sql, result, problem, trajectory))
        return self.answers[-1]

    def _episodes(self, example: Example, schema: Schema, samples: Iterable[int] = (0,)) -> list[Episode]:
        """The episodes with so much of the schema in their prompt, none if the prompt is too long."""
        environment = replace(self.environment, schemas={schema.db_id: schema})
        seeds = [trajectory_seed(self.seed, example.turn_index, sample) for sample in samples]
        return [e for e in environment.episodes(example, seeds) if e.trajectory.status is None]

    def _elected(self, episodes: Sequence[Episode], show: Show) -> Trajectory:
        """Sample answers, and show how many agree and the steps of the one that they vote for."""
        executor, decode = self.environment.executor, self.environment.tokens.decode
        steps: list[list[Event]] = [[] for _ in episodes]
        for episode, events in zip(episodes, steps, strict=True):
            episode.told = partial(show_step, decode=decode, show=events.append)
        self.play(episodes, self.temperature or 1.0)
        queries = [episode.trajectory.answer_sql for episode in episodes]
        winner, votes = majority_vote(queries, self.schema.path, executor)
        agree = f"{votes} of {len(episodes)} agree" if votes > 1 else "no two answers agree"
        show(Event("note", f"{agree}; the first:"))
        for event in steps[winner]:
            show(event)
        return episodes[winner].trajectory

    def undo(self) -> str | None:
        """Forget the last question; returns it, None if there is none."""
        return self.answers.pop().question if self.answers else None

    def records(self) -> list[dict]:
        """The dialogue as rows of a file of trajectories, for mtsql.extras.viewer."""
        decode, db_id = self.environment.tokens.tokenizer.decode, self.schema.db_id
        return [
            trajectory_record(answer.trajectory, decode)
            | {"question": answer.question, "db_id": db_id, "turn_index": turn}
            | {"answer_result": answer.result and compact_result(answer.result, RESULT_CHARACTERS)}
            for turn, answer in enumerate(self.answers)
        ]


def value_text(value: object) -> str:
    """A value of a result as people read it."""
    return f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
