"""Databases of the toy benchmark: two to four linked tables with rows, as SQLite files; and their words.

An agent has to run its queries to get them right: a text column stores its values with a capital, in lower
case, or as a one-letter code. The schema text shows only the first row, which usually holds a NULL there.

words.toml, which says what entries mean, has the words of train, dev and test, words_unseen.toml those of
test_themes, questions.toml those with which one asks. A model that meets no other words than those of a
dozen themes learns a list. With a part of its training databases about words like "pandor" and "chuble",
new in each database of a split, it has to find a question's word in the schema, and a value in the
question, copy both, and pass over what it does not know.
"""

from __future__ import annotations

import random
import re
import sqlite3
import tomllib
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TypeAlias


def _read(name: str) -> dict:
    return tomllib.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))


_WORD = re.compile(r"[a-z]+")
_KNOWN, _UNSEEN, ASKING = _read("words.toml"), _read("words_unseen.toml"), _read("questions.toml")
ADJECTIVES: dict[str, list[str]] = _KNOWN["adjectives"] | _UNSEEN["adjectives"]
PERSONS = ("person", "person_unseen")  # the kinds of label that people say "who" of
KEPT = ("number", "of", "id")  # words of grammar in the names and phrases of columns
LENGTHS = range(4, 10)  # letters of an invented word
POOL, LABELS = 12, 24  # values of an invented list; of one that names entities, of which a table has up to 16


@dataclass(frozen=True)
class ColumnWords:
    """A column before it is placed in a database: possible names, ways to say it, its values.

    `form` is "amount" or "year", whose values lie within `bounds`, "label" (values that occur once in a
    table), "proper" (people write them with a capital) or "common"; the latter three are drawn from
    `values`. `kind` is that of the word file, "" for invented words.
    """

    names: Sequence[str]
    phrases: Sequence[str]
    kind: str
    form: str
    bounds: Sequence[int] = ()
    values: Sequence[str] = ()


@dataclass(frozen=True)
class EntityWords:
    """An entity before it is placed in a database; its foreign key, if any, points to the entity `parent`.

    `person` says whether people say "who" of it.
    """

    singular: str
    plural: str
    columns: Sequence[ColumnWords]
    parent: str | None = None
    person: bool = False


def themes(unseen: bool = False) -> dict[str, list[EntityWords]]:
    """The themes of all splits, or of `test_themes` alone: name -> its entities, parents before children."""
    source = _UNSEEN if unseen else _KNOWN
    titles = {kind: [*map(" ".join, product(*words.values()))] for kind, words in source["titles"].items()}
    pools = {"label": source["labels"] | titles, "proper": source["proper"], "common": source["common"]}

    def column(entry: dict | str) -> ColumnWords:
        entry = source["columns"][entry] if isinstance(entry, str) else entry
        kind = entry["kind"]
        form = next((form for form, lists in pools.items() if kind in lists), kind)
        return ColumnWords(**entry, form=form, values=pools.get(form, {}).get(kind, ()))

    def entity(entry: dict) -> EntityWords:
        columns = [column(words) for words in entry["columns"]]
        return EntityWords(**entry | {"columns": columns}, person=columns[0].kind in PERSONS)

    return {name: [entity(entry) for entry in entries] for name, entries in source["themes"].items()}


class Inventor:
    """Invents words letter by letter: each follows the two before it as often as in the known words."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.following: dict[str, list[str]] = defaultdict(list)
        for word in sorted(set(_WORD.findall(str(_KNOWN).lower()))):
            for at, letter in enumerate(f"{word}."):
                self.following[f"..{word}"[at : at + 2]].append(letter)
        self.taken = set(_WORD.findall(f"{_KNOWN} {_UNSEEN} {ASKING['taken']['words']}".lower()))

    def word(self) -> str:
        """A new word, in lower case: none that means something, and none that it has given before.

        It does not end in an s, so that another s makes its plural.
        """
        while True:
            word = ".."
            while word == ".." or (word[-1] != "." and len(word) < LENGTHS.stop + 2):  # ".." and one too long
                word += self.rng.choice(self.following[word[-2:]])
            word = word.strip(".")
            if len(word) in LENGTHS and word[-1] != "s" and not {word, f"{word}s"} & self.taken:
                self.taken.add(word)
                return word

    def theme(self, entities: Sequence[EntityWords]) -> list[EntityWords]:
        """A theme with other words: the same word of `entities` becomes the same word everywhere.

        Words of grammar stay, and a plural stays one.
        """
        renamed = defaultdict(self.word, zip(KEPT, KEPT, strict=True))
        pools: dict[str, Sequence[str]] = {}

        def rename(text: str) -> str:
            return _WORD.sub(lambda found: renamed[found[0]], text)

        def column(known: ColumnWords) -> ColumnWords:
            if known.values and known.kind not in pools:
                pools[known.kind] = self._pool(known)
            names, phrases = ([rename(text) for text in texts] for texts in (known.names, known.phrases))
            return replace(known, names=names, phrases=phrases, kind="", values=pools.get(known.kind, ()))

        def entity(known: EntityWords) -> EntityWords:
            columns = [column(words) for words in known.columns]
            parent = known.parent and rename(known.parent)
            return EntityWords(rename(known.singular), rename(known.plural), columns, parent, known.person)

        for known in entities:
            renamed[known.plural] = rename(known.singular) + "s"
        return [entity(known) for known in entities]

    def asked(self, question: str) -> str:
        """A question with words around it that mean nothing, in half of the cases: not all words matter."""
        if self.rng.random() < 0.5:
            return question
        before, behind = self.rng.choice(((1, 0), (2, 0), (3, 0), (0, 1), (0, 2), (1, 1), (2, 1)))
        if before:
            words = " ".join(self.word() for _ in range(before)).capitalize()
            question = f"{words} {question[0].lower()}{question[1:]}"
        return " ".join([question[:-1], *(self.word() for _ in range(behind))]) + question[-1]

    def _pool(self, known: ColumnWords) -> list[str]:
        """Values in place of a column's: labels of as many words as its own, others of one.

        Others may be stored by their first letter, so no two of a pool share it.
        """
        if known.form == "label":
            count = len(known.values[0].split())
            return [" ".join(self.word().capitalize() for _ in range(count)) for _ in range(LABELS)]
        values: dict[str, str] = {}
        while len(values) < POOL:
            word = self.word()
            values.setdefault(word[0], word)
        return [word.capitalize() if known.form == "proper" else word for word in values.values()]


RENAMED = 0.1  # share of columns whose name is drawn from all that they can have, most not the question's
NUMBERS = ("amount", "year")  # forms of columns, see `Column`
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
    the ones below; a key's form is "key". `style` says how values are stored: "title", "lower",
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
