"""What is wrong with a wrong answer: the error kinds of MTSQL-R1 (section 4.4, Figure 7), by rules.

The paper names the kinds and leaves the counting to a language model; these rules read them off the two
queries. The borders are drawn so that one slip is one kind:

- execution: there is no answer, or it does not run. It stands alone.
- constraint: a condition of WHERE, HAVING or ON is lost, added, or has another operator or value; OR for AND;
  another LIMIT. ORDER BY that goes with a lost LIMIT, GROUP BY that goes with a lost HAVING, joins that only
  a lost condition needs, and what a lost sub-query holds belong to the slip; likewise for what is added.
- schema_linking: another column in an otherwise equal condition, or selected, grouped or ordered by; a column
  selected too much or too little; another table where one table alone is read.
- aggregation: another aggregate, GROUP BY, ORDER BY, direction or set operation; or, if nothing else differs,
  nesting: a sub-query in FROM, or one in a condition in place of a set operation, a superlative or a join.
- join_path: other tables joined, or joined on other columns or by LEFT, though no differing element needs it.
- other: none of these, or SQL that cannot be read though SQLite runs it.

What EX or a join makes equal tells two queries apart only if nothing else does: DISTINCT, count(x) and
count(*), '5' and 5, a key and the key it is joined on, a condition stated once or twice.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import fmean

from sqlglot import exp

from mtsql.extras.query_elements import (
    CLAUSES,
    ELEMENTS,
    Element,
    Reading,
    column_classes,
    read_clauses,
    table_of,
    with_outputs,
)
from mtsql.sql.score import Scorer
from mtsql.sql.structure import SqlParseError, SqlSchema
from mtsql.sql.tree import canonical_tree, unreadable_if_it_fails

ERRORS = ("execution", "constraint", "schema_linking", "aggregation", "join_path", "other")
DETAIL = re.compile(r"'(?:''|[^'])*'|\d+(\.\d+)?| DESC\b")  # values and directions
WHOLE_CLAUSES = {
    "operators": "aggregation",
    "distinct": "aggregation",
    "or": "constraint",
    "limit": "constraint",
}


def add_errors(records: Sequence[dict], scorer: Scorer) -> dict[str, dict[str, float]]:
    """Add `errors` to each record of an evaluation (`mtsql.report.evaluation.score_records`): the kinds of a
    wrong answer, none where the gold SQL does not run. Returns the summary's shares of the kinds.
    """
    for record in records:
        db_id, answer, kinds = record["db_id"], record["predicted"], ()
        if not record["ex"] and record["gold_problem"] is None:
            runs = scorer.runs(db_id, answer)
            kinds = error_kinds(record["gold"], answer, scorer.schemas[db_id], runs)
        record["errors"] = list(kinds)
    return {"errors": {kind: fmean(kind in r["errors"] for r in records) for kind in ERRORS}}


def error_kinds(gold: str, predicted: str | None, schema: SqlSchema, executes: bool) -> tuple[str, ...]:
    """The kinds of error, in the order of ERRORS, of a prediction that is wrong by EX; at least one.

    `executes` says whether the prediction runs. Raises nothing, whatever the texts hold: SQL that
    cannot be read, gold or predicted, gives "other".
    """
    if predicted is None or not executes:
        return ("execution",)
    try:
        with unreadable_if_it_fails():
            trees = canonical_tree(gold, schema), canonical_tree(predicted, schema)
            kinds = _differences(trees, schema, strict=False) or _differences(trees, schema, strict=True)
    except SqlParseError:
        kinds = set()
    return tuple(kind for kind in ERRORS if kind in kinds) or ("other",)


def _differences(trees: tuple[exp.Query, exp.Query], schema: SqlSchema, strict: bool) -> set[str]:
    """The kinds that gold and prediction show; `strict` tells apart what EX or a join makes equal."""
    same = _same_columns(trees, schema, strict)
    whole = [read_clauses(tree, schema, same, strict) for tree in trees]
    nested = [Counter(e.text for e in _elements(reading) if e.nested) for reading in whole]
    same_form = nested[0] == nested[1] and whole[0]["operators"] == whole[1]["operators"]
    # What a sub-query holds that the other query lacks is looked for there, but need not be found.
    main = whole if same_form else [read_clauses(t, schema, same, strict, main_only=True) for t in trees]
    lost = {clause: main[0][clause] - whole[1][clause] for clause in CLAUSES}
    added = {clause: main[1][clause] - whole[0][clause] for clause in CLAUSES}
    forms = [_forms(*readings) for readings in zip(main, whole, strict=True)]
    exchanged = _exchanged(forms[0] - forms[1], forms[1] - forms[0])
    kinds = set()
    if any(side["tables"] and not _needed(side, same) for side in (lost, added)):
        alone = all(reading["tables"].total() == 1 for reading in main)
        kinds.add("schema_linking" if alone else "join_path")
    if same_form and whole[0]["tables"] == whole[1]["tables"] and _joined_otherwise(*whole):
        kinds.add("join_path")
    if not same_form:
        lost["or"] = added["or"] = lost["inner"] = added["inner"] = Counter()
    if exchanged:
        for side in (lost, added):
            side["conditions"] = Counter({e: n for e, n in side["conditions"].items() if not e.nested})
            side["order"] = side["limit"] = Counter()
    _drop_followers(lost, added)
    _drop_followers(added, lost)
    kinds |= {kind for clause, kind in WHOLE_CLAUSES.items() if lost[clause] or added[clause]}
    for clause in ELEMENTS:
        kinds |= _element_kinds(clause, list(lost[clause].elements()), list(added[clause].elements()))
    nesting = exchanged or lost["from"] or added["from"]
    return kinds or ({"aggregation"} if nesting else set())


def _same_columns(trees: tuple[exp.Query, exp.Query], schema: SqlSchema, strict: bool) -> dict[str, str]:
    """Columns -> the ones they are taken for: outputs of WITH, and keys joined in either query."""
    readings = [read_clauses(tree, schema, {}, strict) for tree in trees]
    keys = {pair for reading in readings for pair in reading["joins"]}
    across = (pair for pair in keys if table_of(pair[0]) != table_of(pair[1]))
    same = {} if strict else column_classes(across)
    outputs = [output for tree in trees for output in with_outputs(tree)]
    same |= {name: same.get(column, column) for name, column in outputs}
    if any(reading["tables"].total() == 1 for reading in readings):
        same[".*"] = "*"  # of one table, t.* is *
    return same


def _elements(reading: Reading) -> list[Element]:
    return [element for clause in ELEMENTS for element in reading[clause].elements()]


def _forms(main: Reading, whole: Reading) -> Counter:
    """How often a query uses each form that can say what another one says."""
    nested = [e.text.startswith("(NOT") for e in _elements(whole) if e.nested]
    counts = {clause: main[clause].total() for clause in ("operators", "from", "limit", "joins")}
    counts["having"] = sum(bool(e.aggregates) for e in main["conditions"])
    counts["extreme"] = sum(bool({"max", "min"} & set(e.aggregates)) for e in main["select"])
    return Counter({**counts, "excluding": sum(nested), "nested": len(nested) - sum(nested)})


def _exchanged(lost: Counter, added: Counter) -> bool:
    """Whether a sub-query stands in for another form (NOT IN only for EXCEPT), or LIMIT for max or min."""
    pairs = ((lost, added), (added, lost))
    return any(
        ("nested" in one and other.keys() - {"excluding"})
        or ("excluding" in one and "operators" in other)
        or ("limit" in one and "extreme" in other)
        for one, other in pairs
    )


def _needed(side: Reading, same: dict[str, str]) -> bool:
    """Whether an element of this side needs its tables: for a column, or to count their rows."""
    elements = _elements(side)
    columns = {column for e in elements for column in e.columns}
    columns |= {column for column, first in same.items() if first in columns}
    counts = any("count" in name for e in elements for name in e.aggregates)
    return counts or any(table_of(column) in side["tables"] for column in columns)


def _joined_otherwise(gold: Reading, pred: Reading) -> bool:
    """Whether the same tables are joined on other columns, or by LEFT in one query only."""
    return column_classes(gold["joins"]) != column_classes(pred["joins"]) or gold["sides"] != pred["sides"]


def _drop_followers(side: Reading, other: Reading) -> None:
    """Drops ORDER BY where LIMIT came or went with it, GROUP BY where HAVING or such an order did."""
    users = [e for clause in ("conditions", "order") for e in side[clause] if e.aggregates]
    selected = [e for clause in (side, other) for e in clause["select"] if e.aggregates]
    if side["limit"] and not other["limit"]:
        side["order"] = Counter()
    if users and not selected and not other["group"]:
        side["group"] = Counter()


def _element_kinds(clause: str, lost: list[Element], added: list[Element]) -> set[str]:
    """The kinds of error in one clause; elements that differ in their columns only are paired first."""
    kinds = {"schema_linking"} if _pair(lost, added, lambda e: e.text) else set()
    if clause in ("select", "inner"):
        return kinds | _selected_kinds(lost, added)
    own = "constraint" if clause == "conditions" else "aggregation"
    if _pair(lost, added, lambda e: e.frame):
        kinds.add("aggregation")
    if _pair(lost, added, lambda e: e.columns):
        kinds.add(own)
    if _pair(lost, added, lambda e: DETAIL.sub("", e.text)):
        kinds |= {own, "schema_linking"}
    return kinds | ({own} if lost or added else set())


def _selected_kinds(lost: list[Element], added: list[Element]) -> set[str]:
    """Selected items: an aggregate for a column is aggregation alone, as is count(*) that is missing."""
    if not (lost and added):
        return {"aggregation" if e.aggregates else "schema_linking" for e in lost + added}
    aggregates, columns = (
        [Counter(name for e in items for name in getattr(e, field)) for items in (lost, added)]
        for field in ("aggregates", "columns")
    )
    drift = aggregates[0] != aggregates[1]
    kinds = {"aggregation"} if drift else set()
    if columns[0] != columns[1] and (not drift or (all(aggregates) and all(columns))):
        kinds.add("schema_linking")
    return kinds


def _pair(lost: list[Element], added: list[Element], key: Callable[[Element], object]) -> bool:
    """Takes pairs with equal keys out of the two lists; True if there were any."""
    before = len(lost)
    for element in lost[:]:
        partner = next((other for other in added if key(other) == key(element)), None)
        if partner is not None:
            lost.remove(element)
            added.remove(partner)
    return len(lost) < before
