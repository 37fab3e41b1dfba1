"""What fine-tuning on gold SQL learns from: direct answers, or demonstrations of the protocol with tools.

A model that does not call its tools untrained is shown how by a scripted agent. Mostly the agent proposes
the gold SQL, runs it, asks the memory and answers. In a part of the questions its first query fails, and
is repaired to the gold SQL. Where the gold SQL joins tables it mostly fails as policies' own queries do: a
column is asked of the wrong table, or a join is missing. Such a repair can be guessed from the prompt, which
teaches nothing about reading a result. So elsewhere the prompt shows a stale schema, in which the failing
query is right: a column or a table has another name. What is there today is to be read in the error, and
nowhere else.

After a failure the agent says what it needed, how the repair joins ("FROM singer AS t1 JOIN ...") or where a
column is ("name is in singer: t1.name"), mostly as the error's hint has it, and then writes the repair. At
times the next query fails too, the same again or another one: where every demonstration fails once, a policy
learns to count its failures and not to look at results.

Half of the questions are answered at once even so. With calls alone a policy has learned the SQL of later
turns less well after as many steps (docs/lab/qwen.md).

A known fault: of the first queries that are learned with tools 7 % have a join, of gold SQL 32 %, and
policies follow (docs/lab/qwen.md).

A query that fails only because the schema is stale is learned: it is what the prompt asks for. Any other has
loss mask 0: the policy learns to run, to judge and to repair, not to fail.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from mtsql.agent.env import Environment, Episode, outcome_of
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS, make_tools
from mtsql.agent.trajectory import Status, Stop, Trajectory
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.recipes.mtsql_r1 import tool_call, verdict
from mtsql.sql.execute import ExecutionResult
from mtsql.sql.text import KEYWORDS, PIECE, in_normal_form, normal_form

SHARES = {"both": 0.45, "none": 0.5, "no_execution": 0.025, "no_memory": 0.025}  # of the sets of tools
# Shares of the questions with EXECUTE whose first query fails, where a mistake can be made: gold SQL with a
# join, without one; and of those in which the mistakes that policies make themselves are tried first.
REPAIRED_JOIN, REPAIRED, OWN_FIRST = 0.9, 0.2, 0.9
OWN_KINDS = ("wrong table", "lost join")
FAILS_AGAIN = 0.4  # share of the first queries that fail whose next one fails too
STALE_QUESTION = 0.5  # share of stale schemas whose names stand in the question too
JOINED = re.compile(r"\bFROM \w+ AS t1(?: JOIN \w+ AS t\d+ ON t\d+\.\w+ = t\d+\.\w+)+(?! AND)")
ALIASED = re.compile(r"\b(?:FROM|JOIN) (\w+) AS (t\d+)\b")
QUALIFIED = re.compile(r"\b(t\d+)\.(\w+)")
FROM = re.compile(r"\b(?:FROM|JOIN) (\w+)")
NAME = re.compile(r"'[^']*'|(?<![\w.])(?:(t\d+)\.)?(\w+)")  # or a text, in which none is found
COMPARED = re.compile(r"(?<![\w.])(?:(t\d+)\.)?(\w+) = '([^']+)'")


@dataclass(frozen=True)
class Mistake:
    """A query that fails, and what the prompt shows, so that it looks right.

    `learned` says that the prompt tells it, so that its message has loss mask 1. `look` is a query that shows
    what there is, to be run before the repair.
    """

    wrong: str
    shown: tuple[Example, Schema]
    learned: bool = False
    look: str | None = None


def gold_trajectories(
    environment: Environment, asked: Sequence[Example], seed: int
) -> list[list[Trajectory]]:
    """A trajectory of each question that ends in its gold SQL in normal form, none where it does not fit.

    Without tools in the environment it is a direct answer: the short-horizon baseline. With them it is a
    demonstration, at times with fewer tools (never with others), so that the policy knows the prompts of
    Table 4's ablations.
    """
    environments = {name: replace(environment, tools=make_tools(name)) for name in TOOL_SETS}
    found = []
    for example in asked:
        rng = random.Random(f"{seed}/{example.id}")
        chosen, mistakes = environments[rng.choices(list(SHARES), list(SHARES.values()))[0]], []
        if not chosen.tools.keys() <= environment.tools.keys():
            chosen = environment  # the run has no such tool
        share = REPAIRED_JOIN if "join" in example.gold_sql.lower().split() else REPAIRED
        if EXEC_SQL in chosen.tools and rng.random() < share:
            question, kinds = Question(chosen, example), rng.sample(list(KINDS), len(KINDS))
            if rng.random() < OWN_FIRST:
                kinds.sort(key=lambda kind: kind not in OWN_KINDS)
            made = filter(None, (KINDS[kind](question, rng) for kind in kinds))
            mistakes = list(islice(made, 1))
            if mistakes and not mistakes[0].look and rng.random() < FAILS_AGAIN:
                others = (mistake for mistake in made if not mistake.look)
                again = next(others, mistakes[0]) if rng.random() < 0.5 else mistakes[0]
                mistakes.append(replace(again, learned=False))
        trajectory = play(chosen, example, mistakes) or play(chosen, example)
        trajectory = trajectory or play(environments["none"], example)
        found.append([] if trajectory is None else [trajectory])
    return found


def play(environment: Environment, example: Example, mistakes: Sequence[Mistake] = ()) -> Trajectory | None:
    """The scripted agent's episode: what is wrong, then the gold SQL, which passes every check.

    The first of the mistakes says what the prompt shows. None if it does not fit into the limits.
    """
    (episode,) = environment.episodes(example, [0], mistakes[0].shown if mistakes else None)
    recipe, question = episode.recipe, Question(environment, example)
    gold = question.gold
    said = ""  # the verdict on what came back, and what was needed
    for mistake in mistakes:
        say(episode, said + recipe.call(mistake.wrong), learned=mistake.learned)
        needed = question.needed(mistake.wrong)
        said = verdict(EXEC_SQL, False) + "\n" + (needed and needed + "\n")
        if mistake.look:
            say(episode, said + recipe.call(mistake.look))
    if EXEC_SQL in episode.tools:
        say(episode, said + recipe.call(gold))
        said = verdict(EXEC_SQL, True) + "\n"
    if MEMORY_RETRIEVE in episode.tools and example.history:
        say(episode, said + tool_call(MEMORY_RETRIEVE, gold))
        said = verdict(MEMORY_RETRIEVE, True) + "\n"
    say(episode, said + recipe.answer(gold))
    repeated = sum(a.wrong == b.wrong for a, b in pairwise(mistakes))  # off the protocol, and not learned
    played = episode.trajectory
    return played if played.status is Status.ANSWERED and played.off_protocol == repeated else None


def say(episode: Episode, text: str, stop: Stop = Stop.END_OF_TURN, learned: bool = True) -> None:
    """Give an episode a message as if the policy had sampled it, within its limits; nothing if it is over.

    The loss mask is `learned` on all tokens, an end of turn included.
    """
    if episode.trajectory.status is not None:
        return
    ids = episode.tokens.message_ids(text)
    if stop is Stop.STOP_STRING:
        ids = ids[:-1]
    if len(ids) > min(episode.limits.max_turn_tokens, episode.remaining_tokens()):
        stop = Stop.LIMIT
    episode.step(ids, [0.0] * len(ids), stop, [int(learned)] * len(ids))


class Question:
    """What a mistake is made of: a question, its gold SQL in normal form, and the names in its schema."""

    def __init__(self, environment: Environment, example: Example) -> None:
        self.environment, self.schema = environment, environment.schemas[example.db_id]
        self.example = in_normal_form(example, self.schema)
        self.gold = normal_form(example.gold_sql, self.schema)
        self.columns = columns_of(self.schema)
        self.table_of = {alias: t for t, alias in ALIASED.findall(self.gold) if t in self.columns}

    def execute(self, sql: str) -> ExecutionResult:
        """What a query gives in the question's database."""
        return self.environment.executor.execute(self.schema.path, sql)

    def columns_in(self, sql: str) -> dict[tuple[str, str], None]:
        """The (table, column) of each column in SQL in normal form, in its order."""
        from_, table_of = set(FROM.findall(sql)), {alias: table for table, alias in ALIASED.findall(sql)}
        found = {}
        for alias, name in NAME.findall(sql):
            having = [table for table in from_ if name in self.columns.get(table, ())]
            if alias in table_of or (not alias and len(having) == 1):
                found[table_of.get(alias) or having[0], name] = None
        return found

    def needed(self, wrong: str) -> str:
        """What the gold SQL has and the failed query has not: how it joins, else at most two columns.

        Of these come first that the query names.
        """
        joined = JOINED.search(self.gold)
        if joined and joined[0] not in wrong:
            return joined[0]
        missing = [pair for pair in self.columns_in(self.gold) if pair not in self.columns_in(wrong)]
        missing.sort(key=lambda pair: pair[1] not in PIECE.findall(wrong))
        tables = set(FROM.findall(self.gold)) - set(FROM.findall(wrong))
        alias_of = {table: alias for alias, table in self.table_of.items()}
        said = [f"{c} is in {t}" + (f": {alias_of[t]}.{c}" if t in alias_of else "") for t, c in missing[:2]]
        return "; ".join(said or [f"there is {table}" for table in sorted(tables)])

    def checked(self, mistake: Mistake) -> Mistake | None:
        """The mistake, if its query fails where the gold SQL does not; before a look it finds nothing."""
        wrong, gold = (outcome_of(self.execute(sql)) for sql in (mistake.wrong, self.gold))
        fails = (wrong, gold) == ("null", "ok") if mistake.look else wrong == "error" != gold
        return mistake if fails else None

    def one_of(self, wrongs: Sequence[str], rng: random.Random) -> Mistake | None:
        """A mistake with one of these queries, under the question as it is; None if there is none."""
        shown = (self.example, self.schema)
        return self.checked(Mistake(rng.choice(wrongs), shown)) if wrongs else None


