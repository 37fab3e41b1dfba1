"""Many trajectories of many questions, some at a time, so that only what is kept stays in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tqdm import tqdm
from transformers import PreTrainedModel

from mtsql.agent.env import Environment
from mtsql.agent.rollout import rollout
from mtsql.agent.trajectory import Trajectory
from mtsql.config import Common
from mtsql.data.datasets import Example
from mtsql.run import make_sampling, trajectory_seed

CHUNK = 16  # Questions are sampled as many at a time as make so many times --rows trajectories.


def sample_questions(
    config: Common,
    policy: PreTrainedModel,
    environment: Environment,
    numbered: Sequence[tuple[int, Example]],
    seed: tuple[int, ...],
    title: str,
    progress: bool,
) -> Iterator[tuple[Example, list[Trajectory]]]:
    """Each question with --samples-per-question trajectories at --temperature.

    A question whose prompt is too long has none. The seed of a trajectory comes from `seed`, the
    question's number and the sample's.
    """
    sampling = make_sampling(config, environment, config.temperature)
    size = max(1, CHUNK * config.rows // config.samples_per_question)
    with tqdm(total=len(numbered), desc=title, unit="question", disable=not progress) as bar:
        for start in range(0, len(numbered), size):
            chunk = numbered[start : start + size]
            episodes = [
                episode
                for number, example in chunk
                for episode in environment.episodes(
                    example,
                    [trajectory_seed(*seed, number, sample) for sample in range(config.samples_per_question)],
                )
                if episode.trajectory.status is None
            ]
            played = rollout(
                policy, environment.tokens, episodes, sampling, config.rows, cache_gib=config.cache_gib
            )
            by_question = {name: list(group) for name, group in groupby(played, key=lambda t: t.example_id)}
            yield from ((example, by_question.get(example.id, [])) for _, example in chunk)
            bar.update(len(chunk))
