"""Databases of the toy benchmark: two to four linked tables with rows, written as SQLite files.

An agent has to run its queries to get them right: a text column stores its values with a capital, in lower
case, or as a one-letter code. The schema text shows only the first row, which usually holds a NULL there.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mtsql.toy.words import ColumnWords, EntityWords

RENAMED = (
    0.1  # share of columns whose name is drawn from all that they can have, most not the question's word
)
NUMBERS = ("amount", "year")  # forms of columns, see `mtsql.toy.words`
CATEGORIES = {  # forms whose values repeat, so that questions can ask for one: how they are stored, at random
    "proper": ("title", "title", "lower", "lower"),
    "common": (*("title", "lower") * 4, "code"),
}
STORED = {"title": str.capitalize, "lower": str.lower, "code": lambda word: word[0].upper()}


@dataclass(frozen=True)
class Column:
    """A column of one database.

    `phrase` is what questions call it, `other_names` are names that it could have had. `kind` and `form` are
    those of `mtsql.toy.words`; a key's form is "key". `style` says how values are stored: "title", "lower",
    "code", or "" where they are as they are (names, numbers). `values` are those of its rows as people write
    them.
    """

    table: str
    name: str
    other_names: tuple[str, ...] = ()
    phrase: str = "id"
    kind: str = ""
    form: str = "key"
    style: str = ""
    values: tuple = ()

    @property
    def distinct(self) -> list:
        """Its values, each once."""
        return list(dict.fromkeys(self.values))

    @property
    def plural(self) -> str:
        """The plural of its phrase."""
        if self.phrase.startswith("number of"):
            return "numbers of" + self.phrase.removeprefix("number of")
        if self.phrase.endswith("y") and self.phrase != "pay":
            return self.phrase[:-1] + "ies"
        return self.phrase + ("es" if self.phrase.endswith("s") else "s")

    @property
    def a(self) -> str:
        """Its phrase behind the article."""
        return ("an " if self.phrase[0] in "aei" else "a ") + self.phrase

    def stored(self, value: int | str) -> int | str:
        """The form in which the database stores a value."""
        return STORED[self.style](value) if self.style else value


@dataclass(frozen=True)
class Table:
    """A table: its key column, its own columns, and the column `link` that points to `parent`, if any.

    `person` says whether questions call its entities "who". `rows` are in the order key, columns, link.
    """

    name: str
    singular: str
    plural: str
    person: bool
    key: str
    columns: tuple[Column, ...]
    parent: Table | None
    link: str
    rows: list[tuple]

    @property
    def label(self) -> Column:
        """The column that names an entity; its values are unique."""
        return self.columns[0]

    @property
    def fields(self) -> list[tuple[str, str, str]]:
        """(name, phrase, type) of every column in order, keys included."""
        fields = [(self.key, f"{self.singular} id", "number")]
        fields += [(c.name, c.phrase, "number" if c.form in NUMBERS else "text") for c in self.columns]
        return fields + ([(self.link, f"{self.parent.singular} id", "number")] if self.parent else [])

    @property
    def its(self) -> str:
        """The possessive for one of its entities."""
        return "their" if self.person else "its"

    def of(self, forms: Collection[str], avoid: Collection[Column] = ()) -> list[Column]:
        """The columns of these forms, or of any, but for those of `avoid`."""
        return [c for c in self.columns if (not forms or c.form in forms) and c not in avoid]


Database: TypeAlias = dict[str, Table]  # by name, parents before children


def _values(column: ColumnWords, count: int, rng: random.Random) -> list:
    """`count` values of a column, in the words people use; labels are unique."""
    if column.bounds:
        return [rng.randint(*column.bounds) for _ in range(count)]
    if column.form == "label":
        return rng.sample(column.values, count)
    pool = rng.sample(column.values, min(len(column.values), rng.randint(3, 5)))
    return [rng.choice(pool) for _ in range(count)]


def make_database(entities: Sequence[EntityWords], rng: random.Random) -> Database:
    """Draw a database: some linked entities of a theme, their columns, names, forms of values, and rows."""
    count = rng.choice((2, 2, 2, 2, 2, 2, 3, 3, 3, 4))
    child = rng.choice([e for e in entities if e.parent])
    chosen = [next(e for e in entities if e.singular == child.parent), child]
    while len(chosen) < count:
        linked = ({e.singular for e in chosen} | {e.parent for e in chosen}) - {None}
        near = [e for e in entities if e not in chosen and linked & {e.singular, e.parent}]
        if not near:
            break
        chosen.append(rng.choice(near))
    chosen.sort(key=entities.index)
    plural, capital, long_key = rng.random() < 0.35, rng.random() < 0.25, rng.random() < 0.3
    sizes = [rng.randint(10, 16) if e.parent else rng.randint(4, 7) for e in chosen]

    def cased(name: str) -> str:
        return name.capitalize() if capital else name

    tables: Database = {}  # by singular
    for entity, size in zip(chosen, sizes, strict=True):
        name = cased(entity.plural if plural else entity.singular)
        label, *others = entity.columns
        kept = rng.sample(others, rng.randint(min(3, len(others)), len(others)))
        columns, cells = [], [range(1, size + 1)]
        for spec in (label, *sorted(kept, key=others.index)):
            called = rng.choice(spec.names) if rng.random() < RENAMED else spec.names[0]
            other_names = (n for n in (*spec.names, spec.phrases[0]) if n != called and " " not in n)
            phrase = rng.choice(spec.phrases)
            style = rng.choice(CATEGORIES[spec.form]) if spec.form in CATEGORIES else ""
            values = tuple(_values(spec, size, rng))
            words = (tuple(map(cased, other_names)), phrase, spec.kind, spec.form)
            columns.append(Column(name, cased(called), *words, style, values))
            cells.append([columns[-1].stored(value) for value in values])
            if style in ("title", "lower") and rng.random() < 0.8:
                cells[-1][0] = None
        parent = tables.get(entity.parent)
        if parent:  # parents at the end of the list are left without children, so that NOT IN finds some
            cells.append([rng.randint(1, len(parent.rows) - 1) for _ in range(size)])
        key, link = cased(f"{entity.singular}_id" if long_key else "id"), cased(f"{entity.parent}_id")
        names = (name, entity.singular, entity.plural, entity.person, key)
        tables[entity.singular] = Table(*names, tuple(columns), parent, link, list(zip(*cells, strict=True)))
    return {table.name: table for table in tables.values()}


def write_sqlite(database: Database, path: Path) -> sqlite3.Connection:
    """Write tables, keys and rows to `path`, a new SQLite file; returns the connection."""
    connection = sqlite3.connect(path)
    for table in database.values():
        lines = [f"{name} {'integer' if kind == 'number' else 'text'}" for name, _, kind in table.fields]
        lines.append(f"primary key ({table.key})")
        if table.parent:
            lines.append(f"foreign key ({table.link}) references {table.parent.name}({table.parent.key})")
        connection.execute(f"create table {table.name} ({', '.join(lines)})")
        places = ", ".join("?" * len(table.fields))
        connection.executemany(f"insert into {table.name} values ({places})", table.rows)
    connection.commit()
    return connection


def tables_entry(db_id: str, database: Database) -> dict:
    """The database's entry in Spider's tables.json format."""
    tables = list(database.values())
    fields = [(-1, "*", "*", "text"), *((i, *field) for i, t in enumerate(tables) for field in t.fields)]
    places = [place for place, *_ in fields]
    keys = {table.name: places.index(i) for i, table in enumerate(tables)}  # the first field of each
    links = [[keys[t.name] + len(t.columns) + 1, keys[t.parent.name]] for t in tables if t.parent]
    return {
        "db_id": db_id,
        "table_names": [t.singular for t in tables],
        "table_names_original": list(database),
        "column_names": [[place, phrase] for place, _, phrase, _ in fields],
        "column_names_original": [[place, name] for place, name, *_ in fields],
        "column_types": [kind for *_, kind in fields],
        "primary_keys": list(keys.values()),
        "foreign_keys": links,
    }
