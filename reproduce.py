"""Every arm of MTSQL-R1's own method and its baselines of the same model, and one page of tables and figures.

    python reproduce.py --suite toy --out runs/suite --seeds 0 1 2
    python reproduce.py --suite sparc --data sparc --other cosql --model Qwen/Qwen3-1.7B --out runs/sparc
    python reproduce.py --suite real --data DATA --model models/qwen2.5-coder-0.5b

Runs the parts below for each seed, skipping those whose result is there: stop it at any time and start it
again. Several seeds may run side by side, each in a process of its own with the same --out. The page in
docs/results/ is of all seeds that --out holds, and names the arms that are not finished. `--list` shows
every command and what is done, `--page` writes the page of what is there.

Stages and arms (paper, Table 2 to 4, 7 and 8, Figures 4 to 13):
Not there: other authors' systems and prompted large models (the 14B of Table 4 too); the average of SParC and
CoSQL, each of which is a suite, is on the real suite's page alone. With lora_rank = 0 in [sft] all learns.
- base: the untrained model with both tools, with either, and with none
- short horizon: fine-tuning on gold SQL, and RL from the base, both without tools
- warm start: rounds 1 to 3 of Algorithm 1
- RL: outcome rewards; outcome and process rewards; the latter without the curriculum's order. All RL runs,
  short-horizon RL among them, have the same questions, steps and samples
- the final agent without a tool: taken away at the end, or trained without (in warm start and RL) - the
final agent with its own answers in the history, and with a cap on the response - elsewhere: the split of
unseen themes, or the other data set - half and twice the embedded model, with seed 0 The real suite has its
own arms: mtsql/experiments/real.py. Its DATA is a folder of several data sets, and its seeds above 0 start
from the warm start of seed 0. Its own defaults are --out runs/real and --seeds 0; its page is real.md in
--out, made of real.json beside it, in which rows of other parts stay.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

from mtsql.config import SftConfig, from_toml, user_errors
from mtsql.errors import UserError
from mtsql.experiments.arms import ELSEWHERE
from mtsql.experiments.findings import EMBEDDED
from mtsql.experiments.real import CONFIG as REAL_CONFIG
from mtsql.experiments.real import check_data, real_parts
from mtsql.experiments.real_page import write_real_page
from mtsql.experiments.suite import run_suite, suite_parser
from mtsql.experiments.suite_page import write_suite_page
from mtsql.parts import Part
from mtsql.toy.benchmark import MODELS_SEED
from mtsql.toy.tiny import MODELS

PROTOCOL = (
    f"All of this ran once, on the benchmark of seed {MODELS_SEED}, whose test splits have chosen no "
    "setting; the quick start had been evaluated on them before. The settings were committed before any arm "
    "was evaluated here, as was how claims are judged. Rates, rewards and levels come from earlier designs, "
    "chosen on dev and, as suite_toy_notes.md says, in part on test of other benchmarks; the numbers of "
    "steps and of questions were lowered for time alone. The share of the one split that stands in the "
    "other, in %:"
)


class Suite(NamedTuple):
    """What a benchmark needs to be told."""

    config: str
    split: str
    split_elsewhere: str
    latency_questions: int
    gold_questions: int  # of short-horizon fine-tuning: as many as RL chooses from; 0 is all
    caps: tuple[int, ...]  # response tokens of the capped arms
    layers: tuple[int, ...] = ()  # of further embedded models, trained with seed 0 alone


SUITES = {
    "toy": Suite("configs/toy_suite.toml", "test", "test_themes", 24, 1500, (90, 60), (2, 8)),
    "sparc": Suite("configs/sparc_qwen3_1.7b_lora.toml", "dev", "dev", 60, 0, (4000, 2000)),
    "cosql": Suite("configs/cosql_qwen3_1.7b_lora.toml", "dev", "dev", 60, 0, (4000, 2000)),
}


def seed_parts(suite: Suite, data: str, other: str, model: str, out: Path, seed: int) -> list[Part]:
    """Training and evaluation of one seed; without `model` from the toy's own, made if need be."""
    folder = out / f"seed{seed}"
    shared = ["--config", suite.config, "--seed", str(seed)]
    parts = []

    def train(name: str, script: list[str], start: str, *options: str, done: str = "policy") -> str:
        command = [*script, *shared, "--data", data, "--out", str(folder / name)]
        command += ["--model", start] if start else []
        parts.append(Part(name, [*command, *options], folder / name / done))
        return str(folder / name / done)

    sft, grpo, resume = ["train_sft.py"], ["train_grpo.py"], "--resume"
    imitation = ["-m", "mtsql.toy.imitation"]
    if not model:
        shipped = MODELS / f"seed{seed}"
        if not shipped.exists():
            train("imitation", imitation, "", resume, done="run.json")
        model = str(shipped if shipped.exists() else folder / "imitation")
    rank = from_toml(Path(suite.config), SftConfig).get("lora_rank", 0)
    new = ("--lora-rank", str(rank)) if rank else ()  # RL from the base needs it too: [grpo] goes on with one
    direct = ("--tools", "none", *new)
    gold = ("--targets", "gold", "--rounds", "1", "--questions", str(suite.gold_questions))
    short_sft = train("short_sft", sft, model, *direct, *gold, resume)
    warm = train("sft", sft, model, resume)
    counting = ["-m", "mtsql.extras.curriculum"]
    curriculum = ("--curriculum", train("curriculum", counting, warm, done="counts.jsonl"))
    short_rl = train("short_rl", grpo, model, *direct, *curriculum, "--rewards", "outcome", resume)
    outcome = train("rl_outcome", grpo, warm, *curriculum, "--rewards", "outcome", resume)
    process = train("rl_process", grpo, warm, *curriculum, "--rewards", "process", resume)
    asking = ["-m", "mtsql.experiments.asked_questions"]
    asked = train("asked", asking, warm, *curriculum, "--rewards", "process", done="counts.jsonl")
    shuffled = ("--curriculum", asked, "--rewards", "process", "--level-size", "0", resume)
    shuffled = train("rl_shuffled", grpo, warm, *shuffled)
    trained_without = {}
    for tools in ("no_execution", "no_memory"):
        without = train(f"sft_{tools}", sft, model, "--tools", tools, resume)
        options = ("--tools", tools, *curriculum, "--rewards", "process", resume)
        trained_without[tools] = train(f"rl_{tools}_trained", grpo, without, *options)

    timed = ("--latency-questions", str(suite.latency_questions), "--sampled-runs", "1")

    def evaluate(arm: str, policy: str, *options: str, latency: bool = False, away: bool = True) -> None:
        def one_side(name: str, data: str, split: str, *more: str) -> None:
            done = folder / "evaluation" / name
            command = ["evaluate.py", *shared, "--data", data, "--split", split, "--model", policy]
            command += ["--out", str(done), *options, *more]
            parts.append(Part(f"evaluate {name}", command, done / "summary.json"))

        one_side(arm, data, suite.split, *(timed if latency else ()))
        if other and away:
            one_side(f"{arm}{ELSEWHERE}", other, suite.split_elsewhere)

    no_tools, predicted = ("--tools", "none"), ("--history", "predicted")
    rounds = {f"round_{n}": str(folder / "sft" / "policies" / f"round_{n}") for n in (1, 2)}
    long_horizon = {"base": model, **rounds, "round_3": warm, "rl_outcome": outcome, "rl_process": process}
    short_horizon = {"base_direct": model, "short_sft": short_sft, "short_rl": short_rl}
    for arm, policy in long_horizon.items():
        evaluate(arm, policy, latency=True)
    for arm, policy in short_horizon.items():
        evaluate(arm, policy, *no_tools, latency=True)
    evaluate("rl_shuffled", shuffled)
    for arm, policy in (("base", model), ("rl", process)):
        for tools in ("no_execution", "no_memory"):
            evaluate(f"{arm}_{tools}", policy, "--tools", tools)
    for tools, policy in trained_without.items():
        evaluate(f"rl_{tools}_trained", policy, "--tools", tools)
    evaluate("base_predicted", model, *predicted, away=False)
    evaluate("short_sft_predicted", short_sft, *predicted, *no_tools, away=False)
    evaluate("round_3_predicted", warm, *predicted, away=False)
    evaluate("rl_process_predicted", process, *predicted, away=False)
    for cap in suite.caps:
        capped = ("--max-response-tokens", str(cap))
        evaluate(f"rl_cap_{cap}", process, *capped, latency=True, away=False)
    for layers in suite.layers if seed == 0 else ():
        name = f"layers_{layers}"
        train(f"{name}/imitation", imitation, "", "--layers", str(layers), resume, done="run.json")
        base = str(folder / name / "imitation")
        short_sft = train(f"{name}/short_sft", sft, base, *direct, *gold, resume)
        warm = train(f"{name}/sft", sft, base, resume)
        counts = train(f"{name}/curriculum", counting, warm, done="counts.jsonl")
        options = ("--curriculum", counts, "--rewards", "process", resume)
        process = train(f"{name}/rl_process", grpo, warm, *options)
        for arm, policy in (("base", base), ("round_3", warm), ("rl_process", process)):
            evaluate(f"{name}_{arm}", policy)
        evaluate(f"{name}_short_sft", short_sft, *no_tools)
    return parts


