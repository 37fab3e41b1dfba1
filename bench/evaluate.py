"""How fast the evaluation and the executor are: `python bench/evaluate.py --help`.

Two parts. All metrics of gold against gold (and EM, EX, partial F1, hardness, further metrics) over the
dialogues of a SParC-format file, from an empty cache; and statements a second of the executor, cold, cached
and on several threads. Every figure is of this one run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from mtsql.extras.prediction_files import Rules, read_pairs, score_pairs, summarise_items
from mtsql.files import write_atomically
from mtsql.sql.execute import Executor


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="dialogues in SParC's format")
    parser.add_argument("--tables", type=Path, required=True, help="their tables.json")
    parser.add_argument("--databases", type=Path, required=True, help="folder of <db_id>/<db_id>.sqlite")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    dialogues = json.loads(options.data.read_text(encoding="utf-8"))
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        gold, pred = Path(folder) / "gold.txt", Path(folder) / "pred.txt"
        turns = [[" ".join(t["query"].split()) for t in d["interaction"]] for d in dialogues]
        names = [d["database_id"] for d in dialogues]
        gold.write_text(
            "\n".join(
                "".join(f"{q}\t{name}\n" for q in block) for block, name in zip(turns, names, strict=True)
            )
        )
        pred.write_text("\n".join("".join(f"{q}\n" for q in block) for block in turns))
        start = time.perf_counter()
        pairs = read_pairs(gold, pred)
        executor = Executor()
        items = score_pairs(pairs, options.databases, options.tables, Rules(), executor, gold)
        summary = summarise_items(items, "all")
        figures["all_metrics_seconds"] = time.perf_counter() - start
    figures |= {"pairs": len(pairs), "ex": summary["ex"]["mean"], "em": summary["em"]["mean"]}
    requests = list(dict.fromkeys((options.databases / p.db_id / f"{p.db_id}.sqlite", p.gold) for p in pairs))
    for threads, name in ((1, "one_thread"), (4, "four_threads")):
        executor, start = Executor(), time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(executor.execute, *zip(*requests, strict=True)))
        figures[f"cold_{name}_per_second"] = len(requests) / (time.perf_counter() - start)
    rounds = []
    for _ in range(5):
        start = time.perf_counter()
        for request in requests:
            executor.execute(*request)
        rounds.append(len(requests) / (time.perf_counter() - start))
    figures["cached_per_second"] = statistics.median(rounds)
    for name, value in figures.items():
        print(f"{name:32}{value:>14,.3f}")
    if options.json:
        write_atomically(options.json, json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
