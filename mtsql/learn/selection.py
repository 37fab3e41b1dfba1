"""Which of the policy's own trajectories become training data (MTSQL-R1, Algorithm 1, S2).

The paper's "interactions" are tool interactions (section 4.2, Finding 5: "number of tool interactions").
It does not say what happens to a solved question none of whose trajectories is short (or long) enough.
Its Table 7 counts 2.57 trajectories for each solved question of CoSQL and 2.89 of SParC, which leaves
little room for questions without any; so here the nearest ones stand in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from mtsql.agent.trajectory import Trajectory

SHORT = 2  # most tool interactions of a trajectory that is kept for a simple question
LONG = 2  # fewest of one that is kept for a hard question
KEPT_SHORT = 2  # trajectories kept of a simple question
CLUSTERS = 3  # of a hard question's trajectories; one of each is kept
LLOYD_STEPS = 100  # far more than a few dozen vectors need


def select_trajectories(
    valid: Sequence[Trajectory],
    simple: bool,
    embed: Callable[[Sequence[Trajectory]], np.ndarray],
    rng: random.Random,
) -> list[Trajectory]:
    """S2 for one question: a few of `valid`, its right trajectories of one round (at least one).

    A simple question (easy SQL, or all samples right) keeps a random KEPT_SHORT of its trajectories with at
    most SHORT tool interactions. Another keeps one at random from each cluster of those with at least LONG;
    `embed` gives their vectors, (n, d), and is not called where there is nothing to choose. Where none is
    within the bound, those nearest to it are the candidates. What the model wrote is different in each.
    """
    distinct = list({_written(t): t for t in valid}.values())
    counts = [t.interactions for t in distinct]
    if simple:
        most = max(SHORT, min(counts))
        candidates = [t for t, count in zip(distinct, counts, strict=True) if count <= most]
        return rng.sample(candidates, min(KEPT_SHORT, len(candidates)))
    fewest = min(LONG, max(counts))
    candidates = [t for t, count in zip(distinct, counts, strict=True) if count >= fewest]
    if len(candidates) <= CLUSTERS:
        return candidates
    labels = cluster(embed(candidates), CLUSTERS, rng)
    return [candidates[rng.choice(np.flatnonzero(labels == c))] for c in range(labels.max() + 1)]


def cluster(vectors: np.ndarray, k: int, rng: random.Random) -> np.ndarray:
    """k-means of directions: the cluster of each of `vectors` (n, d), an (n,) of 0 to k - 1.

    No cluster is empty; with fewer than k distinct directions there are as many clusters as those. The
    start is farthest-first from a random vector, the rest Lloyd's algorithm. Raises ValueError for vectors
    that are zero or not finite, which have no direction.
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


def _written(trajectory: Trajectory) -> tuple[tuple[int, ...], ...]:
    return tuple(s.ids for s in trajectory.segments if s.role == "model")
