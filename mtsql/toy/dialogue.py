"""Dialogues of the toy benchmark: the kinds of question and their queries; questions.toml has their words.

The follow-ups are SParC's four kinds (Yu et al., 2019, section 4): refine the constraints, ask for
another property, change the entity, ask about the answer. Later questions name only what changes.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from mtsql.toy import words
from mtsql.toy.database import CATEGORIES, NUMBERS, Column, Table, ToyDatabase
from mtsql.toy.query import Condition, Query

AGGREGATES = {"avg": "average", "max": "highest", "min": "lowest", "sum": "total"}
WORDINGS: Mapping[str, list[str]] = words.ASKING["conditions"] | words.ASKING["questions"]
OF_CHILDREN = ("parent_condition", "pair", "children", "childless")  # asked of tables that have a parent


class CannotAsk(Exception):
    """A kind of question does not fit this database or what was asked before."""


def require(fits: Any) -> None:
    """Raise CannotAsk unless `fits` is true or not empty."""
    if not fits:
        raise CannotAsk


class Asked(NamedTuple):
    """A question and the query that answers it."""

    question: str
    query: Query


def _plain(query: Query) -> bool:
    """A list, count or aggregate under conditions, and nothing more."""
    return not (query.group or query.order or query.combined or query.joined)


def _plain_list(query: Query) -> bool:
    """Columns under conditions, and nothing more."""
    return _plain(query) and not query.select[0][0]


class Speaker:
    """Makes the questions of one dialogue over one database; what does not fit it raises CannotAsk."""

    def __init__(self, database: ToyDatabase, rng: random.Random) -> None:
        self.database = database
        self.rng = rng

    def ask_first(self) -> Asked:
        """A question that stands on its own."""
        tables = list(self.database.tables.values())
        children = [t for t in tables if t.foreign_key]
        table, child = self.rng.choice(tables + children), self.rng.choice(children)
        kind = self.draw("first")
        return getattr(self, kind)(child if kind in OF_CHILDREN else table)

    def ask_follow_up(self, query: Query) -> Asked:
        """A question about, or in place of, what was asked last."""
        return getattr(self, self.draw("follow_up"))(query, self.database.tables[query.table])

    def draw(self, which: str) -> str:
        """A kind of question, the name of one of the methods below, at random by the kinds' weights."""
        kinds = words.ASKING["weights"][which]
        return self.rng.choices(list(kinds), list(kinds.values()))[0]

    def put(self, kind: str, /, **said: Any) -> str:
        """One of the wordings of a kind, with its blanks filled by `said`."""
        wordings = WORDINGS[kind]
        return (self.rng.choice(wordings) if len(wordings) > 1 else wordings[0]).format(**said)

    def ask(self, kind: str, query: Query, /, **said: Any) -> Asked:
        """A question of a kind for a query, whose main table its wordings call {table}."""
        return Asked(self.put(kind, table=self.database.tables[query.table], **said), query)

    # Columns and conditions

    def column(self, table: Table, forms: Collection[str] = (), avoid: Collection[Column] = ()) -> Column:
        """A random column of `table` of one of these forms, or of any, but for those of `avoid`."""
        fitting = table.of(forms, avoid)
        require(fitting)
        return self.rng.choice(fitting)

    def numbers_in(self, table: Table, column: Column) -> list[int]:
        """The values of a column of numbers, from small to large."""
        place = 1 + table.columns.index(column)
        return sorted(row[place] for row in self.database.rows[table.name])

    def condition(self, table: Table, avoid: tuple[Condition, ...] = ()) -> Condition:
        """A condition on a column of `table` that no condition of `avoid` uses."""
        used = {c.column for c in avoid}
        categories, numbers = table.of(CATEGORIES, used), table.of(NUMBERS, used)
        if categories and (self.rng.random() < 0.68 or not numbers):
            column = self.rng.choice(categories)
            return Condition(column, "=", self.rng.choice(self.database.words_of[column]))
        require(numbers)
        column = self.rng.choice(numbers)
        seen = self.numbers_in(table, column)
        value = self.rng.choice(seen[len(seen) // 4 : -(len(seen) // 4)])
        return Condition(column, self.rng.choice((">", "<", ">")), value)

    def with_conditions(self, query: Query, table: Table, count: int) -> Query:
        """The query with `count` more conditions on columns of `table`."""
        for _ in range(count):
            query = query.under(self.condition(table, query.where))
        return query

    def average_condition(self, table: Table) -> Condition:
        """`column > (SELECT avg(column) FROM table)`, or `<`, for a random column."""
        column = self.column(table, ("amount",))
        return Condition(column, self.rng.choice((">", "<")), Query(table.name, (("avg", column),)))

    def aggregate(self, table: Table) -> tuple[tuple[str, Column], str]:
        """An average, maximum, minimum or total to select, and its name."""
        column = self.column(table, ("amount",))
        aggregate = self.rng.choice(list(AGGREGATES))
        return (aggregate, column), f"{AGGREGATES[aggregate]} {column.phrase}"

    def order(self, table: Table, *directions: str) -> tuple[tuple[str, Column, str], str]:
        """An order by a number in one of the directions, and the word for what comes first."""
        column = self.column(table, NUMBERS)
        direction = self.rng.choice(directions)
        extremes = ("latest", "earliest") if column.form == "year" else ("highest", "lowest")
        return ("", column, direction), extremes[direction == "ASC"]

    def say(self, condition: Condition, main: Table) -> str:
        """A condition as an English phrase that stands behind the plural of `main`."""
        column, value, more = condition.column, condition.value, condition.op == ">"
        if column.table != main.name:
            other = self.database.tables[column.table]
            return self.put("parent", other=other, inner=self.say(condition, other))
        if isinstance(value, str):
            negated = condition.op == "!="
            if column.kind in ("city", "country"):
                at = "from" if main.person or column.kind == "country" else "in"
                return f"{'not ' if negated else ''}{at} {value}"
            return self.put("is_not" if negated else "is", column=column, bound=value)
        if column.form == "year":
            when = "after" if more else "before"
            return f"from {when} {value}" if column.phrase == "year" else f"with {column.a} {when} {value}"
        average = isinstance(value, Query)
        bound = "the average" if average else value
        if column.phrase in words.ADJECTIVES and (average or self.rng.random() < 0.7):
            return f"{words.ADJECTIVES[column.phrase][not more]} {bound}"
        kind = ("more" if more else "less") + ("_average" if average else "")
        return self.put(kind, column=column, bound=bound)

    def say_all(self, query: Query, main: Table | None = None) -> str:
        """All conditions of a query as such a phrase with a leading blank; "" without conditions."""
        main = main or self.database.tables[query.table]
        return "".join((" and " if i else " ") + self.say(c, main) for i, c in enumerate(query.where))

    # First questions

    def listing(self, query: Query) -> Asked:
        """A question for the selected columns of a query."""
        such = self.say_all(query)
        columns = [c for _, c in query.select]
        label = self.database.tables[query.table].label
        if columns == [label] and query.where and self.rng.random() < 0.5:
            return self.ask("list_entities", query, such=such)
        wanted = " and ".join(c.plural for c in columns)
        every = "" if query.where else self.rng.choice(("all ", "the ", ""))
        return self.ask("list", query, such=such, wanted=wanted, every=every)

    def one_column(self, table: Table) -> Asked:
        """A column under at most one condition."""
        return self._columns(table, 1, self.rng.choice((0, 1, 1)))

    def two_columns(self, table: Table) -> Asked:
        """Two columns under at most one condition."""
        return self._columns(table, 2, self.rng.choice((0, 1)))

    def _columns(self, table: Table, count: int, conditions: int) -> Asked:
        chosen = [table.label] if count == 1 and self.rng.random() < 0.6 else []
        while len(chosen) < count:
            chosen.append(self.column(table, avoid=chosen))
        query = Query(table.name, tuple(("", c) for c in chosen))
        query = self.with_conditions(query, table, conditions)
        require(not {c.column for c in query.where if c.op == "="} & set(chosen))
        return self.listing(query)

    def count(self, table: Table) -> Asked:
        """How many there are."""
        conditions = self.rng.choice((0, 1, 1))
        query = self.with_conditions(Query(table.name, (("count", None),)), table, conditions)
        return self.ask("count", query, such=self.say_all(query))

    def one_aggregate(self, table: Table) -> Asked:
        """An average, maximum, minimum or total."""
        conditions = self.rng.choice((0, 1))
        selected, name = self.aggregate(table)
        query = self.with_conditions(Query(table.name, (selected,)), table, conditions)
        return self.ask("aggregate", query, name=name, such=self.say_all(query), again=self.say_all(query))

    def group(self, table: Table) -> Asked:
        """A count for each value of a column."""
        column = self.column(table, CATEGORIES)
        query = Query(table.name, (("", column), ("count", None)), group=column)
        return self.ask("group", query, column=column)

    def having(self, table: Table) -> Asked:
        """Values that occur often enough."""
        column = self.column(table, CATEGORIES)
        least = self.rng.choice((2, 3))
        query = Query(table.name, (("", column),), group=column, least=least)
        return self.ask("having", query, column=column, least=least)

    def superlative(self, table: Table) -> Asked:
        """The entity with the most or the least of something."""
        order, extreme = self.order(table, "DESC", "DESC", "ASC")
        _, column, direction = order
        query = Query(table.name, (("", table.label),), order=order, limit=1)
        if column.phrase in words.ADJECTIVES:
            most = words.ADJECTIVES[column.phrase][2 if direction == "DESC" else 3]
            return self.ask("most", query, most=most)
        return self.ask("highest", query, extreme=extreme, column=column)

    def parent_condition(self, table: Table) -> Asked:
        """Entities whose parent meets a condition: a join."""
        conditions = self.rng.choice((0, 0, 1))
        condition = self.condition(self.database.parent(table.name))
        counting = self.rng.random() < 0.3
        query = Query(table.name, (("count", None),) if counting else (("", table.label),), (condition,))
        query = self.with_conditions(query, table, conditions)
        if counting:
            return self.ask("count_joined", query, such=self.say_all(query))
        return self.listing(query)

    def pair(self, table: Table) -> Asked:
        """Each entity beside its parent: a join without conditions."""
        parent = self.database.parent(table.name)
        column = self.rng.choice(parent.columns)
        query = Query(table.name, (("", table.label), ("", column)))
        return self.ask("pair", query, column=column, parent=parent)

    def children(self, table: Table) -> Asked:
        """Parents by their number of children: count each, the most, or at least so many."""
        conditions = self.rng.choice((0, 0, 0, 1))
        parent = self.database.parent(table.name)
        query = Query(parent.name, (("", parent.label),), group=parent.label, joined=table.name)
        kind = self.rng.choice(("each", "most", "fewest", "having"))
        query = self.with_conditions(query, table, conditions)
        children = table.plural + self.say_all(query, table)
        if kind == "each":
            query = replace(query, select=(*query.select, ("count", None)))
            return self.ask("children_each", query, children=children)
        if kind == "having":
            query = replace(query, least=self.rng.choice((2, 3)))
            return self.ask("children_having", query, children=children, least=query.least)
        order = ("count", None, "DESC" if kind == "most" else "ASC")
        return self.ask(
            "children_extreme", replace(query, order=order, limit=1), children=children, kind=kind
        )

    def nested(self, table: Table) -> Asked:
        """Entities above or below the average: a nested query."""
        return self.listing(Query(table.name, (("", table.label),), (self.average_condition(table),)))

    def childless(self, table: Table) -> Asked:
        """Parents without children: NOT IN."""
        parent = self.database.parent(table.name)
        inner = Query(table.name, (("", Column(table.name, table.foreign_key[0])),))
        condition = Condition(Column(parent.name, parent.key), "NOT IN", inner)
        return self.ask("childless", Query(parent.name, (("", parent.label),), (condition,)), child=table)

    def both(self, table: Table) -> Asked:
        """Values shared by two kinds of entity: INTERSECT."""
        categories = table.of(CATEGORIES)
        column = self.rng.choice(categories) if categories else None
        number = self.column(table, NUMBERS)
        require(column)
        seen = self.numbers_in(table, number)
        low, high = seen[len(seen) // 2], seen[len(seen) // 2 - 1]
        first = Query(table.name, (("", column),), (Condition(number, "<", low),))
        second = Query(table.name, (("", column),), (Condition(number, ">", high),))
        query = replace(first, combined=("INTERSECT", second))
        return self.ask("both", query, column=column, such=self.say_all(first), others=self.say_all(second))

    # Follow-ups to `query`, whose main table is `table`

    def refine(self, query: Query, table: Table) -> Asked:
        """Add a constraint, on the entity itself or on its parent."""
        require(_plain(query) and len(query.where) <= 2)
        parent = self.database.parent(query.table)
        source = parent if parent and self.rng.random() < 0.25 else table
        condition = self.condition(source, query.where)
        return self.ask("refine", query.under(condition), such=self.say(condition, table))

    def other_property(self, query: Query, table: Table) -> Asked:
        """Other columns of the same entities."""
        require(not (query.group or query.combined or any(a for a, _ in query.select)))
        shown = [c for _, c in query.select] + [c.column for c in query.where if c.op == "="]
        column = self.column(table, avoid=shown)
        kind = "property_of_one" if query.limit else "property_of_each"
        return self.ask(kind, query.showing(column), column=column, its="their" if table.person else "its")

    def other_value(self, query: Query, table: Table) -> Asked:
        """The same question about another entity: one value takes the place of another."""
        fitting = [c for c in query.where if isinstance(c.value, str) and c.op == "="]
        require(fitting and not query.combined)
        old = self.rng.choice(fitting)
        others = [w for w in self.database.words_of[old.column] if w != old.value]
        require(others)
        word = self.rng.choice(others)
        return self.ask("other_value", query.changed(old, replace(old, value=word)), word=word)

    def negate(self, query: Query, table: Table) -> Asked:
        """The others: an equality becomes an inequality."""
        require(_plain(query) and query.where)
        old = query.where[-1]
        require(isinstance(old.value, str) and old.op == "=")
        new = replace(old, op="!=")
        return self.ask("negate", query.changed(old, new), such=self.say(new, table))

    def count_those(self, query: Query, table: Table) -> Asked:
        """How many the last answer holds."""
        require(_plain_list(query) and query.where)
        return self.ask("count_those", replace(query, select=(("count", None),)))

    def list_those(self, query: Query, table: Table) -> Asked:
        """Who they are, after a count or an average."""
        require(_plain(query) and not _plain_list(query))
        return self.ask("list_those", query.showing(table.label))

    def aggregate_those(self, query: Query, table: Table) -> Asked:
        """An average, maximum, minimum or total over the last answer."""
        require(_plain(query))
        selected, name = self.aggregate(table)
        return self.ask("aggregate_those", replace(query, select=(selected,)), name=name)

    def sort_those(self, query: Query, table: Table) -> Asked:
        """The same list in an order."""
        require(_plain_list(query))
        order, extreme = self.order(table, "DESC", "ASC")
        return self.ask("sort_those", replace(query, order=order), column=order[1], extreme=extreme)

    def extreme_of_those(self, query: Query, table: Table) -> Asked:
        """The one with the most of something among the last answer."""
        require(_plain(query))
        order, extreme = self.order(table, "DESC", "ASC")
        query = replace(query.showing(table.label), order=order, limit=1)
        return self.ask("extreme_of_those", query, column=order[1], extreme=extreme)

    def group_those(self, query: Query, table: Table) -> Asked:
        """The last answer counted by a column."""
        require(_plain(query))
        column = self.column(table, CATEGORIES, [c.column for c in query.where])
        query = replace(query, select=(("", column), ("count", None)), group=column)
        return self.ask("group_those", query, column=column)

    def about_groups(self, query: Query, table: Table) -> Asked:
        """The largest group, or the large ones."""
        require(query.group and not (query.order or query.least))
        grouped = self.database.tables[query.group.table]
        name = grouped.singular if query.group == grouped.label else query.group.phrase
        query = query.showing(query.group)
        if self.rng.random() < 0.5:
            return self.ask(
                "largest_group", replace(query, order=("count", None, "DESC"), limit=1), name=name
            )
        least = self.rng.choice((2, 3))
        return self.ask("large_groups", replace(query, least=least), least=least)

    def above_average(self, query: Query, table: Table) -> Asked:
        """A nested constraint."""
        require(_plain_list(query) and len(query.where) <= 1)
        condition = self.average_condition(table)
        require(condition.column not in {c.column for c in query.where})
        return self.ask("above_average", query.under(condition), such=self.say(condition, table))

    def combine(self, query: Query, table: Table) -> Asked:
        """Leave some out (EXCEPT) or add some (UNION)."""
        require(_plain_list(query) and len(query.where) <= 1 and len(query.select) <= 1)
        condition = self.condition(table, query.where)
        such = self.say(condition, table)
        kind, operator = (
            ("leave_out", "EXCEPT") if self.rng.random() < 0.6 or not query.where else ("add", "UNION")
        )
        other = Query(query.table, query.select, (condition,))
        return self.ask(kind, replace(query, combined=(operator, other)), such=such)

    def parents_of_those(self, query: Query, table: Table) -> Asked:
        """What the entities of the answer belong to."""
        parent = self.database.parent(query.table)
        require(parent and not (query.group or query.combined or query.select[0][0]))
        column = parent.label if self.rng.random() < 0.6 else self.rng.choice(parent.columns)
        kind, its = "parent_of_one" if query.limit else "parent_of_each", "their" if table.person else "its"
        return self.ask(kind, query.showing(column), column=column, parent=parent, its=its)
