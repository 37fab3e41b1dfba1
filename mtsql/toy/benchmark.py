"""The embedded benchmark: dialogues over generated databases, on disk exactly as SParC is.

`python -m mtsql benchmark FOLDER` writes train.json, dev.json, test.json, test_themes.json, tables.json
and database/<id>/<id>.sqlite, the same bytes for the same seed, and scripted_mistakes.json, the wrong
queries from which the scripted agent of the imitation phase draws (train only). dev and test have new
databases of the themes of train. A part of train and dev is about invented words, new in each database of
a split (`mtsql.toy.database`); test_themes has themes, names, words and ways of asking that no other split
has. With --single it is the first question of each of those dialogues, in Spider's format:
train_spider.json, ...
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from mtsql.config import command_line, user_errors
from mtsql.files import folder_atomically, refuse_filled
from mtsql.toy.database import ASKING, Database, Inventor, make_database, tables_entry, themes, write_sqlite
from mtsql.toy.dialogue import CannotAsk, Speaker
from mtsql.toy.query import Query, mistakes, render

TURNS = (1, 2, 2, 3, 3, 3, 4, 4, 5)  # a dialogue's length is drawn from these
MODELS_SEED = 1  # of the benchmark whose train the models in models/toy have learned
# For each split, by whose words it is in: databases, dialogues in each.
Splits: TypeAlias = Mapping[str, Mapping[str, tuple[int, int]]]
SPLITS: Splits = {
    "train": {"known": (1200, 10), "invented": (600, 10)},
    "dev": {"known": (40, 5), "invented": (20, 5)},
    "test": {"known": (70, 3)},
    "test_themes": {"unseen": (60, 3)},
}


def asked_anew(question: str) -> str:
    """A question in the words of the split test_themes, which has other words for every question."""
    ways = ASKING["asked_anew"]
    found = ((re.fullmatch(known, question), new) for known, new in ways["sentences"].items())
    said = next(match.expand(new) for match, new in found if match)
    for known, new in ways["phrases"].items():
        said = re.sub(known, new, said)
    return said


def _answer(connection: sqlite3.Connection, sql: str) -> list[tuple] | None:
    """The rows, or None for an error."""
    try:
        return connection.execute(sql).fetchall()
    except sqlite3.Error:
        return None


def _useful(rows: list[tuple]) -> bool:
    """Whether a gold result says something: at most 40 rows, the first not all NULL, no lone zero."""
    return 0 < len(rows) <= 40 and any(value is not None for value in rows[0]) and rows != [(0,)]


def _tie(connection: sqlite3.Connection, query: Query) -> bool:
    """Whether LIMIT 1 would pick one of several equal firsts, so that the answer is arbitrary."""
    if not query.limit:
        return False
    two = replace(query, select=(*query.select, query.order[:2]), limit=2)
    rows = connection.execute(render(two)).fetchall()
    return len(rows) == 2 and rows[0][-1] == rows[1][-1]


class Turn(NamedTuple):
    """A question, its gold SQL, and the mistakes ({kind, query}) that change the answer."""

    question: str
    gold: str
    mistakes: list[dict[str, str]]


def make_dialogue(
    database: Database, connection: sqlite3.Connection, rng: random.Random, said: Callable[[str], str]
) -> list[Turn]:
    """The turns of one dialogue, after 60 tries as many as there are; `connection` is to the database's file.

    `said` is how a question is put that people usually put as it is.
    """
    speaker, length = Speaker(database, rng), rng.choice(TURNS)
    turns: list[Turn] = []
    previous, before = None, None  # the query of the last turn and its rows
    for _ in range(60):
        try:
            question, query = speaker.ask(previous)
        except CannotAsk:
            continue
        gold = render(query)
        rows = connection.execute(gold).fetchall()
        if not _useful(rows) or rows == before or _tie(connection, query):
            continue
        wrong = [m for m in mistakes(query, previous, database) if _answer(connection, m["query"]) != rows]
        turns.append(Turn(said(question), gold, wrong))
        if len(turns) == length:
            break
        previous, before = query, rows
    return turns


def _record(db_id: str, turns: list[Turn]) -> dict:
    """A dialogue in SParC's format."""
    asked = [
        {"utterance": t.question, "utterance_toks": re.findall(r"\w+|[^\w\s]", t.question), "query": t.gold}
        for t in turns
    ]
    final = {"utterance": turns[-1].question, "query": turns[-1].gold}
    return {"database_id": db_id, "interaction": asked, "final": final}


def _write_databases(
    folder: Path, seed: int, split: str, parts: Mapping[str, tuple[int, int]]
) -> tuple[list[dict], list[tuple[str, list[Turn]]]]:
    """Write the databases of a split; gives their entries in tables.json, and dialogues by database id."""
    entries, dialogues = [], []
    for whose, (databases, dialogues_each) in parts.items():
        rng = random.Random(f"{seed}/{split}/{whose}")
        inventor = Inventor(rng)
        said = {"known": str, "invented": inventor.asked, "unseen": asked_anew}[whose]
        named = list(themes(whose == "unseen").items())
        for number in range(databases):
            theme, entities = named[number % len(named)]
            db_id = f"{theme}_{'' if whose == 'known' else f'{whose}_'}{split}_{number:03d}"
            database = make_database(inventor.theme(entities) if whose == "invented" else entities, rng)
            entries.append(tables_entry(db_id, database))
            with closing(write_sqlite(database, folder / "database" / db_id)) as connection:
                made = [make_dialogue(database, connection, rng, said) for _ in range(dialogues_each)]
            dialogues += [(db_id, turns) for turns in made if turns]
    return entries, dialogues


def write_benchmark(folder: Path, seed: int, single: bool = False, splits: Splits = SPLITS) -> None:
    """Write the benchmark, or as much of it as `splits` says, into `folder`, which appears when complete.

    `single` keeps of each dialogue the first question, the only one that surely stands alone. The same
    `seed` gives the same bytes. Raises UserError if `folder` exists.
    """
    refuse_filled(folder)
    tables = []
    with folder_atomically(folder) as partial:
        for split, parts in splits.items():
            entries, dialogues = _write_databases(partial, seed, split, parts)
            tables += entries
            if single:
                dialogues = [(db_id, turns[:1]) for db_id, turns in dialogues]
                asked = [{"db_id": i, "question": t.question, "query": t.gold} for i, (t,) in dialogues]
            else:
                asked = [_record(*dialogue) for dialogue in dialogues]
            name = "train_spider" if single and split == "train" else split
            (partial / f"{name}.json").write_text(json.dumps(asked, indent=1))
            if split == "train":
                wrong = [[turn.mistakes for turn in turns] for _, turns in dialogues]
                (partial / "scripted_mistakes.json").write_text(json.dumps(wrong))
        (partial / "tables.json").write_text(json.dumps(tables, indent=1))


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("folder", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--seed", type=int, default=0)
    single = "the first question of each dialogue alone, in Spider's format"
    parser.add_argument("--single", action="store_true", help=single)
    write_benchmark(**vars(parser.parse_args()))


if __name__ == "__main__":
    user_errors(main)
