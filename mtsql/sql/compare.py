"""Equality of two query results up to the order of columns (and of rows)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence


def results_equal(gold_rows: Sequence[tuple], pred_rows: Sequence[tuple], order_matters: bool) -> bool:
    """Whether one permutation of the columns makes the lists (or multisets) of rows equal.

    As in the official evaluation (exec_eval.py), two empty results are equal whatever their widths, and
    1 equals 1.0 but not '1'. The search pairs one gold column after the other and gives a pair up as soon
    as the rows of the paired columns differ.
    """
    if gold_rows is pred_rows or (not gold_rows and not pred_rows):
        return True
    if len(gold_rows) != len(pred_rows) or len(gold_rows[0]) != len(pred_rows[0]):
        return False
    if not _same_cells(gold_rows, pred_rows, order_matters):
        return False
    if list(gold_rows) == list(pred_rows):
        return True
    gold_columns = list(zip(*gold_rows, strict=True))
    pred_columns = list(zip(*pred_rows, strict=True))
    if order_matters:
        # Equal columns are interchangeable here, so equal multisets of columns decide.
        return Counter(gold_columns) == Counter(pred_columns)
    start = [0] * len(gold_rows)
    return _match_columns(gold_columns, pred_columns, start, start)


def _same_cells(gold_rows: Sequence[tuple], pred_rows: Sequence[tuple], order_matters: bool) -> bool:
    """The official quick check of sorted rows; it also tells 1 from 1.0 where that changes the sorting."""
    gold = [_sorted_row(row) for row in gold_rows]
    pred = [_sorted_row(row) for row in pred_rows]
    return gold == pred if order_matters else set(gold) == set(pred)


def _sorted_row(row: tuple) -> tuple:
    return tuple(sorted(row, key=lambda cell: str(cell) + str(type(cell))))


def _match_columns(
    gold_columns: list[tuple],
    pred_columns: list[tuple],
    gold_groups: list[int],
    pred_groups: list[int],
) -> bool:
    """Whether the columns left can be paired; a group is the rows that agree in all pairs so far."""
    if not gold_columns:
        return True
    wanted = Counter(zip(gold_groups, gold_columns[0], strict=True))
    number = {key: index for index, key in enumerate(wanted)}
    tried = set()
    for index, column in enumerate(pred_columns):
        if column in tried:
            continue
        tried.add(column)
        keys = list(zip(pred_groups, column, strict=True))
        if Counter(keys) == wanted and _match_columns(
            gold_columns[1:],
            pred_columns[:index] + pred_columns[index + 1 :],
            [number[key] for key in zip(gold_groups, gold_columns[0], strict=True)],
            [number[key] for key in keys],
        ):
            return True
    return False