def main() -> None:
    """Run what is missing, then write the page."""
    parser = suite_parser(__doc__, "runs/suite", range(5))
    parser.add_argument("--suite", choices=[*SUITES, "real"], required=True, help="benchmark")
    parser.add_argument("--data", default="", help="SParC or CoSQL folder; the toy benchmark is made")
    parser.add_argument("--other", default="", help="folder of the other of the two, for out of domain")
    parser.add_argument("--model", default="", help="base model [toy: that of models/toy, or made]")
    parser.add_argument("--config", default="", help="settings, if not those of the suite")
    parser.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="", help="of --suite real [its settings']"
    )
    if parser.parse_args().suite == "real":  # apart from the others, whose parts have the same names
        parser.set_defaults(out=Path("runs/real"), seeds=[0])
    chosen = parser.parse_args()
    if chosen.suite == "real":
        reproduce_real(chosen)
        return
    if chosen.dtype:
        raise UserError(f"--dtype is for --suite real; --suite {chosen.suite} takes that of its --config")
    name, out, data, other = chosen.suite, chosen.out, chosen.data, chosen.other
    suite = SUITES[name]._replace(config=chosen.config or SUITES[name].config)
    shared = []
    if name == "toy":
        if data or other:
            raise UserError("--suite toy makes its own data; leave out --data and --other")
        data = other = str(out / "benchmark")
        making = ["-m", "mtsql.toy.benchmark", data, "--seed", str(MODELS_SEED)]
        shared = [Part("benchmark", making, out / "benchmark")]
    elif not (data and chosen.model):
        raise UserError(f"--suite {name} needs --data and --model")

    def parts_of(seeds: list[int]) -> list[Part]:
        each = (seed_parts(suite, data, other, chosen.model, out, seed) for seed in seeds)
        return [*shared, *(part for parts in each for part in parts)]

    if run_suite(parts_of(chosen.seeds), chosen):
        begun = {int(folder.name[4:]) for folder in out.glob("seed*") if folder.name[4:].isdigit()}
        seeds = sorted({*chosen.seeds, *begun})
        made_with = f"python reproduce.py --suite {name} --seeds {' '.join(map(str, seeds))}"
        title, path = f"MTSQL-R1's experiments on {name}", Path(f"docs/results/suite_{name}.md")
        built_in, about = {}, ""
        if name == "toy" and (out / "benchmark").exists():
            own = "" if chosen.config else f"{PROTOCOL}\n\n"  # other settings have another story
            built_in, about = EMBEDDED, own
        page = write_suite_page(out, path, title, seeds, parts_of(seeds), made_with, built_in, about)
        print(f"\n{page}")


def reproduce_real(chosen: argparse.Namespace) -> None:
    """Run what is missing of the real suite, then write its page to --out."""
    if not (chosen.data and chosen.model) or chosen.other:
        raise UserError(
            "--suite real needs --data, a folder of several data sets, and --model; and no --other"
        )
    if not (chosen.list or chosen.page):
        check_data(Path(chosen.data))
    config, seeds, dtype = chosen.config or REAL_CONFIG, chosen.seeds, chosen.dtype
    parts = {s: real_parts(Path(chosen.data), chosen.model, chosen.out, s, config, dtype) for s in seeds}
    if run_suite([part for own in parts.values() for part in own], chosen):
        made_with = f"python reproduce.py --suite real --data DATA --model {chosen.model} --out {chosen.out}"
        made_with += f" --config {config}" if config != REAL_CONFIG else ""
        made_with += f" --dtype {dtype}" if dtype else ""

        def listing(seed: int) -> list[Part]:
            return real_parts(Path("DATA"), chosen.model, chosen.out, seed, config, dtype)

        print(f"\n{write_real_page(parts, chosen.out / 'real.md', chosen.model, listing, made_with)}")


if __name__ == "__main__":
    user_errors(main)
