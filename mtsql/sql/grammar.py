"""The official grammar, quirks included (test-suite-sql-eval, process_sql.py), and the schema as it sees it.

It reads a list of words from left to right, takes FROM before SELECT, and ignores what is left over at
the end. That leniency and the many refusals decide verdicts, so both are kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from mtsql.data.sandbox import FileVersion, Reader, file_version
from mtsql.data.schema import folded

MAX_CHARACTERS = 100_000
TOO_LONG = f"longer than {MAX_CHARACTERS} characters"
MAX_KEPT = 5_000  # readings of statements
AGGREGATES = ("none", "max", "min", "count", "sum", "avg")  # "none" is 0,
UNIT_OPERATORS = ("none", "-", "+", "*", "/")  # here too
COMPARISONS = ("not", "between", "=", ">", "<", ">=", "<=", "!=", "in", "like", "is", "exists")
SET_OPERATORS = ("intersect", "union", "except")
ALL_COLUMNS = "__all__"
CLAUSES = frozenset(("select", "from", "where", "group", "order", "limit", *SET_OPERATORS))
JOIN_WORDS = frozenset(("join", "on", "as"))
CLAUSE_ENDS = CLAUSES | {")", ";", None}  # None is the end of the text
CONDITION_ENDS = CLAUSE_ENDS | JOIN_WORDS
VALUE_ENDS = CLAUSES | JOIN_WORDS | {",", ")", "and", None}
STRING = re.compile('"[^"]*"')
MARK = "\ue000"  # stands for a string literal while words are split; a private-use character
SEPARATE = re.compile(r"[:,](?!\d)|\.{2,}|[;@#$%&?!*()\[\]{}<>«“‘„`»”’]|--")
MAX_DEPTH = 100  # of queries in queries
FINAL_PERIOD = re.compile(r"(?<!\.)\.\s*$")


class SqlParseError(ValueError):
    """The SQL has no representation in the Spider structure."""


@dataclass(frozen=True, eq=False)
class SqlSchema:
    """Tables in the order of the database, then views, with their columns; all names as `folded` has them."""

    tables: Mapping[str, tuple[str, ...]]

    @classmethod
    def from_database(cls, db_path: str | Path) -> SqlSchema:
        """The schema of a SQLite file, read from the file itself as the official evaluation does.

        Unlike there, it has views and generated columns, and letters beyond ASCII keep their case. The same
        object is returned while the file is unchanged. A table whose module is not there is left out, and so
        is a view that cannot be read. Raises FileNotFoundError if there is no such file, UserError if it is
        no database.
        """
        return _read_schema(file_version(db_path))


@lru_cache(maxsize=1_000)
def _read_schema(version: FileVersion) -> SqlSchema:
    reader = Reader(version[0])
    made = "SELECT name, sql LIKE 'CREATE TABLE%' FROM sqlite_master WHERE type IN ('table', 'view')"
    tables = {}
    for name, plain in reader.rows(f"{made} ORDER BY type, rowid"):
        if columns := reader.columns(name, bool(plain)):
            tables[folded(name)] = tuple(folded(column) for column, _, _ in columns)
    return SqlSchema(tables)


def column_id(table: str, column: str) -> str:
    """How the structure names a column."""
    return f"__{table}.{column}__"


def foreign_key_map(tables_json_entry: dict) -> dict[str, str]:
    """Column -> representative of its foreign-key class, from an entry of tables.json.

    As in the official evaluation, pairs join the first class that holds either end, classes are never
    merged afterwards, and the column that comes first in the file represents its class.
    """
    classes: list[set[int]] = []
    for pair in tables_json_entry["foreign_keys"]:
        home = next((c for c in classes if not c.isdisjoint(pair)), None)
        if home is None:
            classes.append(home := set())
        home.update(pair)
    tables = tables_json_entry["table_names_original"]
    columns = tables_json_entry["column_names_original"]

    def name(index: int) -> str:
        table, column = columns[index]
        return column_id(folded(tables[table]), folded(column))

    return {name(i): name(min(members)) for members in classes for i in sorted(members)}


def split_words(sql: str) -> list[str]:
    """The words of `sql`, as `folded` has them; a string literal is one word and keeps its case.

    Words part at white space and at the punctuation that the Penn Treebank rules set off, so `a=1`
    stays one word. "!", "<" and ">" join with a separate "=" that follows.
    Raises SqlParseError if the quotes do not pair up.
    """
    if MARK in sql:
        raise SqlParseError("a private-use character")
    text = sql.replace("'", '"')
    if text.count('"') % 2:
        raise SqlParseError("unbalanced quotes")
    literals = iter(STRING.findall(text))
    text = FINAL_PERIOD.sub(" . ", SEPARATE.sub(r" \g<0> ", STRING.sub(MARK, text)))
    words: list[str] = []
    for word in text.split():
        if word == "=" and words and words[-1] in ("!", "<", ">"):
            words[-1] += "="
        elif word == MARK:
            words.append(next(literals))
        else:
            for _ in range(word.count(MARK)):  # a literal glued to other text is no literal
                next(literals)
            words.append(folded(word))
    return words


@lru_cache(maxsize=MAX_KEPT)
def parse_sql(sql: str, schema: SqlSchema, keep_limit: bool = False) -> dict:
    """The Spider structure of `sql`; it may be a cached one, so callers must not change it.

    Keys: select, from, where, groupBy, having, orderBy, limit, intersect, union, except. A column
    is "__table.column__", "*" is "__all__". LIMIT is 1 whatever it says, unless `keep_limit`, as the authors
    of MTSQL-R1 have it. Raises SqlParseError where the official parser fails.
    """
    if len(sql) > MAX_CHARACTERS:
        raise SqlParseError(TOO_LONG)
    words = split_words(sql)
    return _Reader(words, _table_names(words, schema), schema, keep_limit).query()


def _table_names(words: list[str], schema: SqlSchema) -> dict[str, str]:
    """Aliases of the whole text (the last definition wins) and tables -> tables."""
    names = {}
    for index, word in enumerate(words):
        if word == "as":
            if index + 1 == len(words):
                raise SqlParseError("AS without a name")
            names[words[index + 1]] = words[index - 1]
    for table in schema.tables:
        if table in names:
            raise SqlParseError(f"alias {table} is also a table")
        names[table] = table
    return names


@dataclass
class _Reader:
    """A cursor over the words; each method reads one construct and moves past it."""

    words: list[str]
    names: dict[str, str]
    schema: SqlSchema
    keep_limit: bool
    at: int = 0
    depth: int = 0

    @property
    def ahead(self) -> str | None:
        """The next word, None at the end."""
        return self.words[self.at] if self.at < len(self.words) else None

    def take(self) -> str:
        word = self.ahead
        if word is None:
            raise SqlParseError("the query ends too early")
        self.at += 1
        return word

    def skip(self, word: str) -> bool:
        """Moves past `word` if it is next."""
        if self.ahead != word:
            return False
        self.at += 1
        return True

    def expect(self, word: str) -> None:
        if not self.skip(word):
            raise SqlParseError(f"expected {word!r}, found {self.ahead!r}")

    def query(self) -> dict:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise SqlParseError("nested too deeply")
        with self.brackets():
            start = self.at
            if "from" not in self.words[start:]:
                raise SqlParseError("no FROM")
            self.at = self.words.index("from", start) + 1
            units, joins, tables = self.from_clause()
            self.at, end = start, self.at
            sql: dict = {"select": self.select_clause(tables)}
            self.at = end
            sql["from"] = {"table_units": units, "conds": joins}
            sql["where"] = self.conditions(tables) if self.skip("where") else []
            sql["groupBy"] = self.group_clause(tables) if self.skip("group") else []
            sql["having"] = self.conditions(tables) if self.skip("having") else []
            sql["orderBy"] = self.order_clause(tables) if self.skip("order") else []
            sql["limit"] = self.limit_clause() if self.skip("limit") else None
            self.semicolons()
        self.semicolons()
        sql |= dict.fromkeys(SET_OPERATORS)
        if self.ahead in SET_OPERATORS:
            operator = self.take()
            sql[operator] = self.query()
        self.depth -= 1
        return sql

    @contextmanager
    def brackets(self) -> Iterator[None]:
        """Expects a ")" after the block if a "(" stands before it."""
        opened = self.skip("(")
        yield
        if opened:
            self.expect(")")

    def semicolons(self) -> None:
        while self.skip(";"):
            pass

    def from_clause(self) -> tuple[list, list, list[str]]:
        units: list[tuple] = []
        joins: list = []
        tables: list[str] = []
        while self.ahead is not None:
            with self.brackets():
                if self.ahead == "select":
                    units.append(("sql", self.query()))
                else:
                    self.skip("join")
                    tables.append(self.table())
                    units.append(("table_unit", f"__{tables[-1]}__"))
                if self.skip("on"):
                    if joins:
                        self.connect(joins, "and")
                    joins += self.conditions(tables)
            if self.ahead in CLAUSE_ENDS:
                break
        return units, joins, tables

    def table(self) -> str:
        name = self.names.get(self.take())
        if name not in self.schema.tables:
            raise SqlParseError(f"unknown table {name!r}")
        if self.skip("as"):
            self.take()
        return name

    def select_clause(self, tables: list[str]) -> tuple[bool, list]:
        self.expect("select")
        distinct = self.skip("distinct")
        columns = []
        while self.ahead is not None and self.ahead not in CLAUSES:
            aggregate = AGGREGATES.index(self.take()) if self.ahead in AGGREGATES else 0
            columns.append((aggregate, self.value_unit(tables)))
            self.skip(",")
        return distinct, columns

    def group_clause(self, tables: list[str]) -> list:
        self.expect("by")
        columns = []
        while self.ahead not in CLAUSE_ENDS:
            columns.append(self.column_unit(tables))
            if not self.skip(","):
                break
        return columns

    def order_clause(self, tables: list[str]) -> tuple[str, list]:
        self.expect("by")
        units = []
        direction = "asc"
        while self.ahead not in CLAUSE_ENDS:
            units.append(self.value_unit(tables))
            if self.ahead in ("asc", "desc"):
                direction = self.take()
            if not self.skip(","):
                break
        return direction, units

    def limit_clause(self) -> int:
        word = self.take()
        if not self.keep_limit:
            return 1
        try:
            return int(word)
        except ValueError:
            raise SqlParseError(f"LIMIT {word!r} is no number") from None

    def conditions(self, tables: list[str]) -> list:
        found: list = []
        while self.ahead is not None:
            unit = self.value_unit(tables)
            negated = self.skip("not")
            word = self.take()
            if word not in COMPARISONS:
                raise SqlParseError(f"{word!r} is no comparison")
            low = self.value(tables)
            high = None
            if word == "between":
                self.expect("and")
                high = self.value(tables)
            found.append((negated, COMPARISONS.index(word), unit, low, high))
            if self.ahead in CONDITION_ENDS:
                break
            if self.ahead in ("and", "or"):
                self.connect(found, self.take())
        return found

    def connect(self, conditions: list, connector: str) -> None:
        """Adds AND or OR after a condition; in any other place the official evaluation crashes."""
        if len(conditions) % 2 == 0:
            raise SqlParseError(f"{connector.upper()} in the wrong place")
        conditions.append(connector)

    def value(self, tables: list[str]) -> object:
        start = self.at
        with self.brackets():
            if self.ahead == "select":
                return self.query()
            if '"' in (self.ahead or ""):
                return self.take()
            with suppress(ValueError):
                number = float(self.ahead or "")
                self.at += 1
                return number
            while self.ahead not in VALUE_ENDS:  # all words up to there go with the column
                self.at += 1
            return replace(self, words=self.words[start : self.at], at=0).column_unit(tables)

    def value_unit(self, tables: list[str]) -> tuple:
        operator, right = 0, None
        with self.brackets():
            left = self.column_unit(tables)
            if self.ahead in UNIT_OPERATORS:
                operator, right = UNIT_OPERATORS.index(self.take()), self.column_unit(tables)
        return operator, left, right

    def column_unit(self, tables: list[str]) -> tuple[int, str, bool]:
        block = self.skip("(")
        aggregate = 0
        if self.ahead in AGGREGATES:
            aggregate = AGGREGATES.index(self.take())
            self.expect("(")
            block = True  # one ")" closes it, even where two were opened
        distinct = self.skip("distinct")
        column = self.column(tables)
        if block:
            self.expect(")")
        return aggregate, column, distinct

    def column(self, tables: list[str]) -> str:
        word = self.take()
        if word == "*":
            return ALL_COLUMNS
        prefix, dot, name = word.partition(".")
        owners, column = ([self.names.get(prefix)], name) if dot else (tables, word)
        for table in owners:
            if column in self.schema.tables.get(table, ()):
                return column_id(table, column)
        raise SqlParseError(f"unknown column {word!r}")
