"""Trajectories as chat messages, the format that other fine-tuning tools read."""

from __future__ import annotations

from itertools import pairwise

from mtsql.agent.env import Environment
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import TOOL_SETS, TOOLS
from mtsql.agent.trajectory import Segment, Trajectory
from mtsql.data.datasets import Example
from mtsql.sql.normal import in_normal_form


def chat_record(trajectory: Trajectory, example: Example, environment: Environment) -> dict | None:
    """A JSON row of `messages`, `tools` (JSON schemas, where the recipe gives some) and `example_id`.

    `example`, with its history, and `environment` are those that the trajectory was played with; one that had
    other tools than the environment names them as `tool_set`, and a message that is not to be learned has
    `weight` 0, as in OpenAI's format for fine-tuning, one that is but for a part of it that part as
    `unlearned`. A tool
    call stays text in the message of the assistant, as it was sampled; other programs put the model's chat
    template around it. For Qwen3's that gives back the trajectory's text,
    with three exceptions: where observations are messages of the user (SkyRL-SQL, SQL-Trail), the template
    drops the thoughts of all messages before the last; a last message without thinking gets an empty <think>
    block; and text of a database that reads like a control token, which is plain text here, becomes one.
    None for a trajectory with another prompt than the question's: a demonstration over a stale schema.
    """
    had = {tool.name: tool for tool in TOOLS if tool.name in trajectory.tools}
    schema = environment.schemas[example.db_id]
    messages, tools = environment.recipe.prompt(in_normal_form(example, schema), schema, had)
    if tuple(environment.tokens.prompt_ids(messages, tools)) != trajectory.segments[0].ids:
        return None
    messages = list(messages)
    observations = iter(trajectory.observations)
    for before, segment in pairwise(trajectory.segments):
        if segment.role == "model":
            tokens = environment.tokens
            message = {
                "role": "assistant",
                "content": tokens.with_opening(tokens.decode(segment.ids), before.ids),
            }
            messages.append(message | _not_learned(segment, tokens))
        else:
            messages.append({"role": environment.recipe.observation_role, "content": next(observations).text})
    given = {} if tools is None else {"tools": tools}
    if had.keys() != environment.tools.keys():
        given["tool_set"] = next(name for name, names in TOOL_SETS.items() if set(names) == had.keys())
    return {"example_id": trajectory.example_id, "messages": messages, **given}


def _not_learned(segment: Segment, tokens: ChatTokens) -> dict:
    """What has loss mask 0 in a message, where there is something."""
    if all(segment.loss_mask):
        return {}
    if not any(segment.loss_mask):
        return {"weight": 0}
    return {
        "unlearned": tokens.decode(
            [i for i, bit in zip(segment.ids, segment.loss_mask, strict=True) if not bit]
        )
    }
