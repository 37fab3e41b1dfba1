"""What fine-tuning on gold SQL learns from: direct answers, or demonstrations of the protocol with tools.

A model that does not call its tools untrained is shown how by a scripted agent. Mostly the agent proposes
the gold SQL, runs it, asks the memory and answers. In REPAIRED of the questions its first query fails, and
is repaired to the gold SQL. A repair that could be guessed from the prompt teaches nothing about reading a
result. So the prompt shows a stale schema, in which the failing query is right: a column or a table has
another name, or a column stands in another table. What is there today is to be read in the error, and
nowhere else.

A query that fails only because the schema is stale is learned: it is what the prompt asks for. Any other has
loss mask 0: the policy learns to run, to judge and to repair, not to fail.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mtsql.agent.env import Environment, Episode, outcome_of
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS, make_tools
from mtsql.agent.trajectory import Status, Stop, Trajectory
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema, SchemaTable
from mtsql.recipes.mtsql_r1_prompts import tool_call, verdict
from mtsql.sql.normal import KEYWORDS, in_normal_form, normal_form
from mtsql.sql.text import PIECE

SHARES = {"both": 0.85, "none": 0.09, "no_execution": 0.03, "no_memory": 0.03}  # of the sets of tools
REPAIRED = 0.35  # share of the questions with EXECUTE whose first query fails, where a mistake can be made
STALE_QUESTION = 0.5  # share of stale schemas whose names stand in the question too
ALIASED = re.compile(r"\b(?:FROM|JOIN) (\w+) AS (t\d+)\b")
JOINED = re.compile(r"FROM (\w+) AS t1 JOIN (\w+) AS t2 ON t[12]\.\w+ = t[12]\.\w+")
QUALIFIED = re.compile(r"\b(t\d+)\.(\w+)")
COMPARED = re.compile(r"(?:\b(t\d+)\.)?(?<![\w.])(\w+) = '([^']+)'")


@dataclass(frozen=True)
class Mistake:
    """Queries that fail one after another, and what the prompt shows, so that the first one looks right.

    `learned` says that the prompt tells all of them, so that they have loss mask 1. `look` is a query that
    shows what there is, to be run before the repair.
    """

    wrong: tuple[str, ...]
    shown: tuple[Example, Schema]
    learned: bool = False
    look: str | None = None


def gold_trajectories(
    environment: Environment, asked: Sequence[Example], seed: int
) -> list[list[Trajectory]]:
    """A trajectory of each question that ends in its gold SQL in normal form, none where it does not fit.

    Without tools in the environment it is a direct answer: the short-horizon baseline. With them it is a
    demonstration, at times with fewer tools, so that the policy knows the prompts of Table 4's ablations.
    """
    environments = {name: replace(environment, tools=make_tools(name)) for name in TOOL_SETS}
    found = []
    for example in asked:
        rng = random.Random(f"{seed}/{example.id}")
        tool_set = rng.choices(list(SHARES), list(SHARES.values()))[0] if environment.tools else "none"
        chosen, mistake = environments[tool_set], None
        if EXEC_SQL in chosen.tools and rng.random() < REPAIRED:
            mistake = make_mistake(chosen, example, rng)
        trajectory = play(chosen, example, mistake) or play(chosen, example)
        trajectory = trajectory or play(environments["none"], example)
        found.append([] if trajectory is None else [trajectory])
    return found


def play(environment: Environment, example: Example, mistake: Mistake | None = None) -> Trajectory | None:
    """The scripted agent's episode: what is wrong, then the gold SQL, which passes every check.

    None if it does not fit into the limits.
    """
    (episode,) = environment.episodes(example, [0], mistake and mistake.shown)
    recipe, gold = episode.recipe, normal_form(example.gold_sql, episode.schema)
    said = ""  # the verdict on what came back
    for sql in mistake.wrong if mistake else ():
        written = json.dumps(sql, ensure_ascii=False)[1:-1]  # as it stands in a call
        say(episode, said + recipe.call(sql), unlearned="" if mistake.learned else written)
        said = verdict(EXEC_SQL, False) + "\n"
    if mistake and mistake.look:
        say(episode, said + recipe.call(mistake.look))
    if EXEC_SQL in episode.tools:
        say(episode, said + recipe.call(gold))
        said = verdict(EXEC_SQL, True) + "\n"
    if MEMORY_RETRIEVE in episode.tools and example.history:
        say(episode, said + tool_call(MEMORY_RETRIEVE, gold))
        said = verdict(MEMORY_RETRIEVE, True) + "\n"
    say(episode, said + recipe.answer(gold))
    finished = episode.trajectory.status is Status.ANSWERED and not episode.trajectory.off_protocol
    return episode.trajectory if finished else None


def say(episode: Episode, text: str, stop: Stop = Stop.END_OF_TURN, unlearned: str = "") -> None:
    """Give an episode a message as if the policy had sampled it, within its limits; nothing if it is over.

    The loss mask is 1 on all tokens, an end of turn included, but for those of `unlearned`, a part of the
    message or all of it.
    """
    if episode.trajectory.status is not None:
        return
    ids, loss_mask = episode.tokens.message_ids(text), None
    if stop is Stop.STOP_STRING:
        ids = ids[:-1]
    if len(ids) > min(episode.limits.max_turn_tokens, episode.remaining_tokens()):
        stop = Stop.LIMIT
    elif unlearned:
        part = unlearned in text and unlearned != text
        loss_mask = episode.tokens.loss_mask_without(ids, unlearned) if part else [0] * len(ids)
    episode.step(ids, [0.0] * len(ids), stop, loss_mask)


def make_mistake(environment: Environment, example: Example, rng: random.Random) -> Mistake | None:
    """One of KINDS that can be made of the question; None if none can."""
    for kind in rng.sample(list(KINDS), len(KINDS)):
        mistake = KINDS[kind](environment, example, rng)
        if mistake is not None:
            return mistake
    return None


def stale_names(
    environment: Environment, example: Example, rng: random.Random, tables: bool, count: int = 1
) -> Mistake | None:
    """`count` of the names in the gold SQL have other names in the prompt, taken from other databases."""
    schema, gold, _ = _read_gold(environment, example)
    example = in_normal_form(example, schema)
    own_tables, own_columns = _table_names(schema), _column_names(schema)
    own = own_tables - own_columns if tables else own_columns - own_tables
    used = sorted({p for p in PIECE.findall(gold) if p in own and p.lower() not in KEYWORDS})
    others = [s for name, s in sorted(environment.schemas.items()) if name != schema.db_id]
    if len(used) < count or not others:
        return None
    names: dict[str, str] = {}  # from today's to the stale one
    taken = {name.lower() for name in (*own_tables, *own_columns, *PIECE.findall(gold))} | KEYWORDS
    for name in rng.sample(used, count):
        other = rng.choice(others)
        pool = sorted(_table_names(other) if tables else _column_names(other))
        pool = [n for n in pool if n.isidentifier() and n.lower() not in taken]
        if not pool:
            return None
        names[name] = rng.choice(pool)
        taken.add(names[name].lower())
    in_question = rng.random() < STALE_QUESTION
    shown = (_renamed_question(example, names, in_question), _renamed_schema(schema, names))
    spoken = shown[0].question.lower()
    told = tables or all(name.lower() in spoken or _spoken(name) in spoken for name in names.values())
    wrong = []
    while names:
        wrong.append(_renamed(gold, names))
        message = environment.executor.execute(schema.path, wrong[-1]).message
        missed = next((name for name, stale in names.items() if re.search(rf"\b{stale}\b", message)), None)
        if missed is None:
            return None
        del names[missed]
    return Mistake(tuple(wrong), shown, told)


def moved_column(environment: Environment, example: Example, rng: random.Random) -> Mistake | None:
    """The prompt shows a column in another table of the join; the error says where it is."""
    schema, gold, table_of = _read_gold(environment, example)
    keys = _key_names(schema)
    pairs = [
        (alias, column, other)
        for alias, column in sorted(set(QUALIFIED.findall(gold)))
        for other in table_of
        if column not in keys and alias in table_of and column not in _columns(schema, table_of[other])
    ]
    if not pairs:
        return None
    alias, column, other = rng.choice(pairs)
    wrong = re.sub(rf"\b{alias}\.{column}\b", f"{other}.{column}", gold)
    shown = _moved(schema, {column}, table_of[alias], table_of[other])
    return _failing(environment, example, wrong, shown, told=True)


def lost_join(environment: Environment, example: Example, rng: random.Random) -> Mistake | None:
    """The prompt shows all columns in one table, so that the join looks needless."""
    schema, gold, _ = _read_gold(environment, example)
    join = JOINED.search(gold)
    if join is None or gold.count(" JOIN ") != 1:
        return None
    kept, lost = rng.sample([1, 2], 2)
    rest = gold.replace(join[0], "")
    columns = {column for alias, column in QUALIFIED.findall(rest) if alias == f"t{lost}"}
    if not columns or columns & set(_columns(schema, join[kept])):
        return None
    wrong = re.sub(r"\bt[12]\.", "", gold.replace(join[0], f"FROM {join[kept]}"))
    shown = _moved(schema, columns, join[lost], join[kept])
    return _failing(environment, example, wrong, shown, told=True)


def ambiguous_column(environment: Environment, example: Example, rng: random.Random) -> Mistake | None:
    """A column that several joined tables have, without its table."""
    schema, gold, table_of = _read_gold(environment, example)
    having = Counter(column for table in table_of.values() for column in set(_columns(schema, table)))
    places = [found for found in QUALIFIED.finditer(gold) if having[found[2]] > 1]
    if not places:
        return None
    place = rng.choice(places)
    wrong = gold[: place.start()] + place[2] + gold[place.end() :]
    return _failing(environment, example, wrong, schema, told=False)


def other_value(environment: Environment, example: Example, rng: random.Random) -> Mistake | None:
    """A text is compared in a form that the database does not have; the agent looks which there are."""
    schema, gold, table_of = _read_gold(environment, example)
    example = in_normal_form(example, schema)
    found = rng.choice(COMPARED.findall(gold) or [None])
    if found is None:
        return None
    alias, column, value = found
    table = table_of.get(alias) or next(iter(re.findall(r"\bFROM (\w+)", gold)), None)
    asked = re.search(rf"\b{re.escape(value)}\b", example.question, re.IGNORECASE)
    if asked is None:  # 'F' where the question says female
        forms = [w for w in re.findall(r"\w+", example.question) if w.lower().startswith(value.lower())]
    elif asked[0] == value:
        forms = [form for form in (value.lower(), value.upper(), value.title()) if form != value]
    else:
        forms = [asked[0]]
    if not forms or table is None:
        return None
    form, execute = rng.choice(forms), environment.executor.execute
    wrong = gold.replace(f"'{value}'", f"'{form}'")
    look = f"SELECT DISTINCT {column} FROM {table}"
    seen = environment.recipe.observe_execution(
        example.question, look, execute(schema.path, look), False, environment.limits.max_interactions
    )
    shows = [outcome_of(execute(schema.path, sql)) for sql in (wrong, gold)]
    if shows != ["null", "ok"] or value not in seen:
        return None
    question = example.question.replace(asked[0], form) if asked else example.question
    return Mistake((wrong,), (replace(example, question=question), schema), look=look)


KINDS: dict[str, Callable[[Environment, Example, random.Random], Mistake | None]] = {
    "stale column": lambda *given: stale_names(*given, tables=False),
    "stale table": lambda *given: stale_names(*given, tables=True),
    "two stale columns": lambda *given: stale_names(*given, tables=False, count=2),
    "moved column": moved_column,
    "lost join": lost_join,
    "ambiguous column": ambiguous_column,
    "other value": other_value,
}


def _read_gold(environment: Environment, example: Example) -> tuple[Schema, str, dict[str, str]]:
    """The question's schema, its gold SQL in normal form, and the table of each alias in that."""
    schema = environment.schemas[example.db_id]
    gold = normal_form(example.gold_sql, schema)
    return schema, gold, {alias: table for table, alias in ALIASED.findall(gold)}


