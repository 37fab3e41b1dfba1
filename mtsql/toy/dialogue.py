"""Dialogues of the toy benchmark: questions in English with their queries.

The follow-ups are SParC's four kinds (Yu et al., 2019, section 4): refine the constraints, ask for
another property, change the entity, ask about the answer. Later questions name only what changes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from mtsql.toy import words
from mtsql.toy.database import Column, Table, ToyDatabase
from mtsql.toy.query import Condition, Query
from mtsql.toy.style import Style

AGGREGATES = {"avg": "average", "max": "highest", "min": "lowest", "sum": "total"}


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


def extremes(column: Column) -> tuple[str, str]:
    """The words for its largest and its smallest value."""
    return ("latest", "earliest") if column.kind == "year" else ("highest", "lowest")


class Speaker:
    """Makes the questions of one dialogue over one database."""

    def __init__(self, database: ToyDatabase, rng: random.Random, style: Style) -> None:
        self.database = database
        self.rng = rng
        self.style = style

    def pick(self, *options: str) -> str:
        """One of several wordings."""
        return self.rng.choice(options)

    # Columns and conditions

    def column(self, table: Table, test: Callable[[Column], bool]) -> Column | None:
        """A random column of `table` that passes `test`, or None."""
        fitting = [c for c in table.columns if test(c)]
        return self.rng.choice(fitting) if fitting else None

    def condition(self, table: Table, avoid: tuple[Condition, ...] = ()) -> Condition | None:
        """A condition on a column of `table` that no condition of `avoid` uses."""
        used = {c.column for c in avoid}
        categories = [c for c in table.columns if c.is_category and c not in used]
        numbers = [c for c in table.columns if c.is_number and c not in used]
        if categories and (self.rng.random() < 0.68 or not numbers):
            column = self.rng.choice(categories)
            return Condition(column, "=", self.rng.choice(self.database.words_of[column]))
        if not numbers:
            return None
        column = self.rng.choice(numbers)
        place = 1 + table.columns.index(column)
        seen = sorted(row[place] for row in self.database.rows[table.name])
        value = self.rng.choice(seen[len(seen) // 4 : -(len(seen) // 4)])
        return Condition(column, self.rng.choice((">", "<", ">")), value)

    def say(self, condition: Condition, main: Table) -> str:
        """A condition as an English phrase behind the plural of `main`."""
        column, value = condition.column, condition.value
        if column.table != main.name:
            other = self.database.tables[column.table]
            inner = self.say(condition, other)
            link = self.pick("of", "that belong to", "of the")
            return f"{link} {other.plural} {inner}"
        if isinstance(value, Query):
            if column.kind != "year" and column.phrase in words.ADJECTIVES:
                more, less, *_ = words.ADJECTIVES[column.phrase]
                return f"{more if condition.op == '>' else less} the average"
            side = self.pick("above", "over") if condition.op == ">" else "below"
            return f"with {_a(column)} {side} the average"
        if isinstance(value, str):
            word = value if column.is_proper else value.lower()
            if condition.op == "!=":
                if column.kind == "city":
                    return f"not in {word}" if not main.person else f"not from {word}"
                if column.kind == "country":
                    return f"not from {word}"
                return f"whose {column.phrase} is not {word}"
            if column.kind in ("city", "country"):
                return f"from {word}" if main.person or column.kind == "country" else f"in {word}"
            return self.pick(
                f"whose {column.phrase} is {word}",
                f"with the {column.phrase} {word}",
                f"with {word} as {column.phrase}",
            )
        more = condition.op == ">"
        if column.kind == "year":
            when = "after" if more else "before"
            return f"from {when} {value}" if column.phrase == "year" else f"with {_a(column)} {when} {value}"
        if column.phrase in words.ADJECTIVES and self.rng.random() < 0.7:
            return f"{words.ADJECTIVES[column.phrase][0 if more else 1]} {value}"
        side = (
            self.pick("above", "over", "greater than") if more else self.pick("below", "under", "less than")
        )
        return f"with {_a(column)} {side} {value}"

    def say_all(self, query: Query) -> str:
        """All conditions of a query, behind a noun, with a leading blank (or "")."""
        main = self.database.tables[query.table]
        return "".join((" " if i == 0 else " and ") + self.say(c, main) for i, c in enumerate(query.where))

    # First questions

    def listing(self, query: Query) -> str:
        """A question for the selected columns of a query."""
        table = self.database.tables[query.table]
        conditions = self.say_all(query)
        columns = [c for _, c in query.select]
        if columns == [table.label] and query.where and self.rng.random() < 0.5:
            return self.pick(
                f"Which {table.plural}{conditions} are there?",
                f"Find the {table.plural}{conditions}.",
                f"I am looking for {table.plural}{conditions}.",
            )
        wanted = " and ".join(_nouns(c) for c in columns)
        every = "" if query.where else self.pick("all ", "the ", "")
        return self.pick(
            f"What are the {wanted} of {every}{table.plural}{conditions}?",
            f"List the {wanted} of {every}{table.plural}{conditions}.",
            f"Show the {wanted} of {every}{table.plural}{conditions}.",
            f"Give me the {wanted} for {every}{table.plural}{conditions}.",
        )

    def ask_list(self, table: Table, conditions: int, columns: int) -> Asked | None:
        """Columns of a table under 0 to 2 conditions."""
        chosen = [table.label] if columns == 1 and self.rng.random() < 0.6 else []
        while len(chosen) < columns:
            chosen.append(self.rng.choice([c for c in table.columns if c not in chosen]))
        query = Query(table.name, tuple(("", c) for c in chosen))
        query = self._with_conditions(query, table, conditions)
        if query is None or {c.column for c in query.where if c.op == "="} & set(chosen):
            return None
        return Asked(self.listing(query), query)

    def _with_conditions(self, query: Query, table: Table, count: int) -> Query | None:
        for _ in range(count):
            condition = self.condition(table, query.where)
            if condition is None:
                return None
            query = replace(query, where=(*query.where, condition))
        return query

    def ask_count(self, table: Table, conditions: int) -> Asked | None:
        """How many there are."""
        query = self._with_conditions(Query(table.name, (("count", None),)), table, conditions)
        if query is None:
            return None
        text = self.say_all(query)
        question = self.pick(
            f"How many {table.plural}{text} are there?",
            f"Count the {table.plural}{text}.",
            f"What is the number of {table.plural}{text}?",
        )
        return Asked(question, query)

    def ask_aggregate(self, table: Table, conditions: int) -> Asked | None:
        """An average, maximum, minimum or total."""
        column = self.column(table, lambda c: c.kind.startswith("int"))
        if column is None:
            return None
        aggregate = self.rng.choice(list(AGGREGATES))
        query = Query(table.name, ((aggregate, column),))
        query = self._with_conditions(query, table, conditions)
        if query is None:
            return None
        name = f"{AGGREGATES[aggregate]} {column.phrase}"
        question = self.pick(
            f"What is the {name} of {table.plural}{self.say_all(query)}?",
            f"Find the {name} of the {table.plural}{self.say_all(query)}.",
        )
        return Asked(question, query)

    def ask_group(self, table: Table) -> Asked | None:
        """A count for each value of a column."""
        column = self.column(table, lambda c: c.is_category)
        if column is None:
            return None
        query = Query(table.name, (("", column), ("count", None)), group=column)
        question = self.pick(
            f"How many {table.plural} are there for each {column.phrase}?",
            f"Show each {column.phrase} and its number of {table.plural}.",
            f"Count the {table.plural} of every {column.phrase}.",
        )
        return Asked(question, query)

    def ask_having(self, table: Table) -> Asked | None:
        """Values that occur often enough."""
        column = self.column(table, lambda c: c.is_category)
        if column is None:
            return None
        least = self.rng.choice((2, 3))
        query = Query(table.name, (("", column),), group=column, having=(">=", least))
        question = self.pick(
            f"Which {_nouns(column)} have at least {least} {table.plural}?",
            f"Find every {column.phrase} with {least} or more {table.plural}.",
        )
        return Asked(question, query)

    def ask_superlative(self, table: Table, conditions: int) -> Asked | None:
        """The entity with the most or the least of something."""
        column = self.column(table, lambda c: c.is_number)
        if column is None:
            return None
        query = self._with_conditions(Query(table.name, (("", table.label),)), table, conditions)
        if query is None:
            return None
        direction = self.rng.choice(("DESC", "DESC", "ASC"))
        query = replace(query, order=("", column, direction), limit=1)
        noun = table.singular
        most = self._most(column, direction)
        text = self.say_all(query)
        if most:
            question = self.pick(
                f"What is the {table.label.phrase} of the {most} {noun}{text}?",
                f"Which is the {most} {noun}{text}?",
            )
        else:
            extreme = extremes(column)[direction == "ASC"]
            question = self.pick(
                f"Which {noun}{text} has the {extreme} {column.phrase}?",
                f"Find the {noun}{text} with the {extreme} {column.phrase}.",
            )
        return Asked(question, query)

    def _most(self, column: Column, direction: str) -> str | None:
        adjective = words.ADJECTIVES.get(column.phrase)
        return adjective and adjective[2 if direction == "DESC" else 3]

    def ask_parent_condition(self, table: Table, conditions: int) -> Asked | None:
        """Entities whose parent meets a condition: a join."""
        parent = self.database.parent(table.name)
        condition = parent and self.condition(parent)
        if condition is None:
            return None
        counting = self.rng.random() < 0.3
        query = Query(table.name, (("count", None),) if counting else (("", table.label),), (condition,))
        query = self._with_conditions(query, table, conditions)
        if query is None:
            return None
        if counting:
            return Asked(f"How many {table.plural}{self.say_all(query)} are there?", query)
        return Asked(self.listing(query), query)

    def ask_pair(self, table: Table) -> Asked | None:
        """Each entity beside its parent: a join without conditions."""
        parent = self.database.parent(table.name)
        if parent is None:
            return None
        column = self.rng.choice(parent.columns)
        query = Query(table.name, (("", table.label), ("", column)))
        of_parent = f"the {column.phrase} of its {parent.singular}"
        question = self.pick(
            f"Show the {table.label.phrase} of each {table.singular} and {of_parent}.",
            f"For every {table.singular}, list the {table.label.phrase} and {of_parent}.",
        )
        return Asked(question, query)

    def ask_children(self, table: Table, conditions: int) -> Asked | None:
        """Parents by their number of children: count each, the most, or at least so many."""
        parent = self.database.parent(table.name)
        if parent is None:
            return None
        base = Query(parent.name, (("", parent.label),), group=parent.label, joined=table.name)
        kind = self.rng.choice(("each", "most", "least", "having"))
        base = self._with_conditions(base, table, conditions)
        if base is None:
            return None
        text = "".join((" " if i == 0 else " and ") + self.say(c, table) for i, c in enumerate(base.where))
        if kind == "each":
            query = replace(base, select=(*base.select, ("count", None)))
            question = self.pick(
                f"How many {table.plural}{text} does each {parent.singular} have?",
                f"For each {parent.singular}, count its {table.plural}{text}.",
            )
        elif kind == "having":
            least = self.rng.choice((2, 3))
            query = replace(base, having=(">=", least))
            question = f"Which {parent.plural} have at least {least} {table.plural}{text}?"
        else:
            direction = "DESC" if kind == "most" else "ASC"
            query = replace(base, order=("count", None, direction), limit=1)
            amount = "most" if kind == "most" else "fewest"
            question = self.pick(
                f"Which {parent.singular} has the {amount} {table.plural}{text}?",
                f"Find the {parent.singular} with the {amount} {table.plural}{text}.",
            )
        return Asked(question, query)

    def ask_above_average(self, table: Table) -> Asked | None:
        """Entities above or below the average: a nested query."""
        condition = self.average_condition(table)
        if condition is None:
            return None
        query = Query(table.name, (("", table.label),), (condition,))
        return Asked(self.listing(query), query)

    def average_condition(self, table: Table) -> Condition | None:
        """`column > (SELECT avg(column) FROM table)`, or below it."""
        column = self.column(table, lambda c: c.kind.startswith("int"))
        if column is None:
            return None
        inner = Query(table.name, (("avg", column),))
        return Condition(column, self.rng.choice((">", "<")), inner)

    def ask_childless(self, table: Table) -> Asked | None:
        """Parents without children: NOT IN."""
        parent = self.database.parent(table.name)
        if parent is None:
            return None
        key = Column(parent.name, parent.key, (), "id", "key", "")
        link = Column(table.name, table.foreign_key[0], (), "id", "key", "")
        inner = Query(table.name, (("", link),))
        query = Query(parent.name, (("", parent.label),), (Condition(key, "NOT IN", inner),))
        question = self.pick(
            f"Which {parent.plural} have no {table.plural}?",
            f"List the {_nouns(parent.label)} of {parent.plural} without any {table.plural}.",
        )
        return Asked(question, query)

    def ask_both(self, table: Table) -> Asked | None:
        """Values shared by two kinds of entity: INTERSECT."""
        column = self.column(table, lambda c: c.is_category)
        number = self.column(table, lambda c: c.is_number)
        if column is None or number is None:
            return None
        place = 1 + table.columns.index(number)
        seen = sorted(row[place] for row in self.database.rows[table.name])
        low, high = seen[len(seen) // 2], seen[len(seen) // 2 - 1]
        first = Query(table.name, (("", column),), (Condition(number, "<", low),))
        second = Query(table.name, (("", column),), (Condition(number, ">", high),))
        text = f"{table.plural}{self.say_all(first)} and {table.plural}{self.say_all(second)}"
        question = self.pick(
            f"Which {_nouns(column)} have both {text}?",
            f"Find the {_nouns(column)} that are shared by {text}.",
        )
        return Asked(question, replace(first, combined=("INTERSECT", second)))

    def ask_first(self) -> Asked | None:
        """A question that stands on its own."""
        tables = list(self.database.tables.values())
        children = [t for t in tables if t.foreign_key]
        table = self.rng.choice(tables + children)
        child = self.rng.choice(children)
        makers = {
            "list": lambda: self.ask_list(table, self.rng.choice((0, 1, 1)), 1),
            "two_columns": lambda: self.ask_list(table, self.rng.choice((0, 1)), 2),
            "count": lambda: self.ask_count(table, self.rng.choice((0, 1, 1))),
            "aggregate": lambda: self.ask_aggregate(table, self.rng.choice((0, 1))),
            "group": lambda: self.ask_group(table),
            "having": lambda: self.ask_having(table),
            "superlative": lambda: self.ask_superlative(table, 0),
            "parent_condition": lambda: self.ask_parent_condition(child, self.rng.choice((0, 0, 1))),
            "pair": lambda: self.ask_pair(child),
            "children": lambda: self.ask_children(child, self.rng.choice((0, 0, 0, 1))),
            "above_average": lambda: self.ask_above_average(table),
            "childless": lambda: self.ask_childless(child),
            "both": lambda: self.ask_both(table),
        }
        kind = self.rng.choices(list(self.style.first), list(self.style.first.values()))[0]
        return makers[kind]()
