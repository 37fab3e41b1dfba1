"""Database schemas: from tables.json and the SQLite file, and as the text that the agent reads.

Names are compared and quoted as SQLite does it (`folded`, `written`).
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase

from mtsql.data.sandbox import Reader
from mtsql.data.sql_worker import quoted
from mtsql.errors import UserError, loading
from mtsql.files import file_errors, load_json

RESERVED = frozenset(
    """add all alter and as autoincrement between case cast check collate commit constraint create
    current_date current_time current_timestamp default deferrable delete distinct drop else escape
    except exists foreign from group having in index insert intersect into is isnull join limit not
    nothing notnull null on or order primary raise references returning select set table then to
    transaction union unique update using values when where""".split()
)
OF_A_DESCRIPTION = ("original_column_name", "column_name", "column_description", "value_description")
LOWER = str.maketrans(ascii_uppercase, ascii_lowercase)
BARE = re.compile(r"[^\W\d][\w$]*|_[\w$]*")


def folded(name: str) -> str:
    """The name as SQLite compares it: in lower case as far as its letters are ASCII."""
    return name.translate(LOWER)


def written(name: str) -> str:
    """The name as a query has to write it: in quotes only where SQLite needs them."""
    return name if BARE.fullmatch(name) and name.lower() not in RESERVED else quoted(name)


@dataclass(frozen=True)
class SchemaTable:
    """A table: columns as (name, type), primary key columns, foreign keys, one example row.

    `descriptions` says what each column means, "" where its dataset does not; () where no column has one.
    """

    name: str
    columns: tuple[tuple[str, str], ...]
    primary_keys: tuple[str, ...]
    foreign_keys: tuple[tuple[str, str, str], ...]  # (column, other table, other column)
    example_row: tuple | None
    descriptions: tuple[str, ...] = ()


@dataclass(frozen=True)
class Schema:
    """A database as the agent knows it. `entry` is its object in tables.json."""

    db_id: str
    path: Path
    tables: tuple[SchemaTable, ...]
    entry: dict

    def text(self, compact: bool) -> str:
        """The schema as text: MTSQL-R1, appendix D, or one line a table (`compact`).

        Names are in quotes where SQLite needs them. Cells stay on one line and are cut to 40 characters, so
        that one long text does not fill the prompt. A described column ends in a comment, in the first form
        only.
        """
        return "\n".join(_compact(t) if compact else _create_table(t) for t in self.tables)


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 3] + "..."


def one_line(text: str) -> str:
    """The text with a space for each line break, tab and the like."""
    return re.sub(r"\s", " ", text)


def _cell(value: object) -> str:
    return one_line(_cut("None" if value is None else str(value), 40))


def _create_table(table: SchemaTable) -> str:
    lines = [f"    {written(name)} {kind}" for name, kind in table.columns]
    if table.primary_keys:
        lines.append(f"    primary key ({', '.join(map(written, table.primary_keys))})")
    for column, other, key in table.foreign_keys:
        lines.append(f"    foreign key ({written(column)}) references {written(other)}({written(key)})")
    lines = [line + "," for line in lines[:-1]] + lines[-1:]
    for index, description in enumerate(table.descriptions):
        lines[index] += f" -- {description}" if description else ""
    text = f"create table {written(table.name)} (\n" + "\n".join(lines) + "\n)"
    if table.example_row is not None:
        header = "\t".join(written(name) for name, _ in table.columns)
        row = "\t".join(_cell(value) for value in table.example_row)
        text += f"\n/*\n1 example rows from table {written(table.name)}:\n{header}\n{row}\n*/"
    return text


def _compact(table: SchemaTable) -> str:
    links = {column: f"={written(other)}.{written(key)}" for column, other, key in table.foreign_keys}
    row = table.example_row or ("",) * len(table.columns)
    cells = [
        written(name) + (links[name] if name in links else f":{'' if value is None else _cell(value)}")
        for (name, _), value in zip(table.columns, row, strict=True)
    ]
    return f"{written(table.name)}(" + ", ".join(cells) + ")"


def load_schemas(tables_file: Path, databases: Path) -> dict[str, Schema]:
    """Every database of tables.json whose SQLite file exists, by db_id.

    Raises UserError if tables.json is missing or broken, or no database is found at all.
    """
    schemas = {}
    for number, entry in enumerate(read_json(tables_file)):
        with loading(f"{tables_file}, item {number}: expected a database with Spider's fields"):
            path = databases / entry["db_id"] / f"{entry['db_id']}.sqlite"
            if path.is_file():
                schemas[entry["db_id"]] = _schema(entry, path)
    if not schemas:
        raise UserError(f"{databases} holds no <db_id>/<db_id>.sqlite of a database named in {tables_file}")
    return schemas


def read_json(path: Path) -> list:
    """The list in a JSON file; UserError names the file if it is missing, broken or no list."""
    content = load_json(path)
    if not isinstance(content, list):
        raise UserError(f"{path} should hold a list, not {type(content).__name__}")
    return content


def _descriptions(entry: dict, path: Path) -> dict[tuple[str, str], str]:
    """What columns mean, in at most 100 characters, by table and column in lower case.

    From database_description/<table>.csv beside a BIRD database (its meaning, then its values), or from the
    column_names of SynSQL's tables.json, which are the comments of its `ddls`; elsewhere they are only names.
    """
    found = {}
    if "ddls" in entry:
        tables = dict(enumerate(entry["table_names_original"]))
        for index, (table, column) in enumerate(entry["column_names_original"]):
            found[folded(tables.get(table, "")), folded(column)] = entry["column_names"][index][1]
    for file in sorted((path.parent / "database_description").glob("[!.]*.csv")):
        # Released as UTF-8 with a byte order mark, but some files hold other bytes, which are left out.
        with loading(f"{file} is not valid CSV"), file_errors(file):
            lines = io.StringIO(file.read_text("utf-8-sig", errors="ignore"), newline="")
            for row in csv.DictReader(lines, restval=""):
                column, name, meaning, values = (row.get(key, "").strip() for key in OF_A_DESCRIPTION)
                found[folded(file.stem), folded(column)] = "; ".join(filter(None, (meaning or name, values)))
    texts = {key: " ".join(text.split()) for key, text in found.items()}
    return {key: _cut(text, 100) for key, text in texts.items() if _letters(text) != _letters(key[1])}


def _letters(text: str) -> str:
    """What is left to compare, so that "First name" only repeats the column first_name."""
    return text.lower().replace(" ", "").replace("_", "")


def example_row(reader: Reader, wanted: str, table: str) -> tuple | None:
    """The first row; None if there is none, or it takes too long or fails, as that of a broken view does."""
    return next(iter(reader.rows(f"select {wanted} from {quoted(table)} limit 1", needed=False)), None)


def _schema(entry: dict, path: Path) -> Schema:
    columns = entry["column_names_original"]
    names = entry["table_names_original"]
    primary = [k for key in entry["primary_keys"] for k in (key if isinstance(key, list) else [key])]
    descriptions = _descriptions(entry, path)
    tables = []
    reader = Reader(path)
    for index, name in enumerate(names):
        own = [(i, c) for i, (t, c) in enumerate(columns) if t == index]
        wanted = ", ".join(f"{quoted(name)}.{quoted(c)}" for _, c in own)  # "c" alone may be read as a text
        row = example_row(reader, wanted, name)  # None for a column that the file lacks
        kinds = tuple((c, entry["column_types"][i]) for i, c in own)
        keys = tuple(c for i, c in own if i in primary)
        pairs = [(columns[a], columns[b]) for a, b in entry["foreign_keys"] if columns[a][0] == index]
        foreign = tuple((column, names[other], key) for (_, column), (other, key) in pairs)
        meanings = tuple(descriptions.get((folded(name), folded(c)), "") for _, c in own)
        tables.append(SchemaTable(name, kinds, keys, foreign, row, meanings))
    return Schema(entry["db_id"], path, tuple(tables), entry)
