"""Dialogues of the toy benchmark: questions in English with their queries.

The follow-ups are SParC's four kinds (Yu et al., 2019, section 4): refine the constraints, ask for
another property, change the entity, ask about the answer. Later questions name only what changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mtsql.toy import words
from mtsql.toy.database import Column, Table, ToyDatabase
from mtsql.toy.query import Condition, Query

AGGREGATES = {"avg": "average", "max": "highest", "min": "lowest", "sum": "total"}
Ask = Callable[..., "Asked"]
Weights = Mapping[Ask, int]  # how likely a kind of question is


class CannotAsk(Exception):
    """A kind of question does not fit this database or what was asked before."""


def require(fits: Any) -> None:
    """Raise CannotAsk unless `fits` is true or not empty."""
    if not fits:
        raise CannotAsk


@dataclass(frozen=True)
class Asked:
    """A question and the query that answers it."""

    question: str
    query: Query


def _nouns(column: Column) -> str:
    """The plural of a column's phrase."""
    phrase = column.phrase
    if phrase.startswith("number of"):
        return "numbers of" + phrase.removeprefix("number of")
    if phrase.endswith("y") and phrase != "pay":
        return phrase[:-1] + "ies"
    return phrase + ("es" if phrase.endswith("s") else "s")


def _a(column: Column) -> str:
    """A column's phrase behind its article."""
    return ("an " if column.phrase[0] in "aei" else "a ") + column.phrase


