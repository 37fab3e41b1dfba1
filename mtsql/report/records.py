"""Trajectories as rows of JSON: for the viewer, as chat messages, and as answers that are kept as they come.

The last let an evaluation that was stopped go on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from mtsql.agent.env import Environment, Episode
from mtsql.agent.tools import TOOL_SETS, TOOLS, make_tools
from mtsql.agent.trajectory import Trajectory, trajectory_record
from mtsql.data.datasets import Example
from mtsql.errors import UserError, loading
from mtsql.files import load_json_lines, write_atomically, writing_errors
from mtsql.recipes.prompt_options import compact_result
from mtsql.recipes.rewards import Decode
from mtsql.sql.score import Scorer
from mtsql.sql.text import as_executed, in_normal_form

RESULT_CHARACTERS = 300
ROLES = ("prompt", "model", "environment")
# What `mtsql.extras.viewer` shows.
OF_A_RECORD = itemgetter("example_id", "status")
OF_A_SEGMENT = itemgetter("text", "loss_mask_sum", "ids")


def question_record(
    trajectory: Trajectory,
    example: Example,
    scorer: Scorer,
    decode: Decode,
    reward: float | None = None,
    scores: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """A JSON row for mtsql.extras.viewer; `scores` are EX, EM and the parts of the reward, as far as known.

    Results are cut to RESULT_CHARACTERS characters.
    """

    def result(sql: str | None) -> str | None:
        if sql is None:
            return None
        ran = scorer.executor.execute(scorer.paths[example.db_id], as_executed(sql, keep_distinct=True))
        return compact_result(ran, RESULT_CHARACTERS)

    return trajectory_record(trajectory, decode, reward) | {
        "db_id": example.db_id,
        "turn_index": example.turn_index,
        "question": example.question,
        "hardness": scorer.hardness(example.db_id, example.gold_sql),
        "gold_sql": example.gold_sql,
        "gold_result": result(example.gold_sql),
        "answer_result": result(trajectory.answer_sql),
        "scores": dict(scores or {}),
    }


def drop_later_records(path: Path, step: int) -> None:
    """Keep the records of steps before `step` in a file of trajectories, as a resumed run needs it.

    Raises UserError as `read_records`.
    """
    kept = []
    if step and path.exists():
        kept = [record for record in read_records(path) if (record.get("step") or 0) < step]
    write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept))


def read_records(path: Path) -> Iterator[dict]:
    """The records of a JSONL file. Raises UserError for a missing file or a line that is no trajectory."""
    for number, record in load_json_lines(path):
        with loading(f"{path}, line {number}: not a trajectory"):
            _ = OF_A_RECORD(record), float(record.get("reward") or 0)
            _ = [(ROLES.index(segment["role"]), OF_A_SEGMENT(segment)) for segment in record["segments"]]
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
            tokens = environment.tokens
            message = {
                "role": "assistant",
                "content": tokens.with_opening(tokens.decode(segment.ids), before.ids),
            }
            messages.append(message | ({} if any(segment.loss_mask) else {"weight": 0}))
        else:
            messages.append({"role": environment.recipe.observation_role, "content": next(observations).text})
    given = {} if tools is None else {"tools": tools}
    if had.keys() != environment.tools.keys():
        given["tool_set"] = next(name for name in TOOL_SETS if make_tools(name).keys() == had.keys())
    return {"example_id": trajectory.example_id, "messages": messages, **given}


class AnswerLog:
    """A file with one trajectory a line; `find` gives what an earlier run of the same `options` answered.

    Raises UserError if the file holds answers given with other options.
    """

    def __init__(self, path: Path, options: dict[str, Any]) -> None:
        self.path, self.lock = path, threading.Lock()
        header = json.dumps(options, sort_keys=True)
        with loading(f"{path} is damaged; remove it to ask anew"):
            lines = self._whole_lines()
            known = dict(json.loads(lines[0])) if lines else {}
            trajectories = [Trajectory.from_plain(json.loads(line)) for line in lines[1:]]
        if lines and lines[0] != header:
            now = json.loads(header)
            other = sorted(name for name in known.keys() | now.keys() if known.get(name) != now.get(name))
            raise UserError(
                f"{path} holds answers of an evaluation that differs in {', '.join(other)}; "
                "give the same options again, or another --out"
            )
        write_atomically(path, "".join(line + "\n" for line in lines or [header]))
        self.answers = {(t.example_id, t.seed): t for t in trajectories}

    def _whole_lines(self) -> list[str]:
        """Without a last line that a killed process left unfinished."""
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        return text.split("\n")[:-1]

    def find(self, trajectory: Trajectory) -> Trajectory | None:
        """The finished trajectory of the same question and seed."""
        return self.answers.get((trajectory.example_id, trajectory.seed))

    def add(self, trajectory: Trajectory) -> None:
        """Append a trajectory if it is finished."""
        if trajectory.status is None:
            return
        with self.lock, writing_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(trajectory, default=vars) + "\n")


def play_unanswered(
    episodes: Sequence[Episode], log: AnswerLog | None
) -> tuple[list[Episode], list[Trajectory]]:
    """The episodes that are still to be played, and the trajectory of each of `episodes`."""
    if log is None:
        return list(episodes), [episode.trajectory for episode in episodes]
    found = [log.find(episode.trajectory) for episode in episodes]
    waiting = [e for e, known in zip(episodes, found, strict=True) if known is None]
    for episode in waiting:
        episode.told = log.add
    return waiting, [known or e.trajectory for e, known in zip(episodes, found, strict=True)]
