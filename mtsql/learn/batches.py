"""Micro-batches: how an optimizer step's trajectories are cut so that each piece fits.

Gradients do not depend on the cut, because losses are divided by the whole step's denominators. On a
CPU small pieces are also faster: their activations stay in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mtsql.agent.trajectory import Trajectory
from mtsql.learn.parallel import Processes


@dataclass
class MicroBatch:
    """Groups of trajectories that go through the model together, a part of an optimizer step.

    Its loss counts `weight` times: 0 where a process only keeps step with the others. With several updates
    `old_logprobs` (tokens,) are those before the first.
    """

    groups: Sequence[Sequence[Trajectory]]
    weight: float = 1.0
    old_logprobs: Tensor | None = None

    @property
    def trajectories(self) -> list[Trajectory]:
        """Those of all groups."""
        return [t for group in self.groups for t in group]


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
    """The groups of each micro-batch in a layout: "shared", "packed" or "rows".

    Where no prompt is shared, they are groups of one.
    """
    if layout == "shared":
        return group_micro_batches(groups, max_positions)
    flat = [t for group in groups for t in group]
    if layout == "rows":
        return [[[t] for t in part] for part in row_micro_batches(flat, max_positions)]
    return group_micro_batches([[t] for t in flat], max_positions)


def step_batches(
    groups: Sequence[Sequence[Trajectory]], layout: str, max_positions: int, processes: Processes, shard: bool
) -> list[MicroBatch]:
    """This process's micro-batches of an optimizer step on the groups, which are the same in all processes.

    With sharded weights every process gets equally many (`Processes.pad`); the filler is one trajectory.
    """
    cut = micro_batches(processes.share(groups), layout, max_positions)
    if not shard:
        return [MicroBatch(part) for part in cut]
    return [MicroBatch(*pair) for pair in processes.pad(cut, [groups[0][:1]])] if groups else []
