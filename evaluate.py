"""Evaluate a policy: answer every question of a split once, and report EX and EM.

    python evaluate.py --config configs/toy.toml --model runs/grpo/policy --data DATA --out runs/eval

or score prediction files in the official Spider, SParC and CoSQL formats, or compare two evaluations:

    python evaluate.py --gold GOLD.txt --pred PRED.txt --databases DIR --tables tables.json --etype all
    python evaluate.py --compare A.json B.json

(`python evaluate.py --help --gold` lists the options of the second form.)

EX is the official execution match, EM the official exact set match; both over all questions, by turn,
by hardness, and for whole dialogues. Also reported: how every episode ended, tool calls, tokens, the
five abilities of section 4.3, the kinds of errors of section 4.4 by rules, the parts of other recipes'
rewards, the mean and deviation of turns, and the length of thoughts (SQL-Trail, A.8).
--sampled-runs N adds the mean of N runs at temperature 1 (or --temperature) and, from 2 on, the majority vote
of each question's N answers by execution result, and pass@k (SQL-Trail, section 4.3: N = 8). With
--own-temperature the mean over N runs is that of SkyRL-SQL, section 5.
--fallback N samples N answers only where the policy ends without SQL; their vote stands in (as in the chat).
--ex bird makes EX, the vote and pass@k BIRD's: equal sets of rows, as the papers report it on BIRD.
--address URL --api-model NAME --tokenizer FOLDER evaluates a policy that is served elsewhere, by vLLM or any
server of OpenAI's form, in the same environment (mtsql/extras/served.py).
The run folder gets summary.json, predictions.jsonl (one record a question), trajectories.jsonl, and as
chat.jsonl what was answered as chat messages, for train_sft.py --targets (a teacher answers --split train).
Answers are kept as they come: the same command goes on after an interruption.

Departures from the paper:
- One database a question, DISTINCT ignored (the official default), as in the authors' code.
- EM is the official exact set match, where the paper's reward compares strings (`em_string` does here).
- Errors are sorted by rules; the paper asks GPT-5.
- --history predicted puts the policy's own earlier answers in the memory. The paper's main numbers are read
  as with gold history, our default; by its review it reports predicted history too. There is no vote then:
  the N answers have different histories.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar, Literal

from mtsql.config import Common, Served, option, read_options, save_config, user_errors


@dataclass(frozen=True, kw_only=True)
class Args(Served, Common):
    """The options of an evaluation; those of every script are in mtsql/config.py."""

    SECTION: ClassVar = "evaluate"
    history: Literal["gold", "predicted", "questions"] = option("gold", "earlier turns in memory")
    split: Literal["train", "dev", "test", "test_themes", "held_out", "rl"] = option(
        "dev", "part of the data (see --held-out)"
    )
    dialogues: int = option(0, "first dialogues of the split only; 0 is all of them", least=0)
    temperature: float = option(0.0, "of the answers; 0 is greedy (SkyRL-SQL, Table 5: 0.6)", least=0)
    top_p: float = option(1.0, "where sampled: the likeliest tokens that hold so much (Qwen3: 0.95)", least=0)
    sampled_runs: int = option(
        0, "further runs, at --temperature or else 1: mean, majority vote, pass@k (SQL-Trail: 8)", least=0
    )
    fallback: int = option(0, "answers to sample where the first has no SQL, to vote in its place", least=0)
    concurrency: int = option(8, "questions that --address is asked at once", least=1)


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    if {word.partition("=")[0] for word in sys.argv[1:]} & {"--gold", "--pred", "--compare"}:
        from mtsql.extras import prediction_files

        user_errors(prediction_files.main)
        sys.exit()
    OPTIONS = read_options(Args, __doc__)

import json
from collections.abc import Collection
from statistics import fmean

from mtsql.agent.env import Answered
from mtsql.agent.rollout import trajectory_seed
from mtsql.agent.trajectory import Status
from mtsql.errors import UserError
from mtsql.extras.errors import add_errors
from mtsql.extras.served import begin_answers
from mtsql.files import json_lines, write_atomically
from mtsql.learn.parallel import leave_processes
from mtsql.report.evaluation import score_records
from mtsql.report.metrics import format_summary, summarise
from mtsql.report.records import AnswerLog, chat_record, question_record
from mtsql.report.voting import add_fallback, add_votes, format_votes
from mtsql.task import Task, answer_options, make_sampling, refuse_finished, reward_function


def main(config: Args) -> None:
    """The evaluation protocol."""
    if not 0 < config.top_p <= 1:
        raise UserError(f"--top-p should be above 0 and at most 1, not {config.top_p:g}")
    if config.fallback and config.history == "predicted":
        raise UserError("--fallback needs --history gold or questions: with predicted each run has its own")
    sampled_at = config.temperature or 1.0
    task = begin_answers(config, config.split)  # of --model or --address
    refuse_finished(task.out)
    dialogues = task.dataset.dialogues[: config.dialogues or None]
    options = answer_options(config, task.dataset)

    def answer(temperature: float, numbers: range, only: Collection[str] | None = None) -> list[Answered]:
        log = AnswerLog(task.out / f".answers_{numbers.start}_{task.processes.rank}.jsonl", options)
        title = f"evaluate at temperature {temperature:g}"
        seeds = [trajectory_seed(config.seed, number) for number in numbers]
        sampling = make_sampling(task.environment, temperature, config.top_p)
        return task.answer(dialogues, sampling, seeds, config.history, title, log, only)

    (answered,) = answer(config.temperature, range(1))
    samples = answer(sampled_at, range(1, 1 + config.sampled_runs)) if config.sampled_runs else []
    failed = {example.id for example, trajectory in answered if trajectory.answer_sql is None}
    again = answer(sampled_at, range(1, 1 + config.fallback), failed) if config.fallback else []
    leave_processes(task.processes)
    if not task.processes.is_main:
        return
    scorer, reward = task.scorer, reward_function(config, task.tokens, task.scorer)
    runs = (answered, *samples, *again)
    records, *sampled = (score_records(run, scorer, task.environment, reward) for run in runs)
    sampled, again = sampled[: len(samples)], sampled[len(samples) :]
    summary = summarise(records)
    summary |= add_errors(records, task.scorer)
    if sampled:
        summary |= add_sampled(records, sampled)
    if len(sampled) > 1 and config.history != "predicted":
        summary |= add_votes(records, sampled, task.scorer)
    if again:
        summary |= add_fallback(records, again, task.scorer)
    if task.costs:
        summary["served_in_last_session"] = dict(task.costs)
    write_results(config, task, summary, records, answered)
    drawn = f"temperature {config.temperature:g}, top-p {config.top_p:g}" if config.temperature else "greedy"
    print(
        f"{config.model or config.api_model} on {config.split} of {' '.join(config.data)}: {config.recipe}, "
        f"history {config.history}, tools {config.tools}, EX {config.ex}, "
        + ("the server's own temperature" if config.own_temperature else drawn)
    )
    print(format_summary(summary))
    if sampled:
        ex, em = (100 * summary[f"{metric}_sampled"] for metric in ("ex", "em"))
        scores = f"EX {ex:.1f} %, EM {em:.1f} %"
        how = "" if config.own_temperature else f"at temperature {sampled_at:g}, "
        print(f"{how}mean of {config.sampled_runs} run(s): {scores}")
    if votes := format_votes(summary):
        print(votes)
    if len(sampled) > 1 and "pass_at_k" not in summary:
        print("no majority vote and no pass@k: with --history predicted each run has its own history")


def write_results(config: Args, task: Task, summary: dict, records: list[dict], answered: Answered) -> None:
    """Write the run folder; the answers that were kept for an interruption are no longer needed."""
    write_atomically(task.out / "predictions.jsonl", json_lines(records))
    decode, shown, chats = task.tokens.tokenizer.decode, [], []
    for (example, trajectory), record in zip(answered, records, strict=True):
        found = {"scores": {"ex": record["ex"], "em": record["em"]}, "hardness": record["hardness"]}
        shown.append(question_record(trajectory, example, task.scorer, decode) | found)
        has_sql = trajectory.status is Status.ANSWERED
        if has_sql and (chat := chat_record(trajectory, example, task.environment)):
            for message in chat["messages"]:
                message.pop("weight", None)  # a server's ids are not ours, but its words can be learned
            chats.append(chat)
    write_atomically(task.out / "trajectories.jsonl", json_lines(shown))
    write_atomically(task.out / "chat.jsonl", json_lines(chats))
    write_atomically(task.out / "summary.json", json.dumps(summary, indent=1))
    save_config(config, task.out)  # with which it is done
    for log in task.out.glob(".answers_*.jsonl"):
        log.unlink()


def add_sampled(records: list[dict], sampled: list[list[dict]]) -> dict:
    """Add each question's mean EX and EM over sampled runs to its record; return the summary's numbers."""
    summary: dict = {}
    for metric in ("ex", "em"):
        for record, *others in zip(records, *sampled, strict=True):
            record[f"{metric}_sampled"] = fmean(other[metric] for other in others)
        summary[f"{metric}_sampled"] = fmean(r[f"{metric}_sampled"] for r in records)
    runs = [summarise(run)["abilities"] for run in sampled]
    measured = [ability for ability in runs[0] if all(run[ability] is not None for run in runs)]
    summary["abilities_sampled"] = {ability: fmean(run[ability] for run in runs) for ability in measured}
    return summary


if __name__ == "__main__":
    user_errors(main, OPTIONS)
