"""What the readers of SQL share: the schema as they see it, and foreign-key classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mtsql.data.names import folded
from mtsql.data.sandbox import FileVersion, Reader, file_version

MAX_CHARACTERS = 100_000
TOO_LONG = f"longer than {MAX_CHARACTERS} characters"
MAX_KEPT = 5_000  # readings of statements


class SqlParseError(ValueError):
    """The SQL has no representation in the Spider structure."""


@dataclass(frozen=True)
class SqlSchema:
    """Tables in the order of the database, then views, with their columns; all names as `folded` has them."""

    tables: Mapping[str, tuple[str, ...]]

    def __hash__(self) -> int:
        return hash(tuple(self.tables.items()))

    @classmethod
    def from_database(cls, db_path: str | Path) -> SqlSchema:
        """The schema of a SQLite file, read from the file itself as the official evaluation does.

        Unlike there, it has views and generated columns, and letters beyond ASCII keep their case. The same
        object is returned while the file is unchanged. A table whose module is not there is left out, and so
        is a view that cannot be read. Raises MissingDatabase if there is no such file, UserError if it is no
        database.
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
