"""What the parsers share: the schema as they see it, the error they raise, foreign-key classes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

AGGREGATES = ("none", "max", "min", "count", "sum", "avg")
UNIT_OPERATORS = ("none", "-", "+", "*", "/")
COMPARISONS = ("not", "between", "=", ">", "<", ">=", "<=", "!=", "in", "like", "is", "exists")
SET_OPERATORS = ("intersect", "union", "except")
NO_AGGREGATE = AGGREGATES.index("none")
NO_OPERATOR = UNIT_OPERATORS.index("none")
ALL_COLUMNS = "__all__"


class SqlParseError(ValueError):
    """The SQL has no representation in the Spider structure."""


@dataclass(frozen=True)
class SqlSchema:
    """Tables with their columns, all in lower case, in the order of the database."""

    tables: Mapping[str, tuple[str, ...]]

    def __hash__(self) -> int:
        return hash(tuple(self.tables.items()))

    @classmethod
    def from_database(cls, db_path: str | Path) -> SqlSchema:
        """The schema of a SQLite file, read live as the official evaluation does (section 1).

        The same object is returned while the file is unchanged. Raises FileNotFoundError if there
        is no such file.
        """
        path = os.fspath(db_path)
        if not os.path.isfile(path):
            raise FileNotFoundError(f"The database file {path} does not exist.")
        stat = os.stat(path)
        return _read_schema(path, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=1_000)
def _read_schema(path: str, _modified: int, _size: int) -> SqlSchema:
    connection = sqlite3.connect(Path(path).absolute().as_uri() + "?mode=ro", uri=True)
    try:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        tables = {}
        for (name,) in names:
            columns = connection.execute("SELECT name FROM pragma_table_info(?)", (name,))
            tables[name.lower()] = tuple(column.lower() for (column,) in columns)
    except sqlite3.DatabaseError as error:
        raise ValueError(f"{path} is not a usable SQLite database ({error})") from None
    finally:
        connection.close()
    return SqlSchema(tables)


def column_id(table: str, column: str) -> str:
    """How the structure names a column."""
    return f"__{table}.{column}__"


def foreign_key_map(tables_json_entry: dict) -> dict[str, str]:
    """Column -> representative of its foreign-key class, from an entry of tables.json.

    Section 3.3 of the notes: pairs join the first class that holds either end, classes are never
    merged afterwards, and the column that comes first in the file represents its class.
    """
    classes: list[set[int]] = []
    for pair in tables_json_entry["foreign_keys"]:
        home = next((c for c in classes if not c.isdisjoint(pair)), None)
        if home is None:
            classes.append(set(pair))
        else:
            home.update(pair)
    tables = tables_json_entry["table_names_original"]
    columns = tables_json_entry["column_names_original"]

    def name(index: int) -> str:
        table, column = columns[index]
        return column_id(tables[table].lower(), column.lower())

    return {name(i): name(min(members)) for members in classes for i in sorted(members)}
