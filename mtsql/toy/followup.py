"""Follow-up questions of the toy benchmark: what is named is only what changes.

Each function is one kind: a question that a speaker asks after `query`, whose main table is `table`. Each
raises CannotAsk where it does not fit.
"""

from __future__ import annotations

from dataclasses import replace

from mtsql.toy.database import Table
from mtsql.toy.dialogue import Asked, Speaker, Weights, require
from mtsql.toy.query import Query


def ask_follow_up(speaker: Speaker, query: Query) -> Asked:
    """A question about, or in place of, what was asked last."""
    return speaker.draw(FOLLOW_UPS)(speaker, query, speaker.database.tables[query.table])


def _plain(query: Query) -> bool:
    """A list, count or aggregate under conditions, and nothing more."""
    return not (query.group or query.order or query.combined or query.joined)


def _plain_list(query: Query) -> bool:
    """Columns under conditions, and nothing more."""
    return _plain(query) and not query.select[0][0]


def refine(speaker: Speaker, query: Query, table: Table) -> Asked:
    """Add a constraint, on the entity itself or on its parent."""
    require(_plain(query) and len(query.where) <= 2)
    parent = speaker.database.parent(query.table)
    source = parent if parent and speaker.rng.random() < 0.25 else table
    condition = speaker.condition(source, query.where)
    text = speaker.say(condition, table)
    question = speaker.pick(
        f"Only the ones {text}.",
        f"Keep just those {text}.",
        f"Now only {table.plural} {text}.",
        f"Can you narrow that to the ones {text}?",
        f"And if we take only those {text}?",
    )
    return Asked(question, replace(query, where=(*query.where, condition)))


def change_property(speaker: Speaker, query: Query, table: Table) -> Asked:
    """Other columns of the same entities."""
    require(not (query.group or query.combined or any(a for a, _ in query.select)))
    shown = [c for _, c in query.select] + [c.column for c in query.where if c.op == "="]
    column = speaker.column(table, lambda c: c not in shown)
    if query.limit:
        question = speaker.pick(
            f"What is the {column.phrase} of that {table.singular}?",
            f"And its {column.phrase}?" if not table.person else f"And their {column.phrase}?",
        )
    else:
        question = speaker.pick(
            f"What is the {column.phrase} of each?",
            f"Show the {column.phrase} of each of them instead.",
            f"And the {column.phrase} for each of these?",
        )
    return Asked(question, replace(query, select=(("", column),)))


def change_value(speaker: Speaker, query: Query, table: Table) -> Asked:
    """The same question about another entity: one value takes the place of another."""
    fitting = [c for c in query.where if isinstance(c.value, str) and c.op == "="]
    require(fitting and not query.combined)
    old = speaker.rng.choice(fitting)
    others = [w for w in speaker.database.words_of[old.column] if w != old.value]
    require(others)
    word = speaker.rng.choice(others)
    new = replace(old, value=word)
    question = speaker.pick(
        f"What about {word}?",
        f"And for {word}?",
        f"How about {word} instead?",
        f"The same for {word}, please.",
    )
    return Asked(question, replace(query, where=tuple(new if c == old else c for c in query.where)))


def negate(speaker: Speaker, query: Query, table: Table) -> Asked:
    """The others: an equality becomes an inequality."""
    require(_plain(query) and query.where)
    old = query.where[-1]
    require(isinstance(old.value, str) and old.op == "=")
    new = replace(old, op="!=")
    text = speaker.say(new, table)
    question = speaker.pick(f"And the ones {text}?", f"Now show those {text} instead.")
    return Asked(question, replace(query, where=(*query.where[:-1], new)))


def count_those(speaker: Speaker, query: Query, table: Table) -> Asked:
    """How many the last answer holds."""
    require(_plain_list(query) and query.where)
    question = speaker.pick("How many are there?", "How many of them are there?", "Count them.")
    return Asked(question, replace(query, select=(("count", None),)))


def list_those(speaker: Speaker, query: Query, table: Table) -> Asked:
    """Who they are, after a count or an average."""
    require(_plain(query) and not _plain_list(query))
    question = speaker.pick(
        f"What are their {table.label.phrase}s?",
        f"List the {table.label.phrase}s of these {table.plural}.",
        f"Which {table.plural} are they?",
    )
    return Asked(question, replace(query, select=(("", table.label),)))


def aggregate_those(speaker: Speaker, query: Query, table: Table) -> Asked:
    """An average, maximum, minimum or total over the last answer."""
    require(_plain(query))
    selected, name = speaker.aggregate(table)
    question = speaker.pick(f"What is their {name}?", f"And the {name} among them?")
    return Asked(question, replace(query, select=(selected,)))


