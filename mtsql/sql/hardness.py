"""Hardness of a gold query, as the official evaluation counts it (evaluation.py, eval_hardness)."""

from __future__ import annotations

from mtsql.sql.parse import parse_sql
from mtsql.sql.structure import COMPARISONS, NO_AGGREGATE, SET_OPERATORS, SqlSchema, split_conditions

LIKE = COMPARISONS.index("like")


def hardness(gold_sql: str, schema: SqlSchema) -> str:
    """ "easy", "medium", "hard" or "extra". Raises SqlParseError if the query does not parse."""
    sql = parse_sql(gold_sql, schema)
    parts, nested, others = _components(sql), _nested(sql), _others(sql)
    if parts <= 1 and others == 0 and nested == 0:
        return "easy"
    if nested == 0 and ((others <= 2 and parts <= 1) or (parts <= 2 and others < 2)):
        return "medium"
    if nested == 0 and ((others > 2 and parts <= 2) or (2 < parts <= 3 and others <= 2)):
        return "hard"
    if parts <= 1 and others == 0 and nested <= 1:
        return "hard"
    return "extra"


def _components(sql: dict) -> int:
    clauses = sum(bool(sql[clause]) for clause in ("where", "groupBy", "orderBy", "limit"))
    joins = max(len(sql["from"]["table_units"]) - 1, 0)
    conditions, connectors = split_conditions(sql)
    likes = sum(condition[1] == LIKE for condition in conditions)
    return clauses + joins + connectors.count("or") + likes


def _nested(sql: dict) -> int:
    conditions, _ = split_conditions(sql)
    values = [value for condition in conditions for value in condition[3:5]]
    return sum(isinstance(value, dict) for value in values) + sum(
        sql[operator] is not None for operator in SET_OPERATORS
    )


def _others(sql: dict) -> int:
    """How many of four lists are long. HAVING counts by its NOT flags and connectors (a known bug)."""
    units = sql["select"][1] + sql["where"][::2] + sql["groupBy"] + sql["having"]
    if sql["orderBy"]:
        units = units + [u for unit in sql["orderBy"][1] for u in unit[1:] if u is not None]
    aggregates = sum(unit[0] != NO_AGGREGATE for unit in units)
    lists = (sql["select"][1], sql["where"], sql["groupBy"])
    return (aggregates > 1) + sum(len(items) > 1 for items in lists)
