"""Four papers on the same machinery: the same tiny model, questions and budget, one recipe each.

    python -m mtsql.experiments.compare_recipes --out runs/recipes --seeds 0 1 2

One model imitates a scripted agent in the formats of all four recipes, once; from it, for each seed, each
recipe trains by GRPO with its own protocol, rewards and settings, for as many steps and samples and on the
same questions: those that the first model does not always get right, counted once with SQL-Trail's prompts.
Beside them comparisons after the papers': RL in a single turn (SkyRL-SQL, SQL-Trail), the execution reward
alone (SQL-Trail argues against it), no filter (MTIR-SQL), the prompt without the schema (SkyRL-SQL). Parts
that are done are not run again; once the first model is there, seeds may run side by side. `--list` shows
every command, `--page` writes docs/results/recipes.md of what is there.
"""

from __future__ import annotations

from pathlib import Path

from mtsql.config import user_errors
from mtsql.experiments.recipes_page import write_recipes_page
from mtsql.experiments.suite import run_suite, suite_parser
from mtsql.parts import Part
from mtsql.recipes import RECIPES

CONFIG = "configs/recipes.toml"
SINGLE_TURN = ("--tools", "none", "--max-interactions", "0")
ABLATIONS = {  # arm: (recipe, options of its training, of its training and its evaluation)
    "skyrl_sql_single": ("skyrl_sql", (), SINGLE_TURN),
    "sql_trail_single": ("sql_trail", ("--weights", "turns=0"), SINGLE_TURN),
    "sql_trail_execution": ("sql_trail", ("--rewards", "execution"), ()),
    "mtir_sql_unfiltered": ("mtir_sql", ("--no-filter-rollouts",), ()),
}


def start_parts(out: Path, config: str) -> list[Part]:
    """The benchmark, the model that every recipe starts from, and the counts that choose RL's questions."""
    data, model, counts = out / "benchmark", out / "imitation", out / "counts"
    shared = ["--config", config, "--data", str(data)]
    imitation = ["-m", "mtsql.toy.imitation", *shared, "--out", str(model)]
    imitation += ["--further-recipes", ",".join(RECIPES[1:]), "--resume"]
    counting = ["-m", "mtsql.extras.curriculum", "--config", "configs/sql_trail.toml", config]
    counting += ["--data", str(data), "--model", str(model)]
    return [
        Part("benchmark", ["-m", "mtsql.toy.benchmark", str(data), "--single"], data),
        Part("imitation", imitation, model / "run.json"),
        Part("curriculum", [*counting, "--out", str(counts)], counts / "counts.jsonl"),
    ]


def seed_parts(out: Path, config: str, seed: int) -> list[Part]:
    """Training and evaluation of one seed."""
    folder, model = out / f"seed{seed}", out / "imitation"
    shared = ["--seed", str(seed), "--data", str(out / "benchmark")]
    parts = []
    trained = {recipe: (recipe, (), ()) for recipe in RECIPES} | ABLATIONS
    for arm, (recipe, training, both) in trained.items():
        paper = [] if recipe == RECIPES[0] else [f"configs/{recipe}.toml"]
        options = ["--config", *paper, config, *shared, *both]
        grpo = ["train_grpo.py", *options, "--model", str(model), "--out", str(folder / arm), *training]
        grpo += ["--curriculum", str(out / "counts" / "counts.jsonl")]
        policy = folder / arm / "policy"
        parts.append(Part(arm, [*grpo, "--resume"], policy))
        evaluated = {f"{arm}_rl": (policy, ("--sampled-runs", "8" if arm in RECIPES else "1"))}
        if both or arm in RECIPES:
            evaluated[f"{arm}_base"] = (model, ("--sampled-runs", "1"))
        if arm == "skyrl_sql":
            evaluated["skyrl_sql_base_names"] = (model, ("--schema", "names"))
            evaluated["skyrl_sql_rl_names"] = (policy, ("--schema", "names"))
        for name, (path, more) in evaluated.items():
            done = folder / "evaluation" / name
            command = ["evaluate.py", *options, "--model", str(path), "--out", str(done), *more]
            parts.append(Part(f"evaluate {name}", command, done / "summary.json"))
    return parts


def main() -> None:
    """Run what is missing, then write the page."""
    parser = suite_parser(__doc__, "runs/recipes", range(3))
    parser.add_argument("--config", default=CONFIG, help=f"settings [{CONFIG}]")
    chosen = parser.parse_args()
    parts = start_parts(chosen.out, chosen.config)
    for seed in chosen.seeds:
        parts += seed_parts(chosen.out, chosen.config, seed)
    if run_suite(parts, chosen):
        command = f"python -m mtsql.experiments.compare_recipes --out {chosen.out} --seeds"
        made_with = " ".join([command, *map(str, chosen.seeds)])
        page = Path("docs/results/recipes.md")
        print(f"\n{write_recipes_page(chosen.out, page, chosen.seeds, parts, made_with)}")


if __name__ == "__main__":
    user_errors(main)