def columns_of(schema: Schema) -> dict[str, list[str]]:
    """The columns' names by table."""
    return {table.name: [column for column, _ in table.columns] for table in schema.tables}


def stale_name(question: Question, rng: random.Random, of_tables: bool) -> Mistake | None:
    """A table or column of the gold SQL has another name in the prompt, taken from another database."""
    gold, schema, schemas = question.gold, question.schema, question.environment.schemas
    tables, columns = set(question.columns), set().union(*question.columns.values())
    own = tables - columns if of_tables else columns - tables
    pieces = set(PIECE.findall(gold))
    used = sorted(name for name in own & pieces if name.lower() not in KEYWORDS)
    others = [schemas[name] for name in sorted(schemas) if name != schema.db_id]
    if not used or not others:
        return None
    other = columns_of(rng.choice(others))
    taken = {name.lower() for name in pieces | tables | columns} | KEYWORDS
    pool = sorted(other if of_tables else set().union(*other.values()))
    pool = [name for name in pool if name.isidentifier() and name.lower() not in taken]
    if not pool:
        return None
    name, stale = rng.choice(used), rng.choice(pool)
    shown = renamed_question(question.example, name, stale, rng.random() < STALE_QUESTION)
    spoken = shown.question.lower()
    told = of_tables or stale.lower() in spoken or _spoken(stale) in spoken
    shows = (shown, renamed_schema(schema, name, stale))
    return question.checked(Mistake(_renamed(gold, name, stale), shows, told))


