"""Micro-batches: how an optimizer step's trajectories are cut so that each piece fits.

Gradients do not depend on the cut, because losses are divided by the whole step's denominators. On a
CPU small pieces are also faster: their activations stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtsql.agent.trajectory import Trajectory


def row_micro_batches(trajectories: Sequence[Trajectory], max_positions: int) -> list[list[Trajectory]]:
    """Trajectories of like length together, at most `max_positions` positions with the padding.

    One that is longer than `max_positions` stands alone.
    """
    batches: list[list[Trajectory]] = []
    for trajectory in sorted(trajectories, key=lambda t: len(t.ids)):
        # Sorted by length, so that this one's length is the batch's width.
        if not batches or (len(batches[-1]) + 1) * len(trajectory.ids) > max_positions:
            batches.append([])
        batches[-1].append(trajectory)
    return batches


def shared_prefix(group: Sequence[Trajectory]) -> int:
    """Number of tokens with which all prompts of the group begin: all of it for one question's samples,
    the schema for questions over one database.
    """
    first, *others = (t.segments[0].ids for t in group)
    shared = len(first)
    for prompt in others:
        same = (i for i, (a, b) in enumerate(zip(first, prompt, strict=False)) if a != b)
        shared = min(shared, next(same, min(len(first), len(prompt))))
    return shared


def group_micro_batches(
    groups: Sequence[Sequence[Trajectory]], max_positions: int
) -> list[list[Sequence[Trajectory]]]:
    """Whole groups of like length together, at most `max_positions` positions in each.

    A group is a set of trajectories behind their shared prefix; it is never cut, and one that is
    longer than `max_positions` stands alone. What follows the prefix counts as padded to the longest.
    """
    measured = []
    for group in groups:
        prefix = shared_prefix(group)
        measured.append((max(len(t.ids) for t in group) - prefix, prefix, group))
    batches: list[list[Sequence[Trajectory]]] = []
    prefixes = rows = 0
    for longest, prefix, group in sorted(measured, key=lambda m: m[0]):
        prefixes += prefix
        rows += len(group)
        if not batches or prefixes + rows * longest > max_positions:
            batches.append([])
            prefixes, rows = prefix, len(group)
        batches[-1].append(group)
    return batches
