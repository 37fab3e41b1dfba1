"""Does a policy read what its tool returned? Probabilities at the token where a repair differs from what
failed.

    python -m mtsql.extras.probe --config configs/real_qwen.toml --data DATA --model MODEL \\
        --failures runs/real/held_out/short_sft/predictions.jsonl --out runs/real/probe/warm_start

A query has failed with an error. The policy has judged it (no_pass) and writes the next call, given as far
as gold SQL and failed query agree. P(gold) is the probability of the gold SQL's next token, P(copy) that of
the failed query's, `seen` after the real error with its hint, `blind` after "error: the query fails". The
gap, P(gold | seen) - P(gold | blind), is what the policy takes from the observation: 0 for one that repairs
by guessing.

The failures, of --split (held_out), are those of --failures (an evaluation's predictions.jsonl, of any
policy), and --questions questions with mistakes of each kind of mtsql/extras/demonstrations.py.
OUT/probe.json has the means by kind, OUT/probe.jsonl each failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mtsql.config import Common, Count, option, read_options, save_config, user_errors


@dataclass(frozen=True, kw_only=True)
class Args(Common):
    """Whether a policy reads what its tool returned (mtsql.extras.probe)."""

    SECTION: ClassVar = "probe"
    split: Literal["train", "dev", "held_out", "rl"] = option("held_out", "part of the data")
    failures: str = option("", "predictions.jsonl of an evaluation over these questions")
    questions: Count = option(40, "questions with a mistake of each kind")


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = read_options(Args, __doc__)

import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from tqdm import tqdm

from mtsql.agent.env import Environment, outcome_of
from mtsql.agent.prefix import shared_length
from mtsql.agent.tools import EXEC_SQL
from mtsql.agent.trajectory import Segment, Stop, Trajectory
from mtsql.data.datasets import Example, examples
from mtsql.data.schema import Schema
from mtsql.errors import UserError
from mtsql.extras.demonstrations import KINDS
from mtsql.files import load_json_lines, write_atomically
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.recipes.mtsql_r1_prompts import verdict
from mtsql.sql.normal import normal_form
from mtsql.task import Task, begin_task

BLIND = "error: the query fails"
PROBABILITIES = ("gold_seen", "gold_blind", "gap", "copy_seen", "copy_blind")


class Failure(NamedTuple):
    """A query that fails; `shown` is what the prompt says, where that is another question and schema."""

    kind: str
    example: Example
    sql: str
    shown: tuple[Example, Schema] | None = None


def main(config: Args) -> None:
    """Probe every failure, write the means."""
    task, rows = begin_task(config, config.split), []
    failures = [*own_failures(config, task), *made_failures(config, task)]
    with torch.no_grad():
        task.policy.eval()
        for failure in tqdm(failures, desc="probe", unit="failure"):
            if found := probe(task, failure):
                about = {"kind": failure.kind, "example_id": failure.example.id, "failed": failure.sql}
                rows.append(about | found)
    means = {}
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        means[kind] = {name: fmean(row[name] for row in of_kind) for name in PROBABILITIES}
        means[kind]["failures"] = len(of_kind)
    save_config(config, task.out)
    write_atomically(task.out / "probe.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    write_atomically(task.out / "probe.json", json.dumps(means, indent=1))
    print(format_probe(means))


def own_failures(config: Args, task: Task) -> Iterator[Failure]:
    """The answers in --failures that end in an error where the gold SQL does not; UserError for another."""
    asked = {example.id: example for example in examples(task.dataset.dialogues)}
    for number, row in load_json_lines(Path(config.failures)) if config.failures else ():
        named, answer = map(row.get, ("example_id", "predicted")) if isinstance(row, dict) else (None, None)
        if not (isinstance(named, str) and isinstance(answer, str | None)):
            raise UserError(f"{config.failures}, line {number}: give an evaluation's predictions.jsonl")
        if answer and named in asked:
            example = asked[named]
            schema = task.environment.schemas[example.db_id]
            yield Failure("own", example, normal_form(answer, schema))


def made_failures(config: Args, task: Task) -> Iterator[Failure]:
    """--questions questions of each kind of mistake that ends in an error."""
    asked = examples(task.dataset.dialogues)
    random.Random(config.seed).shuffle(asked)
    for kind, make in KINDS.items():
        made = ((e, make(task.environment, e, random.Random(f"{config.seed}/{e.id}"))) for e in asked)
        alone = ((e, m) for e, m in made if m is not None and len(m.wrong) == 1 and not m.look)
        for example, mistake in islice(alone, config.questions):
            yield Failure(kind, example, mistake.wrong[0], mistake.shown)


def probe(task: Task, failure: Failure) -> dict[str, float] | None:
    """The probabilities at the first token where the repair differs from the failed query.

    None if the query does not fail with an error, or the gold SQL does.
    """
    contexts = repair_contexts(task.environment, failure)
    if contexts is None:
        return None
    group, names = [], []
    for name, (given, *tokens) in contexts.items():
        for what, token in zip(("gold", "copy"), tokens, strict=True):
            segments = [Segment.given("prompt", given), Segment.sampled([token], [0.0])]
            group.append(Trajectory(failure.example.id, 0, segments))
            names.append(f"{what}_{name}")
    batch = token_batch(task.policy, [group])
    logprobs, _ = token_logprobs(task.policy, batch)  # (4,)
    found = dict(zip(names, logprobs.exp().tolist(), strict=True))
    return found | {"gap": found["gold_seen"] - found["gold_blind"]}


def repair_contexts(
    environment: Environment, failure: Failure
) -> dict[str, tuple[list[int], int, int]] | None:
    """By "seen" and "blind": all ids before the token where the repair differs, the gold's there, the copy's.

    None as `probe`.
    """
    example, tokens, recipe = failure.example, environment.tokens, environment.recipe
    schema, execute = environment.schemas[example.db_id], environment.executor.execute
    gold = normal_form(example.gold_sql, schema)
    if [outcome_of(execute(schema.path, sql)) == "error" for sql in (failure.sql, gold)] != [True, False]:
        return None
    (episode,) = environment.episodes(example, [0], failure.shown)
    call = tokens.message_ids(recipe.call(failure.sql))
    if episode.trajectory.status or episode.step(call, [0.0] * len(call), Stop.END_OF_TURN) is None:
        return None
    prompt, message, observation = (list(segment.ids) for segment in episode.trajectory.segments)
    judged = verdict(EXEC_SQL, False) + "\n"
    right, copy = (tokens.message_ids(judged + recipe.call(sql)) for sql in (gold, failure.sql))
    place = shared_length(right, copy)
    blind = tokens.observation_suffix(BLIND, True, recipe.observation_role)
    return {
        name: (prompt + message + suffix + right[:place], right[place], copy[place])
        for name, suffix in (("seen", observation), ("blind", blind))
    }


def format_probe(means: dict[str, dict[str, float]]) -> str:
    """A table with a line for each kind of failure."""
    lines = [f"{'failures':<20}{'number':>8}{'P(gold) seen':>14}{'blind':>8}{'gap':>8}{'P(copy) seen':>14}"]
    lines += [
        f"{kind:<20}{row['failures']:>8}{row['gold_seen']:>14.3f}{row['gold_blind']:>8.3f}{row['gap']:>8.3f}"
        f"{row['copy_seen']:>14.3f}"
        for kind, row in means.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    user_errors(main, OPTIONS)