class Speaker:
    """Makes the questions of one dialogue over one database; what does not fit it raises CannotAsk."""

    def __init__(self, database: ToyDatabase, rng: random.Random) -> None:
        self.database = database
        self.rng = rng

    def pick(self, *options: str) -> str:
        """One of several wordings, at random."""
        return self.rng.choice(options)

    def draw(self, kinds: Weights) -> Ask:
        """One of several kinds of question, at random by their weights."""
        return self.rng.choices(list(kinds), list(kinds.values()))[0]

    # Columns and conditions

    def column(self, table: Table, test: Callable[[Column], bool]) -> Column:
        """A random column of `table` that passes `test`."""
        fitting = [c for c in table.columns if test(c)]
        require(fitting)
        return self.rng.choice(fitting)

    def numbers_in(self, table: Table, column: Column) -> list[int]:
        """The values of a column of numbers, from small to large."""
        place = 1 + table.columns.index(column)
        return sorted(row[place] for row in self.database.rows[table.name])

    def condition(self, table: Table, avoid: tuple[Condition, ...] = ()) -> Condition:
        """A condition on a column of `table` that no condition of `avoid` uses."""
        used = {c.column for c in avoid}
        categories = [c for c in table.columns if c.is_category and c not in used]
        numbers = [c for c in table.columns if c.is_number and c not in used]
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
            query = replace(query, where=(*query.where, self.condition(table, query.where)))
        return query

    def average_condition(self, table: Table) -> Condition:
        """`column > (SELECT avg(column) FROM table)`, or `<`, for a random column."""
        column = self.column(table, lambda c: c.is_amount)
        inner = Query(table.name, (("avg", column),))
        return Condition(column, self.rng.choice((">", "<")), inner)

    def aggregate(self, table: Table) -> tuple[tuple[str, Column], str]:
        """An average, maximum, minimum or total to select, and its name."""
        column = self.column(table, lambda c: c.is_amount)
        aggregate = self.rng.choice(list(AGGREGATES))
        return (aggregate, column), f"{AGGREGATES[aggregate]} {column.phrase}"

    def order(self, table: Table, *directions: str) -> tuple[tuple[str, Column, str], str]:
        """An order by a number in one of the directions, and the word for what comes first."""
        column = self.column(table, lambda c: c.is_number)
        direction = self.pick(*directions)
        extremes = ("latest", "earliest") if column.form == "year" else ("highest", "lowest")
        return ("", column, direction), extremes[direction == "ASC"]

    def say(self, condition: Condition, main: Table) -> str:
        """A condition as an English phrase that stands behind the plural of `main`."""
        column, value = condition.column, condition.value
        if column.table != main.name:
            other = self.database.tables[column.table]
            inner = self.say(condition, other)
            link = self.pick("of", "that belong to", "of the")
            return f"{link} {other.plural} {inner}"
        if isinstance(value, str):
            negation = "not " if condition.op == "!=" else ""
            if column.kind in ("city", "country"):
                return f"{negation}{'from' if main.person or column.kind == 'country' else 'in'} {value}"
            if negation:
                return f"whose {column.phrase} is not {value}"
            return self.pick(
                f"whose {column.phrase} is {value}",
                f"with the {column.phrase} {value}",
                f"with {value} as {column.phrase}",
            )
        more = condition.op == ">"
        if column.form == "year":
            when = "after" if more else "before"
            return f"from {when} {value}" if column.phrase == "year" else f"with {_a(column)} {when} {value}"
        average = isinstance(value, Query)
        bound = "the average" if average else value
        if column.phrase in words.ADJECTIVES and (average or self.rng.random() < 0.7):
            return f"{words.ADJECTIVES[column.phrase][not more]} {bound}"
        if average:
            side = self.pick("above", "over") if more else "below"
        elif more:
            side = self.pick("above", "over", "greater than")
        else:
            side = self.pick("below", "under", "less than")
        return f"with {_a(column)} {side} {bound}"

    def say_all(self, query: Query, main: Table | None = None) -> str:
        """All conditions of a query as such a phrase with a leading blank; "" without conditions."""
        main = main or self.database.tables[query.table]
        return "".join((" " if i == 0 else " and ") + self.say(c, main) for i, c in enumerate(query.where))

    # First questions

    def listing(self, query: Query) -> Asked:
        """A question for the selected columns of a query."""
        table = self.database.tables[query.table]
        conditions = self.say_all(query)
        columns = [c for _, c in query.select]
        if columns == [table.label] and query.where and self.rng.random() < 0.5:
            question = self.pick(
                f"Which {table.plural}{conditions} are there?",
                f"Find the {table.plural}{conditions}.",
                f"I am looking for {table.plural}{conditions}.",
            )
            return Asked(question, query)
        wanted = " and ".join(_nouns(c) for c in columns)
        every = "" if query.where else self.pick("all ", "the ", "")
        question = self.pick(
            f"What are the {wanted} of {every}{table.plural}{conditions}?",
            f"List the {wanted} of {every}{table.plural}{conditions}.",
            f"Show the {wanted} of {every}{table.plural}{conditions}.",
            f"Give me the {wanted} for {every}{table.plural}{conditions}.",
        )
        return Asked(question, query)

    def ask_column(self, table: Table) -> Asked:
        """A column under at most one condition."""
        return self._columns(table, 1, conditions=self.rng.choice((0, 1, 1)))

    def ask_two_columns(self, table: Table) -> Asked:
        """Two columns under at most one condition."""
        return self._columns(table, 2, conditions=self.rng.choice((0, 1)))

    def _columns(self, table: Table, count: int, conditions: int) -> Asked:
        chosen = [table.label] if count == 1 and self.rng.random() < 0.6 else []
        while len(chosen) < count:
            chosen.append(self.rng.choice([c for c in table.columns if c not in chosen]))
        query = Query(table.name, tuple(("", c) for c in chosen))
        query = self.with_conditions(query, table, conditions)
        require(not {c.column for c in query.where if c.op == "="} & set(chosen))
        return self.listing(query)

    def ask_count(self, table: Table) -> Asked:
        """How many there are."""
        conditions = self.rng.choice((0, 1, 1))
        query = self.with_conditions(Query(table.name, (("count", None),)), table, conditions)
        text = self.say_all(query)
        question = self.pick(
            f"How many {table.plural}{text} are there?",
            f"Count the {table.plural}{text}.",
            f"What is the number of {table.plural}{text}?",
        )
        return Asked(question, query)

    def ask_aggregate(self, table: Table) -> Asked:
        """An average, maximum, minimum or total."""
        conditions = self.rng.choice((0, 1))
        selected, name = self.aggregate(table)
        query = self.with_conditions(Query(table.name, (selected,)), table, conditions)
        question = self.pick(
            f"What is the {name} of {table.plural}{self.say_all(query)}?",
            f"Find the {name} of the {table.plural}{self.say_all(query)}.",
        )
        return Asked(question, query)

    def ask_group(self, table: Table) -> Asked:
        """A count for each value of a column."""
        column = self.column(table, lambda c: c.is_category)
        query = Query(table.name, (("", column), ("count", None)), group=column)
        question = self.pick(
            f"How many {table.plural} are there for each {column.phrase}?",
            f"Show each {column.phrase} and its number of {table.plural}.",
            f"Count the {table.plural} of every {column.phrase}.",
        )
        return Asked(question, query)

    def ask_having(self, table: Table) -> Asked:
        """Values that occur often enough."""
        column = self.column(table, lambda c: c.is_category)
        least = self.rng.choice((2, 3))
        query = Query(table.name, (("", column),), group=column, having=(">=", least))
        question = self.pick(
            f"Which {_nouns(column)} have at least {least} {table.plural}?",
            f"Find every {column.phrase} with {least} or more {table.plural}.",
        )
        return Asked(question, query)

    def ask_superlative(self, table: Table) -> Asked:
        """The entity with the most or the least of something."""
        order, extreme = self.order(table, "DESC", "DESC", "ASC")
        _, column, direction = order
        if column.phrase in words.ADJECTIVES:
            most = words.ADJECTIVES[column.phrase][2 if direction == "DESC" else 3]
            question = self.pick(
                f"What is the {table.label.phrase} of the {most} {table.singular}?",
                f"Which is the {most} {table.singular}?",
            )
        else:
            question = self.pick(
                f"Which {table.singular} has the {extreme} {column.phrase}?",
                f"Find the {table.singular} with the {extreme} {column.phrase}.",
            )
        return Asked(question, Query(table.name, (("", table.label),), order=order, limit=1))

    def ask_parent_condition(self, table: Table) -> Asked:
        """Entities whose parent meets a condition: a join."""
        conditions = self.rng.choice((0, 0, 1))
        condition = self.condition(self.database.parent(table.name))
        counting = self.rng.random() < 0.3
        query = Query(table.name, (("count", None),) if counting else (("", table.label),), (condition,))
        query = self.with_conditions(query, table, conditions)
        if counting:
            return Asked(f"How many {table.plural}{self.say_all(query)} are there?", query)
        return self.listing(query)

    def ask_pair(self, table: Table) -> Asked:
        """Each entity beside its parent: a join without conditions."""
        parent = self.database.parent(table.name)
        column = self.rng.choice(parent.columns)
        query = Query(table.name, (("", table.label), ("", column)))
        of_parent = f"the {column.phrase} of its {parent.singular}"
        question = self.pick(
            f"Show the {table.label.phrase} of each {table.singular} and {of_parent}.",
            f"For every {table.singular}, list the {table.label.phrase} and {of_parent}.",
        )
        return Asked(question, query)

    def ask_children(self, table: Table) -> Asked:
        """Parents by their number of children: count each, the most, or at least so many."""
        conditions = self.rng.choice((0, 0, 0, 1))
        parent = self.database.parent(table.name)
        query = Query(parent.name, (("", parent.label),), group=parent.label, joined=table.name)
        kind = self.rng.choice(("each", "most", "fewest", "having"))
        query = self.with_conditions(query, table, conditions)
        children = table.plural + self.say_all(query, table)
        if kind == "each":
            query = replace(query, select=(*query.select, ("count", None)))
            question = self.pick(
                f"How many {children} does each {parent.singular} have?",
                f"For each {parent.singular}, count its {children}.",
            )
        elif kind == "having":
            least = self.rng.choice((2, 3))
            query = replace(query, having=(">=", least))
            question = f"Which {parent.plural} have at least {least} {children}?"
        else:
            direction = "DESC" if kind == "most" else "ASC"
            query = replace(query, order=("count", None, direction), limit=1)
            question = self.pick(
                f"Which {parent.singular} has the {kind} {children}?",
                f"Find the {parent.singular} with the {kind} {children}.",
            )
        return Asked(question, query)

    def ask_above_average(self, table: Table) -> Asked:
        """Entities above or below the average: a nested query."""
        return self.listing(Query(table.name, (("", table.label),), (self.average_condition(table),)))

    def ask_childless(self, table: Table) -> Asked:
        """Parents without children: NOT IN."""
        parent = self.database.parent(table.name)
        key = Column(parent.name, parent.key, (), "id", "", "key", "")
        link = Column(table.name, table.foreign_key[0], (), "id", "", "key", "")
        inner = Query(table.name, (("", link),))
        query = Query(parent.name, (("", parent.label),), (Condition(key, "NOT IN", inner),))
        question = self.pick(
            f"Which {parent.plural} have no {table.plural}?",
            f"List the {_nouns(parent.label)} of {parent.plural} without any {table.plural}.",
        )
        return Asked(question, query)

    def ask_both(self, table: Table) -> Asked:
        """Values shared by two kinds of entity: INTERSECT."""
        categories = [c for c in table.columns if c.is_category]
        column = self.rng.choice(categories) if categories else None
        number = self.column(table, lambda c: c.is_number)
        require(column)
        seen = self.numbers_in(table, number)
        low, high = seen[len(seen) // 2], seen[len(seen) // 2 - 1]
        first = Query(table.name, (("", column),), (Condition(number, "<", low),))
        second = Query(table.name, (("", column),), (Condition(number, ">", high),))
        text = f"{table.plural}{self.say_all(first)} and {table.plural}{self.say_all(second)}"
        question = self.pick(
            f"Which {_nouns(column)} have both {text}?",
            f"Find the {_nouns(column)} that are shared by {text}.",
        )
        return Asked(question, replace(first, combined=("INTERSECT", second)))

    def ask_first(self) -> Asked:
        """A question that stands on its own."""
        tables = list(self.database.tables.values())
        children = [t for t in tables if t.foreign_key]
        table, child = self.rng.choice(tables + children), self.rng.choice(children)
        ask = self.draw(FIRST_QUESTIONS)
        return ask(self, child if ask in OF_CHILDREN else table)


FIRST_QUESTIONS: Weights = {
    Speaker.ask_column: 20,
    Speaker.ask_two_columns: 9,
    Speaker.ask_count: 9,
    Speaker.ask_aggregate: 8,
    Speaker.ask_group: 4,
    Speaker.ask_having: 3,
    Speaker.ask_superlative: 6,
    Speaker.ask_parent_condition: 8,
    Speaker.ask_pair: 3,
    Speaker.ask_children: 8,
    Speaker.ask_above_average: 3,
    Speaker.ask_childless: 2,
    Speaker.ask_both: 3,
}
OF_CHILDREN = (Speaker.ask_parent_condition, Speaker.ask_pair, Speaker.ask_children, Speaker.ask_childless)
