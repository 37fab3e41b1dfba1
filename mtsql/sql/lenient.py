"""The Spider structure from a lenient reading, for what the official grammar refuses."""

from __future__ import annotations

from dataclasses import dataclass

from sqlglot import exp

from mtsql.sql.grammar import MAX_DEPTH
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
from mtsql.sql.tree import (
    canonical_tree,
    clause_items,
    join_condition,
    sources,
    unbracketed,
    unreadable_if_it_fails,
)

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


def parse_lenient(sql: str, schema: SqlSchema) -> dict:
    """The structure of `sql`; kinds of joins, brackets in conditions and aliases disappear.

    What has no place in it (CASE, other functions, window functions, names that the schema lacks)
    stands as its text where a column would; a query of WITH counts among the tables.
    Raises SqlParseError for what sqlglot cannot read.
    """
    with unreadable_if_it_fails():
        return _Builder().query(canonical_tree(sql, schema))


@dataclass
class _Builder:
    """One method for each part of the structure."""

    depth: int = 0

    def query(self, node: exp.Expression) -> dict:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise SqlParseError("nested too deeply")
        made = self.body(node)
        self.depth -= 1
        with_clause = node.args.get("with_")
        for named in with_clause.expressions if with_clause else []:
            made["from"]["table_units"].append(("sql", self.query(named.this)))
        return made

    def body(self, node: exp.Expression) -> dict:
        if isinstance(node, exp.Subquery):
            return self.query(node.this)
        if isinstance(node, exp.SetOperation):
            return self.set_operation(node)
        selected, origin = [node], {"table_units": [], "conds": []}
        if isinstance(node, exp.Select):
            selected, origin = node.expressions, self.from_clause(node)
        return {
            "select": (bool(node.args.get("distinct")), [self.selected(e) for e in selected]),
            "from": origin,
            "where": self.conditions(*clause_items(node, "where")),
            "groupBy": [self.column_unit(item) for item in clause_items(node, "group")],
            "having": self.conditions(*clause_items(node, "having")),
            **self.tail(node),
            **dict.fromkeys(SET_OPERATORS),
        }

    def set_operation(self, node: exp.SetOperation) -> dict:
        """The second query hangs on the last of the first; ORDER BY and LIMIT belong to it."""
        left, right = self.query(node.left), self.query(node.right)
        right |= {key: value for key, value in self.tail(node).items() if value}
        last = left
        while later := [last[o] for o in SET_OPERATORS if last[o]]:
            last = later[0]
        last[SET_NODES[type(node)]] = right
        return left

    def tail(self, node: exp.Query) -> dict:
        order, limit = clause_items(node, "order"), 1 if node.args.get("limit") else None
        units = [self.value_unit(item.this) for item in order]
        direction = "desc" if order and order[-1].args.get("desc") else "asc"
        return {"orderBy": (direction, units) if order else [], "limit": limit}

    def from_clause(self, select: exp.Select) -> dict:
        units: list[tuple] = []
        conditions: list = []
        for source in sources(select):
            if isinstance(source, exp.Table):
                units.append(("table_unit", f"__{source.name}__"))
            else:
                units.append(("sql", self.query(source)))
        for join in select.args.get("joins") or []:
            found = self.conditions(*join_condition(join))
            conditions += ["and", *found] if conditions and found else found
        return {"table_units": units, "conds": conditions}

    def selected(self, node: exp.Expression) -> tuple[int, tuple]:
        if type(node) in AGGREGATE_NODES:
            aggregate, column, distinct = self.column_unit(node)
            return aggregate, (NO_OPERATOR, (NO_AGGREGATE, column, distinct), None)
        return NO_AGGREGATE, self.value_unit(node)

    def conditions(self, node: exp.Expression | None = None) -> list:
        if node is None:
            return []
        node = unbracketed(node)
        if isinstance(node, exp.And | exp.Or):
            return [*self.conditions(node.left), node.key, *self.conditions(node.right)]
        return [self.condition(node, negated=False)]

    def condition(self, node: exp.Expression, negated: bool) -> tuple:
        node = unbracketed(node)
        if isinstance(node, exp.Not):
            return self.condition(node.this, not negated)
        unit = node.this
        low = high = None
        if isinstance(node, exp.Between):
            word, low, high = "between", self.value(node.args["low"]), self.value(node.args["high"])
        elif isinstance(node, exp.In) and (node.args.get("query") or node.expressions):
            word, low = "in", self.members(node)
        elif isinstance(node, exp.Exists):
            word, unit, low = "exists", exp.Star(), self.value(node.this)
        elif type(node) in COMPARISON_NODES:
            word, low = COMPARISON_NODES[type(node)], self.value(node.expression)
        else:
            word, unit = "not", node  # a truth value without a comparison
        return negated, COMPARISONS.index(word), self.value_unit(unit), low, high

    def members(self, node: exp.In) -> object:
        if node.args.get("query"):
            return self.query(node.args["query"])
        values = tuple(self.value(item) for item in node.expressions)
        return values if len(values) > 1 else values[0]

    def value(self, node: exp.Expression) -> object:
        node = unbracketed(node)
        if isinstance(node, exp.Query):
            return self.query(node)
        if isinstance(node, exp.Null | exp.Boolean):
            return node.sql().lower()
        if node.is_string:
            return f'"{node.this}"'
        number = node.this if isinstance(node, exp.Neg) else node
        if isinstance(number, exp.Literal):
            try:
                return float(number.this) * (-1 if node is not number else 1)
            except ValueError:
                return number.this
        return self.column_unit(node)

    def value_unit(self, node: exp.Expression) -> tuple:
        node = unbracketed(node)
        if type(node) in OPERATOR_NODES:
            operator = UNIT_OPERATORS.index(OPERATOR_NODES[type(node)])
            return operator, self.column_unit(node.left), self.column_unit(node.right)
        return NO_OPERATOR, self.column_unit(node), None

    def column_unit(self, node: exp.Expression) -> tuple[int, str, bool]:
        node = unbracketed(node)
        aggregate, distinct = NO_AGGREGATE, False
        if type(node) in AGGREGATE_NODES and not node.expressions:
            aggregate, node = AGGREGATES.index(AGGREGATE_NODES[type(node)]), node.this
        if isinstance(node, exp.Distinct) and len(node.expressions) == 1:
            distinct, node = True, node.expressions[0]
        return aggregate, self.column(node), distinct

    def column(self, node: exp.Expression | None) -> str:
        if isinstance(node, exp.Star) or (isinstance(node, exp.Column) and isinstance(node.this, exp.Star)):
            return ALL_COLUMNS
        if isinstance(node, exp.Column) and node.table:
            return column_id(node.table, node.name)
        return node.sql(dialect="sqlite") if node else ""
