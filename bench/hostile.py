"""A table of what the executor makes of hostile statements.

python bench/hostile.py [--seconds 0.5]

Those of tests/hostile.py, which every test run tries, and here:

- published: the forms of statements in SQLite's list of vulnerabilities, a common table expression in place of
  the tables that they create
- escape: statements that lead out of a sandbox
- reach: tables and table-valued functions that do, or that lead into the file's raw pages
- edges: every built-in function with the arguments that SQLite's own fuzzing likes
- copied: every slow function in every place to which SQLite copies an aliased expression
"""

import hashlib
import sys
import tempfile
from collections import Counter
from datetime import date
from itertools import product
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hostile import BOUNDED, DENIED, PLACES, SLOW, STATEMENTS, copied, make_database, resident_bytes, run_all

from mtsql.config import command_line
from mtsql.sql.execute import Executor

T = "(SELECT 1 AS a, 2 AS b UNION ALL SELECT NULL, 'x')"
EXTREMES = (
    "NULL", "-9223372036854775808", "9223372036854775807", "1e308", "-0.0", "''", "zeroblob(149000)", "x'00ff'",
    "'%1000000d'", "char(0, 65533)",
)  # fmt: skip
ONE = (
    "abs", "hex", "length", "lower", "ltrim", "quote", "round", "rtrim", "sign", "soundex", "trim", "typeof",
    "unicode", "upper", "char", "zeroblob", "randomblob", "likelihood", "json", "json_type", "json_valid", "date",
    "time", "julianday", "unixepoch", "sqrt", "exp", "ln", "ceil", "unhex", "octet_length", "sqlite_compileoption_get",
)  # fmt: skip
TWO = (
    "instr", "substr", "ltrim", "trim", "round", "glob", "like", "ifnull", "nullif", "max", "min", "printf",
    "json_extract", "json_remove", "json_patch", "json_array", "strftime", "pow", "mod", "atan2", "log", "concat_ws",
)  # fmt: skip
AGGREGATES = ("sum", "total", "avg", "max", "min", "count", "group_concat", "json_group_array", "string_agg")
FRAMES = (
    "ORDER BY a", "PARTITION BY a ORDER BY b DESC", "ORDER BY a ROWS 9223372036854775807 PRECEDING",
    "ORDER BY a ROWS BETWEEN -1 PRECEDING AND CURRENT ROW", "ORDER BY a RANGE BETWEEN 1e999 PRECEDING AND 1 FOLLOWING",
    "ORDER BY a GROUPS BETWEEN 1 FOLLOWING AND 0 FOLLOWING", "ROWS BETWEEN NULL PRECEDING AND 'x' FOLLOWING",
    "ORDER BY a ROWS UNBOUNDED PRECEDING EXCLUDE TIES", "ORDER BY (SELECT a FROM t)", "PARTITION BY sum(a)",
)  # fmt: skip

