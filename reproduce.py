"""The experiments of the papers as suites of commands, and a page of each suite's numbers.

    python reproduce.py --suite quick
    python reproduce.py --suite toy --seeds 0 1 2
    python reproduce.py --suite sparc --data sparc --other cosql --model Qwen/Qwen3-1.7B
    python reproduce.py --suite real --data DATA --model models/qwen2.5-coder-0.5b
    python reproduce.py --suite recipes

- quick: the recipe in small on the embedded benchmark, which `bash quickstart.sh` calls
- toy: every arm of MTSQL-R1's own method and its baselines of the same model, on the embedded benchmark
- sparc, cosql: the same on SParC or CoSQL; --other is the folder of the other of the two
- real: the recipe with a small language model; --data is one folder with real/train_mix.json (see
  docs/training.md), {sparc,cosql}/{dev,tables}.json, spider/dev.json and database/
- recipes: the four papers on the embedded benchmark

A suite is a table of trainings and arms (mtsql/extras/reproduce/suites.toml). Each is one command, which is
skipped when its result is there: stop it at any time and start it again. Several seeds may run side by side,
each in a process of its own with the same --out, once seed 0 has made what all share (toy shares nothing).
quick and toy begin with the tiny models in models/toy; for a seed that has none there one is made first,
by imitation of a scripted agent, in an hour or more.
--out gets the page, its figures, and its rows as JSON. Not there: other authors' systems, and prompted large
models.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mtsql.config import command_line, from_toml, user_errors
from mtsql.extras.reproduce.suites import SUITES, parts_of


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = command_line(__doc__)
    parser.add_argument("--suite", choices=SUITES, required=True, help="which experiments")
    parser.add_argument("--data", default="", help="folder of the data, if the suite does not make it")
    parser.add_argument("--other", default="", help="folder of the other of SParC and CoSQL")
    parser.add_argument("--model", default="", help="base model [toy, quick: models/toy, or made]")
    parser.add_argument("--out", type=Path, help="run folder [runs/suite_toy, runs/real, runs/recipes, ...]")
    parser.add_argument("--seeds", type=int, nargs="+", help="[toy: 0 to 4, recipes: 0 to 2, others: 0]")
    parser.add_argument("--config", default="", help="settings, if not those of the suite")
    parser.add_argument("--list", action="store_true", help="show the commands and what is done, and stop")
    parser.add_argument("--page", action="store_true", help="write the page of what is there, and stop")
    return parser.parse_args()


if __name__ == "__main__":  # before torch is imported, so that --help is answered at once
    CHOSEN = read_arguments()

from mtsql.errors import UserError
from mtsql.extras.reproduce import Part, refuse_other_options, run_part
from mtsql.extras.reproduce.page import write_page
from mtsql.files import shipped
from mtsql.toy.tiny import MODELS
from train_sft import Args as SftArgs


def parts_of_suite(chosen: argparse.Namespace) -> list[Part]:
    """All commands in order. Raises UserError if the suite lacks data or a model."""
    name, data, suite = chosen.suite, chosen.data, SUITES[chosen.suite]
    suite = suite._replace(config=chosen.config or suite.config)
    parts = [suite.benchmark_part(chosen.out)] if suite.benchmark else []
    if suite.benchmark and (data or chosen.other):
        raise UserError(f"--suite {name} makes its own data; leave out --data and --other")
    if not (suite.benchmark or (data and chosen.model)):
        raise UserError(f"--suite {name} needs --data and --model")
    missing = [file for file in suite.files if not (chosen.list or (Path(data) / file).exists())]
    if missing:  # a part may read it hours later
        raise UserError(f"--data {data} lacks {', '.join(missing)}, which --suite {name} needs")
    rank = str(from_toml(shipped(suite.config), SftArgs).get("lora_rank", 0))
    places = {"data": data or str(chosen.out / "benchmark"), "other": chosen.other, "rank": rank}
    for seed in sorted(chosen.seeds or suite.seeds):  # what seed 0 makes for all comes first
        made = shipped(MODELS / f"seed{seed}")
        own = str(made) if name in ("quick", "toy") and made.exists() else ""
        parts += parts_of(suite, chosen.out, seed, places | {"model": chosen.model or own})
    return parts


def main(chosen: argparse.Namespace) -> None:
    """Run what is missing, then write the page."""
    page = chosen.suite if chosen.suite in ("real", "recipes") else f"suite_{chosen.suite}"
    chosen.out = chosen.out or Path("runs") / page
    parts = [] if chosen.page else parts_of_suite(chosen)
    if chosen.list:
        print("\n".join(part.listed() for part in parts))
        return
    for part in parts:
        refuse_other_options(part)
    for part in parts:
        run_part(*part)
    suite = SUITES[chosen.suite]
    given = "" if suite.benchmark else " --data DATA --model MODEL"
    given += " --other OTHER" * bool(chosen.other) + f" --config {chosen.config}" * bool(chosen.config)
    made_by = f"python reproduce.py --suite {chosen.suite}{given}"
    written = write_page(suite, made_by, chosen.out / f"{page}.md", Path(chosen.model).name)
    print(f"\n{written.read_text()}\n{written}")


if __name__ == "__main__":
    user_errors(main, CHOSEN)
