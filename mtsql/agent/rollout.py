"""Plays many episodes at once: the model writes messages, the environment answers them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel

from mtsql.agent.generator import Generator, Row
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory

ENVIRONMENT_THREADS = 8
REFILL_SHARE = 0.25  # New episodes start when this share of the rows is free,
ANSWER_SHARE = 0.125  # observations are appended when this share of the live rows waits for one.


@dataclass(frozen=True)
class Sampling:
    """How messages are sampled. `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_turn_tokens: int = 512


class Episode(Protocol):
    """One episode as the rollout sees it."""

    trajectory: Trajectory

    def remaining_tokens(self) -> int:
        """Tokens of the response still allowed; at least 1 while the episode goes on."""

    def step(self, ids: list[int], logprobs: list[float], ended: bool) -> list[int] | None:
        """Take a sampled message; return the ids that the environment appended, None at the end.

        `ended` says whether the last id is a sampled end of turn. Called from a worker thread.
        """


def rollout(
    model: PreTrainedModel,
    tokens: ChatTokens,
    episodes: Sequence[Episode],
    sampling: Sampling,
    max_rows: int = 256,
    progress: Callable[[int, int, dict[str, float]], None] | None = None,
) -> list[Trajectory]:
    """Play all episodes to their ends, at most `max_rows` at once; trajectories in the same order.

    When something is appended or started depends on the tokens alone and never on the clock, so
    that a run repeats bit for bit. `progress(done, total, stats)` is called as episodes finish.
    """
    queue = deque(episodes)
    playing: dict[Row, Episode] = {}
    waiting: list[tuple[Row, Future[list[int] | None]]] = []
    started_at, sampled, done = time.perf_counter(), 0, 0

    def limit(episode: Episode) -> int:
        return min(sampling.max_turn_tokens, episode.remaining_tokens())

    with (
        ThreadPoolExecutor(ENVIRONMENT_THREADS) as pool,
        Generator(model, tokens.end_of_turn_ids, sampling.temperature, sampling.top_p) as generator,
    ):
        while queue or playing:
            free = max_rows - len(playing)
            if queue and free >= REFILL_SHARE * max_rows:
                fresh = [queue.popleft() for _ in range(min(free, len(queue)))]
                rows = generator.start(
                    [e.trajectory.ids for e in fresh],
                    [e.trajectory.seed for e in fresh],
                    [limit(e) for e in fresh],
                )
                playing.update(zip(rows, fresh, strict=True))

            for row in generator.step():
                sampled += len(row.ids)
                step = playing[row].step
                waiting.append((row, pool.submit(step, row.ids, row.logprobs, row.ended)))

            if waiting and len(waiting) >= ANSWER_SHARE * len(playing):
                answers = [(row, future.result()) for row, future in waiting]
                waiting = []
                finished = [row for row, ids in answers if ids is None]
                going_on = [(row, ids) for row, ids in answers if ids is not None]
                generator.append(
                    [row for row, _ in going_on],
                    [ids for _, ids in going_on],
                    [limit(playing[row]) for row, _ in going_on],
                )
                generator.release(finished)
                for row in finished:
                    del playing[row]
                done += len(finished)
                if progress is not None and finished:
                    seconds = time.perf_counter() - started_at
                    stats = {"sampled_tokens": sampled, "tokens_per_second": sampled / seconds}
                    progress(done, len(episodes), stats)
    return [episode.trajectory for episode in episodes]
