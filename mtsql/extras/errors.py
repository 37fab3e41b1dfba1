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

What EX or a join makes equal is no difference: count(x) and count(*), '5' and 5, a key and the key it is
joined on, a condition stated once or twice. DISTINCT is one (aggregation) only if nothing else is. USING and
NATURAL are not read as joins on a column.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean
from typing import NamedTuple, TypeAlias

from sqlglot import exp

from mtsql.data.schema import folded
from mtsql.sql.grammar import SqlSchema
from mtsql.sql.score import Scorer
from mtsql.sql.tree import canonical_tree, clause_items, first_select, join_condition, sources

ERRORS = ("execution", "constraint", "schema_linking", "aggregation", "join_path", "other")
DETAIL = re.compile(r"'(?:''|[^'])*'|\d+(\.\d+)?| DESC\b")  # values and directions
WHOLE_CLAUSES = {"operators": "aggregation", "or": "constraint", "limit": "constraint"}
OWN_KIND = {"conditions": {"constraint"}, "group": {"aggregation"}, "order": {"aggregation"}}
ELEMENTS = ("select", "inner", "conditions", "group", "order")  # inner: what sub-queries select
CLAUSES = (*ELEMENTS, "or", "limit", "operators", "from", "tables", "joins", "sides")
OR = exp.var("or")
NUMBER = re.compile(r"\d+(\.\d+)?")


class Element(NamedTuple):
    """An expression of a clause, taken apart."""

    text: str  # each column as _, each sub-query as "query"
    frame: str  # each aggregate as _ too
    columns: tuple[str, ...]
    aggregates: tuple[str, ...]
    nested: bool  # whether it holds a sub-query


Reading: TypeAlias = dict[str, Counter]  # clause -> what it holds: elements, texts, or pairs of columns


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
        kinds = _differences((canonical_tree(gold, schema), canonical_tree(predicted, schema)))
    except Exception:  # of garbage sqlglot makes trees that lack parts
        kinds = set()
    return tuple(kind for kind in ERRORS if kind in kinds) or ("other",)


def _differences(trees: tuple[exp.Query, exp.Query]) -> set[str]:
    """The kinds that gold and prediction show."""
    same = _same_columns(trees)
    gold, pred = readings = [_read_clauses(tree, same) for tree in trees]
    lost = {clause: gold[clause] - pred[clause] for clause in CLAUSES}
    added = {clause: pred[clause] - gold[clause] for clause in CLAUSES}
    nested = [Counter(e.text for e in _elements(reading) if e.nested) for reading in readings]
    same_form = nested[0] == nested[1] and gold["operators"] == pred["operators"]
    exchanged = _exchanged(_forms(gold), _forms(pred))
    kinds = set()
    if any(side["tables"] and not _needed(side, same) for side in (lost, added)):
        alone = all(reading["tables"].total() == 1 for reading in readings)
        kinds.add("schema_linking" if alone else "join_path")
    joined = [(_column_classes(reading["joins"]), reading["sides"]) for reading in readings]
    if same_form and gold["tables"] == pred["tables"] and joined[0] != joined[1]:
        kinds.add("join_path")  # on other columns, or by LEFT in one query only
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
    distinct = [len(list(tree.find_all(exp.Distinct))) for tree in trees]
    others = exchanged or lost["from"] or added["from"] or distinct[0] != distinct[1]
    return kinds or ({"aggregation"} if others else set())


def _same_columns(trees: tuple[exp.Query, exp.Query]) -> dict[str, str]:
    """Columns -> the ones they are taken for: keys joined in either query."""
    readings = [_read_clauses(tree, {}) for tree in trees]
    keys = {pair for reading in readings for pair in reading["joins"]}
    same = _column_classes(pair for pair in keys if _table_of(pair[0]) != _table_of(pair[1]))
    for name, column in (output for tree in trees for output in _with_outputs(tree).items()):
        same[name] = same.get(column, column)
    if any(reading["tables"].total() == 1 for reading in readings):
        same[".*"] = "*"  # of one table, t.* is *
    return same


def _elements(reading: Reading) -> list[Element]:
    return [element for clause in ELEMENTS for element in reading[clause].elements()]


