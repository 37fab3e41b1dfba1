"""SkyRL as the engine: an environment of skyrl-gym, messages in and out.

    python -m mtsql.extras.bridges.rows --engine skyrl --config C --model M --data DATA --out ROWS

writes the dataset; the program that starts SkyRL registers the environment first:

    skyrl_gym.register("mtsql", "mtsql.extras.bridges.skyrl:MtsqlEnv")

environment.skyrl_gym.mtsql.options in SkyRL's configuration is "--config C --model M --data DATA". SkyRL
renders and encodes the messages itself, so the ids are ours only as far as its template's are. It does not
say that a message was cut at a limit: such a message is read like any other, and mostly holds no action.
Recipes with stop strings (SkyRL-SQL, SQL-Trail) need them in SkyRL's sampling parameters, for training and
for evaluation: without </sql> and </solution> there the model writes on, and its message is malformed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

from mtsql.agent.tokens import messages_with_tools
from mtsql.extras.bridges.task import load_task, read_line


class MtsqlEnv(BaseTextEnv):
    """One episode; the question's id and split are in its row."""

    def __init__(self, env_config: Mapping[str, Any], extras: Mapping[str, Any]) -> None:
        """`env_config` holds the options, `extras` the fields of the row."""
        super().__init__()
        self.task = load_task(read_line(env_config["options"]), extras["split"])
        self.episode = self.task.episode(extras["example_id"], seed=0)  # SkyRL's engines have the seeds
        self.max_turns = self.task.environment.limits.max_interactions + 1

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """The question's messages instead of the row's `prompt`, tools in the system message."""
        episode = self.episode
        messages, tools = episode.recipe.prompt(episode.example, episode.schema, episode.tools)
        return messages_with_tools(messages, tools), {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        """Take one message of the model, without its end of turn. At the end comes the reward."""
        task, episode = self.task, self.episode
        ids = task.tokens.message_ids(action, whole=False)
        if task.take(episode, ids, [0.0] * len(ids)) is not None:
            seen = episode.trajectory.observations[-1].text
            observations = [{"role": episode.recipe.observation_role, "content": seen}]
            return BaseTextEnvStepOutput(observations=observations, reward=0.0, done=False, metadata={})
        rewards = task.rewards(episode.trajectory)
        metadata = {"ex": rewards.ex, "em": rewards.em, "status": str(episode.trajectory.status)}
        return BaseTextEnvStepOutput(observations=[], reward=rewards.total, done=True, metadata=metadata)

    def get_metrics(self) -> dict[str, Any]:
        """EX and EM of the answer, 0 without one."""
        rewards = self.task.rewards(self.episode.trajectory)
        return {"ex": rewards.ex, "em": rewards.em}
