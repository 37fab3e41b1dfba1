"""Prediction files in the official formats, scored and shown as the official evaluation does.

Source of the rules: taoyds/test-suite-sql-eval, evaluation.py; docs/evaluation.md tells them. Departures: a
missing or misplaced line is an error (there it is dropped), a query past the executor's limits is wrong and
is listed (there it may hang), a query that fails or is past them without its DISTINCT keeps it (there it
never does), a gold query that fails or cannot be read counts as wrong and is listed (there the evaluation
aborts).
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby, islice, product, takewhile, zip_longest
from operator import itemgetter
from pathlib import Path
from statistics import fmean

from mtsql.config import reader_of
from mtsql.data.schema import Schema, read_json
from mtsql.errors import UserError, loading
from mtsql.files import file_errors, load_json, load_json_lines, write_atomically
from mtsql.report.metrics import HARDNESS, TURNS, bootstrap_interval, grouped, turn_name
from mtsql.sql.execute import Executor, as_scored, execution_match
from mtsql.sql.match import COMPONENTS, partial_match, string_match
from mtsql.sql.score import FURTHER_METRICS, Scorer
from mtsql.sql.text import first_statement

THREADS = 2  # that score pairs
NO_FOREIGN_KEYS = {"foreign_keys": [], "table_names_original": [], "column_names_original": []}
VALUE = re.compile(
    r"""'(?:''|[^'])*' | "(?:""|[^"])*" | (?<![\w\].)])-?(?:\d+(?:\.\d+)?|\.\d+)(?![\w.])""", re.VERBOSE
)
MAX_ALTERNATIVES = 10_000
PLUGGING_SECONDS = 60.0  # no new assignment of gold values is tried after so long
MEASURED = {"all": ("ex", "em"), "exec": ("ex",), "match": ("em",)}  # by etype
ROWS = {  # titles, over the levels of hardness and, with TURN, over the turns; names
    "ex": ("=====================   {}EXECUTION ACCURACY     =====================", "execution"),
    "em": ("\n====================== {}EXACT MATCHING ACCURACY =====================", "exact match"),
}
PARTIAL_TITLES = {
    "acc": "\n---------------------PARTIAL MATCHING ACCURACY----------------------",
    "rec": "---------------------- PARTIAL MATCHING RECALL ----------------------",
    "f1": "---------------------- PARTIAL MATCHING F1 --------------------------",
}
NAMES = {"ex": "EX", "em": "EM (exact set match)"} | FURTHER_METRICS
ASKED = itemgetter("dialogue_id", "turn_index", "gold")
LISTED = 20  # lines of the gold file for each status to look at


def read_pairs(gold: Path, pred: Path) -> list[dict]:
    """The lines of a gold and a prediction file, side by side.

    A pair has the keys line (of the gold file, from 1), dialogue_id, turn_index (both from 0), db_id, gold
    and predicted. Raises UserError naming the first line that is missing, too much, or at another place.
    """
    asked, answered = _blocks(gold), _blocks(pred)
    known, pairs = {cells[-1].strip() for block in asked for _, cells in block}, []
    for number, (golds, preds) in enumerate(zip_longest(asked, answered, fillvalue=())):
        for turn, (of_gold, of_pred) in enumerate(zip_longest(golds, preds)):
            if of_gold is None:
                raise UserError(f"{pred}, line {of_pred[0]} has no gold query in {gold}")
            (line, cells), place = of_gold, f"{gold}, line {of_gold[0]}"
            if of_pred is None:
                raise UserError(
                    f"{place} has no prediction: interaction {number + 1} has {len(golds)} lines there and "
                    f"{len(preds)} in {pred} (write an empty prediction as none)"
                )
            if len(cells) != 2:
                raise UserError(f"{place}: expected SQL, a tab and the name of a database")
            db_id, predicted = cells[1].strip(), of_pred[1]
            named = predicted[-1].strip()
            if len(predicted) > 1 and named in known and named != db_id:
                raise UserError(f"{pred}, line {of_pred[0]} is for {named}, but {place} asks {db_id}")
            pair = {"line": line, "dialogue_id": number, "turn_index": turn, "db_id": db_id}
            pairs.append(pair | {"gold": cells[0], "predicted": predicted[0]})
    if not pairs:
        raise UserError(f"{gold} holds no query")
    return pairs


def _blocks(path: Path) -> list[list[tuple[int, list[str]]]]:
    """(line number, cells) of each line; blank lines part the interactions."""
    with loading(f"{path} is not UTF-8 text"), file_errors(path):
        text = path.read_text(encoding="utf-8-sig")
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1)]
    blocks = (block for filled, block in groupby(lines, key=lambda numbered: bool(numbered[1])) if filled)
    return [[(number, line.split("\t")) for number, line in block] for block in blocks]


