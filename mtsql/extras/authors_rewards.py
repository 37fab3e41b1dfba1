"""MTSQL-R1's reward as the authors' released code has it (github.com/taichengguo/MTSQL-R1, a720f97).

It is chosen by --rewards mtsql.extras.authors_rewards, for MTSQL-R1 alone: it finds no call or answer of
another recipe.

It reads raw text where the paper's reads actions:
- The answer is the last <answer_sql> of the whole response, tool texts included: of an unfinished
  trajectory the "..." of a tool's instructions. Without any it is the SQL of the last tool call, without a
  call the last thought or all of the text. Line breaks in it become blanks, so that "--" hides the rest.
- EM compares the numbers after LIMIT in sub-queries.
- A clause is right or wrong as a whole: no F1 of its elements.
- Proposals are the SQL of all tool calls, repeated or not, without the final answer.
- Every tool call is verified, whichever the tool, by the first <exec_verify> after it, in whatever message
  or thought; without any it has passed. <memory_verify> is never read.
- An error that is none of FOUR_ERRORS is "ok", and so are a call without a response and rows of nothing but
  NULLs.

Some of its quirks are not here. It runs SQL without limits of time and memory and lets an empty answer
equal an empty result, which `mtsql.sql.execute` does not allow. It reads outcomes from the tool's text, so
that a question with the words "no data" is a null result; we run the SQL again. It gives 0 where the gold
query fails; such questions are left out before training. That it takes the schema from CoSQL's folder and
that a wrong format costs nothing changes no number here.
"""

from __future__ import annotations

import json
from typing import NamedTuple

from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.agent.trajectory import Trajectory
from mtsql.data.datasets import Example
from mtsql.recipes.mtsql_r1 import VERDICT, answers, enclosed
from mtsql.recipes.mtsql_r1_rewards import E_VERIFY_TABLE, PROCESS, RewardWeights, r_all
from mtsql.recipes.rewards import Decode, RewardFunction, Rewards, chosen_rewards
from mtsql.sql.execute import ExecutionResult
from mtsql.sql.grammar import SqlParseError, SqlSchema, parse_sql
from mtsql.sql.score import Scorer

FOUR_ERRORS = ("no such table", "no such column", "ambiguous column name", "syntax error")


class Call(NamedTuple):
    """A tool call: its message, counted from 0, and the first verdict after it, "pass" without any."""

    tool: str
    sql: str
    message: int
    passed: bool


def make_reward(rewards: str, scorer: Scorer, decode: Decode, turns: int) -> RewardFunction:
    """The released code's reward, with the weights that `rewards` changes."""
    _, weights = chosen_rewards({__name__: PROCESS}, rewards)
    return lambda trajectory, example: authors_reward(trajectory, example, scorer, weights, decode)


def authors_reward(
    trajectory: Trajectory, example: Example, scorer: Scorer, weights: RewardWeights, decode: Decode
) -> Rewards:
    """R_all with the quirks above; `decode` gives the text of token ids, control tokens included."""
    db_id, gold = example.db_id, example.gold_sql
    parts = [(segment.role, decode(segment.ids)) for segment in trajectory.segments[1:]]
    calls = _calls([text for role, text in parts if role == "model"])
    answer = _answer("".join(text for _, text in parts), calls).replace("\n", " ")
    ex, em = scorer.ex(db_id, gold, answer), scorer.em(db_id, gold, answer, keep_limit=True)
    proposals, e_verify, m_verify = [], [], []
    for call in calls:
        f1 = whole_clause_f1(gold, call.sql, scorer.schemas[db_id])
        proposals.append(f1)
        if call.tool == EXEC_SQL:
            outcome = "ok"
            if call.message < len(trajectory.observations):
                ran = trajectory.observations[call.message].sql
                outcome = _outcome(scorer.executor.execute(scorer.paths[db_id], ran))
            e_verify.append(E_VERIFY_TABLE[outcome, call.passed])
        elif call.tool == MEMORY_RETRIEVE:
            m_verify.append(f1 if call.passed else 1.0 - f1)
    return r_all(weights, float(ex), float(em), (proposals, e_verify, m_verify))


def _calls(messages: list[str]) -> list[Call]:
    verdicts = list(VERDICT[EXEC_SQL].finditer("".join(messages)))
    calls, before = [], 0
    for message, text in enumerate(messages):
        for call, end in enclosed(text, r"<tool_call>\s*(?={)", "</tool_call>"):  # in a thought as well
            try:
                content = json.loads(call)
                tool, sql = content["name"], content["arguments"]["code"]
            except (ValueError, RecursionError, KeyError, TypeError):
                continue
            if isinstance(sql, str):
                after = (verdict for verdict in verdicts if verdict.start() >= before + end)
                passed = next((verdict[1] == "pass" for verdict in after), True)
                calls.append(Call(tool, sql, message, passed))
        before += len(text)
    return calls


def _answer(text: str, calls: list[Call]) -> str:
    thoughts = [thought for thought, _ in enclosed(text, "<think>", "</think>")]
    found = answers(text) or [c.sql for c in calls] or thoughts or [text]
    return found[-1].strip()


def _outcome(result: ExecutionResult) -> str:
    if not result.ok:
        return "error" if any(error in result.message for error in FOUR_ERRORS) else "ok"
    return "ok" if result.rows else "null"


def whole_clause_f1(gold_sql: str, pred_sql: str, schema: SqlSchema) -> float:
    """The share of whole clauses that are equal, of those that are not empty on both sides.

    Values, DISTINCT and the order of elements count. 0.0 if one of the two cannot be read.
    """
    try:
        gold, pred = (parse_sql(sql, schema, keep_limit=True) for sql in (gold_sql, pred_sql))
    except SqlParseError:
        return 0.0
    used = [clause for clause in gold if gold[clause] or pred[clause]]
    return sum(gold[clause] == pred[clause] for clause in used) / len(used)