# What the fix of each needs is in SQLite since; the forms stay good tests of the limits around it.
PUBLISHED = (
    # CVE-2018-20346, 20505, 20506 (fts3 shadow tables), CVE-2019-8457 (rtree), CVE-2020-13630 to 13632 (fts3)
    "SELECT fts3_tokenizer('porter', x'4141414141414141')", "SELECT optimize(singer) FROM singer",
    "SELECT snippet(singer) FROM singer", "SELECT offsets(singer) FROM singer", "SELECT matchinfo(singer, 'x') FROM singer",
    "SELECT rtreenode(2, x'00'), rtreedepth(x'ff')", "SELECT rtreecheck('main', 'singer')", "SELECT bm25(singer) FROM singer",
    "SELECT highlight(singer, 0, 'a', 'b') FROM singer", "SELECT * FROM singer WHERE singer MATCH 'a'",
    # CVE-2019-5018, 19244, 19880, CVE-2020-11655, 13871 (windows)
    f"SELECT a, sum(b) OVER (ORDER BY a) FROM {T} GROUP BY a HAVING a IN (SELECT sum(b) OVER () FROM {T})",
    f"SELECT DISTINCT a FROM {T} ORDER BY sum(a) OVER (PARTITION BY b), rank() OVER (ORDER BY a)",
    f"SELECT (SELECT sum(a) OVER (ORDER BY b) FROM {T}) IN (SELECT max(b) OVER (ORDER BY sum(a) OVER ()) FROM {T})",
    "SELECT sum(DISTINCT a) OVER (ORDER BY a) FROM (SELECT 1 AS a)",
    "SELECT max(1, 2) OVER (), lead(1, -9223372036854775808) OVER (ORDER BY 1)",
    "SELECT ntile(0) OVER (), nth_value(1, 0) OVER ()", "SELECT ntile(-1) OVER () FROM number",
    "SELECT count(*) FILTER (WHERE n > (SELECT avg(n) OVER () FROM number)) OVER (ORDER BY n) FROM number",
    # CVE-2019-16168, 19242, 19923, 19926, CVE-2020-13435, 15358, 35525, 35527, CVE-2021-20227 (the planner)
    f"SELECT DISTINCT t.a FROM {T} t LEFT JOIN (SELECT a, b FROM {T} WHERE 0) u ON t.a = u.a WHERE coalesce(u.b, 1)",
    f"SELECT * FROM {T} t, {T} u WHERE t.a IN (SELECT b FROM {T} ORDER BY a, b LIMIT 1 OFFSET u.a)",
    f"SELECT (SELECT 0 FROM {T} ORDER BY a IN (SELECT b FROM {T} ORDER BY 1 DESC)) FROM {T} GROUP BY 1, 1",
    f"SELECT a FROM {T} INTERSECT SELECT b FROM {T} ORDER BY 1 COLLATE nocase, a COLLATE binary",
    f"SELECT count(*) FROM {T} WHERE (a, b) IN (SELECT b, a FROM {T} UNION SELECT NULL, NULL)",
    f"SELECT * FROM {T} t NATURAL LEFT JOIN {T} u NATURAL LEFT JOIN {T} v WHERE v.a IS NOT u.b OR t.a",
    f"SELECT * FROM {T} WHERE a = b OR (a, b) > (SELECT b, a FROM {T}) OR a BETWEEN b AND NULL",
    f"SELECT 1 FROM {T} WHERE a LIKE b ESCAPE a OR a GLOB NULL", "SELECT 1 FROM singer INDEXED BY nothing",
    f"SELECT max(a), b FROM {T} GROUP BY NULL HAVING (SELECT min(b) FROM {T} WHERE a = max(a))",
    "SELECT DISTINCT " + ", ".join(f"n + {i}" for i in range(1_900)) + " FROM number LIMIT 1",  # CVE-2025-7458
    "SELECT n FROM number ORDER BY " + ", ".join(f"n + {i}" for i in range(1_990)) + " LIMIT 1",
    # CVE-2025-6965: more aggregates than columns
    "SELECT " + ", ".join(f"sum(n + {i})" for i in range(45)) + " FROM number GROUP BY n % 3",
    "SELECT " + " + ".join(f"max(n, {i})" for i in range(45)) + " FROM number",
    # CVE-2020-13434, CVE-2022-35737 (printf), CVE-2025-3277, 29087 (concat_ws), 29088
    "SELECT printf('%.2147483647f', 1e300)", "SELECT printf('%*d', 2147483647, 1)", "SELECT printf('%-2147483648s', 'x')",
    "SELECT printf('%!.500f', 1e-300), printf('%,d', 9e18), printf('%q%Q%w', NULL, x'00', char(39))",
    "SELECT printf('%c%c', 0, ''), format('%n%p%z', 1, 2, 3)", "SELECT printf(zeroblob(140000), 1)",
    "SELECT concat_ws(hex(zeroblob(60000)), 1, 2, 3)", "SELECT concat_ws(zeroblob(140000), zeroblob(140000), 'x')",
    "SELECT concat(" + ", ".join(["hex(zeroblob(9000))"] * 20) + ")", "SELECT replace(zeroblob(149000), x'00', zeroblob(2))",
    # CVE-2024-0232 and the JSON parser
    """SELECT json_remove('{"a":[1,2,3]}', '$.a[0]', '$.a[#-1]', '$.b[9223372036854775807]')""",
    """SELECT json_set('[]', '$[4294967296]', 1), json_insert('{}', '$.' || hex(zeroblob(60000)), 1)""",
    "SELECT json('{\"\\ud800\": \"\\udc00\"}'), json('\"\\u0000\"'), json('1e99999'), json('+1'), json('{a:1}')",
    "SELECT json_patch('{\"a\":{\"a\":{}}}', json_object('a', json('{\"a\":null}')))", "SELECT jsonb(x'ffffffffffffffff')",
    "SELECT value FROM json_tree('[' || substr(replace(hex(zeroblob(30000)), '0', '1,'), 1, 119999) || ']')",
    "SELECT count(*) FROM json_each(replace(hex(zeroblob(500)), '0', '['))", "SELECT '{\"a\":1}' -> '$.a' ->> '$' -> NULL",
    # CVE-2020-9327, CVE-2019-19603, 19317 (generated columns, reserved names), CVE-2020-11656, 19645 (ALTER)
    "CREATE TABLE x (a AS (b), b AS (a))", "CREATE TABLE sqlite_x (a)", "ALTER TABLE sqlite_master RENAME TO x",
)  # fmt: skip
ESCAPES = (  # another file, code, the schema, the journal
    "ATTACH 'file:/proc/self/environ?mode=ro' AS e", "ATTACH '/dev/stdin' AS s", "ATTACH 'file::memory:?cache=shared' AS m",
    "ATTACH (SELECT name FROM singer) AS a", "ATTACH 'x.php' AS p; CREATE TABLE p.x (a)", "VACUUM INTO '/dev/shm/x'",
    "VACUUM INTO (SELECT name FROM singer)", "SELECT load_extension('libc.so.6', 'system')", "SELECT load_extension(NULL)",
    "SELECT load_extension('/proc/self/exe')", "SELECT sqlite_log(1, 'x')", "SELECT sqlite3_exec('DROP TABLE singer')",
    "SELECT writefile('x', readfile('concerts.sqlite'))", "SELECT edit('a', 'true')", "SELECT lsmode('x')",
    "SELECT sqlar_compress(x'00'), sqlar_uncompress(x'00', 999999999)", "SELECT zipfile('a', x'00')",
    "PRAGMA writable_schema = RESET", "PRAGMA main.writable_schema(1)", "PRAGMA temp.journal_mode = OFF",
    "PRAGMA main.integrity_check(1)", "PRAGMA activate_extensions = 'x'", "EXPLAIN DROP TABLE singer",
    "EXPLAIN QUERY PLAN DELETE FROM singer", "EXPLAIN ATTACH 'x' AS y", "SAVEPOINT a; RELEASE a", "RELEASE x", "ROLLBACK TO x",
    "BEGIN; DELETE FROM singer; COMMIT", "SELECT 1; ; ; DELETE FROM singer", "SELECT 1 /* ; */ ; -- \nDROP VIEW pairs",
    "REPLACE INTO sqlite_sequence VALUES ('a', 1)", "INSERT INTO sqlite_stat1 VALUES ('a', 'b', '0 sz=0')",
    "WITH x AS MATERIALIZED (SELECT 1) UPDATE singer SET age = (SELECT * FROM x) RETURNING *",
    "INSERT INTO singer SELECT * FROM singer WHERE 1 ON CONFLICT (singer_id) DO UPDATE SET age = 0",
    "CREATE TEMP TRIGGER t INSTEAD OF DELETE ON pairs BEGIN DELETE FROM singer; END", "DETACH temp", "REINDEX nocase",
)  # fmt: skip
TABLES = (
    "sqlite_temp_master", "sqlite_temp_schema", "sqlite_stat1", "sqlite_stat4", "sqlite_sequence",
    "sqlite_memstat", "sqlite_stmt", "sqlite_btreeinfo", "sqlite_dbpage('main')", "sqlite_dbptr", "sqlite_dbdata('main')",
    "dbstat('main', 1)", "bytecode('DELETE FROM singer')", "tables_used('SELECT 1')", "completion('', '')", "fsdir('.')",
    "generate_series(1, 9223372036854775807)", "generate_series(1, 9, 0)", "fts3tokenize('simple', 'a')", "zipfile('x.zip')",
    "csv('x.csv')", "vsv('x')", "prefixes('abc')", "wholenumber", "carray(1, 2)", "unionvtab", "swarmvtab", "fts5vocab('a', 'row')",
    "pragma_database_list", "pragma_function_list", "pragma_journal_mode('wal')", "pragma_wal_checkpoint",
    "pragma_cache_size(999999999)", "pragma_table_info('singer', 'temp')", "pragma_table_info(x'00')",
    "pragma_table_xinfo((SELECT name FROM singer))", "pragma_foreign_key_list('" + "x" * 90_000 + "')", "pragma_nothing",
)  # fmt: skip