def read_schemas(
    pairs: Sequence[dict], databases: Path, tables: Path | None, gold_file: Path
) -> dict[str, Schema]:
    """The databases of the pairs; what only prompts show of them is left out.

    Raises UserError for a database that is not there, KeyError for one that the tables lack.
    """
    entries = {entry["db_id"]: entry for entry in read_json(tables)} if tables else {}
    schemas: dict[str, Schema] = {}
    for pair in pairs:
        name = pair["db_id"]
        path = databases / name / f"{name}.sqlite"
        if not path.is_file():
            raise UserError(f"{gold_file}, line {pair['line']}: there is no database {path}")
        schemas[name] = Schema(name, path, (), entries[name] if tables else NO_FOREIGN_KEYS)
    return schemas


def with_gold_values(gold_sql: str, pred_sql: str) -> Iterator[str]:
    """The prediction, then every assignment of the gold query's values to its values.

    The official evaluation tries all assignments (exec_eval.py, plug_value), here the first
    MAX_ALTERNATIVES are. A value is a number or a quoted text, wherever it stands, LIMIT included.
    """
    yield pred_sql
    pred = "".join(first_statement(pred_sql))
    values = sorted(set(VALUE.findall(gold_sql)))
    between = VALUE.split(pred)
    for chosen in islice(product(values, repeat=len(between) - 1), MAX_ALTERNATIVES):
        yield "".join(text + value for text, value in zip(between, (*chosen, ""), strict=True))


def official_prediction(sql: str) -> str:
    """A prediction as the official evaluation rewrites it first: "value" becomes "1" everywhere."""
    return sql.replace("value", "1")


def score_pair(pair: dict, scorer: Scorer, etype: str, plug_value: bool) -> dict:
    """The pair with hardness, pred_parses, status, em, partial_f1, partial_sizes, ex and FURTHER_METRICS.

    `status` is that of running the prediction (rows, empty, error, timeout, refused), or "gold failed"
    or "gold unreadable". What is not evaluated, by `etype`, one of MEASURED, is not there.
    """
    name, gold, predicted = pair["db_id"], pair["gold"], official_prediction(pair["predicted"])
    hardness = scorer.hardness(name, gold)
    item = pair | {"hardness": hardness, "pred_parses": scorer.readable(name, predicted)}
    item |= _execution(pair, predicted, scorer, etype, plug_value)
    if hardness == "unread" and item["status"] != "gold failed":
        item["status"] = "gold unreadable"
    if etype != "exec":
        item["em"] = int(scorer.em(name, gold, predicted))
        item["em_string"] = int(string_match(gold, predicted))
        found = {}
        if hardness != "unread":
            found = partial_match(gold, predicted, scorer.schemas[name], scorer.foreign_keys[name])
        item["partial_f1"] = {component: part.f1 for component, part in found.items()}
        item["partial_sizes"] = {component: part[1:] for component, part in found.items()}
    return item


def _execution(pair: dict, predicted: str, scorer: Scorer, etype: str, plug_value: bool) -> dict:
    """`status` and, but for etype match, `ex` and those of FURTHER_METRICS that run the queries.

    Every *.sqlite file of a database's folder must agree (a test suite); the status is that in the first
    which finds the prediction wrong.
    """
    gold, executor, path = pair["gold"], scorer.executor, scorer.paths[pair["db_id"]]
    suite, as_run = sorted(path.parent.glob("[!.]*.sqlite")), as_scored(predicted, scorer.kind)
    if etype == "match":
        return {"status": executor.execute(path, *as_run).status}

    def wrong_in(sql: str) -> Path | None:
        return next((p for p in suite if not execution_match(executor, p, gold, sql, scorer.kind)), None)

    deadline = time.monotonic() + PLUGGING_SECONDS
    tried = with_gold_values(gold, predicted) if plug_value else [predicted]
    in_time = takewhile(lambda _: time.monotonic() < deadline, tried)
    try:
        right = next((sql for sql in in_time if wrong_in(sql) is None), None)
        status = executor.execute(wrong_in(predicted) or path, *as_run).status
    except ValueError:
        right, status = None, "gold failed"
    further = scorer.further_ex(suite, gold, predicted if right is None else right)
    return {"status": status, "ex": int(right is not None)} | further


