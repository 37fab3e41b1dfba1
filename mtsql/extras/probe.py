"""Does a policy read what its tool returned? Probabilities at the token where a repair differs from what
failed.

    python -m mtsql.extras.probe --config configs/real_qwen.toml --data DATA --model MODEL \\
        --failures runs/real/held_out/short_sft/predictions.jsonl --out runs/real/probe/warm_start

A query has failed with an error. The policy has judged it (no_pass), says greedily what it says before
a call, and writes the next call, given as far as gold SQL and failed query agree. P(gold) is the probability
of the gold SQL's next token, P(copy) that of the failed query's, `seen` after the real error with its hint,
`blind` after "error: the query fails". The gap, P(gold | seen) - P(gold | blind), is what the policy takes
from the observation: 0 for one that repairs by guessing.

The failures, of --split (held_out), are those of --failures (an evaluation's predictions.jsonl, of any
policy), and --questions questions with mistakes of each kind of mtsql/extras/demonstrations.py.
OUT/probe.json has the means by kind, OUT/probe.jsonl each failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from mtsql.config import Common, option, read_options, save_config, user_errors


@dataclass(frozen=True, kw_only=True)
class Args(Common):
    """Whether a policy reads what its tool returned (mtsql.extras.probe)."""

    SECTION: ClassVar = "probe"
    split: Literal["train", "dev", "held_out", "rl"] = option("held_out", "part of the data")
    failures: str = option("", "predictions.jsonl of an evaluation over these questions")
    questions: int = option(40, "questions with a mistake of each kind", least=0)


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = read_options(Args, __doc__)

import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean

import torch
from tqdm import tqdm

from mtsql.agent.generator import Generator, Sampling
from mtsql.agent.rollout import stop_string_test
from mtsql.agent.tokens import shared_length
from mtsql.agent.tools import EXEC_SQL
from mtsql.agent.trajectory import Stop
from mtsql.data.datasets import Example, examples
from mtsql.errors import UserError, loading
from mtsql.extras.demonstrations import KINDS, Mistake, Question
from mtsql.files import json_lines, load_json_lines, write_atomically
from mtsql.recipes.mtsql_r1 import verdict
from mtsql.sql.text import in_normal_form, normal_form
from mtsql.task import Task, begin_task, refuse_finished

BLIND = "error: the query fails"
CALL = "<tool_call>"
PROBABILITIES = ("gold_seen", "gold_blind", "gap", "copy_seen", "copy_blind")


def main(config: Args) -> None:
    """Probe every failure, write the means."""
    task, rows = begin_task(config, config.split), []
    refuse_finished(task.out)
    if EXEC_SQL not in task.environment.tools or not task.environment.recipe.verifies:
        raise UserError("a probe needs --recipe mtsql_r1 with EXECUTE among its --tools")
    task.policy.eval()
    failures = [*own_failures(config, task), *made_failures(config, task)]
    failed = []  # kind, example, mistake, the tokens before the repair
    for kind, example, mistake in tqdm(failures, desc="queries", unit="failure"):
        if before := judged_failure(task, example, mistake):
            failed.append((kind, example, mistake, before))
    said = said_first(task, [ids for *_, before in failed for ids in before.values()])
    pairs = zip(failed, zip(said[::2], said[1::2], strict=True), strict=True)
    for (kind, example, mistake, before), words in tqdm(pairs, "probe", len(failed), unit="failure"):
        gold = Question(task.environment, example).gold
        found = probe(task, before, words, gold, mistake.wrong)
        rows.append({"kind": kind, "example_id": example.id, "failed": mistake.wrong} | found)
    means = {}
    print("failures".ljust(20) + "number".rjust(8) + "".join(name.rjust(12) for name in PROBABILITIES))
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of_kind = [row for row in rows if row["kind"] == kind]
        means[kind] = {name: fmean(row[name] for row in of_kind) for name in PROBABILITIES}
        print(f"{kind:<20}{len(of_kind):>8}" + "".join(f"{mean:>12.3f}" for mean in means[kind].values()))
        means[kind]["failures"] = len(of_kind)
    write_atomically(task.out / "probe.jsonl", json_lines(rows))
    write_atomically(task.out / "probe.json", json.dumps(means, indent=1))
    save_config(config, task.out)  # with which it is done


def own_failures(config: Args, task: Task) -> Iterator[tuple[str, Example, Mistake]]:
    """The answers in --failures; UserError for another file."""
    asked = {example.id: example for example in examples(task.dataset.dialogues)}
    for number, row in load_json_lines(Path(config.failures)) if config.failures else ():
        with loading(f"{config.failures}, line {number}: give an evaluation's predictions.jsonl"):
            example, answer, gold = asked.get(row["example_id"]), row["predicted"], row["gold"]
        if example and example.gold_sql != gold:
            raise UserError(f"{config.failures}, line {number}: another question than that of --split has")
        if answer and example:
            schema = task.environment.schemas[example.db_id]
            shown = (in_normal_form(example, schema), schema)
            yield "own", example, Mistake(normal_form(answer, schema), shown)


def made_failures(config: Args, task: Task) -> Iterator[tuple[str, Example, Mistake]]:
    """--questions questions with each kind of mistake that ends in an error."""
    asked = examples(task.dataset.dialogues)
    random.Random(config.seed).shuffle(asked)

    def failures(kind: str) -> Iterator[tuple[str, Example, Mistake]]:
        for example in asked:
            rng = random.Random(f"{config.seed}/{example.id}")
            mistake = KINDS[kind](Question(task.environment, example), rng)
            if mistake and not mistake.look:
                yield kind, example, mistake

    for kind in KINDS:
        yield from islice(failures(kind), config.questions)


def judged_failure(task: Task, example: Example, mistake: Mistake) -> dict[str, list[int]] | None:
    """The tokens up to the verdict on a failed query, after the real observation and after a blind one.

    None if the query does not fail with an error, or the gold SQL does.
    """
    tokens, recipe = task.tokens, task.environment.recipe
    if Question(task.environment, example).checked(mistake) is None:
        return None
    (episode,) = task.environment.episodes(example, [0], mistake.shown)
    call = tokens.message_ids(recipe.call(mistake.wrong))
    if episode.trajectory.status or episode.step(call, [0.0] * len(call), Stop.END_OF_TURN) is None:
        return None
    prompt, message, real = (list(segment.ids) for segment in episode.trajectory.segments)
    blind = tokens.observation_suffix(BLIND, True, recipe.observation_role)
    judged = tokens.message_ids(verdict(EXEC_SQL, False) + "\n")[:-1]  # the message goes on
    return {"seen": prompt + message + real + judged, "blind": prompt + message + blind + judged}


def said_first(task: Task, prompts: Sequence[list[int]]) -> list[str]:
    """What the policy says, greedily, between its verdict and its next call after each prompt.

    Nothing where no call comes in 60 tokens.
    """
    sampling = Sampling(temperature=0.0, max_turn_tokens=60, stop_strings=(CALL,))
    stops = stop_string_test(task.tokens, sampling.stop_strings)
    with Generator(task.policy, task.tokens.end_of_turn_ids, sampling, stops) as generator:
        rows = generator.start(prompts, [0] * len(prompts), [sampling.max_turn_tokens] * len(prompts))
        while generator.rows:
            if ended := generator.step():
                generator.release(ended)
    said = [task.tokens.decode(row.ids).partition(CALL) for row in rows]
    return [words if call else "" for words, call, _ in said]


@torch.no_grad()
def probe(
    task: Task, before: dict[str, list[int]], said: Sequence[str], gold_sql: str, copied_sql: str
) -> dict[str, float]:
    """The probabilities where the two calls first differ, after each `before` and what is `said` there."""
    found, call = {}, task.environment.recipe.call
    for (name, ids), words in zip(before.items(), said, strict=True):
        gold, copy = (task.tokens.message_ids(words + call(sql), False) for sql in (gold_sql, copied_sql))
        place = shared_length(gold, copy)
        given = torch.tensor([ids + gold[:place]], device=task.policy.device)  # (1, T)
        logits = task.policy(given, logits_to_keep=1).logits[0, -1]  # (vocabulary,)
        probabilities = logits.float().softmax(-1)
        found[f"gold_{name}"] = probabilities[gold[place]].item()
        found[f"copy_{name}"] = probabilities[copy[place]].item()
    return found | {"gap": found["gold_seen"] - found["gold_blind"]}


if __name__ == "__main__":
    user_errors(main, OPTIONS)
