"""Prediction files in the official formats, scored and shown as the official evaluation does.

Source of the rules: taoyds/test-suite-sql-eval, evaluation.py; docs/evaluation.md tells them. Departures: a
missing or misplaced line is an error (there it is dropped), a query past the executor's limits is wrong and
is listed (there it may hang), a query that fails or is past them without its DISTINCT keeps it (there it
never does), a gold query that fails or cannot be read counts as wrong and is listed (there the evaluation
aborts).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path

from mtsql.data.schema import Schema, read_json
from mtsql.errors import UserError
from mtsql.files import load_json, load_json_lines, reading_errors
from mtsql.report.metrics import HARDNESS, TURNS, bootstrap_interval, grouped, paired_difference, turn_name
from mtsql.sql.execute import Executor, as_scored, execution_match
from mtsql.sql.match import COMPONENTS, exact_set_match, hardness, partial_f1, partial_sizes, string_match
from mtsql.sql.score import FURTHER_METRICS, Scorer
from mtsql.sql.structure import SqlParseError
from mtsql.sql.text import official_prediction, with_gold_values

THREADS = 2  # that score pairs
NO_FOREIGN_KEYS = {"foreign_keys": [], "table_names_original": [], "column_names_original": []}
PLUGGING_SECONDS = 60.0  # no new assignment of gold values is tried after so long
MEASURED = {"all": ("ex", "em"), "exec": ("ex",), "match": ("em",)}  # by etype
TABLES = {  # metric: its name, the title over the levels of hardness, the title over the turns
    "ex": (
        "execution",
        "=====================   EXECUTION ACCURACY     =====================",
        "=====================   TURN EXECUTION ACCURACY     =====================",
    ),
    "em": (
        "exact match",
        "\n====================== EXACT MATCHING ACCURACY =====================",
        "\n====================== TURN EXACT MATCHING ACCURACY =====================",
    ),
}
PARTIAL_TABLES = {
    "\n---------------------PARTIAL MATCHING ACCURACY----------------------": "acc",
    "---------------------- PARTIAL MATCHING RECALL ----------------------": "rec",
    "---------------------- PARTIAL MATCHING F1 --------------------------": "f1",
}


@dataclass(frozen=True)
class Pair:
    """A gold line with its prediction; `line` counts from 1, `turn` from 0."""

    line: int
    interaction: int
    turn: int
    db_id: str
    gold: str
    predicted: str


@dataclass(frozen=True)
class Rules:
    """What is evaluated: `etype` is all, exec or match."""

    etype: str = "all"
    plug_value: bool = False
    keep_distinct: bool = False


def read_pairs(gold: Path, pred: Path) -> list[Pair]:
    """The lines of a gold and a prediction file, side by side.

    Raises UserError naming the first line that is missing, too much, or at another place.
    """
    gold_blocks, pred_blocks = _blocks(gold), _blocks(pred)
    if not gold_blocks:
        raise UserError(f"{gold} holds no query")
    known = {cells[1].strip() for block in gold_blocks for _, cells in block if len(cells) > 1}
    pairs = []
    for number, blocks in enumerate(zip_longest(gold_blocks, pred_blocks, fillvalue=[])):
        for turn, (asked, answered) in enumerate(zip_longest(*blocks)):
            if asked is None:
                raise UserError(f"{pred}, line {answered[0]} has no gold query in {gold}")
            line, cells = asked
            if len(cells) != 2:
                raise UserError(f"{gold}, line {line}: expected SQL, a tab and the name of a database")
            if answered is None:
                raise UserError(
                    f"{gold}, line {line} has no prediction: interaction {number + 1} has {len(blocks[0])} "
                    f"lines there and {len(blocks[1])} in {pred} (write an empty prediction as none)"
                )
            pred_line, pred_cells = answered
            db_id = cells[1].strip()
            named = pred_cells[-1].strip() if len(pred_cells) > 1 else db_id
            if named in known and named != db_id:
                raise UserError(
                    f"{pred}, line {pred_line} is for database {named}, but {gold}, line {line} asks {db_id}"
                )
            pairs.append(Pair(line, number, turn, db_id, cells[0], pred_cells[0]))
    return pairs


def _blocks(path: Path) -> list[list[tuple[int, list[str]]]]:
    """(line number, cells) of each line; blank lines part the interactions."""
    try:
        with reading_errors(path):
            text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error})") from None
    blocks: list[list[tuple[int, list[str]]]] = [[]]
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            blocks[-1].append((number, line.strip().split("\t")))
        elif blocks[-1]:
            blocks.append([])
    return blocks if blocks[-1] else blocks[:-1]


def score_pairs(
    pairs: Sequence[Pair],
    databases: Path,
    tables: Path | None,
    rules: Rules,
    executor: Executor,
    gold_file: Path,
) -> list[dict]:
    """One object a pair: hardness, em, ex, partial_f1, pred_parses, status and FURTHER_METRICS.

    `status` is that of running the prediction (rows, empty, error, timeout, refused), or "gold failed"
    or "gold unreadable". `ex` is None with etype match, `em` and `partial_f1` with exec. Every *.sqlite
    file of a database's folder must agree (a test suite). Raises UserError for an unknown database, or
    for tables without Spider's fields.
    """
    try:
        scorer = Scorer(_schemas(pairs, databases, tables, gold_file), executor)
    except UserError:
        raise
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise UserError(f"{tables}: expected databases with Spider's fields, but {error!r}") from None
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(lambda pair: _score(pair, scorer, rules), pairs))


def _schemas(
    pairs: Sequence[Pair], databases: Path, tables: Path | None, gold_file: Path
) -> dict[str, Schema]:
    """The databases of the pairs; what only prompts show of them is left out."""
    entries = {entry["db_id"]: entry for entry in read_json(tables)} if tables else {}
    schemas: dict[str, Schema] = {}
    for pair in pairs:
        name = pair.db_id
        if name not in schemas:
            path = databases / name / f"{name}.sqlite"
            if not path.is_file():
                raise UserError(f"{gold_file}, line {pair.line}: there is no database {path}")
            if tables and name not in entries:
                raise UserError(f"{gold_file}, line {pair.line}: {tables} has no database {name}")
            schemas[name] = Schema(name, path, (), entries.get(name, NO_FOREIGN_KEYS))
    return schemas


def _score(pair: Pair, scorer: Scorer, rules: Rules) -> dict:
    name, executor = pair.db_id, scorer.executor
    path, schema, keys = scorer.paths[name], scorer.schemas[name], scorer.foreign_keys[name]
    predicted = official_prediction(pair.predicted)
    executed = as_scored(predicted, rules.keep_distinct)
    item: dict = asdict(pair) | {
        "hardness": None, "em": None, "ex": None, "partial_f1": None, "partial_sizes": None,
        "pred_parses": scorer.readable(name, predicted), "status": executor.execute(path, *executed).status,
    }  # fmt: skip
    try:
        item["hardness"] = hardness(pair.gold, schema)
        if rules.etype != "exec":
            item["em"] = int(exact_set_match(pair.gold, predicted, schema, keys))
            item["partial_f1"] = partial_f1(pair.gold, predicted, schema, keys)
            item["partial_sizes"] = partial_sizes(pair.gold, predicted, schema, keys)
    except SqlParseError:
        item["status"] = "gold unreadable"
        item["em"] = 0 if rules.etype != "exec" else None
    if rules.etype != "match":
        tried = with_gold_values(pair.gold, predicted) if rules.plug_value else iter((predicted,))
        suite = sorted(path.parent.glob("[!.]*.sqlite"))
        right = None
        try:
            right = _first_right(tried, pair.gold, suite, rules.keep_distinct, executor)
            if right is None and item["status"] in ("rows", "empty"):
                item["status"] = _status_where_wrong(executed, predicted, pair.gold, suite, rules, executor)
        except ValueError:
            item["status"] = "gold failed"
        item["ex"] = int(right is not None)
        item |= scorer.further_ex(suite, pair.gold, predicted if right is None else right)
    if rules.etype != "exec":
        item["em_string"] = int(string_match(pair.gold, predicted))
    return item


def _first_right(
    tried: Iterator[str], gold: str, paths: list[Path], keep_distinct: bool, executor: Executor
) -> str | None:
    """The first text that every database finds right."""
    deadline = time.monotonic() + PLUGGING_SECONDS
    for candidate in tried:
        if all(execution_match(executor, path, gold, candidate, keep_distinct) for path in paths):
            return candidate
        if time.monotonic() > deadline:
            break
    return None


def _status_where_wrong(
    executed: tuple[str, ...], predicted: str, gold: str, paths: list[Path], rules: Rules, executor: Executor
) -> str:
    """What became of a prediction in the first database that finds it wrong."""
    matches = (execution_match(executor, path, gold, predicted, rules.keep_distinct) for path in paths)
    wrong = next((p for p, right in zip(paths, matches, strict=True) if not right), paths[0])
    return executor.execute(wrong, *executed).status


def summarise_items(items: Sequence[dict], etype: str) -> dict:
    """The official tables' numbers, with 95 % intervals and what the executor's limits touched."""
    blocks, statuses = grouped(items, "interaction"), Counter(item["status"] for item in items)
    summary: dict = {"questions": len(items), "interactions": len(blocks)}
    summary["official_grammar_cannot_read"] = sum(not item["pred_parses"] for item in items)
    summary["status"] = dict(sorted(statuses.items()))
    for metric in metrics_of(items):
        values = by_dialogue(items, metric)
        low, high = bootstrap_interval(values)
        summary[metric] = {"mean": _mean(v for block in values for v in block), "low": low, "high": high}
    levels = {level: [i for i in items if i["hardness"] == level] for level in HARDNESS}
    turns = {turn: [i for i in items if turn_name(i["turn"]) == turn] for turn in TURNS}
    summary["levels"] = {name: _scores(group, etype) for name, group in (levels | {"all": items}).items()}
    summary["turns"] = {name: _scores(group, etype, partial=False) for name, group in turns.items()}
    summary["joint_all"] = {"count": len(blocks)} | {
        metric: _mean(all(item[metric] for item in block) for block in blocks) for metric in MEASURED[etype]
    }
    return summary


def _scores(group: Sequence[dict], etype: str, partial: bool = True) -> dict:
    scores: dict = {"count": len(group)}
    scores |= {metric: _mean(item[metric] for item in group) for metric in MEASURED[etype]}
    if partial and "em" in scores:
        scores["partial"] = {name: _component(group, name) for name in COMPONENTS}
    return scores


def _component(group: Sequence[dict], name: str) -> dict[str, float]:
    """Accuracy over the predictions that have the component, recall over the gold queries, F1 of the two."""
    if not group:  # as the official tool prints a level without questions
        return {"acc": 0.0, "rec": 0.0, "f1": 0.0}
    read = [(i["partial_f1"][name], *i["partial_sizes"][name]) for i in group if i["partial_f1"]]
    accuracy = _mean(score for score, in_pred, _ in read if in_pred)
    recall = _mean(score for score, _, in_gold in read if in_gold)
    f1 = 2 * accuracy * recall / (accuracy + recall) if accuracy + recall else 1.0
    return {"acc": accuracy, "rec": recall, "f1": f1}


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers) if numbers else 0.0


def metrics_of(items: Sequence[dict]) -> list[str]:
    """The 0/1 metrics that the items carry."""
    return [m for m in ("ex", "em", *FURTHER_METRICS) if items[0].get(m) is not None]


def by_dialogue(items: Sequence[dict], metric: str) -> list[list[float]]:
    """A metric by interaction; in a file of single questions each is a dialogue of its own."""
    groups = grouped(items, "interaction")
    if len(groups) == 1:
        return [[item[metric]] for item in items]
    return [[item[metric] for item in group] for group in groups]


def format_tables(summary: dict, etype: str) -> str:
    """The official tables; "joint_all" is interaction match. Turns only where there are dialogues."""
    dialogues = summary["interactions"] > 1
    levels = [*summary["levels"], *(["joint_all"] if dialogues else [])]
    scores = summary["levels"] | {"joint_all": summary["joint_all"]}
    lines = [_row("", levels), _row("count", [scores[level]["count"] for level in levels])]
    for metric in MEASURED[etype]:
        name, title, _ = TABLES[metric]
        lines += [title, _row(name, [scores[level][metric] for level in levels])]
    if etype != "exec":
        graded = [level for level in levels if "partial" in scores[level]]
        for title, key in PARTIAL_TABLES.items():
            lines.append(title)
            lines += [_row(n, [scores[level]["partial"][n][key] for level in graded]) for n in COMPONENTS]
    if dialogues:
        turns = summary["turns"]
        lines += ["", _row("", [f"turn {t}" if t[0] != ">" else "turn > 4" for t in turns])]
        lines.append(_row("count", [turns[t]["count"] for t in turns]))
        for metric in MEASURED[etype]:
            name, _, title = TABLES[metric]
            lines += [title, _row(name, [turns[t][metric] for t in turns])]
    return "\n".join(lines)


def _row(name: str, cells: Sequence[object]) -> str:
    shown = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"{name:20} " + " ".join(f"{cell:<20}" for cell in shown)


def format_further(summary: dict, items: Sequence[dict]) -> str:
    """What the official tool does not print: intervals, further metrics, and the lines to look at."""
    names = {"ex": "EX", "em": "EM (exact set match)"} | FURTHER_METRICS
    lines = [f"{'':32}{'mean %':>9}{'95 % interval':>18}"]
    for metric in metrics_of(items):
        s = summary[metric]
        interval = f"[{100 * s['low']:.1f}, {100 * s['high']:.1f}]"
        lines.append(f"{names[metric]:32}{100 * s['mean']:>9.1f}{interval:>18}")
    unread = summary["official_grammar_cannot_read"]
    lines.append(f"the official grammar cannot read {unread} of {summary['questions']} predictions")
    for status in ("timeout", "refused", "gold failed", "gold unreadable"):
        at = [str(item["line"]) for item in items if item["status"] == status]
        if at:
            more = f" and {len(at) - 20} more" if len(at) > 20 else ""
            lines.append(f"{status}: gold line {', '.join(at[:20])}{more}")
    return "\n".join(lines)


def read_items(path: Path) -> list[dict]:
    """The items of an earlier evaluation: OUT.json of prediction files, or a run's predictions.jsonl.

    Raises UserError if it is neither.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist")
    try:
        if path.suffix == ".jsonl":
            records = [record for _, record in load_json_lines(path)]
            items = [r | {"interaction": r["dialogue_id"], "turn": r["turn_index"]} for r in records]
        else:
            items = load_json(path)["per_item"]
        if all({"interaction", "turn", "gold"} <= item.keys() for item in items) and items:
            return items
    except (UserError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{path} is no evaluation; expected what --json or a run's predictions.jsonl holds")


def compare(a: Path, b: Path) -> str:
    """Two evaluations of the same questions: means, paired difference with interval, McNemar's p.

    Raises UserError unless both hold the same questions.
    """
    ours, theirs = read_items(a), read_items(b)
    if len(ours) != len(theirs):
        raise UserError(f"{a} holds {len(ours)} questions and {b} {len(theirs)}; compare the same questions")
    for number, (x, y) in enumerate(zip(ours, theirs, strict=True), start=1):
        if (x["interaction"], x["turn"], x["gold"]) != (y["interaction"], y["turn"], y["gold"]):
            raise UserError(f"question {number} is not the same in {a} and {b}")
    lines = [
        f"A = {a}",
        f"B = {b}",
        f"{len(ours)} questions in {len(grouped(ours, 'interaction'))} interactions",
    ]
    lines.append(f"{'':20}{'A %':>8}{'B %':>8}{'A - B':>9}{'95 % interval':>18}{'McNemar p':>12}")
    for metric in [m for m in metrics_of(ours) if m in metrics_of(theirs)]:
        left, right = by_dialogue(ours, metric), by_dialogue(theirs, metric)
        difference, low, high, p = paired_difference(left, right)
        means = [100 * _mean(v for block in side for v in block) for side in (left, right)]
        interval = f"[{100 * low:+.1f}, {100 * high:+.1f}]"
        lines.append(
            f"{metric:20}{means[0]:>8.1f}{means[1]:>8.1f}{100 * difference:>+9.1f}{interval:>18}{p:>12.2g}"
        )
    return "\n".join(lines)
