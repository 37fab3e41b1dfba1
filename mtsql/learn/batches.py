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


def group_micro_batches(
    groups: Sequence[Sequence[Trajectory]], max_positions: int
) -> list[list[Sequence[Trajectory]]]:
    """Whole groups of like response length together, at most `max_positions` positions in each.

    A group is the trajectories of one question behind their shared prompt; it is never cut, and one
    that is longer than `max_positions` stands alone. Responses count as padded to the longest.
    """
    batches: list[list[Sequence[Trajectory]]] = []
    prompts = rows = 0
    for group in sorted(groups, key=lambda g: max(t.response_length for t in g)):
        longest = max(t.response_length for t in group)
        prompts += group[0].prompt_length
        rows += len(group)
        if not batches or prompts + rows * longest > max_positions:
            batches.append([])
            prompts, rows = group[0].prompt_length, len(group)
        batches[-1].append(group)
    return batches
