"""Gold values in a prediction's places for values: the official evaluation's `plug_value`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, product

from mtsql.sql.text import first_statement

VALUE = re.compile(
    r"""'(?:''|[^'])*' | "(?:""|[^"])*" | (?<![\w\].)])-?(?:\d+(?:\.\d+)?|\.\d+)(?![\w.])""", re.VERBOSE
)
MAX_ALTERNATIVES = 10_000


def with_gold_values(gold_sql: str, pred_sql: str) -> Iterator[str]:
    """The prediction, then every assignment of the gold query's values to its values.

    The official evaluation tries all assignments (exec_eval.py, plug_value), here the first
    MAX_ALTERNATIVES are. A value is a number or a quoted text, wherever it stands, LIMIT included.
    """
    yield pred_sql
    pred = "".join(first_statement(pred_sql))
    values = sorted({match.group() for match in VALUE.finditer(gold_sql)})
    slots = [match.span() for match in VALUE.finditer(pred)]
    starts = [0, *(end for _, end in slots)]
    ends = [*(start for start, _ in slots), len(pred)]
    between = [pred[start:end] for start, end in zip(starts, ends, strict=True)]
    for chosen in islice(product(values, repeat=len(slots)), MAX_ALTERNATIVES):
        yield "".join(text + value for text, value in zip(between, (*chosen, ""), strict=True))
