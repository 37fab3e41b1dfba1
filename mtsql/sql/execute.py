"""Runs SQL from a model without risk, and compares results as the official evaluation does.

What makes it safe is in mtsql/data/sandbox.py; here are the results that threads share, the verdicts of the
official evaluation (taoyds/test-suite-sql-eval, exec_eval.py), which has no safeguard, and what a database
could have said beside "no such column": where it is, as PostgreSQL's hints do.
"""

from __future__ import annotations

import re
import sys
import threading
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from sqlglot import exp

from mtsql.data.sandbox import OF_THE_MOMENT, ExecutionResult, FileVersion, file_version, run_sql
from mtsql.data.schema import Schema, folded, written
from mtsql.sql.grammar import SqlParseError
from mtsql.sql.text import as_executed
from mtsql.sql.tree import query_tree, sources

MAX_PLACES = MAX_JOINS = 3  # tables of a missed column that a hint names, joins to one of them
MAX_RESULT_BYTES = 16_000_000  # one result, as Python objects,
MAX_SCORED_BYTES = 64_000_000  # or one that is compared with another
ENTRY_BYTES = 1_000  # of a cached result, beside its rows and its SQL
MAX_CACHED_BYTES = 64_000_000
MAX_GOLD_BYTES = 256_000_000  # of gold results, which are kept: a slow one may fail when the machine is busy
MAX_GOLD_ROWS = 1_000_000
MAX_COMPARED_CELLS = 2_000_000  # compared in pairing columns, and five more for each cell
SHOULD = re.compile(r'"(.*)" - should .*', re.DOTALL)  # how SQLite goes on behind a quoted name


