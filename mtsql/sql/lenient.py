"""The Spider structure from a lenient reading, for what the official grammar refuses."""

from __future__ import annotations

from sqlglot import exp

from mtsql.sql.structure import (
    AGGREGATES,
    ALL_COLUMNS,
    COMPARISONS,
    NO_AGGREGATE,
    NO_OPERATOR,
    SET_OPERATORS,
    UNIT_OPERATORS,
    SqlParseError,
    SqlSchema,
    column_id,
)
from mtsql.sql.tree import canonical_tree, join_condition, sources

COMPARISON_NODES = {
    exp.EQ: "=",
    exp.GT: ">",
    exp.LT: "<",
    exp.GTE: ">=",
    exp.LTE: "<=",
    exp.NEQ: "!=",
    exp.Like: "like",
    exp.Is: "is",
}
AGGREGATE_NODES = {exp.Max: "max", exp.Min: "min", exp.Count: "count", exp.Sum: "sum", exp.Avg: "avg"}
OPERATOR_NODES = {exp.Sub: "-", exp.Add: "+", exp.Mul: "*", exp.Div: "/"}
SET_NODES = {exp.Intersect: "intersect", exp.Union: "union", exp.Except: "except"}


def lenient_structure(sql: str, schema: SqlSchema) -> dict:
    """The structure of `sql`; kinds of joins, brackets in conditions and aliases disappear.

    Raises SqlParseError for what has no place in it: other functions, CASE, WITH, EXISTS.
    """
    return _Builder(schema).query(canonical_tree(sql, schema))


