"""The grid search over the reward's weights on held-out databases of the training data (section 3.3.2).

    python -m mtsql.experiments.grid_search --config configs/toy_suite.toml \\
        --model runs/suite/seed0/sft/policy --data runs/suite/benchmark --held-out 10 --out runs/grid \\
        --proposal 0 0.4 0.8 --verify 0 0.1 0.5

For each pair of w3 and w4 (w1 and w2 stay 1) a short GRPO run on the rest of the training data, then EX
and EM on --held-out databases of train. A table at the end; OUT/grid.json holds it. Pairs that are done are
not run again. What is behind `--` goes to train_grpo.py, for example `-- --steps 24`.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

from mtsql.config import user_errors
from mtsql.files import write_atomically
from mtsql.parts import run_part


def main() -> None:
    """Train and evaluate each pair."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--config", required=True, help="settings of train_grpo.py and evaluate.py")
    parser.add_argument("--model", required=True, help="policy that GRPO starts from")
    parser.add_argument("--data", required=True, help="SParC- or CoSQL-format folder")
    parser.add_argument("--held-out", type=int, required=True, help="databases of train to compare on")
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of all runs [0]")
    parser.add_argument("--proposal", type=float, nargs="+", default=[0.0, 0.4, 0.8], help="values of w3")
    parser.add_argument("--verify", type=float, nargs="+", default=[0.0, 0.1, 0.5], help="values of w4")
    parser.add_argument("training", nargs="*", help="options of train_grpo.py, behind --")
    chosen = parser.parse_args()
    shared = ["--config", chosen.config, "--data", chosen.data, "--seed", str(chosen.seed)]
    shared += ["--held-out", str(chosen.held_out)]
    results = []
    for proposal, verify in product(chosen.proposal, chosen.verify):
        folder = chosen.out / f"w3_{proposal:g}_w4_{verify:g}"
        weights = ["--rewards", "process", "--weights", f"proposal={proposal:g},verify={verify:g}"]
        command = ["train_grpo.py", *shared, "--model", chosen.model, "--out", str(folder / "grpo")]
        policy, summary = folder / "grpo" / "policy", folder / "evaluation" / "summary.json"
        command += [*weights, "--resume", *chosen.training]
        run_part(f"w3 {proposal:g}, w4 {verify:g}", command, policy)
        command = ["evaluate.py", *shared, "--model", str(policy), "--out", str(summary.parent)]
        run_part("held-out EX", [*command, "--split", "held_out"], summary)
        scores = json.loads(summary.read_text())
        results.append(
            {"w3": proposal, "w4": verify, "ex": scores["ex"]["mean"], "em": scores["em"]["mean"]}
            | {"low": scores["ex"]["low"], "high": scores["ex"]["high"], "questions": scores["questions"]}
        )
    results.sort(key=lambda r: r["ex"], reverse=True)
    write_atomically(chosen.out / "grid.json", json.dumps(results, indent=1))
    print(f"\n{results[0]['questions']} held-out questions, best first")
    print(f"{'w3':>6} {'w4':>6}  {'EX %':<22} {'EM %':>6}")
    for r in results:
        ex = f"{100 * r['ex']:.1f} [{100 * r['low']:.1f}, {100 * r['high']:.1f}]"
        print(f"{r['w3']:>6g} {r['w4']:>6g}  {ex:<22} {100 * r['em']:>6.1f}")


if __name__ == "__main__":
    user_errors(main)