def _failing(
    environment: Environment, example: Example, wrong: str, shown: Schema, told: bool
) -> Mistake | None:
    """The mistake, if the query fails with an error where the gold SQL does not."""
    schema, gold, _ = _read_gold(environment, example)
    outcomes = [outcome_of(environment.executor.execute(schema.path, sql)) for sql in (wrong, gold)]
    if outcomes[0] != "error" or outcomes[1] == "error":
        return None
    return Mistake((wrong,), (in_normal_form(example, schema), shown), told)


def _table_names(schema: Schema) -> set[str]:
    return {table.name for table in schema.tables}


def _column_names(schema: Schema) -> set[str]:
    return {column for table in schema.tables for column, _ in table.columns}


def _columns(schema: Schema, table: str) -> list[str]:
    return [column for t in schema.tables if t.name == table for column, _ in t.columns]


def _key_names(schema: Schema) -> set[str]:
    foreign = {n for t in schema.tables for column, _, key in t.foreign_keys for n in (column, key)}
    return foreign | {column for table in schema.tables for column in table.primary_keys}


def _spoken(name: str) -> str:
    return name.replace("_", " ").lower()


def _renamed(sql: str, names: Mapping[str, str]) -> str:
    return "".join(names.get(piece, piece) for piece in PIECE.findall(sql))


