"""Schemas read from any SQLite file: what is found, what is refused, what is left out of a long prompt."""

import json
import sqlite3
import time
from contextlib import closing, nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from conftest import SAMPLE, make_database

from mtsql.data.sandbox import read_only_uri
from mtsql.data.schema import RESERVED, Schema, load_schemas, written
from mtsql.errors import UserError
from mtsql.extras.chat.conversation import read_schema, relevant_part
from mtsql.sql.execute import Executor
from mtsql.sql.grammar import SqlSchema, parse_sql
from mtsql.sql.match import exact_set_match
from mtsql.sql.text import same_query


def by_tables_json(path: Path, names: list[str], columns: list[list]) -> Schema:
    """The schema of a database (moved to where it belongs) by a tables.json that knows these columns."""
    entry = {"db_id": path.stem, "table_names_original": names, "column_names_original": columns}
    entry |= {"column_types": ["text"] * len(columns), "primary_keys": [], "foreign_keys": []}
    (path.parent / "tables.json").write_text(json.dumps([entry]))
    (path.parent / path.stem).mkdir()
    path.rename(path.parent / path.stem / f"{path.stem}.sqlite")
    return load_schemas(path.parent / "tables.json", path.parent)[path.stem]


def test_thousands_of_tables_are_read_in_time(tmp_path):
    tables = "".join(f"CREATE TABLE t{number} (a, b);" for number in range(1_500))
    path = make_database(tmp_path / "large.sqlite", tables)
    assert len(read_schema(path).tables) == len(SqlSchema.from_database(path).tables) == 1_500
    with closing(sqlite3.connect(path)) as writer:  # which no reader holds up
        for mode in ("wal", "delete"):
            assert writer.execute(f"PRAGMA journal_mode = {mode}").fetchone() == (mode,)
            assert Executor().execute(path, "SELECT a FROM t0").ok


def test_tables_keys_views_and_example_rows_are_found(tmp_path):
    script = """create table "order items" (id integer primary key, "Unit Price" numeric(8, 2), day date,
            customer int references customer, foreign key (customer) references missing(absent),
            foreign key (day, id) references customer);
        create table customer (code int, name varchar(20), photo blob, total as (code * 2),
            primary key (name, code));
        create view rich as select name from customer where code > 5;
        create view broken as select a from nowhere;
        create virtual table notes using fts5(body);
        insert into customer (code, name) values (7, 'Anna'), (8, 'Bruno');
        insert into notes values ('hello');"""
    tables = read_schema(make_database(tmp_path / "shop.sqlite", script)).tables
    assert [table.name for table in tables] == ["order items", "customer", "notes", "rich"]
    items, customer, notes, rich = tables
    kinds = {"id": "number", "Unit Price": "number", "day": "time", "customer": "number"}
    assert dict(items.columns) == kinds
    assert items.primary_keys == ("id",) and items.example_row is None
    assert set(items.foreign_keys) == {
        ("customer", "customer", "name"), ("customer", "missing", "absent"),
        ("day", "customer", "name"), ("id", "customer", "code"),
    }  # fmt: skip
    assert customer.columns[3][0] == "total"
    assert customer.primary_keys == ("name", "code") and customer.example_row == (7, "Anna", None, 14)
    assert (notes.example_row, rich.example_row) == (("hello",), ("Anna",))


ENDLESS = "with recursive r(x) as (select 1 union all select x + 1 from r) select count(*) as c from r"
DOUBLING = "create view v0 as select 1 as x;" + "".join(
    f"create view v{i} as select p.x from v{i - 1} p, v{i - 1} q;" for i in range(1, 25)
)


@pytest.mark.parametrize(
    "script",
    [
        f"create view json_each as {ENDLESS}; create view pragma_table_list as {ENDLESS};"
        f"create view pragma_table_info as {ENDLESS}; create view pragma_table_xinfo as {ENDLESS};",
        "".join(f"create view w{i} as {ENDLESS};" for i in range(100)),
        DOUBLING + "create view json_tree as select * from v24;"
        "create view pragma_index_list as select * from v24;",
        "".join(f"create table g{i} (b, c as (instr(hex(b), hex(b) || '1'))); insert into g{i} values "
                "(zeroblob(60000));" for i in range(9))
        + "create view v as select instr(hex(zeroblob(3000000)), hex(zeroblob(1500000)) || '1') as b;",
    ],
)  # fmt: skip
def test_a_hostile_schema_is_read_within_its_time(tmp_path, monkeypatch, script):
    monkeypatch.setattr("mtsql.data.sandbox.SCHEMA_SECONDS", 1.0)
    monkeypatch.setattr("mtsql.data.sandbox.EXAMPLE_SECONDS", 0.3)
    path = make_database(tmp_path / "h.db", f"create table t (a); insert into t values (3); {script}")
    start = time.monotonic()
    table = read_schema(path).tables[0]
    assert (table.name, table.columns, table.example_row) == ("t", (("a", "text"),), (3,))
    assert SqlSchema.from_database(path).tables["t"] == ("a",)
    assert Executor(timeout_seconds=0.5).execute(path, "select a from t").rows == ((3,),)
    assert by_tables_json(path, ["t", "w0"], [[-1, "*"], [0, "a"], [1, "c"]]).tables[0].example_row == (3,)
    assert time.monotonic() - start < 4


