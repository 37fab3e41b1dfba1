"""Follow-up questions of the toy benchmark: what is named is only what changes."""

from __future__ import annotations

from dataclasses import replace

from mtsql.toy.dialogue import AGGREGATES, Asked, Speaker, extremes
from mtsql.toy.query import Condition, Query


def _plain(query: Query) -> bool:
    """A list, count or aggregate under conditions, and nothing more."""
    return not (query.group or query.order or query.combined or query.joined)


def refine(speaker: Speaker, query: Query) -> Asked | None:
    """Add a constraint, on the entity itself or on its parent."""
    if not _plain(query) or len(query.where) > 2:
        return None
    table = speaker.database.tables[query.table]
    parent = speaker.database.parent(query.table)
    source = parent if parent and speaker.rng.random() < 0.25 else table
    condition = speaker.condition(source, query.where)
    if condition is None:
        return None
    text = speaker.say(condition, table)
    question = speaker.pick(
        f"Only the ones {text}.",
        f"Keep just those {text}.",
        f"Now only {table.plural} {text}.",
        f"Can you narrow that to the ones {text}?",
        f"And if we take only those {text}?",
    )
    return Asked(question, replace(query, where=(*query.where, condition)))


def change_property(speaker: Speaker, query: Query) -> Asked | None:
    """Other columns of the same entities."""
    if query.group or query.combined or any(a for a, _ in query.select):
        return None
    table = speaker.database.tables[query.table]
    shown = [c for _, c in query.select] + [c.column for c in query.where if c.op == "="]
    columns = [c for c in table.columns if c not in shown]
    if not columns:
        return None
    column = speaker.rng.choice(columns)
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


def change_value(speaker: Speaker, query: Query) -> Asked | None:
    """The same question about another entity: one value takes the place of another."""
    if query.combined:
        return None
    fitting = [c for c in query.where if isinstance(c.value, str) and c.op == "="]
    if not fitting:
        return None
    old = speaker.rng.choice(fitting)
    others = [w for w in speaker.database.words_of[old.column] if w != old.value]
    if not others:
        return None
    new = replace(old, value=speaker.rng.choice(others))
    word = new.value if new.column.is_proper else new.value.lower()
    question = speaker.pick(
        f"What about {word}?",
        f"And for {word}?",
        f"How about {word} instead?",
        f"The same for {word}, please.",
    )
    return Asked(question, replace(query, where=tuple(new if c == old else c for c in query.where)))


def negate(speaker: Speaker, query: Query) -> Asked | None:
    """The others: an equality becomes an inequality."""
    if not _plain(query) or not query.where:
        return None
    old = query.where[-1]
    if not isinstance(old.value, str) or old.op != "=":
        return None
    new = replace(old, op="!=")
    text = speaker.say(new, speaker.database.tables[query.table])
    question = speaker.pick(f"And the ones {text}?", f"Now show those {text} instead.")
    return Asked(question, replace(query, where=(*query.where[:-1], new)))


def count_those(speaker: Speaker, query: Query) -> Asked | None:
    """How many the last answer holds."""
    if not _plain(query) or query.select[0][0] or not query.where:
        return None
    question = speaker.pick("How many are there?", "How many of them are there?", "Count them.")
    return Asked(question, replace(query, select=(("count", None),)))


def list_those(speaker: Speaker, query: Query) -> Asked | None:
    """Who they are, after a count or an average."""
    if not _plain(query) or not query.select[0][0]:
        return None
    table = speaker.database.tables[query.table]
    question = speaker.pick(
        f"What are their {table.label.phrase}s?",
        f"List the {table.label.phrase}s of these {table.plural}.",
        f"Which {table.plural} are they?",
    )
    return Asked(question, replace(query, select=(("", table.label),)))


def aggregate_those(speaker: Speaker, query: Query) -> Asked | None:
    """An average, maximum, minimum or total over the last answer."""
    if not _plain(query):
        return None
    table = speaker.database.tables[query.table]
    column = speaker.column(table, lambda c: c.kind.startswith("int"))
    if column is None:
        return None
    aggregate = speaker.rng.choice(list(AGGREGATES))
    name = f"{AGGREGATES[aggregate]} {column.phrase}"
    question = speaker.pick(f"What is their {name}?", f"And the {name} among them?")
    return Asked(question, replace(query, select=((aggregate, column),)))


def sort_those(speaker: Speaker, query: Query) -> Asked | None:
    """The same list in an order."""
    if not _plain(query) or query.select[0][0]:
        return None
    table = speaker.database.tables[query.table]
    column = speaker.column(table, lambda c: c.is_number)
    if column is None:
        return None
    direction = speaker.rng.choice(("DESC", "ASC"))
    first = extremes(column)[direction == "ASC"]
    question = speaker.pick(
        f"Sort them by {column.phrase}, {first} first.",
        f"Order these by {column.phrase} from the {first} on.",
    )
    return Asked(question, replace(query, order=("", column, direction)))