def _renamed_question(example: Example, names: Mapping[str, str], in_question: bool) -> Example:
    """The question with its history under the stale names; what is asked only with `in_question`."""

    def said(text: str) -> str:
        for name, stale in names.items() if in_question else ():
            text = re.sub(rf"\b{re.escape(name)}s?\b", stale, text, flags=re.IGNORECASE)
            text = re.sub(rf"\b{re.escape(_spoken(name))}s?\b", _spoken(stale), text, flags=re.IGNORECASE)
        return text

    history = tuple(
        replace(turn, question=said(turn.question), sql=turn.sql and _renamed(turn.sql, names))
        for turn in example.history
    )
    return replace(example, question=said(example.question), history=history)


def _renamed_schema(schema: Schema, names: Mapping[str, str]) -> Schema:
    def stale(name: str) -> str:
        return names.get(name, name)

    tables = tuple(
        replace(
            table,
            name=stale(table.name),
            columns=tuple((stale(column), kind) for column, kind in table.columns),
            primary_keys=tuple(map(stale, table.primary_keys)),
            foreign_keys=tuple(tuple(map(stale, key)) for key in table.foreign_keys),
        )
        for table in schema.tables
    )
    return replace(schema, tables=tables)


def _moved(schema: Schema, columns: set[str], source: str, target: str) -> Schema:
    """The schema with some columns of one table at the end of another, their example cells with them."""

    def cells(table: SchemaTable) -> dict[str, tuple[str, object]]:
        """Type and example cell by column."""
        row = table.example_row or (None,) * len(table.columns)
        return {c: (kind, cell) for (c, kind), cell in zip(table.columns, row, strict=True)}

    origin = [table for table in schema.tables if table.name == source]
    moved = {c: pair for table in origin for c, pair in cells(table).items() if c in columns}

    def change(table: SchemaTable) -> SchemaTable:
        held = {c: pair for c, pair in cells(table).items() if table.name != source or c not in columns}
        held |= moved if table.name == target else {}
        return replace(
            table,
            columns=tuple((c, kind) for c, (kind, _) in held.items()),
            foreign_keys=tuple(key for key in table.foreign_keys if key[0] in held),
            example_row=tuple(cell for _, cell in held.values()),
            descriptions=(),
        )

    return replace(schema, tables=tuple(map(change, schema.tables)))


def format_repairs(trajectories: Sequence[Trajectory]) -> str:
    """How many trajectories there are by number of failed queries, as a sentence."""
    failed = Counter(sum(action.passed is False for action in t.actions) for t in trajectories)
    return ", ".join(f"{count:,} trajectories with {n} failed queries" for n, count in sorted(failed.items()))
