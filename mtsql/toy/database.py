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

from mtsql.toy import words

# The share of columns whose name is drawn from all that they can have, most not the question's word.
RENAMED = 0.1
NUMBERS = ("amount", "year")  # forms of columns, see `mtsql.toy.words`
CATEGORIES = ("proper", "common")  # whose values repeat, so that questions can ask for one of them


@dataclass(frozen=True)
class Column:
    """A column of one database.

    `phrase` is what questions call it, `other_names` are names that it could have had. `kind` and `form` are
    those of `mtsql.toy.words`; a key's form is "key". `style` says how values are stored: "title", "lower",
    "code", or "" where they are as they are (names, numbers).
    """

    table: str
    name: str
    other_names: tuple[str, ...] = ()
    phrase: str = "id"
    kind: str = ""
    form: str = "key"
    style: str = ""

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

    def stored(self, word: str, style: str | None = None) -> str:
        """The form in which the database stores `word`, by the column's style or the given one."""
        forms = {"lower": word.lower(), "code": word[0].upper(), "title": word.capitalize()}
        return forms.get(self.style if style is None else style, word)


@dataclass(frozen=True)
class Table:
    """A table with its key column, its own columns, and its foreign key (column, parent table) or None.

    `person` says whether questions call its entities "who".
    """

    name: str
    singular: str
    plural: str
    person: bool
    key: str
    columns: tuple[Column, ...]
    foreign_key: tuple[str, str] | None

    @property
    def label(self) -> Column:
        """The column that names an entity; its values are unique."""
        return self.columns[0]

    def of(self, forms: Collection[str], avoid: Collection[Column] = ()) -> list[Column]:
        """The columns of these forms, or of any, but for those of `avoid`."""
        return [c for c in self.columns if (not forms or c.form in forms) and c not in avoid]


@dataclass(frozen=True)
class ToyDatabase:
    """A schema and its rows.

    `rows[table]` are tuples in the order key, columns, foreign key. `words_of` has the values of each
    category column as people write them.
    """

    db_id: str
    tables: dict[str, Table]
    rows: dict[str, list[tuple]]
    words_of: dict[Column, tuple[str, ...]]

    def parent(self, table: str) -> Table | None:
        """The table that the foreign key of `table` points to, None without one."""
        link = self.tables[table].foreign_key
        return self.tables[link[1]] if link else None

    def fields(self, table: Table) -> list[tuple[str, str, str]]:
        """(name, phrase, type) of every column of a table in order, keys included."""
        columns = [(table.key, f"{table.singular} id", "number")]
        columns += [(c.name, c.phrase, "number" if c.form in NUMBERS else "text") for c in table.columns]
        if table.foreign_key:
            columns.append((table.foreign_key[0], f"{self.parent(table.name).singular} id", "number"))
        return columns


def _values(column: words.ColumnWords, count: int, rng: random.Random) -> list:
    """`count` values of a column, in the words people use; labels are unique."""
    if column.bounds:
        return [rng.randint(*column.bounds) for _ in range(count)]
    if column.form == "label":
        return rng.sample(column.values, count)
    pool = rng.sample(column.values, min(len(column.values), rng.randint(3, 5)))
    return [rng.choice(pool) for _ in range(count)]


