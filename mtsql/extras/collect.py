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

from mtsql.config import CollectConfig, read_options, save_config, user_errors

if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = read_options(CollectConfig, __doc__)

import json
from pathlib import Path

from tqdm import tqdm

from mtsql.agent.rollout import trajectory_seed
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.data.datasets import Example, examples
from mtsql.errors import UserError
from mtsql.extras.served import begin_answers
from mtsql.files import write_atomically
from mtsql.report.answer_log import AnswerLog, play_unanswered
from mtsql.report.chat import chat_record
from mtsql.sql.score import scorable
from mtsql.task import Task, answer_options, draw_questions, make_sampling, show


def main(config: CollectConfig) -> None:
    """Ask, keep, write. Raises UserError if --out holds the trajectories of a collect that has ended."""
    taught, answers = Path(config.out) / "teacher.jsonl", Path(config.out) / ".answers.jsonl"
    if taught.exists() and not answers.exists():
        raise UserError(f"{taught} exists already; take another --out")
    task = begin_answers(config, "train")
    if task.processes.count > 1:
        raise UserError("mtsql.extras.collect runs in one process; a server answers many questions at once")
    asked = examples(task.dataset.dialogues, config.history)
    asked = scorable(draw_questions(asked, config.questions, config.seed), task.scorer)
    taught = play_questions(config, task, asked)
    answered = [(t, example) for t, example in taught if t.status is Status.ANSWERED]
    right = sum(task.scorer.ex(e.db_id, e.gold_sql, t.answer_sql) for t, e in answered)
    save_config(config, task.out)
    lines = (json.dumps(teacher_record(t, e, task), ensure_ascii=False) + "\n" for t, e in answered)
    write_atomically(task.out / "teacher.jsonl", "".join(lines))
    (task.out / ".answers.jsonl").unlink()
    print(
        f"{len(answered):,} of {len(taught):,} trajectories have an answer, {right:,} a right one (EX): "
        f"{task.out / 'teacher.jsonl'}"
    )
    if task.costs:
        print(f"the server took {task.costs.sentence()}")


def play_questions(
    config: CollectConfig, task: Task, asked: list[Example]
) -> list[tuple[Trajectory, Example]]:
    """--samples-per-question trajectories of each question, those of an interrupted run included."""
    episodes, of = [], []
    for number, example in enumerate(asked):
        seeds = [trajectory_seed(config.seed, number, i) for i in range(config.samples_per_question)]
        episodes += task.environment.episodes(example, seeds)
        of += [example] * len(seeds)
    log = AnswerLog(task.out / ".answers.jsonl", answer_options(config, "train", task))
    waiting, trajectories = play_unanswered(episodes, log)
    with tqdm(desc="collect", unit="trajectory") as bar:
        sampling = make_sampling(config, task.environment, config.temperature)
        task.play([e for e in waiting if e.trajectory.status is None], sampling, 0, show(bar))
    return list(zip(trajectories, of, strict=True))


def teacher_record(trajectory: Trajectory, example: Example, task: Task) -> dict:
    """A conversation that is to be learned: also what a server wrote, whose ids here are not its own."""
    record = chat_record(trajectory, example, task.environment)
    messages = [
        {k: v for k, v in message.items() if k not in ("weight", "unlearned")}
        for message in record["messages"]
    ]
    return record | {"messages": messages}


if __name__ == "__main__":
    user_errors(main, OPTIONS)
