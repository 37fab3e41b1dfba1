"""The whole recipe on the embedded benchmark, in order, and one table at the end.

`bash quickstart.sh` calls it. Each phase is one command, which is printed before it runs; a phase whose
result is there already is skipped. `runs/toy/results.json` holds the table's figures.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mtsql.files import write_atomically
from mtsql.parts import minutes_of, run_part
from mtsql.report.metrics import paired_difference
from mtsql.toy.arms_figure import plot_arms

ARMS = {  # arm: (phase that made its policy, tools it is evaluated with)
    "imitation": ("imitation", "both"),
    "short_horizon": ("imitation", "none"),
    "warm_start": ("sft", "both"),
    "rl": ("grpo", "both"),
    "rl_no_execution": ("grpo", "no_execution"),
    "rl_no_memory": ("grpo", "no_memory"),
}
COMPARISONS = (("rl", "warm_start"), ("rl", "rl_no_execution"), ("rl", "rl_no_memory"))


def main() -> None:
    """Benchmark, tiny model, warm start, GRPO, evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/toy"), help="run folder [runs/toy]")
    parser.add_argument("--seed", type=int, default=0, help="seed of warm start, GRPO and sampling [0]")
    parser.add_argument("--base", type=Path, help="another run folder whose benchmark and tiny model to use")
    parser.add_argument(
        "--config", default="configs/toy.toml", help="settings of all phases [configs/toy.toml]"
    )
    arguments = parser.parse_args()
    out, seed = arguments.out, str(arguments.seed)
    base = arguments.base or out
    data, imitation = base / "benchmark", base / "imitation"
    policies = {"imitation": imitation, "sft": out / "sft" / "policy", "grpo": out / "grpo" / "policy"}
    shared = ["--config", arguments.config, "--data", str(data)]
    run_part("benchmark: dialogues over generated databases", ["-m", "mtsql.toy.benchmark", str(data)], data)
    run_part(
        "imitation: a tiny model learns from a scripted agent",
        ["-m", "mtsql.toy.imitation", *shared, "--out", str(imitation)],
        imitation,
    )
    run_part(
        "warm start: self-taught fine-tuning on its own right trajectories",
        [
            "train_sft.py",
            *shared,
            "--model",
            str(imitation),
            "--out",
            str(out / "sft"),
            "--seed",
            seed,
            "--resume",
        ],
        policies["sft"],
    )
    run_part(
        "GRPO: reinforcement learning on whole trajectories",
        [
            "train_grpo.py",
            *shared,
            "--model",
            str(policies["sft"]),
            "--out",
            str(out / "grpo"),
            "--seed",
            seed,
            "--resume",
        ],
        policies["grpo"],
    )
    for arm, (phase, tools) in ARMS.items():
        folder = out / "evaluation" / arm
        command = ["evaluate.py", *shared, "--model", str(policies[phase]), "--tools", tools]
        command += ["--split", "test", "--dialogues", "240", "--out", str(folder), "--seed", seed]
        run_part(f"evaluation: {arm}", command, folder / "summary.json")
    _report(out, policies, arguments.seed)


def _report(out: Path, policies: dict[str, Path], seed: int) -> None:
    ready, total = {}, 0.0
    for phase, folder in policies.items():
        total += minutes_of(folder)
        ready[phase] = total
    results, records = [], {}
    for arm, (phase, _) in ARMS.items():
        folder = out / "evaluation" / arm
        summary = json.loads((folder / "summary.json").read_text())
        lines = (folder / "predictions.jsonl").read_text().splitlines()
        records[arm] = [json.loads(line) for line in lines]
        results.append(
            {
                "arm": arm,
                "ex": summary["ex"]["mean"],
                "ex_low": summary["ex"]["low"],
                "ex_high": summary["ex"]["high"],
                "em": summary["em"]["mean"],
                "em_low": summary["em"]["low"],
                "em_high": summary["em"]["high"],
                "ex_sampled": summary["ex_sampled"],
                "questions": summary["questions"],
                "minutes": round(ready[phase], 2),
                "seed": seed,
            }
        )
    write_atomically(out / "results.json", json.dumps(results, indent=1))
    bars = [{"name": r["arm"], "mean": r["ex"], "low": r["ex_low"], "high": r["ex_high"]} for r in results]
    plot_arms(bars, out / "results.png")
    print(f"\nUnseen databases, {results[0]['questions']} questions, % with 95 % interval over dialogues.")
    print("sampled: EX at temperature 1; minutes: training until the policy was ready.\n")
    print(f"{'arm':<16} {'EX greedy':<20} {'EM greedy':<20} {'EX sampled':>10} {'minutes':>8}")
    for r in results:
        ex, em = (
            f"{100 * r[k]:5.1f} [{100 * r[k + '_low']:.1f}, {100 * r[k + '_high']:.1f}]" for k in ("ex", "em")
        )
        print(f"{r['arm']:<16} {ex:<20} {em:<20} {100 * r['ex_sampled']:>10.1f} {r['minutes']:>8.1f}")
    print("\npaired differences in EX, points with 95 % interval (greedy; sampled):")
    for better, worse in COMPARISONS:
        greedy, sampled = (_paired(records[better], records[worse], key) for key in ("ex", "ex_sampled"))
        print(f"{better} - {worse}: {greedy}; {sampled}")
    print(f"\n{out}/results.json and results.png hold this table, {out}/grpo the training curves.")
    print(f"python -m mtsql.report.viewer {out}/evaluation/rl/trajectories.jsonl shows what the agent did.")


def _paired(better: list[dict], worse: list[dict], key: str) -> str:
    """Difference of two arms with its interval, both in points."""
    sides = []
    for records in (better, worse):
        by_dialogue: dict[str, list[float]] = {}
        for record in records:
            by_dialogue.setdefault(record["dialogue_id"], []).append(record[key])
        sides.append(list(by_dialogue.values()))
    difference, low, high, _ = paired_difference(*sides)
    return f"{100 * difference:+.1f} [{100 * low:+.1f}, {100 * high:+.1f}]"


if __name__ == "__main__":
    main()
