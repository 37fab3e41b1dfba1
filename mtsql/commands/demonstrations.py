"""Demonstrations of the protocol with a model's own mistakes, for `train_sft.py --targets teacher`.

    python -m mtsql.commands.demonstrations --config configs/real_smollm2.toml \\
        --model runs/real/short_sft/policy --data DATA --out OUT

The model answers training questions without tools, --samples-per-question times each. A scripted agent then
plays each question, mostly with both tools: it proposes a sampled answer, judges what it sees, and repairs
what it found to be wrong to a right sample or to the gold SQL (mtsql/learn/demonstrations.py). Then it plays
--gold-questions more with the gold SQL as first proposal, which costs no sampling.
OUT/demonstrations.jsonl has one conversation a line, and `train_sft.py --targets teacher --teacher
OUT/demonstrations.jsonl` learns from them.

This step is not in the paper, whose model calls the tools untrained, if badly when it is small.
"""

from __future__ import annotations

from mtsql.config import DemonstrationsConfig, read_options, save_config, user_errors

if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = read_options(DemonstrationsConfig, __doc__)

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from mtsql.agent.env import Environment
from mtsql.agent.tools import TOOL_SETS, make_tools
from mtsql.data.datasets import Example
from mtsql.errors import UserError
from mtsql.files import write_atomically
from mtsql.learn.demonstrations import (
    Demonstration,
    choose_demonstrations,
    demonstrate_gold,
    demonstrate_samples,
    draw_tool_set,
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
    if config.gold_questions and not config.questions:
        raise UserError("--gold-questions needs --questions above 0: with 0 all questions are sampled")
    check_samples(config)
    run = begin_run(config, "train")
    drawn = training_questions(replace(config, questions=config.questions + config.gold_questions), run)
    cut = config.questions or len(drawn)
    found = run.processes.gather(play_samples(config, run, run.processes.share(list(enumerate(drawn[:cut])))))
    found += run.processes.gather(play_gold(config, run, run.processes.share(drawn[cut:])))
    if run.processes.is_main:
        kept = choose_demonstrations(found, config.kept_per_question, random.Random(config.seed))
        if not kept:
            raise UserError("no sampled answer makes a demonstration")
        records = (
            chat_record(d.trajectory, d.question, run.environment)
            | {"first_proposal": d.first if d.sampled else "gold"}
            for d in kept
        )
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        save_config(config, run.out)
        write_atomically(run.out / "demonstrations.jsonl", lines)
        print(format_demonstrations(list(chain.from_iterable(found)), kept))
    leave_processes(run.processes)


def play_samples(
    config: DemonstrationsConfig, run: Run, numbered: Sequence[tuple[int, Example]]
) -> list[list[Demonstration]]:
    """The demonstrations of each question of a process's share, one a sample that holds SQL."""
    environments = with_tool_sets(run)
    answering = replace(run, environment=environments["none"])
    found = []
    with weights_for_rollouts(config, run):
        for example, sampled in sample_questions(config, answering, numbered, (config.seed,), "sample"):
            rng = random.Random(f"{config.seed}/{example.id}")
            tool_set = draw_tool_set(rng)
            if tool_set == "none":  # nothing to look at, so that only the gold SQL is worth showing
                shown = [demonstrate_gold(environments["none"], example)]
            else:
                answers = [t.answer_sql for t in sampled if t.answer_sql is not None]
                right = [bool(run.scorer.ex(example.db_id, example.gold_sql, sql)) for sql in answers]
                shown = demonstrate_samples(environments[tool_set], example, answers, right, rng)
            found.append([replace(d, tool_set=tool_set) for d in shown])
    return found


def play_gold(config: DemonstrationsConfig, run: Run, asked: Sequence[Example]) -> list[list[Demonstration]]:
    """One demonstration of each question, with the gold SQL as its only proposal."""
    environments, found = with_tool_sets(run), []
    for example in asked:
        tool_set = draw_tool_set(random.Random(f"{config.seed}/{example.id}"))
        found.append([replace(demonstrate_gold(environments[tool_set], example), tool_set=tool_set)])
    return found


def with_tool_sets(run: Run) -> dict[str, Environment]:
    """The run's environment with each set of tools, by its name."""
    return {name: replace(run.environment, tools=make_tools(name)) for name in TOOL_SETS}


def format_demonstrations(found: Sequence[Demonstration], kept: Sequence[Demonstration]) -> str:
    """A small table of the first proposals: how many were sampled, how many are in the file."""
    own = [[d for d in of if d.sampled] for of in (found, kept)]
    sampled, written = (Counter(d.first for d in of) for of in own)
    lines = [f"{'first proposal':<45}{'sampled':>10}{'written':>10}"]
    lines += [f"{name:<45}{count:>10,}{written[name]:>10,}" for name, count in sampled.most_common()]
    shares = (100 * sum(not d.right for d in of) / max(1, len(of)) for of in own)
    lines.append(f"{'wrong':<45}" + "".join(f"{share:>9.1f}%" for share in shares))
    gold = Counter(d.tool_set == "none" for d in kept if not d.sampled)
    lines.append(f"{'gold SQL, with tools':<45}{'':>10}{gold[False]:>10,}")
    lines.append(f"{'gold SQL, without tools':<45}{'':>10}{gold[True]:>10,}")
    return "\n".join(lines)


if __name__ == "__main__":
    user_errors(main, OPTIONS)
