"""Many trajectories of many questions, some at a time, so that only what is kept stays in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tqdm import tqdm
from transformers import PreTrainedModel

from mtsql.agent.env import Environment
from mtsql.agent.rollout import Sampling, rollout, trajectory_seed
from mtsql.agent.trajectory import Trajectory
from mtsql.data.datasets import Example

CHUNK = 16  # Questions are sampled as many at a time as make so many times --rows trajectories.


def sample_questions(
    policy: PreTrainedModel,
    environment: Environment,
    numbered: Sequence[tuple[int, Example]],
    samples: int,
    sampling: Sampling,
    rows: int,
    seed: tuple[int, ...],
    title: str,
    progress: bool,
    cache_gib: float = 0.0,
) -> Iterator[tuple[Example, list[Trajectory]]]:
    """Each question with so many samples; a question whose prompt is too long has none.

    The seed of a trajectory comes from `seed`, the question's number and the sample's. `rows` and
    `cache_gib` are those of `rollout`.
    """
    size = max(1, CHUNK * rows // samples)
    with tqdm(total=len(numbered), desc=title, unit="question", disable=not progress) as bar:
        for start in range(0, len(numbered), size):
            chunk = numbered[start : start + size]
            episodes = [
                episode
                for number, example in chunk
                for episode in environment.episodes(
                    example, [trajectory_seed(*seed, number, sample) for sample in range(samples)]
                )
                if episode.trajectory.status is None
            ]
            played = rollout(policy, environment.tokens, episodes, sampling, rows, cache_gib=cache_gib)
            by_question = {name: list(group) for name, group in groupby(played, key=lambda t: t.example_id)}
            yield from ((example, by_question.get(example.id, [])) for _, example in chunk)
            bar.update(len(chunk))