def extreme_of_those(speaker: Speaker, query: Query) -> Asked | None:
    """The one with the most of something among the last answer."""
    if not _plain(query):
        return None
    table = speaker.database.tables[query.table]
    column = speaker.column(table, lambda c: c.is_number)
    if column is None:
        return None
    direction = speaker.rng.choice(("DESC", "ASC"))
    first = extremes(column)[direction == "ASC"]
    question = speaker.pick(
        f"Which of them has the {first} {column.phrase}?",
        f"Name the one with the {first} {column.phrase}.",
    )
    query = replace(query, select=(("", table.label),), order=("", column, direction), limit=1)
    return Asked(question, query)


def group_those(speaker: Speaker, query: Query) -> Asked | None:
    """The last answer counted by a column."""
    if not _plain(query):
        return None
    table = speaker.database.tables[query.table]
    used = {c.column for c in query.where}
    column = speaker.column(table, lambda c: c.is_category and c not in used)
    if column is None:
        return None
    question = speaker.pick(
        f"How many of them are there for each {column.phrase}?",
        f"Break their number down by {column.phrase}.",
    )
    return Asked(question, replace(query, select=(("", column), ("count", None)), group=column))


def about_groups(speaker: Speaker, query: Query) -> Asked | None:
    """The largest group, or the large ones."""
    if not query.group or query.order or query.having:
        return None
    name = query.group.phrase
    if speaker.database.tables[query.group.table].label == query.group:
        name = speaker.database.tables[query.group.table].singular
    first = (("", query.group),)
    if speaker.rng.random() < 0.5:
        question = speaker.pick(f"Which {name} has the most?", f"Only the {name} with the most.")
        return Asked(question, replace(query, select=first, order=("count", None, "DESC"), limit=1))
    least = speaker.rng.choice((2, 3))
    question = speaker.pick(f"Which of these have at least {least}?", f"Those with {least} or more?")
    return Asked(question, replace(query, select=first, having=(">=", least)))


def above_average(speaker: Speaker, query: Query) -> Asked | None:
    """A nested constraint."""
    if not _plain(query) or query.select[0][0] or len(query.where) > 1:
        return None
    table = speaker.database.tables[query.table]
    condition = speaker.average_condition(table)
    if condition is None or condition.column in {c.column for c in query.where}:
        return None
    text = speaker.say(condition, table)
    question = speaker.pick(f"Only the ones {text}.", f"Keep just those {text}.")
    return Asked(question, replace(query, where=(*query.where, condition)))


def combine(speaker: Speaker, query: Query) -> Asked | None:
    """Leave some out (EXCEPT) or add some (UNION)."""
    if not _plain(query) or query.select[0][0] or len(query.where) > 1 or len(query.select) > 1:
        return None
    table = speaker.database.tables[query.table]
    condition: Condition | None = speaker.condition(table, query.where)
    if condition is None:
        return None
    other = Query(query.table, query.select, (condition,))
    text = speaker.say(condition, table)
    if speaker.rng.random() < 0.6 or not query.where:
        question = speaker.pick(f"Leave out those {text}.", f"Without the ones {text}.")
        return Asked(question, replace(query, combined=("EXCEPT", other)))
    question = speaker.pick(f"Add those {text}.", f"Also include the ones {text}.")
    return Asked(question, replace(query, combined=("UNION", other)))


def parents_of_those(speaker: Speaker, query: Query) -> Asked | None:
    """What the entities of the answer belong to."""
    parent = speaker.database.parent(query.table)
    if parent is None or query.group or query.combined or query.select[0][0]:
        return None
    table = speaker.database.tables[query.table]
    column = parent.label if speaker.rng.random() < 0.6 else speaker.rng.choice(parent.columns)
    if query.limit:
        question = f"What is the {column.phrase} of its {parent.singular}?"
        if table.person:
            question = f"What is the {column.phrase} of their {parent.singular}?"
    else:
        question = speaker.pick(
            f"What is the {column.phrase} of the {parent.singular} of each?",
            f"Show the {column.phrase} of their {parent.plural}.",
        )
    return Asked(question, replace(query, select=(("", column),)))


def change_topic(speaker: Speaker, query: Query) -> Asked | None:
    """A question that stands on its own, whatever was asked before; only the shifted style asks it."""
    return speaker.ask_first()


FOLLOW_UPS = {
    "refine": refine,
    "change_property": change_property,
    "change_value": change_value,
    "negate": negate,
    "count_those": count_those,
    "list_those": list_those,
    "aggregate_those": aggregate_those,
    "sort_those": sort_those,
    "extreme_of_those": extreme_of_those,
    "group_those": group_those,
    "about_groups": about_groups,
    "above_average": above_average,
    "combine": combine,
    "parents_of_those": parents_of_those,
    "change_topic": change_topic,
}
