"""A language model sorts wrong predictions into the error kinds of MTSQL-R1 (section 4.4, Figure 7).

    python -m mtsql.experiments.judge --predictions runs/eval/predictions.jsonl --data DATA \\
        --address http://localhost:8000/v1 --judge NAME --out runs/eval/judged.jsonl

The judge is any server that speaks OpenAI's /chat/completions; the paper's was GPT-5. It sees the schema, the
dialogue so far with its gold SQL, the question, the gold SQL and the prediction, and names the kinds. Each
judgement is written as soon as it is made. The same command again continues, and repeats what is "unjudged"
because the server failed or answered in another form. The table printed at the end compares the judge with
the rules of `mtsql.report.errors`. The key, where one is needed, comes from an environment variable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, Literal

from tqdm import tqdm

from mtsql.agent.tokens import message_text
from mtsql.config import Count, DataOptions, option, read_options, user_errors
from mtsql.data.datasets import Dataset, Example, examples
from mtsql.errors import UserError
from mtsql.extras.http_client import UNREADABLE, Server, ServerError, check_address, read_key, read_object
from mtsql.files import load_json_lines, write_atomically
from mtsql.report.errors import ERRORS
from mtsql.task import load_split

# Ours: the paper has its own in appendix E, which our copy lacks.
PROMPT = """You compare a predicted SQL query with the gold query of a question in a dialogue over a \
database. The prediction is wrong: its result is not that of the gold query. Name the kinds of its errors:

- execution: there is no prediction, or it does not run. No other kind goes with it.
- constraint: a condition (WHERE, HAVING, LIMIT) that the question or an earlier turn asks for is lost or \
changed, or another one is added.
- schema_linking: a wrong column or table is selected, filtered, grouped or ordered by.
- aggregation: an aggregate, GROUP BY, DISTINCT, the order, a set operation or the nesting is wrong.
- join_path: the columns are right, but wrong tables are joined, or by wrong conditions.
- other: none of these.

Database schema:
{schema}

Dialogue so far:
{history}

Question: {question}
Gold SQL: {gold}
Predicted SQL: {predicted}
The prediction {runs}.

Answer with one JSON object and nothing else, with every kind that applies, but none that only follows from \
another: {{"errors": ["...", ...]}}"""
FIELDS = {"example_id": str, "db_id": str, "gold": str, "predicted": str | None, "ex": int, "errors": list}
MAX_FAILURES = 5  # requests in a row without an answer, before the command gives up


@dataclass(frozen=True)
class Judge:
    """A model behind an OpenAI-compatible address; `temperature` None is the server's own."""

    server: Server
    model: str
    temperature: float | None = 0.0

    def ask(self, prompt: str) -> str:
        """The answer to one message. Raises ServerError if there is none."""
        content: dict[str, Any] = {"model": self.model, "messages": [{"role": "user", "content": prompt}]}
        if self.temperature is not None:
            content["temperature"] = self.temperature
        return self.server.post("/chat/completions", content, _content)


def _content(answer: dict[str, Any]) -> str:
    try:
        text = message_text({"content": answer["choices"][0]["message"]["content"]})
    except UNREADABLE:
        text = ""
    if not text:
        raise ValueError("it holds no choices[0].message.content")
    return text


def parse_kinds(answer: str) -> list[str]:
    """The kinds in the judge's answer: one JSON object, alone but for thoughts before and a code fence.

    Raises ServerError for any other form, no kind, or an unknown one.
    """
    text = answer.rpartition("</think>")[2].strip()
    fenced = re.fullmatch(r"```(?:json)?\s(.*)```", text, re.DOTALL)
    kinds = read_object(fenced[1] if fenced else text).get("errors")
    if not isinstance(kinds, list) or not kinds:
        raise ServerError('the answer is not a JSON object with a list "errors" of at least one kind')
    unknown = [kind for kind in kinds if kind not in ERRORS]
    if unknown:
        raise ServerError(f"the answer has the unknown kind {unknown[0]!r:.60}")
    return [kind for kind in ERRORS if kind in kinds]


def read_wrong(path: Path, dataset: Dataset) -> list[tuple[dict, Example]]:
    """The records of wrong predictions with their examples; those whose gold SQL has a problem are left out.

    Raises UserError, with the line, for what is no such record, or not of this dataset.
    """
    if not path.is_file():
        raise UserError(f"{path} is not a file; give the predictions.jsonl of an evaluation")
    asked = {example.id: example for example in examples(dataset.dialogues)}
    wrong = []
    for number, row in load_json_lines(path):
        for name, kind in FIELDS.items():
            if not isinstance(row, dict) or name not in row or not isinstance(row[name], kind):
                raise UserError(
                    f"{path}, line {number}: no field {name!r} as evaluate.py writes it; "
                    "give its predictions.jsonl"
                )
        example = asked.get(row["example_id"])
        if example is None or (example.db_id, example.gold_sql) != (row["db_id"], row["gold"]):
            raise UserError(
                f"{path}, line {number}: {row['example_id']} is not a question of the given dialogues; "
                "give the --data and --split of that evaluation"
            )
        if not row["ex"] and not row.get("gold_problem"):
            wrong.append((row, example))
    if not wrong:
        raise UserError(f"{path} has no wrong prediction to judge")
    return wrong


