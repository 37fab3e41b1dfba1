"""Demonstrations of the protocol with a model's own mistakes, for `train_sft.py --targets teacher`.

    python -m mtsql.commands.demonstrations --config configs/real_smollm2.toml \\
        --model runs/real/short_sft/policy --data DATA --out OUT

The model answers training questions without tools, --samples-per-question times each. A scripted agent then
plays each question, mostly with both tools: it proposes a sampled answer, judges what it sees, and repairs
what it found to be wrong to the gold SQL (mtsql/learn/demonstrations.py). OUT/demonstrations.jsonl has one
conversation a line, and `train_sft.py --targets teacher --teacher OUT/demonstrations.jsonl` learns from them.

This step is not in the paper, whose model calls the tools untrained, if badly when it is small.
"""

from __future__ import annotations

from mtsql.config import DemonstrationsConfig, read_options, save_config, user_errors

if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = read_options(DemonstrationsConfig, __doc__)

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from mtsql.agent.env import Environment
from mtsql.agent.tools import TOOL_SETS, make_tools
from mtsql.data.datasets import Example
from mtsql.errors import UserError
from mtsql.files import write_atomically
from mtsql.learn.demonstrations import (
    CUT,
    GOLD,
    Demonstration,
    demonstrate,
    draw_tool_set,
    keep_share_of_wrong,
    shown_gold,
)
from mtsql.learn.parallel import leave_processes
from mtsql.report.chat import chat_record
from mtsql.run import (
    Run,
    begin_run,
    check_samples,
    sample_questions,
    training_questions,
    weights_for_rollouts,
)


def main(config: DemonstrationsConfig) -> None:
    """Sample, play, write."""
    if config.tools != "both":
        raise UserError("demonstrations are with every set of tools; leave out --tools")
    if config.recipe != "mtsql_r1":
        raise UserError("demonstrations follow --recipe mtsql_r1 alone")
    if config.rewards:
        raise UserError("demonstrations earn no reward; leave out --rewards")
    check_samples(config)
    run = begin_run(config, "train")
    asked = training_questions(config, run)
    environments = {name: replace(run.environment, tools=make_tools(name)) for name in TOOL_SETS}
    share = run.processes.share(list(enumerate(asked)))
    found = list(chain.from_iterable(run.processes.gather(play_answers(config, run, environments, share))))
    if run.processes.is_main:
        kept = keep_share_of_wrong(found, random.Random(config.seed))
        if not kept:
            raise UserError("no sampled answer makes a demonstration")
        records = (
            chat_record(d.trajectory, d.question, run.environment) | {"first_proposal": d.first} for d in kept
        )
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        save_config(config, run.out)
        write_atomically(run.out / "demonstrations.jsonl", lines)
        print(format_demonstrations(found, kept))
    leave_processes(run.processes)


def play_answers(
    config: DemonstrationsConfig,
    run: Run,
    environments: Mapping[str, Environment],
    numbered: Sequence[tuple[int, Example]],
) -> list[list[Demonstration]]:
    """The demonstrations of each question of a process's share; `environments` by their set of tools."""
    answering = replace(run, environment=environments["none"])
    tool_sets = {e.id: draw_tool_set(random.Random(f"{config.seed}/{e.id}")) for _, e in numbered}
    found = []
    with weights_for_rollouts(config, run):
        for example, sampled in sample_questions(config, answering, numbered, (config.seed,), "sample"):
            tool_set = tool_sets[example.id]
            shown_of = []
            for trajectory in sampled:
                answer = trajectory.answer_sql
                if answer is None:
                    continue  # a message that holds no SQL is no proposal
                right = bool(run.scorer.ex(example.db_id, example.gold_sql, answer))
                if tool_set == "none":  # nothing to look at, so that only the gold SQL is worth showing
                    answer, right = shown_gold(example), True
                (episode,) = environments[tool_set].episodes(example, [trajectory.seed])
                shown = demonstrate(episode, answer, right)
                shown_of.append(replace(shown, tool_set=tool_set))
                if not right and shown.trajectory is not None:
                    (episode,) = environments[tool_set].episodes(example, [trajectory.seed])
                    beside = demonstrate(episode, shown_gold(example), True)
                    first = GOLD if beside.trajectory is not None else CUT
                    shown_of.append(replace(beside, tool_set=tool_set, first=first))
            found.append(shown_of)
    return found


def format_demonstrations(found: list[Demonstration], kept: list[Demonstration]) -> str:
    """A small table of the first proposals: how many were sampled, how many are in the file."""
    with_tools = [[d for d in of if d.tool_set != "none" and d.first != GOLD] for of in (found, kept)]
    sampled, written = (Counter(d.first for d in of) for of in with_tools)
    lines = [f"{'first proposal':<45}{'sampled':>10}{'written':>10}"]
    lines += [f"{name:<45}{count:>10,}{written[name]:>10,}" for name, count in sampled.most_common()]
    shares = (100 * sum(not d.right for d in of) / max(1, len(of)) for of in with_tools)
    direct, gold = sum(d.tool_set == "none" for d in kept), sum(d.first == GOLD for d in kept)
    lines += [
        f"{name:<45}{'':>10}{n:>10,}" for name, n in ((GOLD, gold), ("gold SQL, without tools", direct))
    ]
    return "\n".join([*lines, f"{'wrong':<45}" + "".join(f"{share:>9.1f}%" for share in shares)])


if __name__ == "__main__":
    user_errors(main, OPTIONS)
