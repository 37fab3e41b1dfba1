"""The types that carry a rollout: actions, observations, segments, trajectories.

MTSQL-R1, section 3.2.1: an episode is (I, a_1, y_1, obs_1, ..., a_n, y_n). Here I is the prompt
segment, each model message and each observation is one more segment, appended and never rewritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class ActionType(StrEnum):
    """The action space of section 3.1."""

    PROPOSE = "propose"
    EXECUTE = "execute"
    E_VERIFY = "e_verify"
    M_VERIFY = "m_verify"
    SELF_CORRECT = "self_correct"
    FINALIZE = "finalize"


class Stop(StrEnum):
    """Why a sampled message is over."""

    END_OF_TURN = "end_of_turn"  # sampled by the model
    STOP_STRING = "stop_string"
    LIMIT = "limit"  # cut off: what it holds is not read, but trained on like any other


class Status(StrEnum):
    """How an episode ended, or what is wrong with a message. Only ANSWERED carries a final SQL."""

    ANSWERED = "answered"
    OUT_OF_INTERACTIONS = "out_of_interactions"
    OUT_OF_TOKENS = "out_of_tokens"
    MALFORMED_CALL = "malformed_call"
    NO_ACTION = "no_action"


@dataclass(frozen=True)
class Action:
    """One action a_k. `sql` is the candidate it proposes, runs, checks or commits.

    `passed` is the verdict of E_VERIFY and M_VERIFY (None when the tag is missing: not a pass).
    `message` is the place of the model message that holds it, from 0.
    """

    type: ActionType
    message: int
    sql: str | None = None
    passed: bool | None = None


@dataclass(frozen=True)
class Observation:
    """What the environment answered to one tool call, or to a message without one (`tool` "none").

    `outcome` is "ok", "null" (empty result, or nothing but NULLs) or "error".
    """

    tool: str
    sql: str
    outcome: str
    text: str


@dataclass(frozen=True)
class Segment:
    """Token ids with one loss-mask bit and one sampling log-probability each (0.0 if not sampled).

    `role` is "prompt", "model" or "environment". A sampled end-of-turn token has loss mask 1,
    one that had to be added has 0.
    """

    role: str
    ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.ids) == len(self.loss_mask) == len(self.logprobs):
            raise ValueError("a segment needs a loss-mask bit and a log-probability for each id")

    @classmethod
    def given(cls, role: str, ids: list[int]) -> Segment:
        """A segment that the model did not write: loss mask 0 throughout."""
        return cls(role, tuple(ids), (0,) * len(ids), (0.0,) * len(ids))

    @classmethod
    def sampled(
        cls, ids: list[int], logprobs: list[float], loss_mask: Sequence[int] | None = None
    ) -> Segment:
        """A segment that the model wrote: loss mask 1 throughout unless another is given."""
        return cls("model", tuple(ids), tuple(loss_mask or (1,) * len(ids)), tuple(logprobs))


@dataclass
class Trajectory:
    """One episode, token in, token out. `advantage` is A_i of section 3.3.3, once its group is rewarded.

    `off_protocol` counts the actions that the recipe's protocol (in MTSQL-R1 Equation 1) did not call for
    and the messages that were not well formed. `tools` names those that the episode had.
    """

    example_id: str
    seed: int
    segments: list[Segment] = field(default_factory=list)
    actions: list[Action] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)
    status: Status | None = None
    answer_sql: str | None = None
    off_protocol: int = 0
    advantage: float = 0.0
    tools: tuple[str, ...] = ()

    @property
    def interactions(self) -> int:
        """Answered messages, the paper's interactions with tools: the answer itself is none."""
        return len(self.observations)

    @property
    def messages(self) -> int:
        """Messages that the model wrote."""
        return sum(s.role == "model" for s in self.segments)

    @classmethod
    def from_plain(cls, plain: dict) -> Trajectory:
        """One that was written by json.dumps(trajectory, default=vars), read back from JSON."""
        known = {
            "segments": [
                Segment(s["role"], tuple(s["ids"]), tuple(s["loss_mask"]), tuple(s["logprobs"]))
                for s in plain["segments"]
            ],
            "actions": [Action(**a | {"type": ActionType(a["type"])}) for a in plain["actions"]],
            "observations": [Observation(**o) for o in plain["observations"]],
            "status": None if plain["status"] is None else Status(plain["status"]),
            "tools": tuple(plain["tools"]),
        }
        return cls(**plain | known)

    @property
    def ids(self) -> list[int]:
        """All token ids in order."""
        return [i for s in self.segments for i in s.ids]

    @property
    def loss_mask(self) -> list[int]:
        """1 where the model wrote the token; a demonstration's mistake, which is not to be learned, has 0."""
        return [m for s in self.segments for m in s.loss_mask]

    @property
    def logprobs(self) -> list[float]:
        """Log-probability under the sampler, 0.0 where the loss mask is 0."""
        return [p for s in self.segments for p in s.logprobs]

    @property
    def response_length(self) -> int:
        """Tokens after the prompt, observations counted (as in the paper's limit of 8,000)."""
        return sum(len(s.ids) for s in self.segments[1:])

    @property
    def trained_length(self) -> int:
        """Tokens with loss mask 1: what the model wrote, but for what is not to be learned."""
        return sum(self.loss_mask)

    @property
    def sampled_length(self) -> int:
        """Tokens that the model wrote."""
        return sum(len(s.ids) for s in self.segments if s.role == "model")


def trajectory_record(trajectory: Trajectory, decode: Callable[[Sequence[int]], str]) -> dict:
    """A JSON row of a trajectory; `decode` turns token ids into text, control tokens included.

    Model messages have the text of each token too, its log-probability under the sampler, and its loss mask.
    """
    names = ("example_id", "seed", "status", "interactions", "off_protocol", "answer_sql")
    record = {name: getattr(trajectory, name) for name in names}
    actions = [{"type": a.type, "message": a.message, "passed": a.passed} for a in trajectory.actions]
    observations = [{"tool": o.tool, "outcome": o.outcome} for o in trajectory.observations]
    segments = [
        {"role": s.role, "text": decode(s.ids), "loss_mask_sum": sum(s.loss_mask), "ids": list(s.ids)}
        | (_tokens(s, decode) if s.role == "model" else {})
        for s in trajectory.segments
    ]
    parts = {"actions": actions, "observations": observations, "segments": segments}
    return {**record, "reward": None, **parts}


def _tokens(segment: Segment, decode: Callable[[Sequence[int]], str]) -> dict:
    logprobs = [round(p, 3) if math.isfinite(p) else None for p in segment.logprobs]  # JSON has no NaN
    tokens = [decode([i]) for i in segment.ids]
    return {"tokens": tokens, "logprobs": logprobs, "loss_mask": list(segment.loss_mask)}
