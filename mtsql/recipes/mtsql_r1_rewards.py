"""MTSQL-R1: multi-level rewards (section 3.3.2), with the departures of the paper and of its release.

The default rules are what we defend. `PRESETS` names the rules and weights of the paper's text and of
the authors' released code (github.com/taichengguo/MTSQL-R1, a720f97).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from mtsql.agent.env import EXEC_SQL, MEMORY_RETRIEVE, outcome_of
from mtsql.agent.trajectory import ActionType, Observation, Trajectory
from mtsql.data.datasets import Example
from mtsql.recipes.mtsql_r1_prompts import ANSWER, VERDICT
from mtsql.recipes.rewards import Decode, RewardFunction, Rewards, choose_preset, with_weights
from mtsql.recipes.wording import Wording
from mtsql.sql.score import Scorer


@dataclass(frozen=True)
class RewardWeights:
    """w1..w4 of R_all (section 3.3.2); the paper chose its own by grid search and gives none."""

    ex: float = 1.0
    em: float = 1.0
    proposal: float = 0.0
    verify: float = 0.0


@dataclass(frozen=True)
class RewardRules:
    """Departures from the default rewards, off by default.

    `string_em` is the paper's text, every other switch a quirk of the authors' release. Some of its
    quirks have no switch. It runs SQL without limits of time and memory and lets an empty answer equal
    an empty result, which `mtsql.sql.execute` does not allow. It reads outcomes from the tool's text,
    so that a question with the words "no data" is a null result; we run the SQL again. It gives 0
    where the gold query fails; such questions are left out before training. That it takes the schema
    from CoSQL's folder and that a wrong format costs nothing changes no number here.
    """

    string_em: bool = False  # EM compares strings (white space and a final ";" forgiven)
    nested_limit_em: bool = False  # EM compares the numbers after LIMIT in sub-queries
    whole_clause_f1: bool = False  # a clause is right or wrong as a whole: no F1 of its elements
    # Proposals are the SQL of all tool calls, repeated or not, without the final answer.
    all_calls_propose: bool = False
    # Every tool call is verified, whichever the tool, by the first <exec_verify> after it, in whatever
    # message or thought. The outcome of a call that got no response is "ok".
    first_exec_tag: bool = False
    missing_verdict_passes: bool = False
    four_errors: bool = False  # the outcome of an error that is none of FOUR_ERRORS is "ok"
    null_rows_ok: bool = False  # the outcome of rows that hold nothing but NULLs is "ok"
    # The answer is the last <answer_sql> of the whole response, tool texts included: of an unfinished
    # trajectory the "..." of a tool's instructions. Without any, it is the SQL of the last tool call,
    # without a call the last thought or all of the text.
    last_answer_tag: bool = False
    newlines_to_blanks: bool = False  # in the answer, so that "--" hides the rest

    @property
    def read_text(self) -> bool:
        """Whether they read raw text, beyond what the environment recorded."""
        return self.all_calls_propose or self.first_exec_tag or self.last_answer_tag


# Weights and rules. The paper gives no weights (it chose them by grid search): those of the released
# code stand in.
PRESETS: dict[str, tuple[RewardWeights, RewardRules]] = {
    "outcome": (RewardWeights(), RewardRules()),
    "process": (RewardWeights(1.0, 1.0, 0.8, 0.1), RewardRules()),
    "paper": (RewardWeights(1.0, 1.0, 0.8, 0.1), RewardRules(string_em=True)),
    "authors": (
        RewardWeights(1.0, 1.0, 0.8, 0.1),
        RewardRules(
            nested_limit_em=True,
            whole_clause_f1=True,
            all_calls_propose=True,
            first_exec_tag=True,
            missing_verdict_passes=True,
            four_errors=True,
            null_rows_ok=True,
            last_answer_tag=True,
            newlines_to_blanks=True,
        ),
    ),
}

# Section 3.3.2, the E-verify table: (execution outcome, verdict is pass) -> reward.
E_VERIFY_TABLE = {
    ("ok", False): 0.0,
    ("ok", True): 1.0,
    ("null", False): 0.1,
    ("null", True): 0.0,
    ("error", False): 1.0,
    ("error", True): 0.0,
}

FOUR_ERRORS = ("no such table", "no such column", "ambiguous column name", "syntax error")


def reward(
    trajectory: Trajectory,
    example: Example,
    scorer: Scorer,
    weights: RewardWeights,
    rules: RewardRules = RewardRules(),
    decode: Decode | None = None,
) -> Rewards:
    """R_all = w1 R_EX + w2 R_EM + w3 R_Propose/Self-Correct + w4 (R_E-Verify + R_M-Verify).

    Process rewards are means over the trajectory's actions of their type, 0 where there is none. A
    verification without a verdict earns 0; an unanswered question is never right. Rewards read the
    recorded actions only, which come from what the model wrote. `rules` change that; those that read
    raw text need `decode`, token ids to text with control tokens visible. Raises ValueError without.
    """
    db_id, gold = example.db_id, example.gold_sql
    response = _read_response(trajectory, rules, decode) if rules.read_text else None

    answer = _last_answer(response) if rules.last_answer_tag else trajectory.answer_sql
    if rules.newlines_to_blanks and answer is not None:
        answer = answer.replace("\n", " ")
    ex = float(answer is not None and scorer.ex(db_id, gold, answer))
    em = float(answer is not None and _exact_match(scorer, db_id, gold, answer, rules))

    proposals, e_verdicts, m_verdicts = [], [], []
    if weights.proposal or weights.verify:
        clause_f1 = scorer.whole_clause_f1 if rules.whole_clause_f1 else scorer.clause_f1
        proposed = _called(response) if rules.all_calls_propose else _proposed(trajectory)
        proposals = [clause_f1(db_id, gold, sql) for sql in proposed]
        for tool, sql, observation, passed in (
            _verified_calls(trajectory, response) if rules.first_exec_tag else _verified(trajectory)
        ):
            if passed is None and rules.missing_verdict_passes:
                passed = True
            if tool == EXEC_SQL:
                outcome = _outcome(observation, db_id, scorer, rules)
                e_verdicts.append(0.0 if passed is None else E_VERIFY_TABLE[outcome, passed])
            else:
                f1 = clause_f1(db_id, gold, sql)
                m_verdicts.append(0.0 if passed is None else f1 if passed else 1.0 - f1)
    proposal, e_verify, m_verify = (
        fmean(values) if values else 0.0 for values in (proposals, e_verdicts, m_verdicts)
    )
    total = (
        weights.ex * ex
        + weights.em * em
        + weights.proposal * proposal
        + weights.verify * (e_verify + m_verify)
    )
    parts = {"proposal": proposal, "e_verify": e_verify, "m_verify": m_verify}
    return Rewards(ex, em, total, total, parts)


def make_reward(
    preset: str, weights: str, scorer: Scorer, decode: Decode, wording: Wording
) -> RewardFunction:
    """The rewards of a preset ("" is `outcome`) but for the `weights` given as in "proposal=0.8,verify=0.1".

    Raises ValueError for an unknown preset or weight.
    """
    preset_weights, rules = choose_preset(PRESETS, preset)
    given = with_weights(preset_weights, weights)
    return lambda trajectory, example: reward(trajectory, example, scorer, given, rules, decode)


class Verification(NamedTuple):
    """The verdict on one tool call; no observation if the call got no response."""

    tool: str
    sql: str
    observation: Observation | None
    passed: bool | None


def _proposed(trajectory: Trajectory) -> Iterator[str]:
    for action in trajectory.actions:
        if action.type in (ActionType.PROPOSE, ActionType.SELF_CORRECT):
            yield action.sql


def _verified(trajectory: Trajectory) -> Iterator[Verification]:
    for action in trajectory.actions:
        if action.type in (ActionType.E_VERIFY, ActionType.M_VERIFY):
            seen = trajectory.observations[action.interaction - 1]  # the call one message earlier
            yield Verification(seen.tool, action.sql, seen, action.passed)


def _exact_match(scorer: Scorer, db_id: str, gold: str, answer: str, rules: RewardRules) -> bool:
    if rules.string_em:
        return scorer.string_em(gold, answer)
    return scorer.em(db_id, gold, answer, "authors" if rules.nested_limit_em else "official")


def _outcome(observation: Observation | None, db_id: str, scorer: Scorer, rules: RewardRules) -> str:
    """The row of the E-verify table."""
    if observation is None:
        return "ok"
    if not (rules.four_errors or rules.null_rows_ok):
        return observation.outcome
    result = scorer.executor.execute(scorer.paths[db_id], observation.sql)
    if rules.four_errors and not result.ok:
        return "error" if any(error in result.message for error in FOUR_ERRORS) else "ok"
    if rules.null_rows_ok and result.rows:
        return "ok"
    return outcome_of(result)


# What follows reads raw text, for the authors' quirks only.

_CALL = re.compile(r"<tool_call>\s*(?={)(.*?)</tool_call>", re.DOTALL)  # in a thought as well
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class Call:
    """A tool call: its message, counted from 0, and all that the model wrote after it."""

    tool: str
    sql: str
    message: int
    after: str


@dataclass(frozen=True)
class Response:
    """Everything after the prompt, tool texts included, and the tool calls in the model's part."""

    text: str
    calls: tuple[Call, ...]