def read_judged(path: Path, model: str, wrong: Sequence[tuple[dict, Example]]) -> list[dict]:
    """What an earlier run wrote, but for a last line that was cut off.

    Raises UserError if these are judgements by another model, or of other predictions.
    """
    records = [record for _, record in load_json_lines(path)] if path.exists() else []
    predicted = {row["example_id"]: row["predicted"] for row, _ in wrong}
    for record in records:
        known = isinstance(record, dict) and {"example_id", "kinds", "predicted"} <= record.keys()
        known = known and record["example_id"] in predicted
        if not known or predicted[record["example_id"]] != record["predicted"]:
            raise UserError(
                f"{path} holds something else than judgements of these predictions; choose another --out"
            )
        if record.get("model") != model:
            raise UserError(f"{path} holds judgements by {record.get('model')}; choose another --out")
    return records


def judge_predictions(
    judge: Judge, wrong: Sequence[tuple[dict, Example]], dataset: Dataset, out: Path, limit: int = 0
) -> list[dict]:
    """One record for each of the first `limit` predictions (0: all), written to `out` as it comes.

    What `out` holds of an earlier run is kept, judged predictions beyond the limit included.

    A record has the judge's `kinds` and its `answer`; kinds is None, and `unjudged` says why, where there is
    no answer of the right form. Raises UserError if MAX_FAILURES requests in a row have no answer at all.
    """
    earlier = read_judged(out, judge.model, wrong)
    done = [record for record in earlier if record["kinds"] is not None]
    write_atomically(out, "".join(json.dumps(record) + "\n" for record in done))
    judged = {record["example_id"] for record in done}
    unjudged = {record["example_id"] for record in earlier} - judged
    pending = [pair for pair in wrong[: limit or None] if pair[0]["example_id"] not in judged]
    pending.sort(key=lambda pair: pair[0]["example_id"] in unjudged)  # what failed before comes last
    failures = 0
    with out.open("a", encoding="utf-8") as file:
        for row, example in tqdm(pending, desc="judge"):
            record = {"example_id": row["example_id"], "model": judge.model, "predicted": row["predicted"]}
            record |= {"kinds": None, "answer": None, "unjudged": None}
            try:
                record["answer"] = judge.ask(make_prompt(row, example, dataset))
                record["kinds"] = parse_kinds(record["answer"])
            except ServerError as error:
                record["unjudged"] = str(error)
            file.write(json.dumps(record) + "\n")
            file.flush()
            done.append(record)
            failures = failures + 1 if record["answer"] is None else 0
            if failures == MAX_FAILURES:
                raise UserError(
                    f"{failures} requests in a row failed: {record['unjudged']}; what is judged is in {out}, "
                    "and the same command goes on from there"
                )
    return done


def make_prompt(row: dict, example: Example, dataset: Dataset) -> str:
    """What the judge reads about one prediction."""
    turns = [f"{n}. {turn.question}\n   {turn.sql}" for n, turn in enumerate(example.history, 1)]
    return PROMPT.format(
        schema=dataset.schemas[example.db_id].text(compact=False),
        history="\n".join(turns) or "(this is the first question)",
        question="\n".join(filter(None, (example.knowledge, example.question))),
        gold=example.gold_sql,
        predicted=row["predicted"] or "(none)",
        runs="does not run" if "execution" in row["errors"] else "runs",
    )


def format_shares(judged: Sequence[dict], wrong: Sequence[tuple[dict, Example]]) -> str:
    """The share of the judged predictions that show each kind, by the judge and by the rules."""
    rules = {row["example_id"]: row["errors"] for row, _ in wrong}
    pairs = [(r["kinds"], rules[r["example_id"]]) for r in judged if r["kinds"] is not None]
    counted = f"{len(pairs)} wrong predictions judged, {len(judged) - len(pairs)} unjudged"
    if not pairs:
        return counted
    lines = [counted, f"{'share of them with':<22}{'judge':>9}{'rules':>9}"]
    for kind in ERRORS:
        shares = (fmean(kind in kinds for kinds in side) for side in zip(*pairs, strict=True))
        lines.append(f"{kind:<22}" + "".join(f"{100 * share:>7.1f} %" for share in shares))
    same = fmean(set(by_judge) == set(by_rules) for by_judge, by_rules in pairs)
    return "\n".join([*lines, f"{'the same kinds':<22}{100 * same:>7.1f} %"])


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(DataOptions):
    """Options of the judge; the data is that of the evaluation."""

    SECTION: ClassVar = "common"

    predictions: str = option(..., "predictions.jsonl of evaluate.py")
    split: Literal["train", "dev", "test", "held_out"] = option("dev", "part of the data, as evaluated")
    address: str = option(..., "http(s)://host:port/v1")
    judge: str = option(..., "name of the judge at that address")
    out: str = option(..., "judged.jsonl to write, or to continue")
    limit: Count = option(0, "first wrong predictions only; 0 is all of them")
    key_variable: str = option("OPENAI_API_KEY", "environment variable that holds the key")
    own_temperature: bool = option(False, "leave out temperature 0, which some models refuse")


def main(config: JudgeConfig) -> None:
    """Judge, and print the table. Raises UserError for an unusable address, key, or file."""
    check_address(config.address)
    dataset = load_split(config, config.split)
    wrong = read_wrong(Path(config.predictions), dataset)
    temperature = None if config.own_temperature else 0.0
    server = Server(config.address, read_key(config.key_variable))
    judge = Judge(server, config.judge, temperature)
    print(format_shares(judge_predictions(judge, wrong, dataset, Path(config.out), config.limit), wrong))


if __name__ == "__main__":
    user_errors(main, read_options(JudgeConfig, __doc__))
