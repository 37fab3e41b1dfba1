"""Micro-batches: how the trajectories of an optimizer step are cut so that each piece fits into memory.

Gradients do not depend on the cut, because losses are divided by a denominator of the whole step. On a
CPU small pieces are also faster: their activations stay in the processor's cache. And the order in which
fine-tuning takes its trajectories.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from mtsql.agent.tokens import shared_length
from mtsql.agent.trajectory import Trajectory

Groups: TypeAlias = Sequence[Sequence[Trajectory]]


def shared_prefix(group: Sequence[Trajectory]) -> int:
    """Number of tokens with which all prompts of the group begin.

    That is the whole prompt for samples of one question, and the schema for questions over one database.
    """
    first, *others = (t.segments[0].ids for t in group)
    return min((shared_length(first, prompt) for prompt in others), default=len(first))


def alike(trajectories: Sequence[Trajectory]) -> list[list[Trajectory]]:
    """Trajectories in groups: each prompt begins, for half or more, like the one before it.

    Those are samples of one question, and questions over one database, whose schema comes first.
    """
    groups: list[list[Trajectory]] = []
    for trajectory in sorted(trajectories, key=lambda t: t.segments[0].ids):
        prompt = trajectory.segments[0].ids
        if groups and 2 * shared_length(groups[-1][-1].segments[0].ids, prompt) >= len(prompt):
            groups[-1].append(trajectory)
        else:
            groups.append([trajectory])
    return groups


def training_order(
    trajectories: Sequence[Trajectory],
    epochs: float,
    rng: random.Random,
    databases: Mapping[str, str] | None = None,
    size: int = 1,
) -> list[Trajectory]:
    """All trajectories `epochs` times, each time in another random order; the last time perhaps in part.

    With `databases` an order is that of `order_by_database` in blocks of `size`.
    """
    order: list[Trajectory] = []
    for _ in range(math.ceil(epochs)):
        if databases is None:
            order += rng.sample(trajectories, len(trajectories))
        else:
            order += order_by_database(trajectories, databases, size, rng)
    return order[: math.ceil(epochs * len(trajectories))]


def order_by_database(
    trajectories: Sequence[Trajectory], databases: Mapping[str, str], size: int, rng: random.Random
) -> list[Trajectory]:
    """All trajectories once, in random order but in blocks of `size` over one database each.

    `databases` gives the database of each example id. What databases have beyond whole blocks makes up
    blocks over several, and the last of those, which may be short, comes at the end. A question's place is
    drawn by its id, so that two runs go through their questions alike even where one of them leaves some
    out.
    """
    seed = rng.random()

    def place(trajectory: Trajectory) -> float:
        return random.Random(f"{seed}/{trajectory.example_id}").random()

    by_database: dict[str, list[Trajectory]] = {}
    for trajectory in sorted(trajectories, key=place):
        by_database.setdefault(databases[trajectory.example_id], []).append(trajectory)
    whole = {name: len(held) - len(held) % size for name, held in by_database.items()}
    beyond = [t for name, held in by_database.items() for t in held[whole[name] :]]
    blocks = [held[i : i + size] for name, held in by_database.items() for i in range(0, whole[name], size)]
    blocks += [beyond[i : i + size] for i in range(0, len(beyond), size)]
    blocks.sort(key=lambda block: (len(block) < size, place(block[-1])))
    return [trajectory for block in blocks for trajectory in block]


def micro_batches(groups: Groups, max_positions: int, shared: bool = True) -> list[Groups]:
    """Groups of similar length together, at most `max_positions` positions in each micro-batch.

    Where prompts are `shared`, the prefix that a group shares counts once, and so do equal trajectories; a
    group that does not fit is cut, in order of length, into groups that do. Else each trajectory is a group.
    One that is longer than `max_positions` stands alone.
    """
    pieces: list[tuple[int, list[Trajectory]]] = []  # positions, trajectories
    if not shared:
        groups = [[t] for group in groups for t in group]
    for group in groups:
        prefix, held = shared_prefix(group), []
        used = prefix
        for trajectory in sorted(group, key=lambda t: (len(t.ids), t.ids)):
            own = 0 if held and trajectory.ids == held[-1].ids else len(trajectory.ids) - prefix
            if held and used + own > max_positions:
                pieces.append((used, held))
                used, held = prefix, []
            used, held = used + own, [*held, trajectory]
        pieces.append((used, held))
    batches: list[list[Sequence[Trajectory]]] = []
    total = 0
    for positions, piece in sorted(pieces, key=lambda pair: len(pair[1][-1].ids)):
        total += positions
        if not batches or total > max_positions:
            batches.append([])
            total = positions
        batches[-1].append(piece)
    return batches
