"""SQL-Trail, the recipe: prompt and loop (A.3, Algorithm 1), six rewards (A.4), settings (A.5).

What it shares with SkyRL-SQL, with the choices that hold for both, is in skyrl_sql.py. Choices of its own:

- Thoughts: the text and the rules of the prompt say <reasoning>, its example, A.3 and A.8 say <think>. The
  prompt stays as it is printed and both tags count. It is a message of the user, not of the system as in A.3.
- Turns: t counts the messages of the episode, the solution included, and so does T, which is 10: one more than
  --max-interactions, which counts what was answered. Algorithm 1
  lets the model write one more message after T turns, the solution; here the last of the T messages has to be
  it. Algorithm 1 also stops at </reasoning>: here a thought and its action are one message.
- Algorithm 1 answers a query that fails like an action that cannot be read; section 3.1 says that error
  messages are observed, and here they are.
- Every reward of an episode without a solution is 0. By the letter of Equation 7 an easy question would pay for
  giving up at once.
- Hardness is Spider's ("simple" is its "easy"). A question whose gold SQL its grammar does not read, as most of
  BIRD's and SynSQL's, counts as hard in r_turns.
- r_schema (Equation 10): names of tables and columns in either SQL, aliases resolved, in any case, whether the
  database has them or not; "*" is no column. SQL that cannot be read has none, and the reward is 0.
- r_bigram (Equation 9): over the words, quoted texts and single characters of the first statement, all in
  lower case, without white space and comments. SQL longer than 100,000 characters has none.
- r_format: every message has a thought and one action, and the last is a solution; the paper asks for tags in
  the final output. r_exec is the project's EX, which looks at the first statement; r_syntax runs the whole
  answer with EX's small repairs ("> ="), so that a second statement costs it.
- Where single-pass and multi-turn RL are compared, r_turns is off in both (section 5.1): --rewards turns=0.
- Table 4's rows (without guidance, headers, schema) are edits in docs/how_to.md; its second has
  no headers where ours has rows and their numbers alone. The prompts of a single pass and of native thinking are
  ours.
- clip_high is DAPO's 0.28: the paper takes over clip-higher without a number. Equation 2 has one ratio a
  trajectory, the product of its tokens' ratios, and divides by no length. Here each token has its ratio and a
  trajectory counts by its mean, as in GRPO; the gradient of --aggregate constant is Equation 2's but for a factor.
- Sampling with top_p 0.99 (A.5) becomes 1: the loss needs the log-probabilities that were sampled from.
- "Batch size 128" is read as questions in RL and as trajectories in SFT, whose optimizer is that of A.5. RL's
  learning rate, 1e-6, is the default; its other optimizer settings are not given. The number of steps (108) is
  not set here.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import ClassVar

from sqlglot import exp

from mtsql.agent.trajectory import Trajectory
from mtsql.data.datasets import Example
from mtsql.data.schema import folded
from mtsql.recipes.prompt_options import aligned
from mtsql.recipes.rewards import Decode, RewardFunction, Rewards, chosen_rewards, ex_em, keeps_format
from mtsql.recipes.skyrl_sql import SkyrlSql
from mtsql.sql.grammar import MAX_CHARACTERS, SqlParseError, SqlSchema
from mtsql.sql.score import Scorer
from mtsql.sql.text import first_statement, is_blank
from mtsql.sql.tree import canonical_tree


class SqlTrail(SkyrlSql):
    """SQL-Trail's prompts, tags and observations."""

    template: ClassVar[str] = "sql_trail"
    thought_tags: ClassVar[tuple[str, ...]] = ("reasoning", "think")
    invalid: ClassVar[str] = "Your previous action is invalid. Think and try again."

    def table(self, cells: list[list[str]]) -> str:
        """A table as pandas prints it, rows counted from 0."""
        header, *rows = cells
        if not rows:
            return f"Empty DataFrame\nColumns: [{', '.join(header)}]\nIndex: []"
        return aligned([["", *header], *([str(i), *row] for i, row in enumerate(rows))])


make_recipe = SqlTrail


@dataclass(frozen=True)
class RewardWeights:
    """The weights of Equation 12; `ex` is r_exec."""

    ex: float = 5.0
    turns: float = 2.0
    schema: float = 1.0
    bigram: float = 1.0
    syntax: float = 1.0
    format: float = 1.0


# `execution` keeps the first term alone, with its weight.
PRESETS = {"paper": RewardWeights(), "execution": RewardWeights(5.0, 0.0, 0.0, 0.0, 0.0, 0.0)}


def jaccard(a: Set, b: Set) -> float:
    """|a & b| / |a | b|; 0 for two empty sets."""
    return len(a & b) / len(a | b) if a or b else 0.0


def bigrams(sql: str) -> set[tuple[str, str]]:
    """Pairs of neighbouring tokens of the first statement, in lower case."""
    if len(sql) > MAX_CHARACTERS:
        return set()
    pieces = (piece.lower() for piece in first_statement(sql))
    return set(pairwise(p for p in pieces if not is_blank(p)))


def schema_items(sql: str, schema: SqlSchema) -> set[tuple[str, str]]:
    """("table", name) and ("column", name) of all that `sql` names; none if it cannot be read."""
    try:
        tree = canonical_tree(sql, schema)
    except SqlParseError:
        return set()
    own = {folded(cte.alias) for cte in tree.find_all(exp.CTE)}
    tables = {folded(table.name) for table in tree.find_all(exp.Table)} - own
    columns = {folded(c.name) for c in tree.find_all(exp.Column) if not isinstance(c.this, exp.Star)}
    columns |= {folded(c.name) for join in tree.find_all(exp.Join) for c in join.args.get("using") or []}
    return {("table", name) for name in tables} | {("column", name) for name in columns}


def turns_reward(hardness: str, turn: int, budget: int, ex: float) -> float:
    """r_turns (Equation 7): 1 for an answer in the turns that a question of that hardness should take."""
    if hardness in ("easy", "medium"):
        return float(turn <= (2 if hardness == "easy" else 3))
    return float(ex == 1 and turn < budget)


def reward(
    trajectory: Trajectory, example: Example, scorer: Scorer, weights: RewardWeights, budget: int
) -> Rewards:
    """Equation 12, the weighted sum of six rewards from 0 to 1; `budget` is T.

    No answer raises. Raises ValueError for a gold SQL that does not run.
    """
    ex, em = ex_em(trajectory, example, scorer)
    db_id, gold, answer = example.db_id, example.gold_sql, trajectory.answer_sql
    parts = dict.fromkeys(("turns", "schema", "bigram", "syntax", "format"), 0.0)
    if answer is not None:
        hardness, schema = scorer.hardness(db_id, gold), scorer.schemas[db_id]
        parts = {
            "turns": turns_reward(hardness, trajectory.messages, budget, ex),
            "schema": jaccard(schema_items(answer, schema), schema_items(gold, schema)),
            "bigram": jaccard(bigrams(answer), bigrams(gold)),
            "syntax": float(scorer.runs(db_id, answer)),
            "format": float(keeps_format(trajectory)),
        }
    total = sum(weight * {"ex": ex, **parts}[name] for name, weight in asdict(weights).items())
    return Rewards(ex, em, total, parts)


def make_reward(rewards: str, scorer: Scorer, decode: Decode, turns: int) -> RewardFunction:
    """The rewards of --rewards: a preset ("" is `paper`) and changed weights, "turns=0,bigram=0.5".

    Raises UserError for an unknown preset or weight.
    """
    _, weights = chosen_rewards(PRESETS, rewards)
    return lambda trajectory, example: reward(trajectory, example, scorer, weights, turns)
