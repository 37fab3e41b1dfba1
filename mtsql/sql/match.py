"""Exact set match, its ten components, and strict string match (sections 3 and 4 of the notes)."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from mtsql.sql.clauses import clause_f1, whole_clause_f1
from mtsql.sql.parse import Mode, SqlParseError, SqlSchema, official_prediction, parse_sql
from mtsql.sql.structure import COMPARISONS, SET_OPERATORS

__all__ = [
    "clause_f1",
    "exact_set_match",
    "official_prediction",
    "partial_f1",
    "partial_sizes",
    "string_match",
    "whole_clause_f1",
]

EMPTY = {
    "select": (False, ()),
    "from": {"table_units": (), "conds": ()},
    "where": (),
    "groupBy": (),
    "having": (),
    "orderBy": (),
    "limit": None,
    **dict.fromkeys(SET_OPERATORS),
}


def string_match(gold: str, pred: str | None) -> bool:
    """The strict EM of MTSQL-R1, section 3.3.2; only white space and a final ";" are forgiven."""
    return pred is not None and _plain(gold) == _plain(pred)


def _plain(sql: str) -> str:
    return " ".join(sql.split()).rstrip("; ")


def exact_set_match(
    gold_sql: str,
    pred_sql: str | None,
    schema: SqlSchema,
    foreign_keys: dict[str, str],
    mode: Mode = "official",
) -> bool:
    """Exact set match (EM): all components and the tables equal; values and join keys ignored.

    A prediction that is missing or does not parse is wrong. Raises SqlParseError if the gold
    query does not parse. With `mode` "lenient" both queries are read leniently.
    """
    keys = tuple(foreign_keys.items())
    gold = _normalised(gold_sql, schema, keys, mode)
    if pred_sql is None:
        return False
    try:
        pred = _normalised(pred_sql, schema, keys, mode)
    except SqlParseError:
        return False
    return _exact(gold, pred)


def partial_f1(
    gold_sql: str, pred_sql: str | None, schema: SqlSchema, foreign_keys: dict[str, str]
) -> dict[str, float]:
    """F1 of each component of section 4, which is always 0.0 or 1.0.

    A prediction that is missing or does not parse counts as an empty query. Raises SqlParseError
    if the gold query does not parse.
    """
    gold, pred = _both(gold_sql, pred_sql, schema, foreign_keys)
    return {name: float(same(gold, pred)) for name, same in COMPONENTS.items()}


def partial_sizes(
    gold_sql: str, pred_sql: str | None, schema: SqlSchema, foreign_keys: dict[str, str]
) -> dict[str, tuple[int, int]]:
    """(elements in the prediction, elements in the gold query) of each component.

    The official table takes accuracy over the questions whose prediction has the component, recall
    over those whose gold query has it. Errors as `partial_f1`.
    """
    gold, pred = _both(gold_sql, pred_sql, schema, foreign_keys)
    sizes = {name: (size(pred), size(gold)) for name, size in SIZES.items()}
    # The official code swaps the two here, and counts one element where both agree, even on none.
    sizes["and/or"] = (1, 1) if _same_connectors(gold, pred) else sizes["and/or"][::-1]
    return sizes


def _both(
    gold_sql: str, pred_sql: str | None, schema: SqlSchema, foreign_keys: dict[str, str]
) -> tuple[dict, dict]:
    keys = tuple(foreign_keys.items())
    gold = _normalised(gold_sql, schema, keys)
    try:
        return gold, EMPTY if pred_sql is None else _normalised(pred_sql, schema, keys)
    except SqlParseError:
        return gold, EMPTY


@lru_cache(maxsize=50_000)
def _normalised(
    sql: str, schema: SqlSchema, foreign_keys: tuple[tuple[str, str], ...], mode: Mode = "official"
) -> dict:
    structure = parse_sql(sql, schema, mode)
    tables = {unit for kind, unit in structure["from"]["table_units"] if kind == "table_unit"}
    renamed = {
        column: representative
        for column, representative in foreign_keys
        if column.partition(".")[0] + "__" in tables
    }
    return _rename(_drop_values(structure), renamed)


def _drop_values(sql: dict) -> dict:
    """Section 3.1: every value but a sub-query becomes None, in sub-queries as well."""

    def drop(value: object) -> dict | None:
        return _drop_values(value) if isinstance(value, dict) else None

    def conditions(items: list) -> list:
        # Where a connector is missing, the official code skips every second condition.
        return [
            (*item[:3], drop(item[3]), drop(item[4])) if index % 2 == 0 else item
            for index, item in enumerate(items)
        ]

    return {
        **sql,
        "from": {**sql["from"], "conds": conditions(sql["from"]["conds"])},
        "where": conditions(sql["where"]),
        "having": conditions(sql["having"]),
        **{o: sql[o] and _drop_values(sql[o]) for o in SET_OPERATORS},
    }


def _rename(sql: dict, renamed: dict[str, str]) -> dict:
    """Section 3.2: foreign keys to their representatives and DISTINCT away, outside sub-queries."""

    def column(unit: tuple | None) -> tuple | None:
        return unit and (unit[0], renamed.get(unit[1], unit[1]), None)

    def value_unit(unit: tuple) -> tuple:
        return unit[0], column(unit[1]), column(unit[2])

    def conditions(items: list) -> list:
        return [
            (*item[:2], value_unit(item[2]), *item[3:]) if index % 2 == 0 else item
            for index, item in enumerate(items)
        ]

    order = sql["orderBy"]
    return {
        "select": (None, [(aggregate, value_unit(unit)) for aggregate, unit in sql["select"][1]]),
        "from": {**sql["from"], "conds": conditions(sql["from"]["conds"])},
        "where": conditions(sql["where"]),
        "groupBy": [column(unit) for unit in sql["groupBy"]],
        "having": conditions(sql["having"]),
        "orderBy": order and (order[0], [value_unit(unit) for unit in order[1]]),
        "limit": sql["limit"],
        **{o: sql[o] and _rename(sql[o], renamed) for o in SET_OPERATORS},
    }


def _exact(gold: dict, pred: dict) -> bool:
    return all(same(gold, pred) for same in COMPONENTS.values()) and _same_items(
        gold["from"]["table_units"], pred["from"]["table_units"]
    )


def _same_items(gold: list, pred: list) -> bool:
    """Equality as multisets, by == alone: items may hold dicts."""
    if len(gold) != len(pred):
        return False
    left = list(pred)
    for item in gold:
        if item not in left:
            return False
        left.remove(item)
    return True


def _select(sql: dict) -> list:
    return sql["select"][1]


def _grouped(sql: dict) -> list[str]:
    return [unit[1] for unit in sql["groupBy"]]


def _same_group(gold: dict, pred: dict) -> bool:
    return _same_items(
        [column.rpartition(".")[2] for column in _grouped(gold)],
        [column.rpartition(".")[2] for column in _grouped(pred)],
    )


def _same_having(gold: dict, pred: dict) -> bool:
    if not gold["groupBy"] or not pred["groupBy"]:
        return bool(gold["groupBy"]) == bool(pred["groupBy"])
    return _grouped(gold) == _grouped(pred) and gold["having"] == pred["having"]


def _same_order(gold: dict, pred: dict) -> bool:
    if not gold["orderBy"] or not pred["orderBy"]:
        return bool(gold["orderBy"]) == bool(pred["orderBy"])
    same_limit = (gold["limit"] is None) == (pred["limit"] is None)
    return gold["orderBy"] == pred["orderBy"] and same_limit


def _same_connectors(gold: dict, pred: dict) -> bool:
    ours, theirs = gold["where"][1::2], pred["where"][1::2]
    return all(item in theirs for item in ours) and all(item in ours for item in theirs)


def _same_set_operations(gold: dict, pred: dict) -> bool:
    for operator in SET_OPERATORS:
        if (gold[operator] is None) != (pred[operator] is None):
            return False
        if gold[operator] is not None and not _exact(gold[operator], pred[operator]):
            return False
    return True


def _keywords(sql: dict) -> set[str]:
    conditions = [*sql["from"]["conds"][::2], *sql["where"][::2], *sql["having"][::2]]
    connectors = [*sql["from"]["conds"][1::2], *sql["where"][1::2], *sql["having"][1::2]]
    words = {key for key in ("where", "groupBy", "having", "orderBy", "limit") if sql[key]}
    words |= {operator for operator in SET_OPERATORS if sql[operator] is not None}
    words |= {COMPARISONS[condition[1]] for condition in conditions} & {"in", "like"}
    if sql["orderBy"]:
        words.add(sql["orderBy"][0])
    if "or" in connectors:
        words.add("or")
    if any(condition[0] for condition in conditions):
        words.add("not")
    return words


COMPONENTS: dict[str, Callable[[dict, dict], bool]] = {
    "select": lambda g, p: _same_items(_select(g), _select(p)),
    "select(no AGG)": lambda g, p: _same_items(
        [unit for _, unit in _select(g)], [unit for _, unit in _select(p)]
    ),
    "where": lambda g, p: _same_items(g["where"][::2], p["where"][::2]),
    "where(no OP)": lambda g, p: _same_items(
        [condition[2] for condition in g["where"][::2]],
        [condition[2] for condition in p["where"][::2]],
    ),
    "group(no Having)": _same_group,
    "group": _same_having,
    "order": _same_order,
    "and/or": _same_connectors,
    "IUEN": _same_set_operations,
    "keywords": lambda g, p: _keywords(g) == _keywords(p),
}

SIZES: dict[str, Callable[[dict], int]] = {
    "select": lambda sql: len(_select(sql)),
    "select(no AGG)": lambda sql: len(_select(sql)),
    "where": lambda sql: len(sql["where"][::2]),
    "where(no OP)": lambda sql: len(sql["where"][::2]),
    "group(no Having)": lambda sql: len(sql["groupBy"]),
    "group": lambda sql: int(bool(sql["groupBy"])),
    "order": lambda sql: int(bool(sql["orderBy"])),
    "and/or": lambda sql: len(set(sql["where"][1::2])),
    "IUEN": lambda sql: sum(sql[operator] is not None for operator in SET_OPERATORS),
    "keywords": lambda sql: len(_keywords(sql)),
}
