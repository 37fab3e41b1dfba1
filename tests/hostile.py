"""Statements that would hang, bloat or damage a careless executor: (kind, SQL, statuses that are right).

They run on the database that `make_database` writes. tests/test_hostile.py runs all of them, and
bench/hostile.py prints a table of what becomes of them.
"""

import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from mtsql.sql.execute import Executor

STOPPED = frozenset({"timeout"})
REFUSED = frozenset({"refused"})
ERROR = frozenset({"error"})
SAFE = frozenset({"rows", "empty"})
BOUNDED = frozenset({"rows", "empty", "error", "timeout"})  # any of these, within the limits
DENIED = REFUSED | ERROR


def make_database(path: Path) -> Path:
    """A database of 3 singers, 2,000 numbers, 500 texts, a view and a trigger."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(
            """
            CREATE TABLE singer (singer_id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INTEGER);
            INSERT INTO singer VALUES (1, 'Ann', 'France', 30), (2, 'Bob', 'France', 25), (3, 'Cy', NULL, 30);
            CREATE TABLE number (n INTEGER);
            INSERT INTO number WITH r(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM r) SELECT n FROM r LIMIT 2000;
            CREATE TABLE words (w TEXT);
            INSERT INTO words SELECT replace(hex(zeroblob(n % 50)), '00', 'ab') FROM number LIMIT 500;
            CREATE VIEW pairs AS SELECT a.n AS x, b.n AS y FROM number a, number b;
            CREATE TRIGGER guard AFTER DELETE ON singer BEGIN DELETE FROM number; END;
            """
        )
    return path


ENDLESS = "WITH RECURSIVE r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT {} FROM r"
LONG = "replace(hex(zeroblob(70000)), '00', 'a')"
NEAR = "replace(hex(zeroblob(6200)), '00', 'bb') || 'a'"  # characters, the last of which LONG has
THOUSANDS = "number a, number b, number c, number d"


def _chain(depth: int, body: str) -> str:
    """CTEs that each name the one before twice, so that expanding them doubles at every step."""
    steps = ", ".join(f"c{i} AS ({body.format(p=f'c{i - 1}')})" for i in range(1, depth))
    return f"WITH c0 AS (SELECT 1 AS x), {steps} SELECT count(*) FROM c{depth - 1}"


SLOW = (  # of a long text s and a text q that is nearly in it
    "instr(s, q)", "length(replace(s, q, ''))", f"s GLOB '{'*a' * 99}b'", f"s LIKE '{'%a' * 99}b'",
    f"length(trim(s, {NEAR}))", f"length(ltrim(s, {NEAR}))",
)  # fmt: skip
PLACES = (  # SQLite puts the expression in the place of each a, and nothing interrupts it there
    "SELECT {all} FROM {f}", "SELECT {levels} FROM {f}", "SELECT 1 FROM {f} WHERE {any}", "SELECT 1 FROM {f} ORDER BY {all}",
    "SELECT count(*) FROM {f} GROUP BY {all}", "SELECT coalesce({nulls}) FROM {f}",
)  # fmt: skip


def copied(slow: str, place: str) -> str:
    """A statement that holds one slow call, and makes it hundreds of times in one row."""
    text = f"SELECT substr({LONG}, 1, 60000) || n s, substr({LONG}, 1, 30000) || 'b' q FROM number LIMIT 3"
    terms = [f"a + {i}" for i in range(900)]
    levels = f"WITH t AS MATERIALIZED ({text}), c AS (SELECT {slow} AS a FROM t)"
    if "{levels}" in place:
        levels += "".join(f", {n} AS (SELECT {'+'.join('a' * 8)} a FROM {o})" for o, n in ("cd", "de", "ef"))
    written = place.format(
        all=", ".join(terms), levels="+".join("a" * 8), f="f" if "{levels}" in place else "c",
        any=" < 0 OR ".join(terms[:400]) + " < 0", nulls=", ".join(f"nullif(a, a + {i} - {i})" for i in range(45)),
    )  # fmt: skip
    return f"{levels} {written}"


def wide_results() -> list[str]:
    """Rows and names of columns that are larger than a result may be."""
    long, many = "x" * 10_000, ", ".join(["*"] * 1_990)
    cells = (f"substr({LONG}, 1, 69999)", f"char(128512) || substr({LONG}, 1, 69000)", "zeroblob(70000)")
    tables = [f"t AS (SELECT 1 AS {long})", f"t(é{long}) AS (VALUES (1))"]
    tables += [f"t AS MATERIALIZED (SELECT {cell} AS c)" for cell in cells]
    return [f"WITH {table} SELECT {many} FROM t" for table in tables]


def _statements() -> list[tuple[str, str, frozenset[str]]]:
    found: list[tuple[str, str, frozenset[str]]] = []

    def add(kind: str, right: frozenset[str], *statements: str, form: str = "{}") -> None:
        found.extend((kind, form.replace("{}", sql), right) for sql in statements)

    add("unbounded recursion", STOPPED, *(ENDLESS.format(what) for what in (
        "count(*)", "max(x)", "group_concat(x) IS NULL AND count(*)", "count(DISTINCT x)",
    )))  # fmt: skip
    add(
        "unbounded recursion", BOUNDED,
        ENDLESS.format("x"), ENDLESS.format("x") + " ORDER BY x DESC", ENDLESS.format("DISTINCT x % 7"),
        ENDLESS.format("x") + " LIMIT 5 OFFSET 1000000000", ENDLESS.format("x || x") + " GROUP BY x % 100003",
        "WITH RECURSIVE r(x) AS (SELECT 'a' UNION ALL SELECT x || x FROM r) SELECT max(length(x)) FROM r",
        "WITH RECURSIVE r(x) AS (SELECT 1 UNION SELECT x + 1 FROM r) SELECT count(*) FROM r",
        "WITH RECURSIVE r(x) AS (SELECT zeroblob(1000) UNION ALL SELECT x FROM r) SELECT x FROM r ORDER BY 1",
    )  # fmt: skip
    add(
        "cross join", STOPPED,
        f"SELECT count(*) FROM {THOUSANDS}", f"SELECT a.n FROM {THOUSANDS} WHERE a.n < 0 OR d.n < 0",
        f"SELECT a.n FROM {THOUSANDS} ORDER BY a.n * b.n + c.n",
        f"SELECT a.n, count(*) FROM {THOUSANDS} GROUP BY a.n + b.n",
        "SELECT count(*) FROM number a LEFT JOIN number b ON a.n <> b.n LEFT JOIN number c ON b.n <> c.n",
        "SELECT count(*) FROM number WHERE EXISTS (SELECT 1 FROM pairs, number c WHERE x + y + c.n < 0)",
        "SELECT (SELECT count(*) FROM pairs p, number q) FROM number",
        "SELECT count(*) FROM (SELECT x, y FROM pairs EXCEPT SELECT y, x FROM pairs), number",
    )  # fmt: skip
    add("cross join", BOUNDED, f"SELECT * FROM {THOUSANDS}", "SELECT x, y FROM pairs ORDER BY y, x DESC")
    add(
        "cross join of sixty tables", BOUNDED, ", ".join(f"number t{i}" for i in range(60)),
        ", ".join(f"number t{i}" for i in range(70)), " NATURAL JOIN ".join(f"singer t{i}" for i in range(60)),
        " JOIN ".join(f"number t{i}" for i in range(40))
        + " WHERE " + " AND ".join(f"t{i}.n = t{j}.n" for i in range(40) for j in range(i)),
        form="SELECT count(*) FROM {}",
    )  # fmt: skip
    add(
        "windows over everything", BOUNDED, "sum(x) OVER (ORDER BY y)", "group_concat(x) OVER (ORDER BY y)",
        "max(x) OVER (ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING)",
        "sum(x) OVER (ORDER BY y RANGE BETWEEN 1000 PRECEDING AND 1000 FOLLOWING)", form="SELECT {} FROM pairs",
    )  # fmt: skip
    add(
        "cell bomb", ERROR, "zeroblob(1000000000)", "hex(zeroblob(100000000))", f"{LONG} || {LONG} || {LONG}",
        "replace(hex(zeroblob(60000)), '0', hex(zeroblob(60000)))", "CAST(zeroblob(150001) AS TEXT)",
        "printf('%s%s', zeroblob(9), hex(zeroblob(90000)))", f"json_array({LONG}, {LONG}, {LONG})", form="SELECT {}",
    )  # fmt: skip
    add(
        "cell bomb", BOUNDED, "format('%' || '1000000000' || 'd', 1)", "printf('%.*c', 1000000000, 'x')",
        "group_concat(w, hex(zeroblob(10000))) FROM words", "json_group_object(w, w) FROM words, number",
        f"{LONG} FROM pairs", "zeroblob(140000) FROM pairs ORDER BY x + y", "DISTINCT randomblob(100000) FROM pairs",
        f"count(DISTINCT {LONG} || x || y) FROM pairs", f"{LONG} || n FROM number UNION SELECT {LONG} || x FROM pairs",
        "randomblob(1000), randomblob(1000), randomblob(1000) FROM pairs GROUP BY 1, 2, 3", form="SELECT {}",
    )  # fmt: skip
    add(
        "slow built-in function", BOUNDED, f"replace({LONG}, substr({LONG}, 1, 35000) || 'b', 'x')",
        f"trim({LONG}, substr({LONG}, 1, 60000))", f"length(rtrim({LONG}, {NEAR}))",
        f"sum(instr({LONG}, substr({LONG}, 1, 35000) || x || 'b')) FROM pairs",
        f"sum(length(replace({LONG}, substr({LONG}, 1, 30000) || x || 'b', 'y'))) FROM pairs",
        f"json_valid(replace({LONG}, 'a', '['))", "count(*) FROM pairs, json_each('[1,2,3]')",
        " + ".join(f"instr({LONG} || {i}, substr({LONG}, 1, 35000) || 'b')" for i in range(2)),
        ", ".join([f"instr({LONG}, 'b')"] * 51), ", ".join(["length('a')"] * 1_000), form="SELECT {}",
    )  # fmt: skip
    add("copied expression", STOPPED, *map(copied, SLOW, PLACES))
    add("wide result", ERROR | STOPPED, *wide_results())
    likes = ("%a" * 100, "%_" * 110 + "b", "%" * 240, "%a" * 20_000)
    globs = ("*a" * 100, "*[!b]" * 48, "*?" * 110, "*" + "a" * 240, "*a" * 20_000)
    add("exploding pattern", BOUNDED, *(f"SELECT {LONG} || n LIKE '{p}b' FROM number" for p in likes))
    add("exploding pattern", BOUNDED, *(f"SELECT {LONG} GLOB '{p}b'" for p in globs))
    add("exploding pattern", ERROR, "SELECT 'a' REGEXP '(a+)+$'")
    add("doubling CTEs", BOUNDED, *(_chain(40, body) for body in (
        "SELECT 1 AS x FROM {p} p, {p} q", "SELECT (SELECT x FROM {p}) + (SELECT x FROM {p}) AS x",
        "SELECT x FROM {p} UNION ALL SELECT x FROM {p}", "SELECT 1 AS x WHERE 1 IN (SELECT x FROM {p}) OR 2 IN {p}",
    )))  # fmt: skip
    add(
        "deep nesting", BOUNDED, "(" * 900 + "1" + ")" * 900, "(" * 49_000 + "1" + ")" * 49_000, "-" * 50_000 + "1",
        "abs(" * 5_000 + "1" + ")" * 5_000, "1" + " + 1" * 20_000, "CASE WHEN 1 THEN " * 3_000 + "1" + " END" * 3_000,
        "* FROM " + "(SELECT * FROM " * 500 + "singer" + ")" * 500, "1" + " UNION ALL SELECT 1" * 4_000,
        "1" + " UNION SELECT n FROM number" * 450, "1 IN (" + ", ".join(["1"] * 30_000) + ")",
        ", ".join(["1"] * 3_000), "json('" + "[" * 40_000 + "]" * 40_000 + "')", form="SELECT {}",
    )  # fmt: skip
    add(
        "long statement", ERROR, "SELECT '" + "x" * 1_000_000 + "'", "SELECT 1 " + " " * 1_000_000,
        "SELECT 1" + " + 1" * 250_000, "/*" + "*" * 1_000_000, "(" * 1_000_000,
    )  # fmt: skip
    add(
        "not a statement", ERROR,
        "", ";", " ; ; ", "-- nothing", "/* nothing", "/* a /* b */ c */", "SELECT '\0'", "\0", "SELECT '\ud800'",
        "SELECT 1\0; DROP TABLE singer", "SELECT 'open", 'SELECT "open', "SELECT [open", "SELEC 1", "ünïcödé", "SELECT ?",
        "SELECT :name", "SELECT * FROM nowhere", "SELECT abs(-9223372036854775808)", "SELECT unknown(1)",
    )  # fmt: skip
    add(
        "harmless though odd", SAFE,
        "SELECT 1 -- comment", "/* comment */ SELECT 1", "SELECT 1;", "SELECT 'a;b'", "SELECT ';' -- ;", "SELECT 1 / 0",
        "SELECT CAST(x'FF41' AS TEXT)", "SELECT x'00ff'", "SELECT 9223372036854775807 + 1", "SELECT -1e999 - 1e999",
        "\ufeff\ufeff SELECT 1", "SELECT * FROM sqlite_master", "EXPLAIN SELECT 1", "VALUES (1), (2)",
        "SELECT * FROM pragma_table_info('singer')", "PRAGMA table_info(singer)", "PRAGMA foreign_key_list(singer)",
    )  # fmt: skip
    add("stacked statements", REFUSED, *(f"SELECT 1; {more}" for more in (
        "DROP TABLE singer", "SELECT 2", "DELETE FROM singer; SELECT 3", "ATTACH 'x' AS y", "PRAGMA query_only = 0",
    )))  # fmt: skip
    add("write", REFUSED, *(
        "INSERT INTO singer VALUES (9, 'x', 'y', 1)", "INSERT OR REPLACE INTO singer SELECT * FROM singer",
        "INSERT INTO number SELECT n FROM number RETURNING n", "INSERT INTO number VALUES (1) ON CONFLICT DO NOTHING",
        "REPLACE INTO singer VALUES (1, 'x', 'y', 1)", "UPDATE singer SET age = 1", "DELETE FROM singer RETURNING *",
        "WITH r AS (SELECT 1) DELETE FROM singer", "WITH r AS (SELECT 1) INSERT INTO number SELECT * FROM r",
    ))  # fmt: skip
    add("write", DENIED, "UPDATE sqlite_master SET sql = ''", "INSERT INTO pairs VALUES (1, 2)")
    add("change of schema", REFUSED, *(
        "DROP TABLE singer", "DROP VIEW pairs", "DROP TRIGGER guard", "ALTER TABLE singer RENAME TO x",
        "ALTER TABLE singer DROP COLUMN age", "CREATE TABLE x AS SELECT * FROM singer", "CREATE INDEX i ON singer (age)",
        "CREATE VIEW v AS SELECT 1", "CREATE TRIGGER t AFTER INSERT ON number BEGIN SELECT 1; END", "ANALYZE",
        "VACUUM", "VACUUM INTO 'copy.sqlite'", "VACUUM main INTO '../mtsql-copy.sqlite'",
    ))  # fmt: skip
    add("change of schema", DENIED, "REINDEX", "REINDEX singer")
    add("temporary table", REFUSED, *(
        "CREATE TEMP TABLE x (a)", "CREATE TEMPORARY TABLE x AS SELECT * FROM pairs", "CREATE TABLE temp.x (a)",
        "CREATE TEMP VIEW v AS SELECT 1", "CREATE TEMP TRIGGER t AFTER INSERT ON number BEGIN SELECT 1; END",
    ))  # fmt: skip
    add("virtual table", DENIED, *(f"CREATE VIRTUAL TABLE x USING {module}" for module in (
        "fts5(a)", "rtree(id, a, b)", "dbstat", "csv(filename='/etc/passwd')",
    )))  # fmt: skip
    tables = ("dbstat", "sqlite_dbpage", "sqlite_dbdata", "fsdir('/')", "sqlite_stmt", "completion('x')")
    add("virtual table", DENIED, *(f"SELECT * FROM {table}" for table in tables))
    add("other file", REFUSED, *(
        "ATTACH 'other.sqlite' AS other", "ATTACH DATABASE ':memory:' AS m", "ATTACH 'file:x?mode=rwc' AS y", "DETACH main",
    ))  # fmt: skip
    add("file function", DENIED, *(f"SELECT {what}" for what in (
        "load_extension('x')", "sqlite_log(1, 'x')", "readfile('/etc/passwd')", "writefile('x', 'y')", "edit('x')",
        "fts3_tokenizer('simple', x'00')", "system('true')", "eval('DROP TABLE singer')",
    )))  # fmt: skip
    add("pragma", REFUSED, *(f"PRAGMA {what}" for what in (
        "writable_schema = 1", "query_only = 0", "journal_mode = WAL", "journal_mode", "synchronous = 0", "user_version = 7",
        "temp_store_directory = '/tmp'", "wal_checkpoint", "cache_size = 100000000", "mmap_size = 100000000000",
        "integrity_check", "optimize", "hard_heap_limit = 1", "threads = 64", "busy_timeout = 100000", "trusted_schema = 1",
        "locking_mode = EXCLUSIVE", "foreign_keys = ON", "database_list", "case_sensitive_like = 1",
    )))  # fmt: skip
    add("transaction", REFUSED, *"BEGIN,BEGIN EXCLUSIVE,COMMIT,ROLLBACK,SAVEPOINT s,END".split(","))
    return found


STATEMENTS = _statements()
DYING = 200_000_000  # bytes, of which a process that was just killed may hold some for a moment


@dataclass(frozen=True)
class Outcome:
    """What came of one statement: wall time, and `resident`, the memory after it in bytes."""

    kind: str
    sql: str
    right: frozenset[str]
    status: str
    message: str
    seconds: float
    resident: int


def resident_bytes() -> int:
    """The memory of this process and its children that is in use (Linux)."""
    pages, own = 0, str(os.getpid())
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if own in (folder.name, parent):
                pages += int((folder / "statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_all(
    executor: Executor, database: Path, statements: Sequence[tuple[str, str, frozenset[str]]] = STATEMENTS
) -> list[Outcome]:
    """Every statement once, one after the other."""
    outcomes = []
    for kind, sql, right in statements:
        start = time.monotonic()
        result = executor.execute(database, sql)
        seconds, resident = time.monotonic() - start, resident_bytes()
        if resident > DYING:
            time.sleep(0.2)
            resident = min(resident, resident_bytes())
        outcomes.append(Outcome(kind, sql, right, result.status, result.message, seconds, resident))
    return outcomes
