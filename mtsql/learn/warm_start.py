"""Algorithm 1 of MTSQL-R1 (section 3.2.2): which trajectories are trained on (S2); the state between rounds.

The paper's "interactions" are tool interactions (section 4.2, Finding 5: "number of tool interactions").
It does not say what happens to a solved question if none of its trajectories is short (or long) enough. Its
Table 7 counts 2.57 trajectories for each solved question of CoSQL and 2.89 of SParC, so that few questions
can have none; here the trajectories nearest to the bound are taken then. The paper clusters embeddings of
Qwen3-Embedding (section 3.2.2); the policy's own hidden states need no second model.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from mtsql.agent.env import Recipe
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.data.datasets import Example
from mtsql.learn.model import base_of
from mtsql.model_folder import Policy
from mtsql.recipes.rewards import Rewards, is_right

SHORT = 2  # most tool interactions of a trajectory that is kept for a simple question
LONG = 2  # fewest of one that is kept for a hard question
KEPT_SHORT = 2  # trajectories kept of a simple question
CLUSTERS = 3  # of a hard question's trajectories; one of each is kept
LLOYD_STEPS = 100  # far more than a few dozen vectors need
Embedder: TypeAlias = Callable[[Sequence[Trajectory]], np.ndarray]  # n trajectories to (n, d) float32


@dataclass(frozen=True)
class Collected:
    """One question in one round: how many rollouts it had, which were kept, and why the others were not.

    `right` counts those whose answer was right, kept or not;
    `rejected` counts by reason.
    """

    example_id: str
    sampled: int
    right: int
    kept: list[Trajectory]
    rejected: Counter[str] = field(default_factory=Counter)


def rejection(trajectory: Trajectory, rewards: Rewards, recipe: Recipe) -> str | None:
    """Why a rollout cannot be kept: no_answer, wrong_ex, wrong_em, off_protocol; None if it can be."""
    if trajectory.status is not Status.ANSWERED:
        return "no_answer"
    if not is_right(rewards, recipe):
        return "wrong_em" if rewards.ex else "wrong_ex"
    return "off_protocol" if trajectory.off_protocol else None


@dataclass
class Progress:
    """How far Algorithm 1 has come; `to_plain` gives what a checkpoint keeps of it."""

    pool: list[Example]  # D_0
    remaining: list[Example]  # D_i
    kept: list[Trajectory] = field(default_factory=list)  # the cumulative set T
    coverage: list[dict] = field(default_factory=list)  # of each round: Table 7
    solved: set[str] = field(default_factory=set)  # ids of the questions solved in this round
    collected: bool = False  # whether this round's trajectories are in T
    round: int = 0
    index: int = 0  # optimizer steps that are done of this round,
    step: int = 0  # and of all
    rng_state: tuple = ()  # of the generator that draws the order of fine-tuning
    started: float = field(default_factory=time.perf_counter)

    def add(self, found: Sequence[Collected], rng: random.Random) -> None:
        """Put what a round collected into T."""
        self.kept += [t for question in found for t in question.kept]
        self.solved = {question.example_id for question in found if question.kept}
        self.collected, self.rng_state = True, rng.getstate()
        rejected = sum((question.rejected for question in found), Counter())
        of_round = {
            "round": self.round + 1,
            "sampled": sum(question.sampled for question in found),
            "right": sum(question.right for question in found),
            "rejected": dict(sorted(rejected.items())),
            "questions_asked": len(self.remaining),
            "questions_solved": len(self.solved),
            "questions_covered": len({t.example_id for t in self.kept}),
            "trajectories": len(self.kept),
        }
        self.coverage.append(of_round)

    def drop_solved(self) -> None:
        """End a round: what is solved leaves the pool (S4)."""
        self.remaining = [example for example in self.remaining if example.id not in self.solved]
        self.collected, self.index = False, 0

    def to_plain(self) -> dict[str, Any]:
        """What a checkpoint needs, as plain Python values; T as a text, which is fast to write and read."""
        names = ("coverage", "collected", "round", "index", "step", "rng_state")
        return {name: getattr(self, name) for name in names} | {
            "kept": json.dumps(self.kept, default=vars),
            "pool": [example.id for example in self.pool],
            "remaining": [example.id for example in self.remaining],
            "solved": sorted(self.solved),
        }

    @classmethod
    def from_plain(cls, plain: dict[str, Any], pool: Sequence[Example]) -> Progress:
        """What `to_plain` wrote; `pool` is D_0."""
        names = set(plain["remaining"])
        objects = {
            "pool": pool,
            "remaining": [example for example in pool if example.id in names],
            "kept": [Trajectory.from_plain(t) for t in json.loads(plain["kept"])],
            "solved": set(plain["solved"]),
        }
        return cls(**plain | objects)


def select_trajectories(
    valid: Sequence[Trajectory], simple: bool, embed: Embedder, rng: random.Random
) -> list[Trajectory]:
    """Choose a few of `valid`, the right trajectories of one question in one round (at least one).

    A simple question (easy SQL, or all samples right) keeps KEPT_SHORT of its trajectories with at most
    SHORT tool interactions, drawn at random. Any other question keeps one, drawn at random, from each of
    CLUSTERS clusters of its trajectories with at least LONG; `embed` is not called where there is nothing to
    choose. If no trajectory is within the bound, those nearest to it are taken. Of trajectories in which the
    model wrote the same only one can be chosen.
    """
    by_text = {tuple(s.ids for s in t.segments if s.role == "model"): t for t in valid}
    distinct = list(by_text.values())
    counts = [t.interactions for t in distinct]
    if simple:
        most = max(SHORT, min(counts))
        candidates = [t for t in distinct if t.interactions <= most]
        return rng.sample(candidates, min(KEPT_SHORT, len(candidates)))
    fewest = min(LONG, max(counts))
    candidates = [t for t in distinct if t.interactions >= fewest]
    if len(candidates) <= CLUSTERS:
        return candidates
    labels = cluster(embed(candidates), CLUSTERS, rng)
    return [candidates[rng.choice(np.flatnonzero(labels == c))] for c in range(labels.max() + 1)]


def cluster(vectors: np.ndarray, k: int, rng: random.Random) -> np.ndarray:
    """k-means of directions: for each of `vectors` (n, d) the number of its cluster, 0 to k - 1, as (n,).

    No cluster is empty, so that fewer than k distinct directions give fewer clusters. The first centres are
    a random vector and then, one by one, the vector farthest from all centres; Lloyd's algorithm does the
    rest. Raises ValueError for vectors that are zero or not finite, which have no direction.
    """
    norms = np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)  # (n, 1)
    if not (np.isfinite(norms) & (norms > 0)).all():
        raise ValueError("an embedding is zero or not finite, so it cannot be clustered")
    unit = vectors / norms  # (n, d)
    centres = unit[[rng.randrange(len(unit))]]  # (clusters so far, d)
    while len(centres) < k:
        apart = _distances(unit, centres).min(1)  # (n,)
        if apart.max() == 0:  # every vector is a centre
            break
        centres = np.concatenate([centres, unit[[apart.argmax()]]])
    labels = _distances(unit, centres).argmin(1)
    for _ in range(LLOYD_STEPS):
        centres = np.stack([unit[labels == c].mean(0) for c in range(len(centres))])
        moved = _distances(unit, centres).argmin(1)
        # The start leaves no cluster empty; stop before a step that would.
        if (moved == labels).all() or len(np.unique(moved)) < len(centres):
            break
        labels = moved
    return labels


def _distances(vectors: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Squared distances, (n, centres); exactly 0 between equal vectors."""
    return ((vectors[:, None] - centres) ** 2).sum(-1)


@torch.no_grad()
def embed_with_policy(policy: Policy, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """The policy's last hidden states, averaged over the tokens that it wrote, (n, d) float32.

    Each trajectory needs at least one.
    """
    was_training, vectors = policy.training, []
    policy.eval()
    for trajectory in trajectories:
        ids = torch.tensor([trajectory.ids], device=policy.device)  # (1, positions)
        outputs = base_of(policy).base_model(input_ids=ids, use_cache=False)
        hidden = outputs.last_hidden_state[0]  # (positions, d)
        vectors.append(hidden[torch.tensor(trajectory.loss_mask).bool()].float().mean(0))  # (d,)
    policy.train(was_training)
    return torch.stack(vectors).cpu().numpy()
