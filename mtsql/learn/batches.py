"""Micro-batches: how an optimizer step's trajectories are cut so that each piece fits.

Gradients do not depend on the cut, because losses are divided by the whole step's denominators. On a
CPU small pieces are also faster: their activations stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from mtsql.agent.trajectory import Trajectory

LAYOUTS = ("shared", "packed", "rows")


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
    """Groups of like length together, at most `max_positions` positions in each micro-batch.

    A group is a set of trajectories behind their shared prefix. One that does not fit is cut into as few
    groups as do; a trajectory that is longer than `max_positions` stands alone. What follows the prefix
    counts as padded to the longest.
    """
    measured = []
    for group in groups:
        prefix = shared_prefix(group)
        longest = max(len(t.ids) for t in group) - prefix
        size = max(1, (max_positions - prefix) // max(1, longest))  # trajectories that fit behind the prefix
        ordered = sorted(group, key=lambda t: len(t.ids)) if size < len(group) else group
        for start in range(0, len(ordered), size):
            part = ordered[start : start + size]
            measured.append((max(len(t.ids) for t in part) - prefix, prefix, part))
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


def micro_batches(
    groups: Sequence[Sequence[Trajectory]], layout: str, max_positions: int
) -> list[list[Sequence[Trajectory]]]:
    """The groups of each micro-batch in one of LAYOUTS; groups of one where no prompt is shared."""
    if layout == "shared":
        return group_micro_batches(groups, max_positions)
    flat = [t for group in groups for t in group]
    if layout == "rows":
        return [[[t] for t in part] for part in row_micro_batches(flat, max_positions)]
    return group_micro_batches([[t] for t in flat], max_positions)
