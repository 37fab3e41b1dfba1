"""verl as the engine: an agent loop, which asks verl's servers for each message and returns one trajectory.

    python -m mtsql.extras.bridges.rows --engine verl --config C --model M --data DATA --out ROWS

writes the dataset. The agent loop stands in the file of agent_loop_config_path (in
actor_rollout_ref.rollout.agent), with the same options:

    - name: mtsql
      _target_: mtsql.extras.bridges.verl.MtsqlAgentLoop
      options: --config C --model M --data DATA

The reward comes with the trajectory, so verl computes none.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput

from mtsql.extras.bridges.task import completion, load_task, read_line


class MtsqlAgentLoop(AgentLoopBase):
    """One episode; verl makes one such object for each."""

    def __init__(self, *args: Any, options: str, **kwargs: Any) -> None:
        """`options` are those of BridgeConfig; the rest is verl's."""
        super().__init__(*args, **kwargs)
        self.options = read_line(options)

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        """Play the question whose id and split stand in the row's `extra_info`.

        Executing SQL and rewarding block, so they run beside the event loop.
        """
        place, request = row["extra_info"], uuid4()
        task = await self.loop.run_in_executor(None, load_task, self.options, place["split"])
        episode = task.episode(place["example_id"], request.int)  # verl's servers have the seeds
        suffix: list[int] | None = [] if episode.trajectory.status is None else None
        known = True  # whether the server gives log-probabilities
        while suffix is not None:
            limit = {"max_tokens": task.message_limit(episode)}
            output = await self.server_manager.generate(
                request_id=request.hex,
                prompt_ids=episode.trajectory.ids,
                sampling_params=sampling_params | limit | task.message_options(),
            )
            known = known and bool(output.log_probs)
            logprobs = output.log_probs or [0.0] * len(output.token_ids)
            suffix = await self.loop.run_in_executor(None, task.take, episode, output.token_ids, logprobs)
        rewards = await self.loop.run_in_executor(None, task.rewards, episode.trajectory)
        scores = {"ex": rewards.ex, "em": rewards.em}
        prompt_ids, response_ids, loss_mask, logprobs = completion(episode.trajectory)
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            response_mask=loss_mask,
            response_logprobs=logprobs if known else None,
            reward_score=rewards.total,
            num_turns=2 * episode.trajectory.messages,
            metrics=AgentLoopMetrics(),
            extra_fields={"reward_extra_info": scores, "turn_scores": [], "tool_rewards": []},
        )
