"""The recipe in small on the embedded benchmark, in order, and one table at the end.

One round of Algorithm 1, then GRPO with outcome and process rewards, without a curriculum.

`bash quickstart.sh` calls it. Each phase is one command, which is printed before it runs; a phase whose
result is there already is skipped. It starts from a tiny model that has learned SQL and the tools'
protocol by imitation, models/toy/seed<SEED>, as the paper starts from a pre-trained model; --imitate
makes that model too, in an hour or more. `results.json` holds the table's figures and how episodes ended,
`differences.json` those of the paired differences. The arm short_horizon is the tiny model without tools,
which before any training of its own answers better than with them.
"""

from __future__ import annotations

import argparse
import json
from itertools import accumulate
from pathlib import Path

from mtsql.config import user_errors
from mtsql.errors import UserError
from mtsql.extras.reproduce.numbers import Values, estimate, read_evaluation, signed, subtract, with_interval
from mtsql.files import write_atomically
from mtsql.parts import minutes_of, run_part
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
DRAWS = 100_000  # of an interval


def main() -> None:
    """Benchmark, tiny model, warm start, GRPO, evaluation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/toy"), help="run folder [runs/toy]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the tiny model, training, sampling [0]")
    parser.add_argument("--imitate", action="store_true", help="make the tiny model anew, in OUT/imitation")
    parser.add_argument("--config", default="configs/toy.toml", help="of all phases [configs/toy.toml]")
    arguments = parser.parse_args()
    out, seed = arguments.out, str(arguments.seed)
    data = out / "benchmark"
    imitation = out / "imitation" if arguments.imitate else MODELS / f"seed{seed}"
    if not arguments.imitate and not imitation.exists():
        raise UserError(f"--seed {seed}: there is no {imitation}; take another seed, or add --imitate")
    policies = {"imitation": imitation, "sft": out / "sft" / "policy", "grpo": out / "grpo" / "policy"}
    shared = ["--config", arguments.config, "--data", str(data)]
    benchmark = ["-m", "mtsql.toy.benchmark", str(data), "--seed", str(MODELS_SEED)]
    run_part("benchmark: dialogues over generated databases", benchmark, data)
    imitate = ["-m", "mtsql.toy.imitation", *shared, "--seed", seed, "--out", str(imitation), "--resume"]
    run_part("imitation: a tiny model learns from a scripted agent", imitate, imitation / "run.json")

    def train(title: str, phase: str, start: str) -> None:
        command = [f"train_{phase}.py", *shared, "--model", str(policies[start]), "--out", str(out / phase)]
        run_part(title, [*command, "--seed", seed, "--resume"], policies[phase])

    train("warm start: self-taught fine-tuning on its own right trajectories", "sft", "imitation")
    train("GRPO: reinforcement learning on whole trajectories", "grpo", "sft")
    for arm, (phase, tools, split) in ARMS.items():
        folder = out / "evaluation" / arm
        command = ["evaluate.py", *shared, "--model", str(policies[phase]), "--tools", tools]
        command += ["--split", split, "--out", str(folder), "--seed", seed]
        run_part(f"evaluation: {arm}", command, folder / "summary.json")
    _report(out, policies, arguments.seed)


def _mean_and_interval(values: Values, key: str) -> dict[str, float]:
    """A mean and the ends of its interval over databases."""
    found = estimate({0: values}, draws=DRAWS)
    low, high = found.interval
    return {key: found.mean, f"{key}_low": low, f"{key}_high": high}


def _report(out: Path, policies: dict[str, Path], seed: int) -> None:
    """Write and print the arms' figures and their differences."""
    made = policies | {"imitation": policies["imitation"] / "run.json"}
    minutes = dict(zip(policies, accumulate(map(minutes_of, made.values())), strict=True))
    arms = {arm: read_evaluation(out / "evaluation" / arm) for arm in ARMS}
    results, differences = [], []
    for arm, (phase, *_) in ARMS.items():
        found = {"arm": arm}
        for key in ("ex", "em"):
            found |= _mean_and_interval(arms[arm].values(key), key)
        found |= {key: arms[arm].summary[key] for key in ("ex_sampled", "questions", "status")}
        results.append(found | {"minutes": round(minutes[phase], 2), "seed": seed})
    write_atomically(out / "results.json", json.dumps(results, indent=1))
    print(f"\nUnseen databases, {results[0]['questions']} questions, % with 95 % interval over databases;")
    print(f"..._themes: themes and ways of asking that training lacks, {results[-1]['questions']} questions.")
    print("sampled: EX at temperature 1; minutes: of training, that of a model from models/ not counted.\n")
    print(f"{'arm':<21} {'EX greedy':<20} {'EM greedy':<20} {'EX sampled':>10} {'minutes':>8}")
    for r in results:
        found = ([100 * r[key + end] for end in ("", "_low", "_high")] for key in ("ex", "em"))
        ex, em = (f"{mean:5.1f} [{low:.1f}, {high:.1f}]" for mean, low, high in found)
        print(f"{r['arm']:<21} {ex:<20} {em:<20} {100 * r['ex_sampled']:>10.1f} {r['minutes']:>8.1f}")
    print("\npaired differences in EX, points with 95 % interval likewise (sampled EX; greedy EM):")
    for better, worse in COMPARISONS:
        found, said = {"better": better, "worse": worse, "seed": seed}, {}
        for key in ("ex", "em", "ex_sampled"):
            pairs = subtract(arms[better].values(key), arms[worse].values(key))
            found |= _mean_and_interval(pairs, key)
            said[key] = with_interval(estimate({0: pairs}, draws=DRAWS), signed, 100)
        differences.append(found)
        print(f"{better} - {worse}: {said['ex']} ({said['ex_sampled']}; {said['em']})")
    write_atomically(out / "differences.json", json.dumps(differences, indent=1))
    print(f"\n{out}/results.json, differences.json hold this, {out}/grpo the training curves.")
    print(f"python -m mtsql.extras.viewer {out}/evaluation/rl/trajectories.jsonl shows what the agent did.")


if __name__ == "__main__":
    user_errors(main)
