"""Plays many episodes at once: the model writes messages, the environment answers them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import cache, partial

import numpy as np
from tqdm import tqdm

from mtsql.agent.decoder import Decoder
from mtsql.agent.env import Episode
from mtsql.agent.generator import Generator, Row, Sampling, new_cache
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory
from mtsql.model_folder import Policy

ENVIRONMENT_THREADS = 8
REFILL_SHARE = 0.25  # New episodes start when this share of the rows is free.
REPLY_SHARE = 0.0625  # Observations are appended when this share of the cache's rows waits for one.


def rollout(
    policy: Policy | Decoder,
    tokens: ChatTokens,
    episodes: Sequence[Episode],
    sampling: Sampling,
    max_rows: int = 256,
    title: str = "",
    in_order: bool | None = None,
) -> list[Trajectory]:
    """Play all episodes to their ends, at most `max_rows` at once; returns trajectories in the same order.

    They share a cache of most of the memory that is free; rows for which it has no room wait.
    With `in_order` (the default on a CPU) only the tokens decide when an observation is appended and an
    episode started, never the clock, so that a run repeats bit for bit. Without it only those that
    are there are appended, so that no row waits for another's slow query. No message goes on beyond the
    positions that the model was made for. With a `title` a progress bar is shown. Raises UserError if the
    memory does not hold one row.
    """
    queue = deque(episodes)
    playing: dict[Row, Episode] = {}
    waiting: dict[Row, Future[list[int] | None]] = {}
    started_at, sampled = time.perf_counter(), 0
    in_order = policy.device.type != "cuda" if in_order is None else in_order
    longest = max((len(e.trajectory.ids) + e.remaining_tokens() for e in episodes), default=0)

    def limit(episode: Episode) -> int:
        of_model = getattr(policy.config, "max_position_embeddings", 10**9) - len(episode.trajectory.ids)
        return min(sampling.max_turn_tokens, episode.remaining_tokens(), max(1, of_model))

    stops = stop_string_test(tokens, sampling.stop_strings)
    make_cache = partial(new_cache, longest=longest, rows=max_rows)
    with (
        ThreadPoolExecutor(ENVIRONMENT_THREADS) as pool,
        Generator(policy, tokens.end_of_turn_ids, sampling, stops, make_cache) as generator,
        tqdm(total=len(episodes), desc=title, unit="trajectory", disable=not title) as bar,
    ):
        while queue or playing:
            free = max_rows - len(playing)
            if queue and free >= REFILL_SHARE * max_rows and len(generator.in_cache) == len(playing):
                fresh = [queue.popleft() for _ in range(min(free, len(queue)))]
                fresh.sort(key=lambda e: len(e.trajectory.ids))  # neighbours in the cache of like length
                given = [(e.trajectory.ids, e.trajectory.seed, limit(e)) for e in fresh]
                rows = generator.start(*zip(*given, strict=True))
                playing.update(zip(rows, fresh, strict=True))

            for row in generator.step():
                sampled += len(row.ids)
                waiting[row] = pool.submit(playing[row].step, row.ids, row.logprobs, row.stop)

            if waiting and len(waiting) >= REPLY_SHARE * len(generator.in_cache):
                if not in_order and not any(row.decoding for row in generator.in_cache):
                    wait(waiting.values(), return_when=FIRST_COMPLETED)
                there = [row for row, future in waiting.items() if in_order or future.done()]
                replies = {row: waiting.pop(row).result() for row in there}
                going_on = {row: ids for row, ids in replies.items() if ids is not None}
                finished = [row for row in replies if row not in going_on]
                if going_on:
                    limits = [limit(playing[row]) for row in going_on]
                    generator.append(list(going_on), list(going_on.values()), limits)
                if finished:
                    generator.release(finished)
                for row in finished:
                    del playing[row]
                rate = sampled / (time.perf_counter() - started_at)
                bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
                bar.update(len(finished))
    return [episode.trajectory for episode in episodes]


def trajectory_seed(*numbers: int) -> int:
    """One seed for one trajectory, from the run's seed and its place in the run."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])


def stop_string_test(tokens: ChatTokens, strings: tuple[str, ...]) -> Callable[[list[int]], bool] | None:
    """The function that says whether a message ends with the first end of one of `strings`, None without any.

    It decodes as many tokens as the longest string has bytes, since a token is at least one byte of text; and
    only after a token with the last character of a string, or with a part of some character.
    """
    if not strings:
        return None
    reach = max(len(string.encode()) for string in strings)
    ends = {string[-1] for string in strings} | {"\N{REPLACEMENT CHARACTER}"}

    @cache
    def may_end(token: int) -> bool:
        return not ends.isdisjoint(tokens.decode([token]))

    def stops(ids: list[int]) -> bool:
        if not may_end(ids[-1]):
            return False
        tail = tokens.decode(ids[-reach:])
        return any(string in tail for string in strings)

    return stops
