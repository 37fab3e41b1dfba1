"""A teacher's trajectories, for `train_sft.py --targets teacher`: any policy, here or behind an address.

    python -m mtsql.extras.collect --config configs/toy.toml --data DATA --out runs/teacher \\
        --address http://localhost:8000/v1 --api-model NAME --tokenizer FOLDER --protocol chat
    python train_sft.py ... --targets teacher --teacher runs/teacher/teacher.jsonl --rounds 1

It answers training questions in the environment of the options, with the teacher's own calls of the tools,
and writes each answered conversation as chat messages to OUT/teacher.jsonl. What is wrong or off the protocol
is left to train_sft.py, which plays every conversation again and counts what it drops. The same command goes
on after an interruption; a finished OUT/teacher.jsonl is not replaced. So the prompted baselines of Table 2
and SQL-Trail's warm start have a command.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from mtsql.config import (
    Common,
    Count,
    NotNegative,
    Positive,
    Served,
    option,
    read_options,
    save_config,
    user_errors,
)


@dataclass(frozen=True, kw_only=True)
class Args(Served, Common):
    """A teacher's trajectories (mtsql.extras.collect)."""

    SECTION: ClassVar = "collect"
    questions: Count = option(0, "training questions in play, drawn at random; 0 is all of them")
    samples_per_question: Positive = option(1, "trajectories of each question")
    temperature: NotNegative = option(0.7, "of these trajectories")
    concurrency: Positive = option(8, "questions that --address is asked at once")


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = read_options(Args, __doc__)

import json
from pathlib import Path

from mtsql.agent.trajectory import Status
from mtsql.data.datasets import examples
from mtsql.errors import UserError
from mtsql.extras.served import begin_answers
from mtsql.files import write_atomically
from mtsql.report.answer_log import AnswerLog
from mtsql.report.records import chat_record
from mtsql.sql.score import scorable
from mtsql.task import answer_options, draw_questions, sample_questions


def main(config: Args) -> None:
    """Ask, keep, write. Raises UserError if --out holds the trajectories of a collect that has ended."""
    path, kept = Path(config.out) / "teacher.jsonl", Path(config.out) / ".answers.jsonl"
    if path.exists() and not kept.exists():
        raise UserError(f"{path} exists already; take another --out")
    task = begin_answers(config, "train")
    if task.processes.count > 1:
        raise UserError("mtsql.extras.collect runs in one process; a server answers many questions at once")
    asked = draw_questions(examples(task.dataset.dialogues, config.history), config.questions, config.seed)
    numbered = list(enumerate(scorable(asked, task.scorer)))
    log = AnswerLog(kept, answer_options(config, "train", task))
    played, right, lines = 0, 0, []
    for example, trajectories in sample_questions(config, task, numbered, (config.seed,), "collect", log):
        played += len(trajectories)
        for trajectory in trajectories:
            if trajectory.status is Status.ANSWERED:
                right += task.scorer.ex(example.db_id, example.gold_sql, trajectory.answer_sql)
                record = chat_record(trajectory, example, task.environment)
                for message in record["messages"]:  # all is to be learned, though a server's ids are not ours
                    message.pop("weight", None)
                    message.pop("unlearned", None)
                lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    save_config(config, task.out)
    write_atomically(path, "".join(lines))
    kept.unlink()
    print(f"{len(lines):,} of {played:,} trajectories have an answer, {right:,} a right one (EX): {path}")
    if task.costs:
        print(f"the server took {task.costs.sentence()}")


if __name__ == "__main__":
    user_errors(main, OPTIONS)
