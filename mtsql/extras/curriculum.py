"""Success counts for the curriculum of RL (MTSQL-R1, section 3.3.1).

    python -m mtsql curriculum --config configs/toy.toml --model runs/sft/policy \\
        --data DATA --out OUT

samples each training question 20 times and writes OUT/counts.jsonl, one line a question: how many of
its trajectories were right by EX and EM, and how hard it is. `train_grpo.py --curriculum OUT/counts.jsonl`
trains on them, `mtsql.extras.hard_yet_solvable` chooses among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mtsql.config import Sampled, option, read_options, save_config, user_errors


@dataclass(frozen=True, kw_only=True)
class Args(Sampled):
    """Success counts (mtsql.extras.curriculum)."""

    SECTION: ClassVar = "curriculum"
    samples_per_question: int = option(20, "trajectories of each question (paper: 20)", least=1)
    temperature: float = option(1.0, "of these trajectories", least=0.01)


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = read_options(Args, __doc__)

from collections import Counter

from mtsql.files import json_lines, write_atomically
from mtsql.learn.curriculum import SuccessCount
from mtsql.learn.parallel import leave_processes
from mtsql.recipes.rewards import is_right
from mtsql.task import begin_task, refuse_finished, reward_function, training_questions


def main(config: Args) -> None:
    """Count."""
    task = begin_task(config, "rl" if config.for_rl else "train")
    refuse_finished(task.out)
    reward = reward_function(config, task.tokens, task.scorer)
    asked = training_questions(config, task)
    share = task.processes.share(list(enumerate(asked)))
    counts, samples = [], config.samples_per_question
    for example, sampled in task.sample(share, samples, config.temperature, (config.seed,), "count"):
        right = sum(is_right(reward(t, example), task.environment.recipe) for t in sampled)
        hardness = task.scorer.hardness(example.db_id, example.gold_sql)
        counts.append(SuccessCount(example.id, right, len(sampled), example.db_id, hardness))
    counts = task.processes.gather(counts)
    if task.processes.is_main:
        write_atomically(task.out / "counts.jsonl", json_lines(map(vars, counts)))
        save_config(config, task.out)  # with which it counts as done
        print(f"{len(counts)} questions, right of {samples} samples:")
        for right, questions in sorted(Counter(c.right for c in counts).items(), reverse=True):
            print(f"{right:>4} {questions:>6} questions")
    leave_processes(task.processes)


if __name__ == "__main__":
    user_errors(main, OPTIONS)