class _Builder:
    def __init__(self, schema: SqlSchema) -> None:
        self.schema = schema

    def query(self, node: exp.Expression) -> dict:
        if node.args.get("with_"):
            raise SqlParseError("WITH has no place in the structure")
        if isinstance(node, exp.Subquery):
            return self.query(node.this)
        if isinstance(node, exp.SetOperation):
            return self.set_operation(node)
        if not isinstance(node, exp.Select):
            raise SqlParseError(f"{node.key} has no place in the structure")
        args = node.args
        if not sources(node):
            raise SqlParseError("no FROM")
        return {
            "select": (bool(args.get("distinct")), [self.selected(e) for e in node.expressions]),
            "from": self.from_clause(node),
            "where": self.conditions(args["where"].this) if args.get("where") else [],
            "groupBy": [self.column_unit(e) for e in args["group"].expressions] if args.get("group") else [],
            "having": self.conditions(args["having"].this) if args.get("having") else [],
            **self.tail(node),
            **dict.fromkeys(SET_OPERATORS),
        }

    def set_operation(self, node: exp.SetOperation) -> dict:
        """The second query hangs on the last of the first; ORDER BY and LIMIT belong to it."""
        left, right = self.query(node.left), self.query(node.right)
        right |= {key: value for key, value in self.tail(node).items() if value}
        last = left
        while any(last[o] for o in SET_OPERATORS):
            last = next(last[o] for o in SET_OPERATORS if last[o])
        last[SET_NODES[type(node)]] = right
        return left

    def tail(self, node: exp.Query) -> dict:
        order, limit = node.args.get("order"), node.args.get("limit")
        if not order:
            return {"orderBy": [], "limit": 1 if limit else None}
        direction = "desc" if order.expressions[-1].args.get("desc") else "asc"
        units = [self.value_unit(item.this) for item in order.expressions]
        return {"orderBy": (direction, units), "limit": 1 if limit else None}

    def from_clause(self, select: exp.Select) -> dict:
        units: list[tuple] = []
        conditions: list = []
        for source in sources(select):
            if isinstance(source, exp.Table):
                if source.name not in self.schema.tables:
                    raise SqlParseError(f"unknown table {source.name!r}")
                units.append(("table_unit", f"__{source.name}__"))
            else:
                units.append(("sql", self.query(source)))
        for join in select.args.get("joins") or []:
            condition = join_condition(join)
            if condition is not None:
                found = self.conditions(condition)
                conditions += ["and", *found] if conditions else found
        return {"table_units": units, "conds": conditions}

    def selected(self, node: exp.Expression) -> tuple[int, tuple]:
        if type(node) in AGGREGATE_NODES:
            aggregate, column, distinct = self.column_unit(node)
            return aggregate, (NO_OPERATOR, (NO_AGGREGATE, column, distinct), None)
        return NO_AGGREGATE, self.value_unit(node)

    def conditions(self, node: exp.Expression) -> list:
        if isinstance(node, exp.Paren):
            return self.conditions(node.this)
        if isinstance(node, exp.And | exp.Or):
            return [*self.conditions(node.left), node.key, *self.conditions(node.right)]
        return [self.condition(node, negated=False)]

    def condition(self, node: exp.Expression, negated: bool) -> tuple:
        while isinstance(node, exp.Paren):
            node = node.this
        if isinstance(node, exp.Not):
            return self.condition(node.this, not negated)
        low: object
        high: object = None
        if isinstance(node, exp.Between):
            word, low, high = "between", self.value(node.args["low"]), self.value(node.args["high"])
        elif isinstance(node, exp.In):
            word, low = "in", self.members(node)
        elif type(node) in COMPARISON_NODES:
            word, low = COMPARISON_NODES[type(node)], self.value(node.expression)
        else:
            raise SqlParseError(f"{node.key} has no place in a condition")
        return negated, COMPARISONS.index(word), self.value_unit(node.this), low, high

    def members(self, node: exp.In) -> object:
        if node.args.get("query"):
            return self.query(node.args["query"])
        values = tuple(self.value(item) for item in node.expressions)
        if not values:
            raise SqlParseError("IN without values")
        return values if len(values) > 1 else values[0]

    def value(self, node: exp.Expression) -> object:
        while isinstance(node, exp.Paren):
            node = node.this
        if isinstance(node, exp.Query):
            return self.query(node)
        if isinstance(node, exp.Null | exp.Boolean):
            return node.sql().lower()
        if node.is_string:
            return f'"{node.this}"'
        if isinstance(node, exp.Neg) and isinstance(node.this, exp.Literal):
            return -_number(node.this)
        if isinstance(node, exp.Literal):
            return _number(node)
        return self.column_unit(node)

    def value_unit(self, node: exp.Expression) -> tuple:
        while isinstance(node, exp.Paren):
            node = node.this
        if type(node) in OPERATOR_NODES:
            operator = UNIT_OPERATORS.index(OPERATOR_NODES[type(node)])
            return operator, self.column_unit(node.left), self.column_unit(node.right)
        return NO_OPERATOR, self.column_unit(node), None

    def column_unit(self, node: exp.Expression) -> tuple[int, str, bool]:
        while isinstance(node, exp.Paren):
            node = node.this
        aggregate, distinct = NO_AGGREGATE, False
        if type(node) in AGGREGATE_NODES and not node.expressions:
            aggregate, node = AGGREGATES.index(AGGREGATE_NODES[type(node)]), node.this
        if isinstance(node, exp.Distinct) and len(node.expressions) == 1:
            distinct, node = True, node.expressions[0]
        return aggregate, self.column(node), distinct

    def column(self, node: exp.Expression | None) -> str:
        if isinstance(node, exp.Star) or (isinstance(node, exp.Column) and isinstance(node.this, exp.Star)):
            return ALL_COLUMNS
        if isinstance(node, exp.Column) and node.name in self.schema.tables.get(node.table, ()):
            return column_id(node.table, node.name)
        text = node.sql() if node else "nothing"
        raise SqlParseError(f"{text!r} is no column of the schema")


def _number(node: exp.Literal) -> float:
    try:
        return float(node.this)
    except ValueError:
        raise SqlParseError(f"{node.this!r} is no number") from None
