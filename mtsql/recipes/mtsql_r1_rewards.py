"""MTSQL-R1: multi-level rewards (section 3.3.2), and what keeps them from paying for nothing.

Process rewards are means over the actions of a type, and a mean invites padding. So, in the presets `process` and
`paper`, unlike the paper:
- A candidate counts once, however often and in whatever layout it is proposed (`query_words`), and so do its first
  execution verdict and its first memory verdict.
- A candidate that replaces one that passed, or that no tool has been asked about, is no self-correction: neither
  it nor the verdicts on it count.
- The memory of a first question is empty, and asking it is no verification.
- A verification without a verdict earns 0; by the paper's formula one of M-VERIFY would earn 1 - clause F1.
So of a trajectory that follows Equation 1 every action counts but the return to an earlier candidate.

The preset `formula` is the plain formula instead: every action counts, repeated or not, and a missing verdict is
"otherwise" (no pass). "A weighted sum of all ... process-level rewards" says neither sum nor mean over the actions
of a type; in all presets we read the mean, as the released code does, since a sum pays for each further action.

A result whose rows hold nothing but NULLs is "null", not "ok": the paper does not say which.

The paper's formula itself leaves gains that are kept (with the numbers of tests/test_rewards.py):
- Once the first proposal was wrong, rejecting a right one (or not judging it) and proposing the same in other
  words raises the mean of the proposals by more than the verdict costs.
- Where the gold result is empty, a pass earns 0. A false alarm then gains 0.1 of a verdict. A first query that
  fails on purpose by a second statement, which clause F1 ignores, gains half of one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from statistics import fmean
from typing import TypeAlias

from mtsql.agent.trajectory import ActionType, Trajectory
from mtsql.data.datasets import Example
from mtsql.recipes.rewards import Decode, RewardFunction, Rewards, chosen_rewards, ex_em
from mtsql.sql.match import string_match
from mtsql.sql.score import Scorer
from mtsql.sql.text import query_words

# What the actions of PROPOSE and SELF-CORRECT, of E-VERIFY and of M-VERIFY have earned.
ProcessRewards: TypeAlias = tuple[Collection[float], Collection[float], Collection[float]]

# The E-verify table: (execution outcome, verdict is pass) -> reward. No verdict gives 0.
E_VERIFY_TABLE = {
    ("ok", False): 0.0,
    ("ok", True): 1.0,
    ("null", False): 0.1,
    ("null", True): 0.0,
    ("error", False): 1.0,
    ("error", True): 0.0,
}


@dataclass(frozen=True)
class RewardWeights:
    """w1 to w4 of R_all; `verify` is that of both verifications."""

    ex: float = 1.0
    em: float = 1.0
    proposal: float = 0.0
    verify: float = 0.0


# The paper gives no weights (it chose them by grid search): those of the released code stand in.
PROCESS = RewardWeights(1.0, 1.0, 0.8, 0.1)
PRESETS = {"outcome": RewardWeights()} | dict.fromkeys(("process", "paper", "formula"), PROCESS)


def make_reward(rewards: str, scorer: Scorer, decode: Decode, turns: int) -> RewardFunction:
    """The rewards of --rewards: a preset ("" is `outcome`) and changed weights, "process,proposal=0.5".

    `process` is the paper's reward with EM as the official evaluation has it, `paper` with EM of strings as
    its text says, both under the rules above, and `formula` as `paper` without them. What the released code
    does is --rewards mtsql.extras.authors_rewards. Raises UserError for an unknown preset or weight.
    """
    preset, weights = chosen_rewards(PRESETS, rewards)
    return lambda trajectory, example: reward(trajectory, example, scorer, weights, preset)


def reward(
    trajectory: Trajectory, example: Example, scorer: Scorer, weights: RewardWeights, preset: str = "process"
) -> Rewards:
    """R_all of a trajectory, from its answer, its recorded actions, and whether its queries failed, were empty
    or gave rows.

    An unanswered question is never right. EM is the official exact set match, of `preset` "paper" and "formula"
    the strict match of strings; "formula" has the process rewards without the rules above. Process rewards
    are skipped if all weigh 0.
    """
    ex, em = ex_em(trajectory, example, scorer)
    if preset in ("paper", "formula"):
        em = float(string_match(example.gold_sql, trajectory.answer_sql))
    if weights.proposal or weights.verify:
        process = plain_process_rewards if preset == "formula" else process_rewards
        return r_all(weights, ex, em, process(trajectory, example, scorer))
    total = weights.ex * ex + weights.em * em
    return Rewards(ex, em, total, {})


def r_all(weights: RewardWeights, ex: float, em: float, process: ProcessRewards) -> Rewards:
    """R_all = w1 R_EX + w2 R_EM + w3 R_Propose/Self-Correct + w4 (R_E-Verify + R_M-Verify).

    The last three are means over the actions of their type, 0 where there is none.
    """
    means = [fmean(values) if values else 0.0 for values in process]
    total = weights.ex * ex + weights.em * em + weights.proposal * means[0] + weights.verify * sum(means[1:])
    return Rewards(ex, em, total, dict(zip(("proposal", "e_verify", "m_verify"), means, strict=True)))


def process_rewards(trajectory: Trajectory, example: Example, scorer: Scorer) -> ProcessRewards:
    """The rewards of PROPOSE and SELF-CORRECT, of E-VERIFY, and of M-VERIFY: one a candidate.

    A verification without a verdict earns 0. What an evaluation reports as abilities are these numbers too.
    """
    f1: dict[tuple[str, ...], float] = {}  # by candidate, as the other two
    e_verify: dict[tuple[str, ...], float] = {}
    m_verify: dict[tuple[str, ...], float] = {}
    wanted = True  # whether Equation 1 asks for a candidate
    for action in trajectory.actions:
        candidate, passed = query_words(action.sql), action.passed
        if action.type in (ActionType.PROPOSE, ActionType.SELF_CORRECT):
            if wanted:
                f1.setdefault(candidate, scorer.clause_f1(example.db_id, example.gold_sql, action.sql))
            wanted = False
        elif action.type is ActionType.E_VERIFY:
            wanted = not passed
            seen = trajectory.observations[action.message - 1]  # the call one message earlier
            earned = 0.0 if passed is None else E_VERIFY_TABLE[seen.outcome, passed]
            if candidate in f1:
                e_verify.setdefault(candidate, earned)
        elif action.type is ActionType.M_VERIFY and example.history:
            wanted = not passed
            if candidate in f1:
                earned = 0.0 if passed is None else f1[candidate] if passed else 1.0 - f1[candidate]
                m_verify.setdefault(candidate, earned)
    return f1.values(), e_verify.values(), m_verify.values()


def plain_process_rewards(trajectory: Trajectory, example: Example, scorer: Scorer) -> ProcessRewards:
    """The same by the letter of section 3.3.2: one a PROPOSE or SELF-CORRECT, E-VERIFY, and M-VERIFY."""
    proposals, e_verify, m_verify = [], [], []
    for action in trajectory.actions:
        if action.type in (ActionType.PROPOSE, ActionType.SELF_CORRECT):
            proposals.append(scorer.clause_f1(example.db_id, example.gold_sql, action.sql))
        elif action.type is ActionType.E_VERIFY:
            outcome = trajectory.observations[action.message - 1].outcome
            e_verify.append(E_VERIFY_TABLE[outcome, bool(action.passed)])
        elif action.type is ActionType.M_VERIFY:
            f1 = scorer.clause_f1(example.db_id, example.gold_sql, action.sql)
            m_verify.append(f1 if action.passed else 1.0 - f1)
    return proposals, e_verify, m_verify
