"""A table of what the executor makes of hostile statements.

Those of tests/hostile.py, which every test run tries, and those of bench/hostile_more.py.

python bench/hostile.py [--seconds 0.5]
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
from collections import Counter
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hostile import STATEMENTS, make_database, resident_bytes, run_all
from hostile_more import STATEMENTS as MORE

from mtsql.sql.execute import Executor


def main() -> None:
    """Run all statements and print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=0.5, help="limit of a statement [0.5]")
    seconds = parser.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "concerts.sqlite"
        make_database(database)
        before, start = hashlib.sha256(database.read_bytes()).digest(), resident_bytes()
        outcomes = run_all(Executor(timeout_seconds=seconds), database, [*STATEMENTS, *MORE])
        unchanged = hashlib.sha256(database.read_bytes()).digest() == before
        files = len(list(Path(folder).iterdir()))
    grown = (max(o.resident for o in outcomes) - start) / 1e6
    wrong = sum(o.status not in o.right for o in outcomes)
    file = "unchanged" if unchanged else "CHANGED"
    beside = "no other file" if files == 1 else f"{files - 1} OTHER FILES"
    print("# Hostile SQL\n")
    print(f"`python bench/hostile.py --seconds {seconds:g}`, {date.today()}: {len(outcomes)} statements")
    print(f"with a limit of {seconds:g} seconds each, on a database of 2,000 numbers.\n")
    print(f"- results of a wrong type: {wrong}")
    print(f"- longest statement: {max(o.seconds for o in outcomes):.2f} s")
    print(f"- resident memory grew by {grown:.0f} MB at most")
    print(f"- the database file is {file} byte for byte, and {beside} appeared beside it\n")
    for o in outcomes:
        if o.status not in o.right:
            print(f"- WRONG: {o.status} of {o.sql[:80]!r}")
    print("| kind | statements | outcomes | longest |\n|---|---|---|---|")
    for kind in dict.fromkeys(o.kind for o in outcomes):
        some = [o for o in outcomes if o.kind == kind]
        counts = ", ".join(f"{n} {status}" for status, n in Counter(o.status for o in some).most_common())
        print(f"| {kind} | {len(some)} | {counts} | {max(o.seconds for o in some):.2f} s |")


if __name__ == "__main__":
    main()
