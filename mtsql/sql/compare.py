"""Equality of two query results up to the order of columns (and of rows)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain

MAX_COMPARED_CELLS = 2_000_000  # and each cell five times more


def results_equal(gold_rows: Sequence[tuple], pred_rows: Sequence[tuple], order_matters: bool) -> bool:
    """Whether one permutation of the columns makes the lists (or multisets) of rows equal.

    As in the official evaluation (exec_eval.py), two empty results are equal whatever their widths, and
    1 equals 1.0 but not '1'. The search pairs one gold column after the other and gives a pair up as soon
    as the rows of the paired columns differ. Where too many columns are permutations of one another, it finds
    nothing.
    """
    if gold_rows is pred_rows or (not gold_rows and not pred_rows):
        return True
    if len(gold_rows) != len(pred_rows) or len(gold_rows[0]) != len(pred_rows[0]):
        return False
    codes: defaultdict[object, int] = defaultdict(lambda: hash((len(codes), "code")))  # equal for equal cells
    coded = [[tuple(map(codes.__getitem__, row)) for row in rows] for rows in (gold_rows, pred_rows)]
    sums = [list(map(sum, rows)) for rows in coded]  # equal for the same cells in any order
    if Counter(sums[0]) != Counter(sums[1]):
        return False
    if any(type(cell) is float for row in chain(gold_rows, pred_rows) for cell in row) and not _same_cells(
        gold_rows, pred_rows, order_matters
    ):
        return False
    if coded[0] == coded[1]:
        return True
    columns = [list(zip(*rows, strict=True)) for rows in coded]
    if order_matters:
        # Equal columns are interchangeable here, so equal multisets of columns decide.
        return Counter(columns[0]) == Counter(columns[1])
    signs = [[sum(_extended(sums[side], column)) for column in columns[side]] for side in (0, 1)]
    return _match_columns(*columns, *signs)


def _extended(groups: list[int], column: tuple[int, ...]) -> list[int]:
    """A number for each row: equal for rows of equal groups with equal cells."""
    return list(map(hash, zip(groups, column, strict=True)))


def _same_cells(gold_rows: Sequence[tuple], pred_rows: Sequence[tuple], order_matters: bool) -> bool:
    """The official quick check of sorted rows, which tells 1 from 1.0 where that changes the sorting."""
    gold = [_sorted_row(row) for row in gold_rows]
    pred = [_sorted_row(row) for row in pred_rows]
    return gold == pred if order_matters else set(gold) == set(pred)


def _sorted_row(row: tuple) -> tuple:
    return tuple(sorted(row, key=lambda cell: str(cell) + str(type(cell))))


def _match_columns(
    gold_columns: list[tuple], pred_columns: list[tuple], gold_signs: list[int], pred_signs: list[int]
) -> bool:
    """Whether the columns can be paired so that the rows are the same; columns of one pair have equal signs.

    A group is the rows that agree in all columns paired so far.
    """
    start = [0] * len(gold_columns[0])
    left = MAX_COMPARED_CELLS + 5 * len(gold_columns) * len(start)
    wanted = Counter(zip(*gold_columns, strict=True))

    def pairings(depth: int, free: list[int], gold_groups: list[int], pred_groups: list[int]) -> Iterator:
        """For each free column that agrees with the gold column `depth`: the column, and the groups then."""
        nonlocal left
        gold_groups, tried = _extended(gold_groups, gold_columns[depth]), set()
        for column in (c for c in free if pred_signs[c] == gold_signs[depth]):
            left -= len(start)
            if pred_columns[column] not in tried and left >= 0:
                tried.add(pred_columns[column])
                groups = _extended(pred_groups, pred_columns[column])
                if sum(groups) == sum(gold_groups):
                    yield column, [c for c in free if c != column], gold_groups, groups

    search, chosen = [pairings(0, list(range(len(pred_columns))), start, start)], []
    while search:
        found = next(search[-1], None)
        del chosen[len(search) - 1 :]
        if found is None:
            search.pop()
            continue
        chosen.append(found[0])
        if found[1]:
            search.append(pairings(len(search), *found[1:]))
        elif Counter(zip(*(pred_columns[c] for c in chosen), strict=True)) == wanted:
            return True
    return False