def summarise_items(items: Sequence[dict], etype: str) -> dict:
    """The official tables' numbers, with 95 % intervals and what the executor's limits touched."""
    blocks = grouped(items, "dialogue_id")
    summary: dict = {"questions": len(items), "interactions": len(blocks)}
    summary["official_grammar_cannot_read"] = sum(not item["pred_parses"] for item in items)
    summary["status"] = Counter(sorted(item["status"] for item in items))
    for metric in metrics_of(items):
        low, high = bootstrap_interval(by_dialogue(items, metric))
        summary[metric] = {"mean": _mean(item[metric] for item in items), "low": low, "high": high}

    def scores(group: Sequence[dict]) -> dict:
        return {"count": len(group)} | {m: _mean(item[m] for item in group) for m in MEASURED[etype]}

    levels = {level: [i for i in items if i["hardness"] == level] for level in HARDNESS} | {"all": items}
    summary["levels"] = {level: scores(group) for level, group in levels.items()}
    for level, group in levels.items() if etype != "exec" else ():
        summary["levels"][level]["partial"] = {name: _component(group, name) for name in COMPONENTS}
    turns = {turn: [i for i in items if turn_name(i["turn_index"]) == turn] for turn in TURNS}
    summary["turns"] = {turn: scores(group) for turn, group in turns.items()}
    whole = [{m: all(item[m] for item in block) for m in MEASURED[etype]} for block in blocks]
    summary["joint_all"] = scores(whole)
    return summary


def _component(group: Sequence[dict], name: str) -> dict[str, float]:
    """Accuracy over the predictions that have the component, recall over the gold queries, F1 of the two.

    As the official tool has it, the F1 of a level is 1 where both are 0, and 0 where it has no questions.
    """
    read = [(i["partial_f1"][name], *i["partial_sizes"][name]) for i in group if i["partial_f1"]]
    accuracy = _mean(score for score, in_pred, _ in read if in_pred)
    recall = _mean(score for score, _, in_gold in read if in_gold)
    f1 = 2 * accuracy * recall / (accuracy + recall) if accuracy + recall else float(bool(group))
    return {"acc": accuracy, "rec": recall, "f1": f1}


def _mean(values: Iterable[float]) -> float:
    return fmean(list(values) or [0.0])


def metrics_of(items: Sequence[dict]) -> list[str]:
    """The 0/1 metrics that the items carry."""
    return [metric for metric in NAMES if items[0].get(metric) is not None]


def by_dialogue(items: Sequence[dict], metric: str) -> list[list[float]]:
    """A metric by interaction; in a file of single questions each is a dialogue of its own."""
    blocks = grouped(items, "dialogue_id")
    blocks = blocks if len(blocks) > 1 else [[item] for item in items]
    return [[item[metric] for item in block] for block in blocks]


def format_tables(summary: dict, etype: str) -> str:
    """The official tables; "joint_all" is interaction match. Turns only where there are dialogues."""
    dialogues, levels = summary["interactions"] > 1, summary["levels"]
    lines = _table(levels | ({"joint_all": summary["joint_all"]} if dialogues else {}), etype, "")
    for key, title in PARTIAL_TITLES.items() if etype != "exec" else ():
        lines.append(title)
        lines += [_row(name, [of["partial"][name][key] for of in levels.values()]) for name in COMPONENTS]
    if dialogues:
        turns = {f"turn {turn.replace('>', '> ')}": scores for turn, scores in summary["turns"].items()}
        lines += ["", *_table(turns, etype, "TURN ")]
    return "\n".join(lines)


def _table(columns: dict[str, dict], etype: str, of: str) -> list[str]:
    lines = [_row("", columns), _row("count", [scores["count"] for scores in columns.values()])]
    for metric in MEASURED[etype]:
        title, name = ROWS[metric]
        lines += [title.format(of), _row(name, [scores[metric] for scores in columns.values()])]
    return lines


def _row(name: str, cells: Iterable[object]) -> str:
    shown = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"{name:20} " + " ".join(f"{cell:<20}" for cell in shown)


def format_further(summary: dict, items: Sequence[dict]) -> str:
    """What the official tool does not print: intervals, further metrics, and the lines to look at."""
    lines = [f"{'':32}{'mean %':>9}{'95 % interval':>18}"]
    for metric in metrics_of(items):
        mean, low, high = (100 * summary[metric][key] for key in ("mean", "low", "high"))
        lines.append(f"{NAMES[metric]:32}{mean:>9.1f}{f'[{low:.1f}, {high:.1f}]':>18}")
    unread = summary["official_grammar_cannot_read"]
    lines.append(f"the official grammar cannot read {unread} of {summary['questions']} predictions")
    for status in ("timeout", "refused", "gold failed", "gold unreadable"):
        at = [str(item["line"]) for item in items if item["status"] == status]
        if at:
            more = f" and {len(at) - LISTED} more" if len(at) > LISTED else ""
            lines.append(f"{status}: gold line {', '.join(at[:LISTED])}{more}")
    return "\n".join(lines)