def test_letters_beyond_ascii_tell_names_apart_and_views_and_generated_columns_are_seen(tmp_path):
    script = """create view Old as select "Ä" as Age from Ämter; create view broken as select a from nowhere;
        create table Ämter ("Ä" integer primary key, "ä" int, Twice as (ä * 2), Half as (ä / 2) stored);
        create table ämter (ID int);"""
    columns = {"Ämter": ("Ä", "ä", "twice", "half"), "ämter": ("id",), "old": ("age",)}
    schema = SqlSchema.from_database(make_database(tmp_path / "n.sqlite", script))
    assert list(schema.tables.items()) == list(columns.items())
    count = "SELECT count(*) FROM "
    for keep_limit in (False, True):
        read = parse_sql("SELECT Ä , TWICE FROM ÄMTER", schema, keep_limit)
        assert [unit[1][1] for _, unit in read["select"][1]] == ["__Ämter.Ä__", "__Ämter.twice__"]
        view = parse_sql("SELECT Age FROM OLD", schema, keep_limit)["from"]
        assert view["table_units"] == [("table_unit", "__old__")]
        assert not exact_set_match(count + "Ämter", count + "ämter", schema, {}, keep_limit)
    assert same_query("SELECT Ä FROM ÄMTER", "select Ä from Ämter")
    assert not same_query("SELECT Ä FROM Ämter", "SELECT ä FROM Ämter")


def test_names_are_shown_as_sql_has_to_write_them_and_cells_on_one_line(tmp_path):
    """From the file and from tables.json; what the prompt shows runs."""
    other = {"Ämter": ("id",), "ämter": ("no",)}
    tables = {'sold "items"': ('a "b"', "unit price", "order", "größe", "key")} | other
    quoted = {'"sold ""items"""': ('"a ""b"""', '"unit price"', '"order"', "größe", "key")} | other
    script = ""
    for name, columns in quoted.items():
        values = ", ".join(["'one' || char(10) || 'two' || char(9, 8232) || 'three'"] * len(columns))
        script += f"create table {name} ({', '.join(columns)}); insert into {name} values ({values});"
    path, moved = make_database(tmp_path / "shop.sqlite", script), tmp_path / "shop" / "shop.sqlite"
    places = [[table, name] for table, names in enumerate(tables.values()) for name in names]
    for schema in (read_schema(path), by_tables_json(path, list(tables), places)):
        assert all(table.example_row is not None for table in schema.tables)
        lines = schema.text(compact=True).split("\n")
        for line, (name, columns) in zip(lines, quoted.items(), strict=True):
            assert line == f"{name}({', '.join(f'{column}:one two  three' for column in columns)})"
            assert Executor().execute(moved, f"SELECT {', '.join(columns)} FROM {name}").ok
        full = schema.text(compact=False)
        assert 'create table "sold ""items""" (\n    "a ""b"""' in full and "\none two  three\n*/" in full


@pytest.mark.parametrize("word", [*sorted(RESERVED), "key", "match", "offset", "row", "with"])
def test_a_keyword_is_in_quotes_where_sqlite_needs_them(word):
    with sqlite3.connect(":memory:") as connection:
        connection.execute(f'create table "{word}" ("{word}", other)')
        connection.execute(f'insert into "{word}" values (77, 0)')
        for name, runs in ((written(word), True), (word, word not in RESERVED)):
            sql = f"select {name} from {name} where {name} > 0 and {name}.{name} = 77 order by {name}"
            with nullcontext() if runs else pytest.raises(sqlite3.OperationalError):
                assert connection.execute(sql).fetchall() == [(77,)]


def test_a_column_that_the_file_lacks_is_no_text_in_the_example_row(tmp_path):
    path = make_database(tmp_path / "music.sqlite", "create table singer (id); insert into singer values (1)")
    (singer,) = by_tables_json(path, ["singer"], [[-1, "*"], [0, "id"], [0, "nope"]]).tables
    assert singer.example_row is None