def make_database(db_id: str, entities: Sequence[words.EntityWords], rng: random.Random) -> ToyDatabase:
    """Draw a database: some linked entities of a theme, their columns, names, forms of values, and rows."""
    count = rng.choice((2, 2, 2, 2, 2, 2, 3, 3, 3, 4))
    chosen = [rng.choice([e for e in entities if e.parent])]
    chosen.insert(0, next(e for e in entities if e.singular == chosen[0].parent))
    while len(chosen) < count:
        linked = ({e.singular for e in chosen} | {e.parent for e in chosen}) - {None}
        near = [e for e in entities if e not in chosen and linked & {e.singular, e.parent}]
        if not near:
            break
        chosen.append(rng.choice(near))
    chosen.sort(key=entities.index)
    plural, capital, long_key = rng.random() < 0.35, rng.random() < 0.25, rng.random() < 0.3

    def cased(name: str) -> str:
        return name.capitalize() if capital else name

    table_names = {e.singular: cased(e.plural if plural else e.singular) for e in chosen}
    sizes = {e.singular: rng.randint(4, 7) if not e.parent else rng.randint(10, 16) for e in chosen}
    tables, rows, words_of = {}, {}, {}
    for entity in chosen:
        table = table_names[entity.singular]
        label, *others = entity.columns
        kept = rng.sample(others, rng.randint(min(3, len(others)), len(others)))
        columns, values = [], []
        for spec in (label, *sorted(kept, key=others.index)):
            name = rng.choice(spec.names) if rng.random() < RENAMED else spec.names[0]
            other_names = [n for n in (*spec.names, spec.phrases[0]) if n != name and " " not in n]
            phrase, category = rng.choice(spec.phrases), spec.form in CATEGORIES
            styles = ("title", "title", "lower", "lower")
            if spec.form == "common":
                styles = (*("title", "lower") * 4, "code")
            style = rng.choice(styles) if category else ""
            column = Column(
                table, cased(name), tuple(map(cased, other_names)), phrase, spec.kind, spec.form, style
            )
            drawn = _values(spec, sizes[entity.singular], rng)
            if category:
                words_of[column] = tuple(dict.fromkeys(drawn))
                drawn = [column.stored(word) for word in drawn]
                if style != "code" and rng.random() < 0.8:
                    drawn[0] = None
            columns.append(column)
            values.append(drawn)
        link = None
        if entity.parent in table_names:
            link = (cased(f"{entity.parent}_id"), table_names[entity.parent])
            # Parents at the end of the list are left without children, so that NOT IN finds some.
            values.append([rng.randint(1, sizes[entity.parent] - 1) for _ in values[0]])
        rows[table] = [(i + 1, *row) for i, row in enumerate(zip(*values, strict=True))]
        key = cased(f"{entity.singular}_id" if long_key else "id")
        names = (table, entity.singular, entity.plural)
        tables[table] = Table(*names, entity.person, key, tuple(columns), link)
    return ToyDatabase(db_id, tables, rows, words_of)


def write_sqlite(database: ToyDatabase, path: Path) -> None:
    """Write tables, keys and rows to `path`, a new SQLite file."""
    connection = sqlite3.connect(path)
    for table in database.tables.values():
        fields = database.fields(table)
        lines = [f"{name} {'integer' if kind == 'number' else 'text'}" for name, _, kind in fields]
        lines.append(f"primary key ({table.key})")
        if table.foreign_key:
            column, parent = table.foreign_key
            lines.append(f"foreign key ({column}) references {parent}({database.tables[parent].key})")
        connection.execute(f"create table {table.name} ({', '.join(lines)})")
        places = ", ".join("?" * len(fields))
        connection.executemany(f"insert into {table.name} values ({places})", database.rows[table.name])
    connection.commit()
    connection.close()


def tables_entry(database: ToyDatabase) -> dict:
    """The database's entry in Spider's tables.json format."""
    tables = list(database.tables.values())
    fields = [(-1, "*", "*", "text"), *((i, *f) for i, t in enumerate(tables) for f in database.fields(t))]
    places = [place for place, *_ in fields]
    keys = {table.name: places.index(i) for i, table in enumerate(tables)}  # the first field of each
    linked = [(keys[t.name] + len(t.columns) + 1, t.foreign_key[1]) for t in tables if t.foreign_key]
    return {
        "db_id": database.db_id,
        "table_names": [t.singular for t in tables],
        "table_names_original": list(database.tables),
        "column_names": [[place, phrase] for place, _, phrase, _ in fields],
        "column_names_original": [[place, name] for place, name, *_ in fields],
        "column_types": [kind for *_, kind in fields],
        "primary_keys": list(keys.values()),
        "foreign_keys": [[column, keys[parent]] for column, parent in linked],
    }