class ResultCache:
    """The results that were used last, up to a number of bytes; threads may share it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self._bytes = max_bytes, 0
        self._results: OrderedDict[tuple[FileVersion, str], ExecutionResult] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: tuple[FileVersion, str]) -> ExecutionResult | None:
        """The result on one version of a database file."""
        with self._lock:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def put(self, key: tuple[FileVersion, str], result: ExecutionResult) -> None:
        """Keep a result, in place of an earlier one, and drop the oldest beyond the limits."""
        with self._lock:
            self._drop(key)
            self._results[key] = result
            self._bytes += self._size(key)
            while self._bytes > self.max_bytes:
                self._drop(next(iter(self._results)))

    def _drop(self, key: tuple[FileVersion, str]) -> None:
        if key in self._results:
            self._bytes -= self._size(key)
            del self._results[key]

    def _size(self, key: tuple[FileVersion, str]) -> int:
        return self._results[key].bytes + sys.getsizeof(key[1]) + ENTRY_BYTES


class Executor:
    """Runs statements, one at a time in a thread; results are cached while the file is unchanged.

    A file counts as changed if its inode, its size or its time of modification or change is another, or those
    of its write-ahead log.
    """

    def __init__(self, timeout_seconds: float = 5.0, max_rows: int = 10_000) -> None:
        self.timeout_seconds = timeout_seconds
        self.max_rows = max_rows
        self._cache, self._gold = ResultCache(MAX_CACHED_BYTES), ResultCache(MAX_GOLD_BYTES)

    def execute(self, db_path: str | Path, *statements: str) -> ExecutionResult:
        """The result of the first of `statements` that runs, else of the first.

        Their errors are results, not exceptions. Raises FileNotFoundError if there is no such database.
        """
        return self._first(db_path, statements, self.max_rows, MAX_RESULT_BYTES)

    def gold_rows(self, db_path: str | Path, sql: str) -> tuple[tuple, ...]:
        """All rows of a gold query, beyond the row limit.

        Raises ValueError naming the query if it fails, FileNotFoundError as `execute`.
        """
        key = (file_version(db_path), sql)
        result = self._gold.get(key)
        if result is None:
            result = self._execute(db_path, sql, MAX_GOLD_ROWS, MAX_SCORED_BYTES)
            if not result.ok or result.truncated:
                reason = result.message or f"more than {MAX_GOLD_ROWS} rows or {MAX_SCORED_BYTES} bytes"
                raise ValueError(f"the gold query failed ({reason}): {sql}")
            self._gold.put(key, result)
        return result.rows

    def predicted_rows(self, db_path: str | Path, wanted: int, *statements: str) -> tuple[tuple, ...] | None:
        """All rows of the first of `statements` that runs; None if none does or it has more than `wanted`."""
        result = self._first(db_path, statements, wanted, MAX_SCORED_BYTES)
        return result.rows if result.ok and not result.truncated else None

    def _first(self, db_path: str | Path, statements: Sequence[str], *limits: int) -> ExecutionResult:
        results = (self._execute(db_path, sql, *limits) for sql in statements)
        first = next(results)
        return first if first.ok else next((result for result in results if result.ok), first)

    def _execute(self, db_path: str | Path, sql: str, max_rows: int, max_bytes: int) -> ExecutionResult:
        version = file_version(db_path)
        result = self._cache.get((version, sql))
        too_few = result is not None and result.truncated and len(result.rows) < max_rows
        if result is None or (too_few and result.bytes <= max_bytes):
            result = run_sql(db_path, sql, self.timeout_seconds, max_rows, max_bytes)
            if not result.message.startswith(OF_THE_MOMENT):
                self._cache.put((version, sql), result)
        if len(result.rows) > max_rows:  # it was run with a higher limit
            result = replace(result, rows=result.rows[:max_rows], truncated=True)
        return result


def as_scored(sql: str, kind: str) -> tuple[str, ...]:
    """What EX of a kind (`execution_match`) runs, and what it runs where that fails: it with its DISTINCT."""
    if kind == "bird":
        return (sql,)
    kept, dropped = as_executed(sql, keep_distinct=True), as_executed(sql, keep_distinct=False)
    if kind == "keep_distinct":
        return (kept,)
    return (dropped, kept) if "distinct" in sql.lower() else (dropped,)


def execution_match(
    executor: Executor, db_path: str | Path, gold_sql: str, pred_sql: str | None, kind: str = "official"
) -> bool:
    """Execution match (EX) as the official evaluation defines it; R_EX in training.

    Unlike there, a timeout or an empty prediction is wrong, even if the gold result is empty. A query that
    fails without its DISTINCT, or is past a limit, runs with it; where the gold query does, both do. Of
    another `kind` "keep_distinct" lets DISTINCT count, and "bird" is BIRD's EX (bird-bench/mini_dev,
    evaluation_ex.py): both queries as they are written, equal sets of rows, columns in the same order.
    Raises ValueError if the gold query fails, FileNotFoundError if the database is missing.
    """
    gold = as_scored(gold_sql, kind)
    try:
        gold_rows = executor.gold_rows(db_path, gold[0])
    except ValueError:
        if len(gold) == 1:
            raise
        return execution_match(executor, db_path, gold_sql, pred_sql, "keep_distinct")
    if pred_sql is None:
        return False
    most = MAX_GOLD_ROWS if kind == "bird" else len(gold_rows)
    pred_rows = executor.predicted_rows(db_path, most, *as_scored(pred_sql, kind))
    if pred_rows is None:
        return False
    if kind == "bird":
        return set(gold_rows) == set(pred_rows)
    return results_equal(gold_rows, pred_rows, "order by" in gold[0].lower())


def results_equal(gold_rows: Sequence[tuple], pred_rows: Sequence[tuple], order_matters: bool) -> bool:
    """Whether one permutation of the columns makes the lists (or multisets) of rows equal.

    As in the official evaluation (exec_eval.py), two empty results are equal whatever their widths, and
    1 equals 1.0 but not '1'. Where too many columns are permutations of one another, none is found.
    """
    if gold_rows is pred_rows or (not gold_rows and not pred_rows):
        return True
    if len(gold_rows) != len(pred_rows) or len(gold_rows[0]) != len(pred_rows[0]):
        return False
    gold_sums, pred_sums = (map(_cell_sum, rows) for rows in (gold_rows, pred_rows))
    if Counter(gold_sums) != Counter(pred_sums):  # whatever the order of the columns: none need be sought
        return False
    if any(type(cell) is float for row in chain(gold_rows, pred_rows) for cell in row) and not _same_cells(
        gold_rows, pred_rows, order_matters
    ):
        return False
    gold_columns, pred_columns = (list(zip(*rows, strict=True)) for rows in (gold_rows, pred_rows))
    if order_matters:
        # Equal columns are interchangeable here, so equal multisets of columns decide.
        return Counter(gold_columns) == Counter(pred_columns)
    return Counter(gold_rows) == Counter(pred_rows) or _columns_match(gold_columns, pred_columns)


def _cell_sum(cells: tuple) -> int:
    """A number that is the same for the same cells in any order."""
    return sum(map(hash, zip(cells, strict=True)))


def _same_cells(gold_rows: Sequence[tuple], pred_rows: Sequence[tuple], order_matters: bool) -> bool:
    """The official quick check of sorted rows, which tells 1 from 1.0 where that changes the sorting."""
    gold, pred = (
        [tuple(sorted(row, key=lambda cell: str(cell) + str(type(cell)))) for row in rows]
        for rows in (gold_rows, pred_rows)
    )
    return gold == pred if order_matters else set(gold) == set(pred)


def _columns_match(gold: list[tuple], pred: list[tuple]) -> bool:
    """Whether the columns can be paired so that the rows are the same, in any order.

    One gold column after the other is paired; a group is the rows that agree in all columns paired so far,
    and a pair is given up as soon as the groups of the two sides differ in size.
    """
    sums, codes_of = list(map(_cell_sum, pred)), dict[tuple, int]()
    same = [codes_of.setdefault(column, index) for index, column in enumerate(pred)]
    left = MAX_COMPARED_CELLS + 5 * len(gold) * len(gold[0])

    def pairings(
        paired: int, free: frozenset[int], gold_groups: list[int], pred_groups: list[int]
    ) -> Iterator[tuple]:
        """What is left to do for each column that the next gold column may be paired with."""
        nonlocal left
        codes: dict[tuple, int] = {}  # (group, cell) -> the group that it makes

        def regrouped(groups: list[int], column: tuple) -> list[int]:
            return [codes.setdefault(pair, len(codes)) for pair in zip(groups, column, strict=True)]

        alike = _cell_sum(gold[paired])
        candidates = {same[index]: index for index in sorted(free) if sums[index] == alike}
        gold_groups = regrouped(gold_groups, gold[paired])
        sizes = Counter(gold_groups)
        for index in candidates.values():
            left -= len(gold_groups)
            if left < 0:
                return
            groups = regrouped(pred_groups, pred[index])
            if Counter(groups) == sizes:
                yield paired + 1, free - {index}, gold_groups, groups

    start = [0] * len(gold[0])
    search = [iter([(0, frozenset(range(len(pred))), start, start)])]  # no recursion: columns may be 2,000
    while search:
        state = next(search[-1], None)
        if state is None:
            search.pop()
        elif not state[1]:
            return True
        else:
            search.append(pairings(*state))
    return False


def error_hint(message: str, sql: str, schema: Schema) -> str:
    """The names that there are instead of one that SQLite's `message` misses; "" for other errors.

    Instead of a table: all tables. Instead of a column: the tables that have it, each with its name in the
    query or the joins that lead to it from there, then the columns of the table before its dot, or of all
    that the query reads. For an ambiguous column: its names. All for the part of the query that fails.
    """
    problem, _, missed = message.partition(": ")
    if problem == "no such table":
        return f"tables: {_listed(table.name for table in schema.tables)}"
    if problem not in ("no such column", "ambiguous column name"):
        return ""

    def having(name: str) -> list[str]:
        return [t.name for t in schema.tables if folded(name) in (folded(column) for column, _ in t.columns)]

    quoted = SHOULD.fullmatch(missed)
    missed = quoted[1] if quoted else missed.removeprefix("main.")
    before, dot, name = missed.partition(".")
    if not dot or having(missed):  # a name may hold a dot, too
        before, name = "", missed
    found, ambiguous = having(name), problem == "ambiguous column name"
    read = _tables_read(sql, before, name, found, ambiguous)
    ways = _ways(read, schema)
    if ambiguous:
        found = [table for table in found if folded(table) in read.values()] or found
    near = {table: number for number, table in enumerate(ways)}
    found.sort(key=lambda table: near.get(folded(table), len(near)))
    hints = []
    for table in found[:MAX_PLACES]:
        alias, joins = ways.get(folded(table), (before, ""))
        known = folded(alias) == folded(before)  # what was missed: another part of the query has that alias
        way = joins or ("" if known else f" {written(alias)}.{written(name)}")
        hints.append(f"{written(name)} is in {written(table)}" + (way and ":" + way))
    named = {folded(alias): table for alias, table in read.items()}
    wanted = {named.get(folded(before), folded(before))} if before else set(read.values())
    tables = (t for t in schema.tables if folded(t.name) in wanted and not ambiguous)
    hints += [f"{written(t.name)} has {_listed(name for name, _ in t.columns)}" for t in tables]
    return "; ".join(hints)


def _ways(read: Mapping[str, str], schema: Schema) -> dict[str, tuple[str, str]]:
    """How a query that reads `read` gets at tables, `folded`: their names in it, and the joins to them.

    The nearest come first. Joins are over foreign keys, at most MAX_JOINS; "" for a table that it reads.
    """
    links = defaultdict(list)
    for table in schema.tables:
        for column, other, key in table.foreign_keys:
            links[folded(table.name)].append((column, other, key))
            links[folded(other)].append((key, table.name, column))
    ways = {table: (alias, "") for alias, table in reversed(read.items())}
    ends = deque(ways)
    while ends:
        here = ends.popleft()
        name, joins = ways[here]
        for key, other, other_key in links[here] if joins.count(" JOIN ") < MAX_JOINS else ():
            if folded(other) not in ways:
                on = f"{written(other)}.{written(other_key)} = {written(name)}.{written(key)}"
                ways[folded(other)] = (other, f"{joins} JOIN {written(other)} ON {on}")
                ends.append(folded(other))
    return ways


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(written, names))


def _tables_read(sql: str, before: str, name: str, having: Iterable[str], ambiguous: bool) -> dict[str, str]:
    """The tables, `folded`, that the part of a query reads in which a column fails, by their names there.

    `having` are the tables with such a column. The part is the first SELECT that names the column and reads
    none of them, or several where it is ambiguous; the SELECTs around it are read there too, and come last.
    All tables of the query if no part is found, none if it is unreadable.
    """
    try:
        tree = query_tree(sql)
    except SqlParseError:
        return {}
    having, missed = set(map(folded, having)), (folded(before), folded(name))
    for column in tree.find_all(exp.Column):
        if (folded(column.table), folded(column.name)) == missed:
            read, part = dict[str, str](), column.find_ancestor(exp.Select)
            while part:
                around = _named(source for source in sources(part) if isinstance(source, exp.Table))
                read = read | around | read  # the inner of two names counts
                part = part.find_ancestor(exp.Select)
            called = (table for alias, table in read.items() if not before or folded(alias) == missed[0])
            reached = sum(table in having for table in called)
            if (reached > 1) if ambiguous else not reached:
                return read
    return _named(tree.find_all(exp.Table))


def _named(tables: Iterable[exp.Table]) -> dict[str, str]:
    return {table.alias_or_name: folded(table.name) for table in tables}