def test_a_file_of_the_benchmark_gives_what_its_tables_json_says():
    for db_id, known in load_schemas(SAMPLE / "tables.json", SAMPLE / "database").items():
        read = {table.name.lower(): table for table in read_schema(known.path).tables}
        for table in known.tables:
            own = read[table.name.lower()]
            assert [c.lower() for c, _ in own.columns] == [c.lower() for c, _ in table.columns], db_id
            assert own.example_row == table.example_row, db_id


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "is not a file"),
        (b"", "has no table"),
        (b"x" * 4096, "encrypted or damaged"),
        (b"SQLite format 3\0" + b"\xff" * 4096, "encrypted or damaged"),
    ],
)
def test_what_is_no_usable_database_is_one_sentence(tmp_path, content, problem):
    path = tmp_path / "some.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=problem):
        read_schema(path)


def test_a_column_name_that_is_not_utf8_hides_the_example_alone(tmp_path):
    path = make_database(tmp_path / "prices.db", "create table prix (id int, montantX int, nom text);")
    path.write_bytes(path.read_bytes().replace(b"montantX", b"montant\xe9"))  # as another program wrote it
    make_database(path, "insert into prix (id, nom) values (1, 'pain');")
    (table,) = read_schema(path).tables
    assert table.columns == (("id", "number"), ("montant", "number"), ("nom", "text"))
    assert table.example_row is None
    assert Executor().execute(path, "select nom from prix").rows == (("pain",),)


def test_a_database_in_wal_mode_is_read_in_a_folder_that_is_not_ours(tmp_path, monkeypatch):
    path = make_database(tmp_path / "log.db", "create table t (a); insert into t values (3);")
    make_database(path, "pragma journal_mode = wal;")
    assert read_only_uri(path).endswith("log.db?mode=ro")
    monkeypatch.setattr("os.access", lambda *_: False)
    assert read_only_uri(path).endswith("&immutable=1")
    assert read_schema(path).tables[0].example_row == (3,)
    assert Executor().execute(path, "select a from t").rows == ((3,),)
    assert not list(tmp_path.glob("log.db-*"))
    with closing(sqlite3.connect(path)) as writer:
        link = tmp_path / "elsewhere" / "link.db"
        link.parent.mkdir()
        link.symlink_to(path)
        executor = Executor(timeout_seconds=1e10)  # more than a socket's clock holds
        for number, rows in ((4, 2), (5, 3)):
            writer.execute(f"insert into t values ({number})")
            writer.commit()  # into the file beside it
            for name in (path, link):
                assert executor.execute(name, "select count(*) from t").rows == ((rows,),)
                assert read_only_uri(name).endswith("log.db?mode=ro")


@pytest.mark.parametrize(
    ("question", "table"),
    [
        ("Welche Höhe ist es?", "Gebäude"),
        ("Which page is longest?", "HTMLPages"),
        ("How many civil servants?", "ÉtatCivil"),
    ],
)
def test_the_words_in_a_name_are_found_in_a_question(tmp_path, question, table):
    names = ("Länder (id)", "Gebäude (Höhe)", "Gäste (Größe)", "order_items (id)", "HTMLPages (id)")
    script = "".join(f"create table {name};" for name in (*names, "ÉtatCivil (id)"))
    schema = read_schema(make_database(tmp_path / "a.db", script))
    part = relevant_part(schema, [question], lambda p: len(p.tables) == 1)
    assert [t.name for t in part.tables] == [table]


def test_a_locked_database_is_one_sentence(tmp_path):
    path = make_database(tmp_path / "busy.db", "create table t (a);")
    with closing(sqlite3.connect(path, isolation_level=None)) as writer:
        writer.execute("begin exclusive")
        with pytest.raises(UserError, match="is another program writing"):
            read_schema(path)


def test_of_many_tables_those_are_kept_that_the_question_is_about(tmp_path):
    script = "".join(f"create table table_{n} (id int, thing_{n} text);" for n in range(150))
    script += "create table Employees (id integer primary key, branch int references offices(id));"
    script += "create table offices (id integer primary key, city text);"
    schema = read_schema(make_database(tmp_path / "huge.sqlite", f"begin; {script} commit;"))
    fits = MagicMock(side_effect=lambda part: len(part.text(compact=True)) < 400)
    part = relevant_part(schema, ["Hello?", "How many employees are there?"], fits)
    names = [table.name for table in part.tables]
    assert {"Employees", "offices"} <= set(names) and len(part.text(compact=True)) < 400
    assert names == [t.name for t in schema.tables if t.name in names]  # in the file's order
    assert fits.call_count < 15  # looked for by halves
    assert relevant_part(schema, ["x"], lambda _: True) is schema
    assert len(relevant_part(schema, ["offices?"], lambda _: False).tables) == 1
