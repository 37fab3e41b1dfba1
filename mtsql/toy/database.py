"""Databases of the toy benchmark: two to four linked tables with rows, written as SQLite files.

An agent has to run its queries to get them right: a text column stores its values with a capital, in lower
case, or as a one-letter code. The schema text shows only the first row, which usually holds a NULL there.
"""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
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


@dataclass(eq=False)
class Table:
    """A table. `person` says whether questions call its entities "who".

    `columns` are all but the primary key `key` and the foreign key `link`, which points to `parent`.
    """

    name: str
    singular: str
    plural: str
    person: bool
    parent: Table | None
    key: Column = field(init=False)
    columns: list[Column] = field(default_factory=list)
    link: Column | None = None

    @property
    def label(self) -> Column:
        """The column that names an entity; its values are unique."""
        return self.columns[0]

    @property
    def fields(self) -> list[Column]:
        """All columns in order, keys included."""
        return [self.key, *self.columns, *([self.link] if self.link else [])]

    @property
    def its(self) -> str:
        """The possessive for one of its entities."""
        return "their" if self.person else "its"

    def of(self, forms: Collection[str] = (), avoid: Collection[Column] = ()) -> list[Column]:
        """The columns of these forms, or of any, without those of `avoid`."""
        return [c for c in self.columns if c not in avoid and (not forms or c.form in forms)]


@dataclass(frozen=True, eq=False)
class Column:
    """A column of a table.

    `phrase` is what questions call it, `names` are names that it could have had. `kind` and `form` are
    those of `mtsql.toy.words`; a key's form is "key". `style` says how values are stored: "title", "lower",
    "code", or "" where they are as they are (names, numbers). `values` are those of its rows as people write
    them; `starts_with_null` says that the first is not in the database.
    """

    table: Table
    name: str
    phrase: str
    values: Sequence
    form: str = "key"
    kind: str = ""
    names: Sequence[str] = ()
    style: str = ""
    starts_with_null: bool = False

    @property
    def distinct(self) -> list:
        """Its values, each once."""
        return list(dict.fromkeys(self.values))

    @property
    def type(self) -> str:
        """Its type in Spider's words."""
        return "number" if self.form in ("key", *NUMBERS) else "text"

    @property
    def plural(self) -> str:
        """The plural of its phrase."""
        if self.phrase.startswith("number of"):
            return self.phrase.replace("number", "numbers", 1)
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

    @property
    def cells(self) -> list:
        """What the database stores in its rows."""
        cells = [self.stored(value) for value in self.values]
        return [None, *cells[1:]] if self.starts_with_null else cells


Database: TypeAlias = list[Table]  # parents before children


def _choose(entities: Sequence[EntityWords], rng: random.Random) -> list[EntityWords]:
    """Two to four linked entities of a theme, in its order."""
    count = rng.choice((2, 2, 2, 2, 2, 2, 3, 3, 3, 4))
    child = rng.choice([e for e in entities if e.parent])
    chosen = [next(e for e in entities if e.singular == child.parent), child]
    while len(chosen) < count:
        linked = {e.singular for e in chosen} | {e.parent for e in chosen if e.parent}
        near = [e for e in entities if e not in chosen and linked & {e.singular, e.parent}]
        if not near:
            break
        chosen.append(rng.choice(near))
    return sorted(chosen, key=entities.index)


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
    chosen = _choose(entities, rng)
    plural, capital, long_key = rng.random() < 0.35, rng.random() < 0.25, rng.random() < 0.3
    cased = str.capitalize if capital else str
    sizes = [rng.randint(10, 16) if e.parent else rng.randint(4, 7) for e in chosen]
    tables: dict[str, Table] = {}  # by singular
    for entity, size in zip(chosen, sizes, strict=True):
        parent, name = tables.get(entity.parent), cased(entity.plural if plural else entity.singular)
        table = Table(name, entity.singular, entity.plural, entity.person, parent)
        key = f"{entity.singular}_id" if long_key else "id"
        table.key = Column(table, cased(key), f"{entity.singular} id", range(1, size + 1))
        label, *others = entity.columns
        kept = rng.sample(others, rng.randint(min(3, len(others)), len(others)))
        for words in (label, *sorted(kept, key=others.index)):
            names = [cased(name) for name in (*words.names, words.phrases[0]) if " " not in name]
            name = cased(rng.choice(words.names) if rng.random() < RENAMED else words.names[0])
            phrase = rng.choice(words.phrases)
            style = rng.choice(CATEGORIES[words.form]) if words.form in CATEGORIES else ""
            values = _values(words, size, rng)
            null = style in ("title", "lower") and rng.random() < 0.8
            column = Column(table, name, phrase, values, words.form, words.kind, names, style, null)
            table.columns.append(column)
        if parent:  # parents at the end of the list are left without children, so that NOT IN finds some
            links = [rng.randint(1, len(parent.key.values) - 1) for _ in range(size)]
            table.link = Column(table, cased(f"{entity.parent}_id"), f"{entity.parent} id", links)
        tables[entity.singular] = table
    return list(tables.values())


def write_sqlite(database: Database, folder: Path) -> sqlite3.Connection:
    """Write tables, keys and rows into a new folder, as a SQLite file of its name; returns the connection."""
    folder.mkdir(parents=True)
    connection = sqlite3.connect(folder / f"{folder.name}.sqlite")
    for table in database:
        lines = [f"{c.name} {'integer' if c.type == 'number' else 'text'}" for c in table.fields]
        lines.append(f"primary key ({table.key.name})")
        if table.parent:
            parent = table.parent
            lines.append(f"foreign key ({table.link.name}) references {parent.name}({parent.key.name})")
        connection.execute(f"create table {table.name} ({', '.join(lines)})")
        places = ", ".join("?" * len(table.fields))
        rows = zip(*(c.cells for c in table.fields), strict=True)
        connection.executemany(f"insert into {table.name} values ({places})", rows)
    connection.commit()
    return connection


def tables_entry(db_id: str, database: Database) -> dict:
    """The database's entry in Spider's tables.json format."""
    columns = [(i, column) for i, table in enumerate(database) for column in table.fields]
    places = {column: place for place, (_, column) in enumerate(columns, 1)}  # 0 is "*"
    return {
        "db_id": db_id,
        "table_names": [t.singular for t in database],
        "table_names_original": [t.name for t in database],
        "column_names": [[-1, "*"], *([i, c.phrase] for i, c in columns)],
        "column_names_original": [[-1, "*"], *([i, c.name] for i, c in columns)],
        "column_types": ["text", *(c.type for _, c in columns)],
        "primary_keys": [places[t.key] for t in database],
        "foreign_keys": [[places[t.link], places[t.parent.key]] for t in database if t.parent],
    }