def wrong_table(question: Question, rng: random.Random) -> Mistake | None:
    """A column is asked of another table of the join."""
    gold, table_of = question.gold, question.table_of
    wrongs = [
        re.sub(rf"\b{alias}\.{column}\b", f"{other}.{column}", gold)
        for alias, column in sorted(set(QUALIFIED.findall(gold)))
        for other in table_of
        if alias in table_of and column not in question.columns[table_of[other]]
    ]
    return question.one_of(wrongs, rng)


def lost_join(question: Question, rng: random.Random) -> Mistake | None:
    """One of the joined tables stands alone."""
    gold, join = question.gold, JOINED.search(question.gold)
    if join is None or gold.count(" JOIN ") != join[0].count(" JOIN "):
        return None
    tables, shown = [table for table, _ in ALIASED.findall(join[0])], (question.example, question.schema)
    alone = (gold.replace(join[0], f"FROM {table}") for table in rng.sample(tables, len(tables)))
    made = (question.checked(Mistake(re.sub(r"\bt\d+\.", "", sql), shown)) for sql in alone)
    return next(filter(None, made), None)


def ambiguous_column(question: Question, rng: random.Random) -> Mistake | None:
    """A column that several joined tables have, without its table."""
    gold = question.gold
    having = Counter(c for table in question.table_of.values() for c in set(question.columns[table]))
    places = (found for found in QUALIFIED.finditer(gold) if having[found[2]] > 1)
    return question.one_of([gold[: at.start()] + at[2] + gold[at.end() :] for at in places], rng)


