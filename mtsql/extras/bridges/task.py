"""The task for an engine that brings its own training: questions, their environment, what an answer earns.

Everything goes by a question's id and split, which are all that a row of an engine's dataset has to carry.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from mtsql.agent.env import Environment, Episode
from mtsql.agent.rollout import Sampling
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Stop, Trajectory
from mtsql.config import Rewarded, Sampled, option, read_options
from mtsql.data.datasets import Example, examples
from mtsql.errors import UserError
from mtsql.learn.parallel import Processes
from mtsql.model_folder import load_tokenizer
from mtsql.recipes.rewards import RewardFunction, Rewards
from mtsql.sql.score import Scorer
from mtsql.task import draw_questions, load_split, make_sampling, playable, reward_function, task_over

# Writes one message to each sequence of ids: the sampled ids and their log-probabilities.
Write = Callable[[list[list[int]]], tuple[list[list[int]], list[list[float]]]]


@dataclass(frozen=True, kw_only=True)
class BridgeConfig(Rewarded, Sampled):
    """Questions and rewards for another engine; of `model`, only the tokenizer is read for them."""

    SECTION: ClassVar = "bridge"
    out: str = option("", "run folder of mtsql.extras.bridges.trl, or file of mtsql.extras.bridges.rows")


def read_line(options: str) -> BridgeConfig:
    """The options in an engine's configuration, written as on the command line that made its rows.

    Ends the process with one sentence, like a command, for one that is unknown, missing or of another type.
    """
    return read_options(BridgeConfig, None, shlex.split(options))


@dataclass(frozen=True)
class Task:
    """Questions by their ids, the environment that all of them share, and the rewards."""

    tokens: ChatTokens
    environment: Environment
    examples: dict[str, Example]  # all of the split, since an engine may name any
    in_play: list[Example]  # those that become rows
    scorer: Scorer
    reward: RewardFunction
    sampling: Sampling  # limits and stop strings of a message; the engine has its own temperature

    def playable(self) -> list[str]:
        """Ids of the questions that become rows of a dataset. Raises UserError if there is none."""
        return [e.id for e in playable(self.in_play, self.environment, self.scorer, Processes(0, 1))]

    def episode(self, example_id: str, seed: int) -> Episode:
        """A new episode of a question. Raises UserError for an id that the data does not have."""
        if example_id not in self.examples:
            raise UserError(
                f"no question has the id {example_id!r}; write the rows anew from the same --data"
            )
        return self.environment.episodes(self.examples[example_id], [seed])[0]

    def message_limit(self, episode: Episode) -> int:
        """Tokens that the episode's next message may have."""
        return min(self.sampling.max_turn_tokens, episode.remaining_tokens())

    def message_options(self) -> dict[str, Any]:
        """What vLLM has to know of a message, beside its temperature and its length."""
        options = {"stop_token_ids": list(self.tokens.end_of_turn_ids)}
        if self.sampling.stop_strings:
            options |= {"stop": list(self.sampling.stop_strings), "include_stop_str_in_output": True}
        return options

    def take(self, episode: Episode, ids: list[int], logprobs: list[float]) -> list[int] | None:
        """Give the episode a message that an engine sampled; what to append, or None at its end.

        Ids beyond the message's limit are cut off, and the message then ends the episode.
        """
        limit, stop = self.message_limit(episode), Stop.LIMIT
        said = self.tokens.decode(ids)
        if 0 < len(ids) <= limit and ids[-1] in self.tokens.end_of_turn_ids:
            stop = Stop.END_OF_TURN
        elif len(ids) <= limit and any(string in said for string in self.sampling.stop_strings):
            stop = Stop.STOP_STRING
        return episode.step(ids[:limit], logprobs[:limit], stop)

    def rewards(self, trajectory: Trajectory) -> Rewards:
        """What a finished trajectory earns."""
        return self.reward(trajectory, self.examples[trajectory.example_id])


_LOADING = threading.Lock()  # a cache alone lets all threads load that ask before the first is done


def load_task(config: BridgeConfig, split: str = "train") -> Task:
    """The task of a split, made once in a process: engines ask for it with each episode, from many threads.

    Raises UserError for what `load_split` and `load_tokenizer` refuse.
    """
    with _LOADING:
        return _load_task(config, split)


@cache
def _load_task(config: BridgeConfig, split: str) -> Task:
    tokens = ChatTokens(load_tokenizer(config.model), config.thinking != "off")
    over = task_over(config, tokens, load_split(config, split))
    environment, scorer = over["environment"], over["scorer"]
    asked = examples(over["dataset"].dialogues)
    drawn = draw_questions(asked, config.questions, config.seed)
    reward = reward_function(config, tokens, scorer, config.rewards)
    sampling = make_sampling(environment, 1.0)
    by_id = {example.id: example for example in asked}
    return Task(tokens, environment, by_id, drawn, scorer, reward, sampling)


def play_in_lockstep(task: Task, episodes: Sequence[Episode], write: Write) -> None:
    """Play episodes to their ends with an engine that writes one message to all that go on at a time."""
    going = [episode for episode in episodes if episode.trajectory.status is None]
    while going:
        messages = zip(going, *write([episode.trajectory.ids for episode in going]), strict=True)
        going = [
            episode for episode, ids, logprobs in messages if task.take(episode, ids, logprobs) is not None
        ]


def completion(trajectory: Trajectory) -> tuple[list[int], list[int], list[int], list[float]]:
    """Ids of the prompt; ids, loss mask and log-probabilities of all that follows it."""
    ids, start = trajectory.ids, len(trajectory.segments[0].ids)
    return ids[:start], ids[start:], trajectory.loss_mask[start:], trajectory.logprobs[start:]
