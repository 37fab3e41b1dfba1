"""Dialogues of the toy benchmark: the kinds of question and their queries; questions.toml has their words.

The follow-ups are SParC's four kinds (Yu et al., 2019, section 4): refine the constraints, ask for
another property, change the entity, ask about the answer. Later questions name only what changes.

Known faults, kept since a change makes another benchmark, on which the shipped models were not trained:
"fewest" (0.4 % of the questions) and "each" (1.0 %) pass over parents without children, "without the ones"
may take away values and not rows (0.2 %), and "their" may be of child or parent where both have the column.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace
from typing import Any, TypeAlias

from mtsql.toy.database import ADJECTIVES, ASKING, CATEGORIES, NUMBERS, Column, Database, Table
from mtsql.toy.query import AGGREGATES, COUNT, Condition, Query, listing_of

WORDINGS: dict[str, list[str]] = ASKING["conditions"] | ASKING["questions"]
OF_CHILDREN = ("parent_condition", "pair", "children", "childless")  # asked of tables that have a parent
Asked: TypeAlias = tuple[str, Query]  # a question and the query that answers it


class CannotAsk(Exception):
    """A kind of question does not fit this database or what was asked before."""


def require(fits: Any) -> None:
    """Raise CannotAsk unless `fits` is true or not empty."""
    if not fits:
        raise CannotAsk


class Speaker:
    """Makes the questions of one dialogue over one database; what does not fit it raises CannotAsk."""

    def __init__(self, database: Database, rng: random.Random) -> None:
        self.database = database
        self.rng = rng

    def ask(self, last: Query | None) -> Asked:
        """A question about, or in place of, what was asked last; without that one that stands on its own.

        Its kind, the name of one of the methods below, is drawn by the kinds' weights.
        """
        if not last:
            children = [t for t in self.database if t.parent]
            table, child = self.rng.choice(self.database + children), self.rng.choice(children)
        kinds = ASKING["weights"]["follow_up" if last else "first"]
        kind = self.rng.choices(list(kinds), list(kinds.values()))[0]
        return getattr(self, kind)(last or (child if kind in OF_CHILDREN else table))

    def put(self, kind: str, /, **said: Any) -> str:
        """One of the wordings of a kind, with its blanks filled by `said`."""
        wordings = WORDINGS[kind]
        return (self.rng.choice(wordings) if len(wordings) > 1 else wordings[0]).format(**said)

    def asked(self, kind: str, query: Query, /, **said: Any) -> Asked:
        """A question of a kind; its wordings call the query {query} and the query's main table {table}."""
        return self.put(kind, query=query, table=query.table, **said), query

    # Columns and conditions

    def column(self, table: Table, forms: Collection[str] = (), avoid: Collection[Column] = ()) -> Column:
        """A random column of `table` of one of these forms, or of any, but for those of `avoid`."""
        fitting = table.of(forms, avoid)
        require(fitting)
        return self.rng.choice(fitting)

    def condition(self, table: Table, avoid: tuple[Condition, ...] = ()) -> Condition:
        """A condition on a column of `table` that no condition of `avoid` uses."""
        used = {c.column for c in avoid}
        categories, numbers = table.of(CATEGORIES, used), table.of(NUMBERS, used)
        if categories and (self.rng.random() < 0.68 or not numbers):
            column = self.rng.choice(categories)
            return Condition(column, "=", self.rng.choice(column.distinct))
        require(numbers)
        column = self.rng.choice(numbers)
        quarter = len(column.values) // 4
        value = self.rng.choice(sorted(column.values)[quarter:-quarter])
        return Condition(column, self.rng.choice((">", "<", ">")), value)

    def restrict(self, query: Query, table: Table, restricted: int) -> Query:
        """The query with one more condition on a column of `table`, or as it is."""
        return query.under(self.condition(table, query.where)) if restricted else query

    def average_condition(self, table: Table) -> Condition:
        """`column > (SELECT avg(column) FROM table)`, or `<`, for a random column."""
        column = self.column(table, ("amount",))
        return Condition(column, self.rng.choice((">", "<")), Query(table, (("avg", column),)))

    def aggregate(self, table: Table) -> tuple[str, Column]:
        """An average, maximum, minimum or total to select."""
        column = self.column(table, ("amount",))
        return self.rng.choice(list(AGGREGATES)), column

    def order(self, table: Table, *directions: str) -> tuple[str, Column, str]:
        """An order by a number in one of the directions."""
        column = self.column(table, NUMBERS)
        return "", column, self.rng.choice(directions)

    def say(self, condition: Condition, main: Table) -> str:
        """A condition as an English phrase that stands behind the plural of `main`."""
        column, value, more = condition.column, condition.value, condition.op == ">"
        if column.table is not main:
            return self.put("parent", other=column.table, inner=self.say(condition, column.table))
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
        if column.phrase in ADJECTIVES and (average or self.rng.random() < 0.7):
            return f"{ADJECTIVES[column.phrase][not more]} {bound}"
        kind = ("more" if more else "less") + ("_average" if average else "")
        return self.put(kind, column=column, bound=bound)

    def say_all(self, query: Query, main: Table | None = None) -> str:
        """All conditions of a query as such a phrase with a leading blank; "" without conditions."""
        main = main or query.table
        return "".join((" and " if i else " ") + self.say(c, main) for i, c in enumerate(query.where))

    # First questions

    def listing(self, query: Query) -> Asked:
        """A question for the selected columns of a query, none of which a condition says already."""
        columns = [c for _, c in query.select]
        require(not any(c.op == "=" and c.column in columns for c in query.where))
        such = self.say_all(query)
        if columns == [query.table.label] and query.where and self.rng.random() < 0.5:
            return self.asked("list_entities", query, such=such)
        wanted = " and ".join(c.plural for c in columns)
        every = "" if query.where else self.rng.choice(("all ", "the ", ""))
        return self.asked("list", query, such=such, wanted=wanted, every=every)

    def one_column(self, table: Table) -> Asked:
        """A column under at most one condition."""
        restricted = self.rng.choice((0, 1, 1))
        column = table.label if self.rng.random() < 0.6 else self.column(table)
        return self.listing(self.restrict(listing_of(table, column), table, restricted))

    def two_columns(self, table: Table) -> Asked:
        """Two columns under at most one condition."""
        restricted = self.rng.choice((0, 1))
        column = self.column(table)
        columns = column, self.column(table, avoid=[column])
        return self.listing(self.restrict(listing_of(table, *columns), table, restricted))

    def count(self, table: Table) -> Asked:
        """How many there are."""
        query = self.restrict(Query(table, (COUNT,)), table, self.rng.choice((0, 1, 1)))
        return self.asked("count", query, such=self.say_all(query))

    def one_aggregate(self, table: Table) -> Asked:
        """An average, maximum, minimum or total."""
        restricted = self.rng.choice((0, 1))
        query = self.restrict(Query(table, (self.aggregate(table),)), table, restricted)
        return self.asked("aggregate", query, such=self.say_all(query), again=self.say_all(query))

    def group(self, table: Table) -> Asked:
        """A count for each value of a column."""
        column = self.column(table, CATEGORIES)
        return self.asked("group", Query(table, (("", column), COUNT), group=column))

    def having(self, table: Table) -> Asked:
        """Values that occur often enough."""
        column = self.column(table, CATEGORIES)
        query = replace(listing_of(table, column), group=column, least=self.rng.choice((2, 3)))
        return self.asked("having", query)

    def superlative(self, table: Table) -> Asked:
        """The entity with the most or the least of something."""
        order = self.order(table, "DESC", "DESC", "ASC")
        query = replace(listing_of(table, table.label), order=order, limit=1)
        _, column, direction = order
        if column.phrase in ADJECTIVES:
            return self.asked("most", query, most=ADJECTIVES[column.phrase][2 if direction == "DESC" else 3])
        return self.asked("highest", query)

    def parent_condition(self, table: Table) -> Asked:
        """Entities whose parent meets a condition: a join."""
        restricted = self.rng.choice((0, 0, 1))
        condition = self.condition(table.parent)
        counting = self.rng.random() < 0.3
        query = Query(table, (COUNT if counting else ("", table.label),), (condition,))
        query = self.restrict(query, table, restricted)
        if counting:
            return self.asked("count_joined", query, such=self.say_all(query))
        return self.listing(query)

    def pair(self, table: Table) -> Asked:
        """Each entity beside its parent: a join without conditions."""
        column = self.column(table.parent)
        return self.asked("pair", listing_of(table, table.label, column), column=column)

    def children(self, table: Table) -> Asked:
        """Parents by their number of children: count each, the most, or at least so many."""
        restricted = self.rng.choice((0, 0, 0, 1))
        label = table.parent.label
        query = replace(listing_of(table.parent, label), group=label, joined=table)
        kind = self.rng.choice(("each", "most", "fewest", "having"))
        query = self.restrict(query, table, restricted)
        children = table.plural + self.say_all(query, table)
        if kind == "each":
            query = replace(query, select=(*query.select, COUNT))
            return self.asked("children_each", query, children=children)
        if kind == "having":
            query = replace(query, least=self.rng.choice((2, 3)))
            return self.asked("children_having", query, children=children)
        query = replace(query, order=(*COUNT, "DESC" if kind == "most" else "ASC"), limit=1)
        return self.asked("children_extreme", query, children=children, kind=kind)

    def nested(self, table: Table) -> Asked:
        """Entities above or below the average: a nested query."""
        return self.listing(listing_of(table, table.label).under(self.average_condition(table)))

    def childless(self, table: Table) -> Asked:
        """Parents without children: NOT IN."""
        parent = table.parent
        condition = Condition(parent.key, "NOT IN", listing_of(table, table.link))
        return self.asked("childless", listing_of(parent, parent.label).under(condition), child=table)

    def both(self, table: Table) -> Asked:
        """Values shared by two kinds of entity: INTERSECT."""
        categories = table.of(CATEGORIES)
        column = self.rng.choice(categories) if categories else None
        number = self.column(table, NUMBERS)
        require(column)
        seen, half = sorted(number.values), len(number.values) // 2
        first = listing_of(table, column).under(Condition(number, "<", seen[half]))
        second = listing_of(table, column).under(Condition(number, ">", seen[half - 1]))
        query = replace(first, combined=("INTERSECT", second))
        return self.asked("both", query, such=self.say_all(first), others=self.say_all(second))

    # Follow-ups to `query`

    def refine(self, query: Query) -> Asked:
        """Add a constraint, on the entity itself or on its parent."""
        require(query.is_plain and len(query.where) <= 2)
        of_parent = query.table.parent and self.rng.random() < 0.25
        condition = self.condition(query.table.parent if of_parent else query.table, query.where)
        return self.asked("refine", query.under(condition), such=self.say(condition, query.table))

    def other_property(self, query: Query) -> Asked:
        """Other columns of the same entities."""
        require(query.is_list)
        shown = [c for _, c in query.select] + [c.column for c in query.where if c.op == "="]
        kind = "property_of_one" if query.limit else "property_of_each"
        return self.asked(kind, query.showing(self.column(query.table, avoid=shown)))

    def other_value(self, query: Query) -> Asked:
        """The same question about another entity: one value takes the place of another."""
        fitting = [c for c in query.where if c.op == "="]
        require(fitting and not query.combined)
        old = self.rng.choice(fitting)
        others = [word for word in old.column.distinct if word != old.value]
        require(others)
        word = self.rng.choice(others)
        return self.asked("other_value", query.changed(old, replace(old, value=word)), word=word)

    def negate(self, query: Query) -> Asked:
        """The others: an equality becomes an inequality."""
        require(query.is_plain and query.where and query.where[-1].op == "=")
        new = replace(query.where[-1], op="!=")
        return self.asked("negate", query.changed(query.where[-1], new), such=self.say(new, query.table))

    def count_those(self, query: Query) -> Asked:
        """How many the last answer holds."""
        require(query.is_plain and query.is_list and query.where)
        return self.asked("count_those", replace(query, select=(COUNT,)))

    def list_those(self, query: Query) -> Asked:
        """Who they are, after a count or an average."""
        require(query.is_plain and not query.is_list)
        return self.asked("list_those", query.showing(query.table.label))

    def aggregate_those(self, query: Query) -> Asked:
        """An average, maximum, minimum or total over the last answer."""
        require(query.is_plain)
        return self.asked("aggregate_those", replace(query, select=(self.aggregate(query.table),)))

    def sort_those(self, query: Query) -> Asked:
        """The same list in an order."""
        require(query.is_plain and query.is_list)
        return self.asked("sort_those", replace(query, order=self.order(query.table, "DESC", "ASC")))

    def extreme_of_those(self, query: Query) -> Asked:
        """The one with the most of something among the last answer."""
        require(query.is_plain)
        order = self.order(query.table, "DESC", "ASC")
        return self.asked("extreme_of_those", replace(query.showing(query.table.label), order=order, limit=1))

    def group_those(self, query: Query) -> Asked:
        """The last answer counted by a column."""
        require(query.is_plain)
        column = self.column(query.table, CATEGORIES, [c.column for c in query.where])
        return self.asked("group_those", replace(query, select=(("", column), COUNT), group=column))

    def about_groups(self, query: Query) -> Asked:
        """The largest group, or the large ones."""
        require(query.group and not (query.order or query.least))
        grouped = query.group.table
        name = grouped.singular if query.group is grouped.label else query.group.phrase
        query = query.showing(query.group)
        if self.rng.random() < 0.5:
            return self.asked("largest_group", replace(query, order=(*COUNT, "DESC"), limit=1), name=name)
        return self.asked("large_groups", replace(query, least=self.rng.choice((2, 3))))

    def above_average(self, query: Query) -> Asked:
        """A nested constraint."""
        require(query.is_plain and query.is_list and len(query.where) <= 1)
        condition = self.average_condition(query.table)
        require(condition.column not in {c.column for c in query.where})
        return self.asked("above_average", query.under(condition), such=self.say(condition, query.table))

    def combine(self, query: Query) -> Asked:
        """Leave some out (EXCEPT) or add some (UNION)."""
        require(query.is_plain and query.is_list and len(query.where) <= 1 and len(query.select) <= 1)
        condition = self.condition(query.table, query.where)
        such = self.say(condition, query.table)
        out = self.rng.random() < 0.6 or not query.where
        kind, operator = ("leave_out", "EXCEPT") if out else ("add", "UNION")
        other = Query(query.table, query.select, (condition,))
        return self.asked(kind, replace(query, combined=(operator, other)), such=such)

    def parents_of_those(self, query: Query) -> Asked:
        """What the entities of the answer belong to."""
        parent = query.table.parent
        require(parent and query.is_list)
        column = parent.label if self.rng.random() < 0.6 else self.column(parent)
        return self.asked("parent_of_one" if query.limit else "parent_of_each", query.showing(column))