def read_items(path: Path) -> tuple[list[tuple], list[dict]]:
    """What an earlier evaluation asked, and its items: OUT.json of prediction files, or a predictions.jsonl.

    Raises UserError if it is neither.
    """
    with loading(f"{path} is no evaluation; expected what --json or a run's predictions.jsonl holds"):
        lines = path.suffix == ".jsonl"
        items = [item for _, item in load_json_lines(path)] if lines else load_json(path)["per_item"]
        if not items:
            raise ValueError("no item")
        _ = [item[metric] + 0 for metric in metrics_of(items) for item in items]
        return [ASKED(item) for item in items], items


def paired_difference(
    a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]
) -> tuple[float, float, float, float]:
    """(mean of a - mean of b, low, high, p) of two systems' 0/1 scores on the same questions.

    `low` and `high` bound the difference as in `bootstrap_interval`; `p` is McNemar's exact
    two-sided test on the questions that only one of the two gets right. Raises ValueError unless
    both have the same questions.
    """
    differences = [[x - y for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]
    low, high = bootstrap_interval(differences)
    flat = [d for values in differences for d in values]
    only_a, only_b = sum(d > 0 for d in flat), sum(d < 0 for d in flat)
    discordant = only_a + only_b
    tail = sum(math.comb(discordant, k) for k in range(min(only_a, only_b) + 1))
    return sum(flat) / len(flat), low, high, min(1.0, 2 * tail / 2**discordant)


def compare(a: Path, b: Path) -> str:
    """Two evaluations of the same questions: means, paired difference with interval, McNemar's p.

    Raises UserError unless both hold the same questions.
    """
    (asked, ours), (others, theirs) = read_items(a), read_items(b)
    if asked != others:
        raise UserError(f"{a} and {b} do not hold the same questions, so they cannot be compared")
    lines = [f"A = {a}", f"B = {b}"]
    lines.append(f"{len(ours)} questions in {len(grouped(ours, 'dialogue_id'))} interactions")
    lines.append(f"{'':20}{'A %':>8}{'B %':>8}{'A - B':>9}{'95 % interval':>18}{'McNemar p':>12}")
    for metric in (m for m in metrics_of(ours) if m in metrics_of(theirs)):
        difference, low, high, p = paired_difference(by_dialogue(ours, metric), by_dialogue(theirs, metric))
        means = "".join(f"{100 * _mean(item[metric] for item in side):>8.1f}" for side in (ours, theirs))
        interval = f"[{100 * low:+.1f}, {100 * high:+.1f}]"
        lines.append(f"{metric:20}{means}{100 * difference:>+9.1f}{interval:>18}{p:>12.2g}")
    return "\n".join(lines)


def main() -> None:
    """Score the files and print the tables, or print the comparison."""
    about = "Score prediction files as the official evaluation does, or compare two evaluations."
    parser = argparse.ArgumentParser(prog="evaluate.py", description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--gold", type=Path, help="gold file: SQL, tab, database; blank lines between dialogues")
    add("--pred", type=Path, help="predictions: one SQL a line, blank lines as in the gold file")
    add("--databases", type=Path, help="folder of <db_id>/<db_id>.sqlite")
    add("--tables", type=Path, help="tables.json; not needed with --etype exec")
    add("--etype", choices=MEASURED, default="all", help="what to evaluate [all]")
    add("--plug-value", action="store_true", help="also try the gold query's values")
    add("--keep-distinct", action="store_true", help="EX with DISTINCT")
    add("--sql-timeout", type=reader_of(float, 0.01), default=30.0, help="seconds of a query [30]")
    add("--json", type=Path, help="file to write the summary and every verdict to")
    add("--compare", nargs=2, type=Path, metavar=("A", "B"), help="compare two such files instead")
    chosen = parser.parse_args()
    if chosen.compare:
        print(compare(*chosen.compare))
        return
    needed = ["gold", "pred", "databases"] + (["tables"] if chosen.etype != "exec" else [])
    missing = [f"--{name}" for name in needed if getattr(chosen, name) is None]
    if missing:
        parser.error(f"give {', '.join(missing)}")
    pairs = read_pairs(chosen.gold, chosen.pred)
    with loading(f"{chosen.tables}: expected databases with Spider's fields"):
        schemas = read_schemas(pairs, chosen.databases, chosen.tables, chosen.gold)
        kind = "keep_distinct" if chosen.keep_distinct else "official"
        scorer = Scorer(schemas, Executor(timeout_seconds=chosen.sql_timeout), kind)
    with ThreadPoolExecutor(THREADS) as pool:
        items = list(pool.map(lambda pair: score_pair(pair, scorer, chosen.etype, chosen.plug_value), pairs))
    summary = summarise_items(items, chosen.etype)
    print(format_tables(summary, chosen.etype))
    print()
    print(format_further(summary, items))
    if chosen.json:
        write_atomically(chosen.json, json.dumps({"summary": summary, "per_item": items}, indent=1))
