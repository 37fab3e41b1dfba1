"""Questions for RL that are hard yet solvable (SQL-Trail, sections 4.2 and A.6).

    python -m mtsql.extras.hard_yet_solvable --config configs/toy.toml --data DATA \\
        --counts runs/counts/counts.jsonl --out runs/chosen

reads the success counts of `python -m mtsql curriculum` and writes OUT/counts.jsonl with the
lines of the chosen questions, for `train_grpo.py --curriculum OUT/counts.jsonl --level-size 0`. First
comes the balanced set, the lowest scores of Equation 13, then the exploration set, questions that no
sample solved, extra-hard ones first. Ties are broken by the seed.

Departures: the paper scores 2,800 questions of SynSQL with 6 samples each, and draws its exploration set from
three sources (failures on the questions of fine-tuning, SynSQL, extra-hard ones of Spider); here all are from
the counts of one file.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mtsql.config import Count, Data, Seconds, option, read_options, save_config, user_errors
from mtsql.data.datasets import examples
from mtsql.errors import UserError
from mtsql.files import write_atomically
from mtsql.learn.curriculum import SuccessCount, read_counts, refuse_other_data
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer, scorable
from mtsql.task import load_split

HARDEST_FIRST = ("extra", "hard", "medium", "easy", "unread")


@dataclass(frozen=True, kw_only=True)
class SelectionConfig(Data):
    """Options of the selection."""

    SECTION: ClassVar = "selection"
    drop_empty: bool = option(False, "choose no question whose gold SQL returns nothing (MTIR-SQL)")
    counts: str = option(..., "counts.jsonl of python -m mtsql curriculum (paper: 6 samples)")
    balanced: Count = option(700, "hard yet solvable questions (paper: 700)")
    exploration: Count = option(327, "questions that no sample solved (paper: 327)")
    sql_timeout: Seconds = option(5.0, "seconds before a query is stopped")
    seed: Count = option(0, "that breaks ties")


def score(count: SuccessCount) -> float:
    """S(q), Equation 13: the share of right samples, and 1 where all or none are (or there is none)."""
    return count.right / count.sampled if 0 < count.right < count.sampled else 1.0


def choose(
    counts: Sequence[SuccessCount],
    hardness: dict[str, str],
    balanced: Count,
    exploration: Count,
    rng: random.Random,
) -> tuple[list[SuccessCount], list[SuccessCount]]:
    """The balanced set and the exploration set, each as large as there are questions for it.

    `hardness` is that of every question in `counts`.
    """
    shuffled = rng.sample(counts, len(counts))  # sorting is stable
    solvable = sorted((c for c in shuffled if score(c) < 1), key=score)
    unsolved = [c for c in shuffled if c.right == 0 and c.sampled]
    unsolved.sort(key=lambda c: HARDEST_FIRST.index(hardness[c.example_id]))
    return solvable[:balanced], unsolved[:exploration]


def main(config: SelectionConfig) -> None:
    """Choose."""
    counts, out = read_counts(Path(config.counts)), Path(config.out)
    if Path(config.counts).resolve() == (out / "counts.jsonl").resolve():
        raise UserError(f"--out {out} would replace the counts that are read; choose another folder")
    dataset = load_split(config, "train")
    scorer = Scorer(dataset.schemas, Executor(timeout_seconds=config.sql_timeout))
    questions = scorable(examples(dataset.dialogues), scorer, config.drop_empty)
    refuse_other_data(questions, counts)
    hardness = {q.id: scorer.hardness(q.db_id, q.gold_sql) for q in questions}
    known = [count for count in counts if count.example_id in hardness]
    print(f"{len(counts)} counts, {len(known)} of them of questions in the training data")
    chosen = choose(known, hardness, config.balanced, config.exploration, random.Random(config.seed))
    if not any(chosen):
        raise UserError(
            f"{config.counts}: nothing to choose; no question of the training data was ever wrong, "
            "or --balanced and --exploration are 0"
        )
    save_config(config, out)
    lines = "".join(json.dumps(vars(count)) + "\n" for part in chosen for count in part)
    write_atomically(out / "counts.jsonl", lines)
    wanted = (config.balanced, config.exploration)
    titles = ("hard yet solvable", "that no sample solved")
    for title, part, size in zip(titles, chosen, wanted, strict=True):
        short = f", not the {size} asked for: there are no more" if len(part) < size else ""
        print(f"{len(part)} questions {title}{short}")


if __name__ == "__main__":
    user_errors(main, read_options(SelectionConfig, __doc__))