def _read_response(trajectory: Trajectory, rules: RewardRules, decode: Decode | None) -> Response:
    if decode is None:
        raise ValueError(f"{rules} read raw text: reward needs decode, token ids to text.")
    parts = [(segment.role, decode(segment.ids)) for segment in trajectory.segments[1:]]
    messages = [text for role, text in parts if role == "model"]
    calls = []
    for message, text in enumerate(messages):
        later = "".join(messages[message + 1 :])
        for found in _CALL.finditer(text):
            try:
                content = json.loads(found[1])
                tool, sql = content["name"], content["arguments"]["code"]
            except (json.JSONDecodeError, RecursionError, KeyError, TypeError):
                continue
            if isinstance(sql, str):
                calls.append(Call(tool, sql, message, text[found.end() :] + later))
    return Response("".join(text for _, text in parts), tuple(calls))


def _last_answer(response: Response) -> str:
    """The last answer tag; see `RewardRules.last_answer_tag` for what stands in for it."""
    for found in (ANSWER.findall(response.text), [c.sql for c in response.calls]):
        if found:
            return found[-1].strip()
    return (_THOUGHT.findall(response.text) or [response.text])[-1].strip()


def _called(response: Response) -> Iterator[str]:
    return (call.sql for call in response.calls)


def _verified_calls(trajectory: Trajectory, response: Response) -> Iterator[Verification]:
    responses = sum(segment.role == "environment" for segment in trajectory.segments)
    for call in response.calls:
        if call.tool in (EXEC_SQL, MEMORY_RETRIEVE):
            found = VERDICT[EXEC_SQL].search(call.after)
            seen = trajectory.observations[call.message] if call.message < responses else None
            yield Verification(call.tool, call.sql, seen, found and found[1] == "pass")