def _forms(reading: Reading) -> Counter:
    """How often a query uses each form that can say what another one says."""
    counts = {clause: reading[clause].total() for clause in ("operators", "from", "limit", "joins")}
    counts["nested"] = sum(e.nested for e in _elements(reading))
    counts["extreme"] = sum(bool({"max", "min"} & set(e.aggregates)) for e in reading["select"])
    return Counter(counts)


def _exchanged(gold: Counter, pred: Counter) -> bool:
    """Whether a sub-query stands in for another form, or LIMIT for max or min."""
    pairs = ((gold - pred, pred - gold), (pred - gold, gold - pred))
    return any(("nested" in one and other) or ("limit" in one and "extreme" in other) for one, other in pairs)


def _needed(side: Reading, same: dict[str, str]) -> bool:
    """Whether an element of this side needs its tables: for a column, or to count their rows."""
    elements = _elements(side)
    columns = {column for e in elements for column in e.columns}
    columns |= {column for column, first in same.items() if first in columns}
    counts = any("count" in e.aggregates for e in elements)
    return counts or any(_table_of(column) in side["tables"] for column in columns)


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
    own = OWN_KIND.get(clause, set())
    kinds = {"schema_linking"} if _pair(lost, added, lambda e: e.text) else set()
    if _pair(lost, added, lambda e: e.frame):
        kinds |= {"aggregation"}
    if _pair(lost, added, lambda e: e.columns):
        kinds |= own
    if _pair(lost, added, lambda e: DETAIL.sub("", e.text)):
        kinds |= own | {"schema_linking"}
    if clause in OWN_KIND:
        return kinds | (own if lost or added else set())
    return kinds | {"aggregation" if e.aggregates else "schema_linking" for e in lost + added}


def _pair(lost: list[Element], added: list[Element], key: Callable[[Element], object]) -> bool:
    """Takes pairs with equal keys out of the two lists; True if there were any."""
    before = len(lost)
    for element in lost[:]:
        partner = next((other for other in added if key(other) == key(element)), None)
        if partner is not None:
            lost.remove(element)
            added.remove(partner)
    return len(lost) < before


def _read_clauses(tree: exp.Query, same: dict[str, str]) -> Reading:
    """What the clauses of a canonical tree hold, sub-queries included.

    An item counts as often as in the one query that holds it most. `same` maps columns to the ones that
    they are taken for.
    """
    found: Reading = {clause: Counter() for clause in CLAUSES}
    first = first_select(tree)
    names = {folded(cte.alias) for cte in tree.find_all(exp.CTE)}
    for query in tree.find_all(exp.Query):
        for clause, items in _clauses(query).items():
            if clause == "select" and query is not first:
                if query.find_ancestor(exp.From, exp.Join, exp.CTE) is not None:
                    continue  # what a sub-query in FROM selects stands where its names are used
                clause = "inner"
            if clause in ELEMENTS:
                items = [_element(item, same) for item in items]
            found[clause] |= Counter(item for item in items if clause != "tables" or item not in names)
    return found


def _clauses(query: exp.Query) -> dict[str, list]:
    """The clauses of one query, its sub-queries left aside."""
    held: dict[str, list] = {clause: [] for clause in CLAUSES}
    if isinstance(query, exp.SetOperation):
        held["operators"] = [query.key if query.args.get("distinct") else f"{query.key} all"]
    elif isinstance(query, exp.Subquery):
        held["from"] = ["query"] * isinstance(query.parent, exp.From | exp.Join)
    else:
        _read_select(query, held)
    held["order"] = clause_items(query, "order")
    cuts = [query.args[name] for name in ("limit", "offset") if query.args.get(name)]
    held["limit"] = [cut.sql("sqlite").strip() for cut in cuts]
    return held


