"""Score prediction files as the official evaluation does, or compare two evaluations."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from mtsql.config import Seconds, check
from mtsql.extras.prediction_files import (
    Rules,
    compare,
    format_further,
    format_tables,
    read_pairs,
    score_pairs,
    summarise_items,
)
from mtsql.files import write_atomically
from mtsql.sql.execute import Executor


def main() -> None:
    """Score the files and print the tables, or print the comparison."""
    parser = argparse.ArgumentParser(prog="evaluate.py", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--gold", nargs="?", type=Path, help="gold file: SQL, tab, database; blank lines between"
    )
    parser.add_argument(
        "--pred", type=Path, help="predictions: one SQL a line, blank lines as in the gold file"
    )
    parser.add_argument("--databases", type=Path, help="folder of <db_id>/<db_id>.sqlite")
    parser.add_argument("--tables", type=Path, help="tables.json; not needed with --etype exec")
    parser.add_argument(
        "--etype", choices=("all", "exec", "match"), default="all", help="what to evaluate [all]"
    )
    parser.add_argument("--plug-value", action="store_true", help="also try the gold query's values")
    parser.add_argument("--keep-distinct", action="store_true", help="EX with DISTINCT")
    parser.add_argument(
        "--sql-timeout", type=float, default=30.0, help="seconds before a query is stopped [30]"
    )
    parser.add_argument("--json", type=Path, help="file to write the summary and every verdict to")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("A", "B"), help="two such files, alone")
    chosen = parser.parse_args()
    if chosen.compare:
        if len(sys.argv) != 4:
            parser.error("--compare A B goes alone")
        print(compare(*chosen.compare))
        return
    needed = ["gold", "pred", "databases"] + (["tables"] if chosen.etype != "exec" else [])
    missing = [f"--{name}" for name in needed if getattr(chosen, name) is None]
    if missing:
        parser.error(f"give {', '.join(missing)}")
    check("--sql-timeout", chosen.sql_timeout, Seconds)
    pairs = read_pairs(chosen.gold, chosen.pred)
    rules = Rules(chosen.etype, chosen.plug_value, chosen.keep_distinct)
    executor = Executor(timeout_seconds=chosen.sql_timeout)
    items = score_pairs(pairs, chosen.databases, chosen.tables, rules, executor, chosen.gold)
    summary = summarise_items(items, chosen.etype)
    if chosen.json:
        write_atomically(chosen.json, json.dumps({"summary": summary, "per_item": items}, indent=1))
    print(format_tables(summary, chosen.etype))
    print()
    print(format_further(summary, items))