def other_value(question: Question, rng: random.Random) -> Mistake | None:
    """A text is compared in a form that the database does not have; the agent looks which there are."""
    gold, example, environment = question.gold, question.example, question.environment
    compared = COMPARED.findall(gold)
    if not compared:
        return None
    alias, column, value = rng.choice(compared)
    table = question.table_of.get(alias) or next(iter(re.findall(r"\bFROM (\w+)", gold)), None)
    said = re.search(rf"\b{re.escape(value)}\b", example.question, re.IGNORECASE)
    forms = {value.lower(), value.upper(), value.title()} - {value}
    if table is None or said is None or not forms:
        return None
    form = said[0] if said[0] != value else rng.choice(sorted(forms))
    wrong, look = gold.replace(f"'{value}'", f"'{form}'"), f"SELECT DISTINCT {column} FROM {table}"
    seen = environment.recipe.observe_execution(
        example.question, look, question.execute(look), False, environment.limits.max_interactions
    )
    asked = replace(example, question=example.question.replace(said[0], form))
    mistake = Mistake(wrong, (asked, question.schema), look=look)
    return question.checked(mistake) if value in seen else None


KINDS: dict[str, Callable[[Question, random.Random], Mistake | None]] = {
    "stale column": lambda *given: stale_name(*given, of_tables=False),
    "stale table": lambda *given: stale_name(*given, of_tables=True),
    "wrong table": wrong_table,
    "lost join": lost_join,
    "ambiguous column": ambiguous_column,
    "other value": other_value,
}


def _spoken(name: str) -> str:
    return name.replace("_", " ").lower()


def _renamed(sql: str, name: str, stale: str) -> str:
    return "".join(stale if piece == name else piece for piece in PIECE.findall(sql))


def renamed_question(example: Example, name: str, stale: str, in_question: bool) -> Example:
    """The question with its history's SQL under the stale name; what is asked only with `in_question`."""

    def said(text: str) -> str:
        for old, new in ((name, stale), (_spoken(name), _spoken(stale))) if in_question else ():
            text = re.sub(rf"\b{re.escape(old)}s?\b", new, text, flags=re.IGNORECASE)
        return text

    history = tuple(
        replace(turn, question=said(turn.question), sql=turn.sql and _renamed(turn.sql, name, stale))
        for turn in example.history
    )
    return replace(example, question=said(example.question), history=history)


def renamed_schema(schema: Schema, name: str, stale: str) -> Schema:
    """The schema with the stale name in place of today's, in keys too."""

    def new(old: str) -> str:
        return stale if old == name else old

    tables = []
    for table in schema.tables:
        columns = tuple((new(column), kind) for column, kind in table.columns)
        foreign = tuple(tuple(map(new, key)) for key in table.foreign_keys)
        keys = {"primary_keys": tuple(map(new, table.primary_keys)), "foreign_keys": foreign}
        tables.append(replace(table, name=new(table.name), columns=columns, **keys))
    return replace(schema, tables=tuple(tables))


def format_repairs(trajectories: Sequence[Trajectory]) -> str:
    """How many trajectories there are by number of failed queries, as a sentence."""
    failed = Counter(sum(action.passed is False for action in t.actions) for t in trajectories)
    return ", ".join(f"{count:,} trajectories with {n} failed queries" for n, count in sorted(failed.items()))