def _statements() -> list[tuple[str, str, frozenset[str]]]:
    anything = BOUNDED | DENIED  # within the limits
    found = [("published", sql, anything) for sql in PUBLISHED] + [("escape", sql, DENIED) for sql in ESCAPES]
    found += [("reach", f"SELECT * FROM {table}", DENIED | {"empty"}) for table in TABLES]
    edges = [f"{name}({x})" for name, x in product(ONE, EXTREMES)]
    pairs = list(product(EXTREMES, EXTREMES))
    edges += [f"{name}({x}, {y})" for i, name in enumerate(TWO) for x, y in pairs[i % 7 :: 19]]
    found += [("edges", f"SELECT {call}", anything) for call in edges]
    framed = [f"{name}(a) OVER ({frame})" for name, frame in product(AGGREGATES, FRAMES)]
    found += [("edges", f"WITH t AS {T} SELECT {call} FROM t", anything) for call in framed]
    found += [("copied", copied(slow, place), anything) for slow, place in product(SLOW, PLACES)]
    return found


MORE = _statements()


def main() -> None:
    """Run all statements and print the page."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=0.5, help="limit of a statement [0.5]")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "concerts.sqlite"
        make_database(database)
        before, start = hashlib.sha256(database.read_bytes()).digest(), resident_bytes()
        outcomes = run_all(Executor(timeout_seconds=seconds), database, [*STATEMENTS, *MORE])
        unchanged = hashlib.sha256(database.read_bytes()).digest() == before
        files = len(list(Path(folder).iterdir()))
    grown = (max(o.resident for o in outcomes) - start) / 1e6
    wrong = sum(o.status not in o.right for o in outcomes)
    file = "unchanged" if unchanged else "CHANGED"
    beside = "no other file" if files == 1 else f"{files - 1} OTHER FILES"
    print("# Hostile SQL\n")
    print(f"`python bench/hostile.py --seconds {seconds:g}`, {date.today()}: {len(outcomes)} statements")
    print(f"with a limit of {seconds:g} seconds each, on a database of 2,000 numbers.\n")
    print(f"- results of a wrong type: {wrong}")
    print(f"- longest statement: {max(o.seconds for o in outcomes):.2f} s")
    print(f"- resident memory grew by {grown:.0f} MB at most")
    print(f"- the database file is {file} byte for byte, and {beside} appeared beside it\n")
    for o in outcomes:
        if o.status not in o.right:
            print(f"- WRONG: {o.status} of {o.sql[:80]!r}")
    print("| kind | statements | outcomes | longest |\n|---|---|---|---|")
    for kind in dict.fromkeys(o.kind for o in outcomes):
        some = [o for o in outcomes if o.kind == kind]
        counts = ", ".join(f"{n} {status}" for status, n in Counter(o.status for o in some).most_common())
        print(f"| {kind} | {len(some)} | {counts} | {max(o.seconds for o in some):.2f} s |")


if __name__ == "__main__":
    main()
