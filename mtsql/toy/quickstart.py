"""The recipe in small on the embedded benchmark, in order, and one table at the end.

One round of Algorithm 1, then GRPO with outcome and process rewards, without a curriculum.

`bash quickstart.sh` calls it. Each phase is one command, which is printed before it runs; a phase whose
result is there already is skipped. It starts from a tiny model that has learned SQL and the tools'
protocol by imitation, models/toy/seed<SEED>, as the paper starts from a pre-trained model; --imitate
makes that model too, in an hour or more. `results.json` holds the figures of the arms and of their paired
differences. The arm short_horizon is the tiny model without tools, which before any training of its own
answers better than with them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mtsql.config import user_errors
from mtsql.errors import UserError
from mtsql.extras.reproduce.numbers import Values, estimate, read_evaluation, subtract
from mtsql.files import write_atomically
from mtsql.parts import run_part
from mtsql.toy.benchmark import MODELS_SEED
from mtsql.toy.tiny import MODELS

ARMS = {  # arm: (phase that made its policy, tools it is evaluated with, split)
    "imitation": ("imitation", "both", "test"),
    "short_horizon": ("imitation", "none", "test"),
    "warm_start": ("sft", "both", "test"),
    "rl": ("grpo", "both", "test"),
    "rl_no_execution": ("grpo", "no_execution", "test"),
    "rl_no_memory": ("grpo", "no_memory", "test"),
    "short_horizon_themes": ("imitation", "none", "test_themes"),
    "warm_start_themes": ("sft", "both", "test_themes"),
    "rl_themes": ("grpo", "both", "test_themes"),
}
COMPARISONS = (
    ("rl", "warm_start"), ("rl", "short_horizon"), ("rl", "rl_no_execution"), ("rl", "rl_no_memory"),
    ("rl_themes", "warm_start_themes"), ("rl_themes", "short_horizon_themes"),
)  # fmt: skip
METRICS = ("ex", "em", "ex_sampled")
DRAWS = 100_000  # of an interval


def main() -> None:
    """Benchmark, tiny model, warm start, GRPO, evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/toy"), help="run folder [runs/toy]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tiny model, training, sampling [0]")
    parser.add_argument("--imitate", action="store_true", help="make the tiny model anew, in OUT/imitation")
    parser.add_argument("--config", default="configs/toy.toml", help="of all phases [configs/toy.toml]")
    arguments = parser.parse_args()
    out, data = arguments.out, arguments.out / "benchmark"
    imitation = out / "imitation" if arguments.imitate else MODELS / f"seed{arguments.seed}"
    if not arguments.imitate and not imitation.exists():
        raise UserError(f"there is no {imitation}; take another --seed, or add --imitate")
    policies = {"imitation": imitation, "sft": out / "sft" / "policy", "grpo": out / "grpo" / "policy"}
    shared = ["--config", arguments.config, "--data", str(data), "--seed", str(arguments.seed)]
    benchmark = ["-m", "mtsql.toy.benchmark", str(data), "--seed", str(MODELS_SEED)]
    run_part("benchmark: dialogues over generated databases", benchmark, data)
    imitate = ["-m", "mtsql.toy.imitation", *shared, "--out", str(imitation), "--resume"]
    run_part("imitation: a tiny model learns from a scripted agent", imitate, imitation / "run.json")
    for phase, start, title in (
        ("sft", "imitation", "warm start: self-taught fine-tuning on its own right trajectories"),
        ("grpo", "sft", "GRPO: reinforcement learning on whole trajectories"),
    ):
        command = [f"train_{phase}.py", *shared, "--model", str(policies[start]), "--out", str(out / phase)]
        run_part(title, [*command, "--resume"], policies[phase])
    for arm, (phase, tools, split) in ARMS.items():
        folder = out / "evaluation" / arm
        command = ["evaluate.py", *shared, "--model", str(policies[phase]), "--tools", tools]
        command += ["--split", split, "--out", str(folder)]
        run_part(f"evaluation: {arm}", command, folder / "summary.json")
    report(out)


def percent(values: Values) -> tuple[float, float, float]:
    """A mean and the ends of its 95 % interval over databases, in %."""
    found = estimate({0: values}, draws=DRAWS)
    return tuple(100 * number for number in (found.mean, *found.interval))


def report(out: Path) -> None:
    """Write and print the figures of the arms and of their differences."""
    found = {arm: read_evaluation(out / "evaluation" / arm) for arm in ARMS}
    values = {arm: {key: of.values(key) for key in METRICS} for arm, of in found.items()}
    for better, worse in COMPARISONS:
        pair = {key: subtract(values[better][key], values[worse][key]) for key in METRICS}
        values[f"{better} - {worse}"] = pair
    results = {name: {key: percent(of[key]) for key in METRICS} for name, of in values.items()}
    write_atomically(out / "results.json", json.dumps(results, indent=1))
    print("\nUnseen databases, % with 95 % interval over databases; sampled: at temperature 1;")
    print("..._themes: themes and ways of asking that training lacks; a - b: paired difference, points.\n")
    print(f"{'arm':<34}{'EX greedy':<22}{'EM greedy':<22}EX sampled")
    for name, of in results.items():
        cells = [f"{mean:.1f} [{low:.1f}, {high:.1f}]" for mean, low, high in of.values()]
        print("{:<34}{:<22}{:<22}{}".format(name, *cells))
    print(f"\n{out}/results.json holds this, {out}/grpo the training curves.")
    print(f"python -m mtsql.report.viewer {out}/evaluation/rl/trajectories.jsonl shows what the agent did.")


if __name__ == "__main__":
    user_errors(main)
