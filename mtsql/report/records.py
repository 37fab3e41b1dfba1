"""Trajectories as rows of JSON: for the viewer, as chat messages, and as answers that are kept as they come.

The last let an evaluation that was stopped go on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from mtsql.agent.env import Environment
from mtsql.agent.tools import TOOL_SETS, TOOLS, make_tools
from mtsql.agent.trajectory import Trajectory, trajectory_record
from mtsql.data.datasets import Example
from mtsql.errors import UserError, loading
from mtsql.files import file_errors, json_lines, load_json_lines, write_atomically
from mtsql.recipes.prompt_options import compact_result
from mtsql.recipes.rewards import Decode
from mtsql.sql.score import Scorer
from mtsql.sql.text import as_executed, in_normal_form

RESULT_CHARACTERS = 300
ROLES = ("prompt", "model", "environment")


def question_record(trajectory: Trajectory, example: Example, scorer: Scorer, decode: Decode) -> dict:
    """A JSON row for mtsql.extras.viewer; `scores` are for EX, EM and the parts of the reward, once known.

    Results are cut to RESULT_CHARACTERS characters.
    """

    def result(sql: str | None) -> str | None:
        if sql is None:
            return None
        ran = scorer.executor.execute(scorer.paths[example.db_id], as_executed(sql, keep_distinct=True))
        return compact_result(ran, RESULT_CHARACTERS)

    return trajectory_record(trajectory, decode) | {
        "db_id": example.db_id,
        "turn_index": example.turn_index,
        "question": example.question,
        "hardness": scorer.hardness(example.db_id, example.gold_sql),
        "gold_sql": example.gold_sql,
        "gold_result": result(example.gold_sql),
        "answer_result": result(trajectory.answer_sql),
        "scores": {},
    }


def drop_later_records(path: Path, step: int) -> None:
    """Keep the records of steps before `step` in a file of trajectories, as a resumed run needs it.

    Raises UserError as `read_records`.
    """
    kept = []
    if step and path.exists():
        kept = [record for record in read_records(path) if (record.get("step") or 0) < step]
    write_atomically(path, json_lines(kept))


def read_records(path: Path) -> Iterator[dict]:
    """The records of a JSONL file. Raises UserError for a missing file or a line that is no trajectory."""
    for number, record in load_json_lines(path):
        with loading(f"{path}, line {number}: not a trajectory"):
            _ = record["example_id"], record["status"]  # which `mtsql.extras.viewer` shows
            _ = float(0 if (reward := record.get("reward")) is None else reward + 0)
            for segment in record["segments"]:
                _ = segment["text"] + "".join(segment.get("tokens", ()))
                _ = segment["loss_mask_sum"] + len(segment["ids"])
                ROLES.index(segment["role"])
        yield record


def chat_record(trajectory: Trajectory, example: Example, environment: Environment) -> dict | None:
    """A JSON row of `messages`, `tools` (JSON schemas, where the recipe gives some) and `example_id`.

    `example`, with its history, and `environment` are those that the trajectory was played with; one that had
    other tools than the environment names them as `tool_set`, and a message of which no token is learned has
    `weight` 0, as in OpenAI's format for fine-tuning. A tool call stays text in the message of the assistant,
    as it was sampled; other programs put the model's chat template around it. For Qwen3's that gives back
    the trajectory's text, with three exceptions: where observations are messages of the user (SkyRL-SQL,
    SQL-Trail), the template drops the thoughts of all messages before the last; a last message without
    thinking gets an empty <think> block; and text of a database that reads like a control token, which is
    plain text here, becomes one.
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
            text = environment.tokens.with_opening(environment.tokens.decode(segment.ids), before.ids)
            unlearned = {} if any(segment.loss_mask) else {"weight": 0}
            messages.append({"role": "assistant", "content": text} | unlearned)
        else:
            messages.append({"role": environment.recipe.observation_role, "content": next(observations).text})
    given = {} if tools is None else {"tools": tools}
    if had.keys() != environment.tools.keys():
        given["tool_set"] = next(name for name in TOOL_SETS if make_tools(name).keys() == had.keys())
    return {"example_id": trajectory.example_id, "messages": messages, **given}


class AnswerLog:
    """A file with one trajectory a line; `answers` has, by seed, those of an earlier run with the same
    `options`.

    Raises UserError if the file holds answers given with other options.
    """

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self.lock = path, threading.Lock()
        now = json.loads(json.dumps(options))
        with loading(f"{path} is damaged; remove it to ask anew"):
            before, *played = [record for _, record in load_json_lines(path)] if path.exists() else [now]
            differ = sorted(name for name in before | now if before.get(name) != now.get(name))
            trajectories = [Trajectory.from_plain(record) for record in played]
        if differ:
            raise UserError(
                f"{path} holds answers of an evaluation that differs in {', '.join(differ)}; "
                "give the same options again, or another --out"
            )
        write_atomically(path, json_lines([now, *played]))
        self.answers = {trajectory.seed: trajectory for trajectory in trajectories}

    def add(self, trajectory: Trajectory) -> None:
        """Append a trajectory if it is finished."""
        if trajectory.status is None:
            return
        with self.lock, file_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(trajectory, default=vars) + "\n")