def _read_select(select: exp.Select, held: dict[str, list]) -> None:
    """Adds the clauses that only SELECT has; comparing columns of two tables is joining, even in WHERE."""
    joins = select.args.get("joins") or []
    held["select"] = select.expressions
    held["tables"] = [source.name for source in sources(select) if isinstance(source, exp.Table)]
    held["sides"] = [join.side for join in joins if join.side]
    held["group"] = clause_items(select, "group")
    places = [condition for join in joins for condition in join_condition(join)]
    places += clause_items(select, "where") + clause_items(select, "having")
    for condition in (part for place in places for part in _split(place)):
        pair = _compared_columns(condition)
        if condition is OR:
            held["or"].append("or")
        elif not pair or _table_of(pair[0]) == _table_of(pair[1]):
            held["conditions"].append(condition)
        elif isinstance(condition, exp.EQ):
            held["joins"].append(pair)
        else:
            held["sides"].append(f"{pair} {condition.key}")


def _compared_columns(condition: exp.Expression) -> tuple[str, ...]:
    """The two columns that a condition compares, sorted; none if it compares anything else."""
    sides = [condition.left.unnest(), condition.right.unnest()] if isinstance(condition, exp.Binary) else []
    columns = sorted(_column(side) for side in sides if isinstance(side, exp.Column))
    return tuple(columns) if len(columns) == 2 else ()


def _split(condition: exp.Expression) -> list[exp.Expression]:
    """What AND and OR connect, with OR itself for each; BETWEEN as two conditions, IN (a, b) as a OR b."""
    condition = condition.unnest()
    if isinstance(condition, exp.And | exp.Or):
        connector = [OR] if isinstance(condition, exp.Or) else []
        return _split(condition.left) + connector + _split(condition.right)
    if isinstance(condition, exp.Between):
        low, high = condition.args["low"], condition.args["high"]
        return [_comparison(exp.GTE, condition, low), _comparison(exp.LTE, condition, high)]
    if isinstance(condition, exp.In) and condition.expressions:
        equal = [_comparison(exp.EQ, condition, value) for value in condition.expressions]
        return equal + [OR] * (len(equal) - 1)
    return [condition]


def _comparison(operator: type[exp.Binary], condition: exp.Expression, value: exp.Expression) -> exp.Binary:
    return operator(this=condition.this.copy(), expression=value.copy())


def _element(node: exp.Expression, same: dict[str, str]) -> Element:
    root = exp.Paren(this=node.copy())  # so that the node itself can be replaced
    if isinstance(node, exp.Ordered):
        root.this.set("desc", bool(node.args.get("desc")))
    nested = False
    while (query := root.find(exp.Query)) is not None:
        query.replace(exp.var("query"))
        nested = True
    for count in root.find_all(exp.Count):
        count.set("this", exp.Star())
    for value in root.find_all(exp.Literal):
        value.set("is_string", value.is_string and not NUMBER.fullmatch(value.name))
    columns = []
    for column in list(root.find_all(exp.Column, bfs=False)):
        columns.append(same.get(_column(column), _column(column)))
        column.replace(exp.var("_"))
    if isinstance(root.this, exp.Star):
        columns.append("*")
        root.set("this", exp.var("_"))
    aggregates = list(root.find_all(exp.AggFunc))
    names, text = tuple(aggregate.key for aggregate in aggregates), root.sql(dialect="sqlite")
    for aggregate in aggregates:
        aggregate.replace(exp.var("_"))
    return Element(text, root.sql(dialect="sqlite"), tuple(columns), names, nested)


def _column_classes(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Each column of the pairs -> the first of all columns that are equal to it through them."""
    first: dict[str, str] = {}
    for pair in pairs:
        roots = {first.get(column, column) for column in pair}
        for column in {*first, *pair}:
            if first.get(column, column) in roots:
                first[column] = min(roots)
    return first


def _with_outputs(tree: exp.Query) -> dict[str, str]:
    """Name in use -> column, of every plain column that a query of WITH selects."""
    items = ((folded(cte.alias), item) for cte in tree.find_all(exp.CTE) for item in cte.this.selects)
    return {f"{name}.{item.name}": _column(item) for name, item in items if isinstance(item, exp.Column)}


def _column(column: exp.Column) -> str:
    if isinstance(column.this, exp.Star):
        return ".*"  # of which table is lost with its alias
    return folded(f"{column.table}.{column.name}")


def _table_of(column: str) -> str:
    """The table of a column as elements name it."""
    return column.partition(".")[0]
