"""Answers that are kept as they come, so that an evaluation that was stopped goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mtsql.agent.env import Episode
from mtsql.agent.trajectory import Trajectory
from mtsql.errors import UserError, loading
from mtsql.files import write_atomically


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
        with self.lock, self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(trajectory.to_plain()) + "\n")


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
