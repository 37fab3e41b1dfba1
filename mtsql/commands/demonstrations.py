"""Demonstrations of the protocol with a model's own mistakes, for `train_sft.py --targets teacher`.

    python -m mtsql.commands.demonstrations --config configs/real_smollm2.toml \\
        --model runs/real/short_sft/policy --data DATA --out OUT

The model answers training questions without tools, --samples-per-question times each. A scripted agent then
plays each question, mostly with both tools: it proposes a sampled answer, judges what it sees, and repairs
what it found to be wrong to the gold SQL (mtsql/learn/demonstrations.py). Then it plays --gold-questions more
with the gold SQL as first proposal, which costs no sampling; with seven of them to a repair the repairs were
not learned (docs/results/real_trials.md). OUT/demonstrations.jsonl has one conversation a line, and
`train_sft.py --targets teacher --teacher OUT/demonstrations.jsonl` learns from them.

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
    GOLD,
    GOLD_ALONE,
    GOLD_CUT,
    Demonstration,
    demonstrate,
    draw_tool_set,
    keep_share_of_wrong,
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
    asked, shown = (drawn[: config.questions], drawn[config.questions :]) if config.questions else (drawn, [])
    environments = {name: replace(run.environment, tools=make_tools(name)) for name in TOOL_SETS}
    share = run.processes.share(list(enumerate(asked)))
    found = list(chain.from_iterable(run.processes.gather(play_answers(config, run, environments, share))))
    found += run.processes.gather(play_gold(config, environments, run.processes.share(shown)))
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
    found = []
    with weights_for_rollouts(config, run):
        for example, sampled in sample_questions(config, answering, numbered, (config.seed,), "sample"):
            tool_set = tool_set_of(config, example)
            shown_of = []
            for trajectory in sampled:
                answer = trajectory.answer_sql
                if answer is None:
                    continue  # a message that holds no SQL is no proposal
                right = bool(run.scorer.ex(example.db_id, example.gold_sql, answer))
                if tool_set == "none":  # nothing to look at, so that only the gold SQL is worth showing
                    answer, right = example.gold_sql, True
                (episode,) = environments[tool_set].episodes(example, [trajectory.seed])
                shown = demonstrate(episode, answer, right)
                shown_of.append(replace(shown, tool_set=tool_set))
                if not right and shown.trajectory is not None:
                    (episode,) = environments[tool_set].episodes(example, [trajectory.seed])
                    beside = demonstrate(episode, example.gold_sql, True)
                    first = GOLD if beside.trajectory is not None else GOLD_CUT
                    shown_of.append(replace(beside, tool_set=tool_set, first=first))
            found.append(shown_of)
    return found


def play_gold(
    config: DemonstrationsConfig, environments: Mapping[str, Environment], asked: Sequence[Example]
) -> list[Demonstration]:
    """Questions that nobody sampled, whose first proposal is the gold SQL."""
    found = []
    for example in asked:
        tool_set = tool_set_of(config, example)
        (episode,) = environments[tool_set].episodes(example, [0])
        shown = demonstrate(episode, example.gold_sql, True)
        first = GOLD_ALONE if shown.trajectory is not None else GOLD_CUT
        found.append(replace(shown, tool_set=tool_set, first=first))
    return found


def tool_set_of(config: DemonstrationsConfig, example: Example) -> str:
    """The tools with which a question is played."""
    return draw_tool_set(random.Random(f"{config.seed}/{example.id}"))


def format_demonstrations(found: list[Demonstration], kept: list[Demonstration]) -> str:
    """A small table of the first proposals: how many were sampled, how many are in the file."""
    with_tools = [[d for d in of if d.sampled] for of in (found, kept)]
    sampled, written = (Counter(d.first for d in of) for of in with_tools)
    lines = [f"{'first proposal':<45}{'sampled':>10}{'written':>10}"]
    lines += [f"{name:<45}{count:>10,}{written[name]:>10,}" for name, count in sampled.most_common()]
    shares = (100 * sum(not d.right for d in of) / max(1, len(of)) for of in with_tools)
    without = "gold SQL, without tools"
    unsampled = Counter(without if d.tool_set == "none" else d.first for d in kept if not d.sampled)
    lines += [f"{name:<45}{'':>10}{unsampled[name]:>10,}" for name in (GOLD, GOLD_ALONE, without)]
    lines.append(f"{'wrong':<45}" + "".join(f"{share:>9.1f}%" for share in shares))
    cut = sum(d.first == GOLD_CUT for d in found)
    return "\n".join([*lines, f"left out {cut:,}: {GOLD_CUT}"])


if __name__ == "__main__":
    user_errors(main, OPTIONS)
