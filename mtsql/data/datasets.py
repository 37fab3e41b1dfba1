"""Dialogues from SParC- and CoSQL-format files (the toy benchmark is written in the same format).

Single questions (Spider and its variants, BIRD, SynSQL-2.5M) are dialogues of one turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mtsql.data.schema import Schema, load_schemas, read_json
from mtsql.errors import UserError, loading

# Where official folders keep a split beside the first four of `mtsql.task.find_split`: Spider and Spider-Syn,
# SynSQL; BIRD's dev, BIRD mini-dev, Spider-DK, Spider-Realistic.
FURTHER_NAMES = {
    "train": ("train_spider.json", "data.json"),
    "dev": ("dev_20240627/dev.json", "mini_dev_sqlite.json", "Spider-DK.json", "spider-realistic.json"),
}


class Fields(NamedTuple):
    """What a format calls the fields of a question; knowledge and difficulty may be absent."""

    question: str
    sql: str
    knowledge: str = ""
    difficulty: str = ""


# By the field that only this format has. Spider's files have a `sql` too, the parsed query, which is not
# read, so `query` stands before it. Spider-Realistic and Spider-DK have Spider's fields.
# Sources: taoyds/spider, ygan/Spider-Syn, ygan/Spider-DK, bird-bench/mini_dev, RUCKBReasoning/OmniSQL.
FORMATS = {
    "interaction": Fields("utterance", "query"),  # SParC, CoSQL: a list of questions
    "SpiderSynQuestion": Fields("SpiderSynQuestion", "query"),  # Spider-Syn
    "SQL": Fields("question", "SQL", "evidence", "difficulty"),  # BIRD
    "query": Fields("question", "query"),  # Spider
    "sql": Fields("question", "sql", "external_knowledge", "sql_complexity"),  # SynSQL
}


@dataclass(frozen=True)
class HistoryTurn:
    """An earlier question as the agent may know it; `sql` is None with history "questions"."""

    question: str
    sql: str | None


@dataclass(frozen=True)
class Example:
    """One turn of a dialogue, which counts from 0; where it is to be answered, with its history."""

    id: str
    dialogue_id: str
    db_id: str
    turn_index: int
    question: str
    gold_sql: str
    history: tuple[HistoryTurn, ...] = ()
    knowledge: str = ""  # BIRD's evidence, SynSQL's external_knowledge
    difficulty: str = ""  # the dataset's own: BIRD's difficulty, SynSQL's sql_complexity
    source: str = ""  # its dialogue's own field of this name, else the file


@dataclass(frozen=True)
class Dialogue:
    """A sequence of questions over one database."""

    id: str
    db_id: str
    turns: tuple[Example, ...]  # without history


@dataclass(frozen=True)
class Dataset:
    """Dialogues of one split with the schemas of their databases, by db_id."""

    dialogues: tuple[Dialogue, ...]
    schemas: dict[str, Schema]
    missing: Counter[str] = field(default_factory=Counter)  # dialogues without a database, by source


def beside(data: Path, *names: str) -> Path:
    """The first of `names` that lies beside a data file; the first name, if none does.

    The split's own come before them: Spider's test_tables.json, BIRD's dev_databases.
    """
    root = data.parent.parent if data.parent.name == "sql_state_tracking" else data.parent
    splits = [split for split in ("train", "dev", "test") if split in data.stem]
    candidates = [f"{split}_{name}" for split in splits for name in names] + list(names)
    return next((root / name for name in candidates if (root / name).exists()), root / names[0])


def load_dataset(sources: Sequence[tuple[Path, Path, Path]], allow_missing: bool = False) -> Dataset:
    """The dialogues or single questions of files, each with its tables.json and its folder of databases.

    The items' fields tell the format; they are numbered on from file to file. A dialogue over a database that
    is not there raises UserError, or is skipped and counted with `allow_missing`. UserError names the file
    and the field of whatever is wrong, and a database that two files describe differently.
    """
    schemas: dict[str, Schema] = {}
    dialogues: list[Dialogue] = []
    missing: Counter[str] = Counter()
    load = cache(load_schemas)
    for path, tables, databases in sources:
        known = load(tables, databases)
        for name, schema in known.items():
            other = schemas.setdefault(name, schema)
            if other.tables != schema.tables:  # their questions cannot share its name
                raise UserError(
                    f"two sources have different databases {name!r}: {other.path} and {schema.path}; "
                    "rename one, or give both sources the same --tables and --databases"
                )
        for number, item in enumerate(read_json(path)):
            dialogue = _dialogue(path, number, item, f"{len(dialogues) + missing.total():05d}")
            if dialogue.db_id in known:
                dialogues.append(dialogue)
            elif allow_missing:
                missing[dialogue.turns[0].source] += 1
            else:
                raise UserError(
                    f"{path}, item {number}: database {dialogue.db_id!r} is not in {tables} or {databases}; "
                    "give the right --databases, or --allow-missing to skip such items"
                )
    if not dialogues:
        raise UserError(f"{path} holds no dialogue or question whose database is in {databases}")
    return Dataset(tuple(dialogues), schemas, missing)


def _dialogue(data: Path, number: int, item: dict, name: str) -> Dialogue:
    """Item `number` (from 0) of `data` as the dialogue `name`; a single question is a dialogue of one turn.

    Raises UserError with the file, the item and the field that is missing or of another kind.
    """
    with loading(f"{data}, item {number}, is no dialogue or question of a known format"):
        key = next((key for key in FORMATS if key in item), None)
        if key is None:
            raise KeyError(f"none of {', '.join(FORMATS)}")
        fields, asked, database = FORMATS[key], [item], "db_id"
        if key == "interaction":
            asked, database = item["interaction"], "database_id"
        db_id, source, turns = _text(item, database), str(item.get("source", data)), []
        for index, turn in enumerate(asked):
            question, sql = _text(turn, fields.question), _text(turn, fields.sql)
            further = (turn.get(fields.knowledge), turn.get(fields.difficulty))
            knowledge, difficulty = ((text or "").strip() for text in further)
            at = (f"{name}/{index}", name, db_id, index)
            turns.append(Example(*at, question, sql, (), knowledge, difficulty, source))
        if not turns:
            raise ValueError("interaction is empty")
        return Dialogue(name, db_id, tuple(turns))


def _text(item: dict, field: str) -> str:
    if not isinstance(item[field], str):
        raise TypeError(f"{field} is no text")
    return item[field]


def examples(dialogues: Iterable[Dialogue], history: str = "gold") -> list[Example]:
    """One example a turn. `history` is "gold" (earlier questions with gold SQL) or "questions".

    Predicted history depends on the policy's own answers: see `example_after`.
    """
    made = []
    for dialogue in dialogues:
        known = [turn.gold_sql if history == "gold" else None for turn in dialogue.turns]
        made += [example_after(dialogue, known[: turn.turn_index]) for turn in dialogue.turns]
    return made


def example_after(dialogue: Dialogue, answers: Sequence[str | None]) -> Example:
    """The turn after the earlier ones that `answers` holds the SQL of."""
    earlier = zip(dialogue.turns, answers, strict=False)
    history = tuple(HistoryTurn(turn.question, sql) for turn, sql in earlier)
    return replace(dialogue.turns[len(answers)], history=history)
