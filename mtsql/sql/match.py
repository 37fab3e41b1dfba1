"""Verdicts on structures of the official grammar: exact set match (EM), its components, hardness.

Source: taoyds/test-suite-sql-eval, evaluation.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from mtsql.sql.grammar import COMPARISONS, SET_OPERATORS, SqlParseError, SqlSchema, parse_sql

LIKE = COMPARISONS.index("like")
COMPONENTS = (
    "select", "select(no AGG)", "where", "where(no OP)", "group(no Having)", "group", "order", "and/or",
    "IUEN", "keywords",
)  # fmt: skip
EMPTY = {
    "select": (None, []),
    "from": {"table_units": [], "conds": []},
    **{clause: [] for clause in ("where", "groupBy", "having", "orderBy")},
    **dict.fromkeys(("limit", *SET_OPERATORS)),
}


class Component(NamedTuple):
    """What the official table counts of one component: its F1, 0.0 or 1.0, and its elements on both sides.

    The table takes the accuracy over all questions with the component in the prediction, the recall over all
    questions with it in the gold query.
    """

    f1: float
    in_pred: int
    in_gold: int


def string_match(gold: str, pred: str | None) -> bool:
    """The strict EM of MTSQL-R1, section 3.3.2: but for the amount of white space and a final ";"."""
    return pred is not None and _plain(gold) == _plain(pred)


def _plain(sql: str) -> str:
    return " ".join(sql.split()).rstrip("; ")


def exact_set_match(
    gold: str, pred: str | None, schema: SqlSchema, foreign_keys: dict[str, str], keep_limit: bool = False
) -> bool:
    """Exact set match (EM): all components and the tables are equal; values and join keys are ignored.

    A prediction that is missing or does not parse is wrong. Raises SqlParseError if the gold
    query does not parse.
    """
    return _exact(*_both(gold, pred, schema, foreign_keys, keep_limit))


def partial_match(
    gold_sql: str, pred_sql: str | None, schema: SqlSchema, foreign_keys: dict[str, str]
) -> dict[str, Component]:
    """The partial match of each of COMPONENTS.

    A prediction that is missing or does not parse counts as an empty query. Raises SqlParseError
    if the gold query does not parse.
    """
    gold, pred = _both(gold_sql, pred_sql, schema, foreign_keys)
    ours, theirs = _components(gold), _components(pred)
    found = {
        name: Component(float(same), theirs[name].total(), ours[name].total())
        for name, same in _equal_components(gold, pred).items()
    }
    # The official code swaps the two sides here, and counts one element where both agree, even on none.
    same, in_pred, in_gold = found["and/or"]
    found["and/or"] = Component(same, 1, 1) if same else Component(same, in_gold, in_pred)
    return found


def _both(gold_sql: str, pred_sql: str | None, *how: object) -> tuple[dict, dict]:
    """The two as `_read` has them; an empty query for a prediction that is missing or does not parse."""
    gold, pred = _read(gold_sql, *how), EMPTY
    if pred_sql is not None:
        with suppress(SqlParseError):
            pred = _read(pred_sql, *how)
    return gold, pred


def _read(sql: str, schema: SqlSchema, foreign_keys: dict[str, str], keep_limit: bool = False) -> dict:
    """The structure of `sql` without values and DISTINCT, foreign keys replaced by their representatives.

    Only keys of tables in the outermost FROM are replaced.
    """
    structure = parse_sql(sql, schema, keep_limit)
    tables = {unit for kind, unit in structure["from"]["table_units"] if kind == "table_unit"}
    renamed = {c: key for c, key in foreign_keys.items() if c.partition(".")[0] + "__" in tables}
    return _normalise(structure, renamed)


def _normalise(sql: dict, renamed: dict[str, str] | None) -> dict:
    """A query with its columns renamed; a sub-query (`renamed` None) loses its values only, as officially."""

    def column(unit: tuple | None) -> tuple | None:
        return unit if unit is None or renamed is None else (unit[0], renamed.get(unit[1], unit[1]), None)

    def value_unit(unit: tuple) -> tuple:
        return unit[0], column(unit[1]), column(unit[2])

    def value(operand: object) -> dict | None:
        return _normalise(operand, None) if isinstance(operand, dict) else None

    def conditions(items: list) -> list:
        # Where a connector is missing, the official code skips every second condition.
        return [
            (*item[:2], value_unit(item[2]), value(item[3]), value(item[4])) if index % 2 == 0 else item
            for index, item in enumerate(items)
        ]

    distinct, selected = sql["select"]
    order = sql["orderBy"]
    return {
        "select": (
            distinct if renamed is None else None,
            [(aggregate, value_unit(unit)) for aggregate, unit in selected],
        ),
        "from": {**sql["from"], "conds": conditions(sql["from"]["conds"])},
        "where": conditions(sql["where"]),
        "groupBy": [column(unit) for unit in sql["groupBy"]],
        "having": conditions(sql["having"]),
        "orderBy": order and (order[0], [value_unit(unit) for unit in order[1]]),
        "limit": sql["limit"],
        **{o: sql[o] and _normalise(sql[o], renamed) for o in SET_OPERATORS},
    }


def _exact(gold: dict, pred: dict) -> bool:
    tables, others = (_multiset(sql["from"]["table_units"]) for sql in (gold, pred))
    return tables == others and all(_equal_components(gold, pred).values())


def _equal_components(gold: dict, pred: dict) -> dict[str, bool]:
    ours, theirs = _components(gold), _components(pred)
    equal = {name: ours[name] == theirs[name] for name in COMPONENTS}
    pairs = ((gold[operator], pred[operator]) for operator in SET_OPERATORS)
    equal["IUEN"] = all(_exact(one, other) if one and other else one is other for one, other in pairs)
    return equal


def _multiset(items: Iterable[object]) -> Counter[str]:
    """How often each item is there; items hold lists and dicts, so their texts stand for them."""
    return Counter(map(repr, items))


def _components(sql: dict) -> dict[str, Counter[str]]:
    """The elements of each of COMPONENTS in a normalised structure."""
    selected, conditions = sql["select"][1], sql["where"][::2]
    grouped = [column for _, column, _ in sql["groupBy"]]
    found = {
        "select": selected,
        "select(no AGG)": [unit for _, unit in selected],
        "where": conditions,
        "where(no OP)": [condition[2] for condition in conditions],
        "group(no Having)": [column.rpartition(".")[2] for column in grouped],
        "group": [(grouped, sql["having"])] if grouped else [],
        "order": [(sql["orderBy"], sql["limit"] is None)] if sql["orderBy"] else [],
        "and/or": sql["where"][1::2],
        "IUEN": [operator for operator in SET_OPERATORS if sql[operator]],
        "keywords": _keywords(sql),
    }
    counted = {name: _multiset(items) for name, items in found.items()}
    return counted | {"and/or": Counter(set(counted["and/or"]))}


def _keywords(sql: dict) -> set[str]:
    conditions, connectors = _split_conditions(sql)
    words = {key for key in ("where", "groupBy", "having", "orderBy", "limit", *SET_OPERATORS) if sql[key]}
    words |= {COMPARISONS[condition[1]] for condition in conditions} & {"in", "like"}
    words |= {"not" for condition in conditions if condition[0]}
    words |= {"or" for connector in connectors if connector == "or"}
    return words | set(sql["orderBy"][:1])  # asc or desc


def _split_conditions(sql: dict) -> tuple[list[tuple], list]:
    """The conditions of FROM, WHERE and HAVING in a structure, and the connectors between them.

    Where a connector is missing, every second condition stands among the connectors, as officially.
    """
    lists = (sql["from"]["conds"], sql["where"], sql["having"])
    return [c for held in lists for c in held[::2]], [c for held in lists for c in held[1::2]]


def hardness(gold_sql: str, schema: SqlSchema) -> str:
    """ "easy", "medium", "hard" or "extra". Raises SqlParseError if the query does not parse."""
    sql = parse_sql(gold_sql, schema)
    conditions, connectors = _split_conditions(sql)
    parts = sum(bool(sql[clause]) for clause in ("where", "groupBy", "orderBy", "limit"))
    parts += max(len(sql["from"]["table_units"]) - 1, 0) + connectors.count("or")
    parts += sum(condition[1] == LIKE for condition in conditions)
    values = [value for condition in conditions for value in condition[3:5]]
    nested = sum(isinstance(value, dict) for value in [*values, *map(sql.get, SET_OPERATORS)])
    others = _long_lists(sql)
    if parts <= 1 and others == 0 and nested <= 1:
        return "hard" if nested else "easy"
    if nested:
        return "extra"
    if (others <= 2 and parts <= 1) or (parts <= 2 and others < 2):
        return "medium"
    return "hard" if (others > 2 and parts <= 2) or (2 < parts <= 3 and others <= 2) else "extra"


def _long_lists(sql: dict) -> int:
    """How many of four lists are long. HAVING counts by its NOT flags and connectors (a known bug)."""
    selected = sql["select"][1]
    units = selected + sql["where"][::2] + sql["groupBy"] + sql["having"]
    if sql["orderBy"]:
        units = units + [u for unit in sql["orderBy"][1] for u in unit[1:] if u is not None]
    aggregates = sum(bool(unit[0]) for unit in units)
    return (aggregates > 1) + sum(len(items) > 1 for items in (selected, sql["where"], sql["groupBy"]))
