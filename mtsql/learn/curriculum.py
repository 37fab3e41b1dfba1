"""The curriculum of RL (MTSQL-R1, section 3.3.1): success counts, and levels from easy to hard.

    python -m mtsql.learn.curriculum --config configs/toy.toml --model runs/sft/policy --data DATA --out OUT

samples each training question 20 times and writes OUT/counts.jsonl, one line a question: how many of
its trajectories were right by EX and EM. `train_grpo.py --curriculum OUT/counts.jsonl` trains on them.
"""

from __future__ import annotations

import json
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from mtsql.agent.tokens import ChatTokens
from mtsql.config import Common, load_config, option, save_config, user_errors
from mtsql.data.datasets import Example, examples
from mtsql.learn.checkpoint import write_atomically
from mtsql.learn.collection import sample_questions
from mtsql.learn.model import load_policy, load_tokenizer
from mtsql.learn.parallel import join_processes, leave_processes
from mtsql.recipes.rewards import is_right
from mtsql.report.evaluation import scorable
from mtsql.run import load_split, make_environment, make_scorer, pick_device


@dataclass(frozen=True)
class Count:
    """How many of a question's sampled trajectories were right."""

    example_id: str
    right: int
    sampled: int


def read_counts(path: Path) -> list[Count]:
    """The counts that this module's command wrote.

    Raises FileNotFoundError without the file, and ValueError, with its number, for another line.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not there; make it with python -m mtsql.learn.curriculum")
    counts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            count = Count(**json.loads(line))
            if not 0 <= count.right <= count.sampled:
                raise TypeError
        except (json.JSONDecodeError, TypeError):
            raise ValueError(
                f"{path}, line {number}: not a success count; make the file with "
                "python -m mtsql.learn.curriculum"
            ) from None
        counts.append(count)
    return counts


def curriculum_levels(
    questions: Sequence[Example], counts: Sequence[Count], size: int
) -> list[list[Example]]:
    """The questions in bins of `size`, those that were right most often first (section 3.3.1).

    Questions that were always right teach nothing and are left out, and so are those without a count.
    Ties stay in the order of the counts. `size` 0 makes one level of all. Raises ValueError if no
    question is left.
    """
    by_id = {question.id: question for question in questions}
    left = [c for c in counts if c.example_id in by_id and c.sampled and c.right < c.sampled]
    if not left:
        raise ValueError("no question of the curriculum is in the training data and was ever wrong")
    left.sort(key=lambda c: c.right / c.sampled, reverse=True)
    ordered = [by_id[c.example_id] for c in left]
    size = size or len(ordered)
    return [ordered[i : i + size] for i in range(0, len(ordered), size)]


def level_of_step(step: int, steps: int, sizes: Sequence[int]) -> tuple[int, int]:
    """(level from 0, step within it) of a run; a level has its questions' share of the `steps`."""
    ends = [steps * questions // sum(sizes) for questions in accumulate(sizes)]
    level = bisect_right(ends, step)
    return level, step - (ends[level - 1] if level else 0)


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig(Common):
    """Configuration of the counting."""

    model: str = option(..., "local folder or hub name of the policy that RL starts from")
    questions: int = option(0, "training questions in play, drawn at random; 0 is all of them")
    samples_per_question: int = option(20, "trajectories of each question (paper: 20)")
    temperature: float = option(1.0, "of these trajectories")
    correct: str = option("ex_em", "an answer is right by: ex_em, ex")


def main() -> None:
    """Count."""
    config = load_config(CurriculumConfig, "curriculum", __doc__)
    processes = join_processes()
    device = pick_device(config.device)
    tokens = ChatTokens(load_tokenizer(config.model), config.thinking)
    dataset = load_split(config, "train")
    environment = make_environment(config, dataset, tokens, config.tools)
    scorer = make_scorer(environment)
    policy = load_policy(
        config.model, config.dtype, device, attention=config.attention, quantise=config.quantise
    )
    asked = scorable(examples(dataset.dialogues, config.history), scorer, config.drop_empty)
    if config.questions:
        asked = random.Random(config.seed).sample(asked, min(config.questions, len(asked)))
    share = processes.share(list(enumerate(asked)))
    counts = []
    for example, sampled in sample_questions(
        config, policy, environment, share, (config.seed,), "count", processes.first
    ):
        right = sum(is_right(t, example, scorer, config.correct) for t in sampled)
        counts += [Count(example.id, right, len(sampled))] if sampled else []
    counts = processes.gather(counts)
    if processes.first:
        save_config(config, Path(config.out))
        lines = "".join(json.dumps(vars(count)) + "\n" for count in counts)
        write_atomically(Path(config.out) / "counts.jsonl", lines)
        print(f"{len(counts)} questions, right of {config.samples_per_question} samples:")
        for right, questions in sorted(Counter(c.right for c in counts).items(), reverse=True):
            print(f"{right:>4} {questions:>6} questions")
    leave_processes(processes)


if __name__ == "__main__":
    user_errors(main)