def sort_those(speaker: Speaker, query: Query, table: Table) -> Asked:
    """The same list in an order."""
    require(_plain_list(query))
    order, first = speaker.order(table, "DESC", "ASC")
    question = speaker.pick(
        f"Sort them by {order[1].phrase}, {first} first.",
        f"Order these by {order[1].phrase} from the {first} on.",
    )
    return Asked(question, replace(query, order=order))


def extreme_of_those(speaker: Speaker, query: Query, table: Table) -> Asked:
    """The one with the most of something among the last answer."""
    require(_plain(query))
    order, first = speaker.order(table, "DESC", "ASC")
    question = speaker.pick(
        f"Which of them has the {first} {order[1].phrase}?",
        f"Name the one with the {first} {order[1].phrase}.",
    )
    return Asked(question, replace(query, select=(("", table.label),), order=order, limit=1))


def group_those(speaker: Speaker, query: Query, table: Table) -> Asked:
    """The last answer counted by a column."""
    require(_plain(query))
    used = {c.column for c in query.where}
    column = speaker.column(table, lambda c: c.is_category and c not in used)
    question = speaker.pick(
        f"How many of them are there for each {column.phrase}?",
        f"Break their number down by {column.phrase}.",
    )
    return Asked(question, replace(query, select=(("", column), ("count", None)), group=column))


def about_groups(speaker: Speaker, query: Query, table: Table) -> Asked:
    """The largest group, or the large ones."""
    require(query.group and not (query.order or query.having))
    grouped = speaker.database.tables[query.group.table]
    name = grouped.singular if query.group == grouped.label else query.group.phrase
    first = (("", query.group),)
    if speaker.rng.random() < 0.5:
        question = speaker.pick(f"Which {name} has the most?", f"Only the {name} with the most.")
        return Asked(question, replace(query, select=first, order=("count", None, "DESC"), limit=1))
    least = speaker.rng.choice((2, 3))
    question = speaker.pick(f"Which of these have at least {least}?", f"Those with {least} or more?")
    return Asked(question, replace(query, select=first, having=(">=", least)))


def above_average(speaker: Speaker, query: Query, table: Table) -> Asked:
    """A nested constraint."""
    require(_plain_list(query) and len(query.where) <= 1)
    condition = speaker.average_condition(table)
    require(condition.column not in {c.column for c in query.where})
    text = speaker.say(condition, table)
    question = speaker.pick(f"Only the ones {text}.", f"Keep just those {text}.")
    return Asked(question, replace(query, where=(*query.where, condition)))


def combine(speaker: Speaker, query: Query, table: Table) -> Asked:
    """Leave some out (EXCEPT) or add some (UNION)."""
    require(_plain_list(query) and len(query.where) <= 1 and len(query.select) <= 1)
    condition = speaker.condition(table, query.where)
    other = Query(query.table, query.select, (condition,))
    text = speaker.say(condition, table)
    if speaker.rng.random() < 0.6 or not query.where:
        question = speaker.pick(f"Leave out those {text}.", f"Without the ones {text}.")
        return Asked(question, replace(query, combined=("EXCEPT", other)))
    question = speaker.pick(f"Add those {text}.", f"Also include the ones {text}.")
    return Asked(question, replace(query, combined=("UNION", other)))


def parents_of_those(speaker: Speaker, query: Query, table: Table) -> Asked:
    """What the entities of the answer belong to."""
    parent = speaker.database.parent(query.table)
    require(parent and not (query.group or query.combined or query.select[0][0]))
    column = parent.label if speaker.rng.random() < 0.6 else speaker.rng.choice(parent.columns)
    if query.limit:
        question = f"What is the {column.phrase} of {'their' if table.person else 'its'} {parent.singular}?"
    else:
        question = speaker.pick(
            f"What is the {column.phrase} of the {parent.singular} of each?",
            f"Show the {column.phrase} of their {parent.plural}.",
        )
    return Asked(question, replace(query, select=(("", column),)))


FOLLOW_UPS: Weights = {
    refine: 22,
    change_property: 13,
    change_value: 16,
    negate: 5,
    count_those: 8,
    list_those: 12,
    aggregate_those: 8,
    sort_those: 4,
    extreme_of_those: 5,
    group_those: 6,
    about_groups: 9,
    above_average: 2,
    combine: 3,
    parents_of_those: 6,
}
