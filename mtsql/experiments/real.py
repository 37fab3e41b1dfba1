"""The whole recipe with a real language model on real dialogues: the parts of `reproduce.py --suite real`.

The data is one folder: real/train_mix.json (SParC's format, with databases of Spider's training data),
{sparc,cosql}/{dev,tables}.json, spider/dev.json and database/. Settings are in configs/real_qwen.toml,
those for Qwen3 on a GPU in configs/real_qwen3.toml.
"""

from __future__ import annotations

from pathlib import Path

from mtsql.errors import UserError
from mtsql.parts import Part

CONFIG = "configs/real_qwen.toml"
# Every arm answers the dev sets of DATASETS. By the held-out databases of the mix an agent is chosen, among
# all arms that could be it. Spider's dev set has single questions, with no dialogue to check against.
DATASETS = ("sparc", "cosql")
HELD_OUT = "held_out"
NO_CANDIDATES = ("base", "rl_no_execution", "rl_no_memory", "rl_predicted")
SPIDER = "spider"
SINGLE_QUESTIONS = ("short_sft", "warm_start", "short_rl", "rl")
GOLD = ("--targets", "gold", "--rounds", "1")  # either arm's fine-tuning: the same questions and passes
SELF_TAUGHT = ("--targets", "self", "--rounds", "2", "--questions", "4000", "--lora-rank", "0")
ARMS = {
    "base": "untrained, both tools",
    "short_sft": "fine-tuned on gold SQL, no tools",
    "warm_start": "fine-tuned on gold SQL with the protocol shown, both tools",
    "round_1": "then round 1 of Algorithm 1",
    "round_2": "then round 2",
    "short_rl": "`short_sft`, then RL without tools",
    "rl_outcome": "`warm_start`, then RL with outcome rewards",
    "rl": "`warm_start`, then RL with outcome and process rewards",
    "rl_no_execution": "`rl` without EXECUTE",
    "rl_no_memory": "`rl` without MEMORY-VERIFY",
    "rl_predicted": "`rl` with its own earlier answers in memory",
}


DATA_FILES = (
    "real/train_mix.json",
    *(f"{dataset}/{file}.json" for dataset in DATASETS for file in ("dev", "tables")),
    f"{SPIDER}/dev.json",
    "database",
)


def check_data(data: Path) -> None:
    """Raise UserError if something of the suite's data is not there: a part may read it hours later."""
    missing = [name for name in DATA_FILES if not (data / name).exists()]
    if missing:
        raise UserError(
            f"--data {data} lacks {', '.join(missing)}: --suite real needs {', '.join(DATA_FILES)} in it"
        )


def sets_of(arm: str) -> tuple[str, ...]:
    """The sets of questions that an arm is asked."""
    candidate, single = arm not in NO_CANDIDATES, arm in SINGLE_QUESTIONS
    return (*((HELD_OUT,) if candidate else ()), *DATASETS, *((SPIDER,) if single else ()))


def real_parts(
    data: Path, model: str, out: Path, seed: int, config: str = CONFIG, dtype: str = ""
) -> list[Part]:
    """Training and evaluation of one seed; one above 0 has RL of its own, from the fine-tuning of seed 0.

    `dtype` is every command's --dtype, if it is not to be that of `config`.
    """
    folder, first = out / f"seed{seed}", out / "seed0"
    parts: list[Part] = []
    mix = ["--data", str(data / "real/train_mix.json"), "--tables", str(data / "sparc/tables.json")]
    mix += ["--databases", str(data / "database")]
    shared = ["--config", config, "--seed", str(seed)]
    shared += ["--dtype", dtype] if dtype else []
    no_tools, resume = ("--tools", "none"), "--resume"

    def train(name: str, script: list[str], start: str, *options: str, done: str = "policy") -> str:
        command = [*script, *shared, *mix, "--model", start, "--out", str(folder / name), *options]
        parts.append(Part(name, command, folder / name / done))
        return str(folder / name / done)

    def evaluate(arm: str, policy: str, *options: str) -> None:
        for dataset in sets_of(arm):
            asked, split = mix, HELD_OUT
            if dataset != HELD_OUT:
                schemas = mix[2:4] if dataset == SPIDER else []  # SParC's are Spider's databases
                asked, split = ["--data", str(data / dataset / "dev.json"), *schemas, *mix[-2:]], "dev"
            done = folder / "evaluation" / dataset / arm
            command = ["evaluate.py", *shared, *asked, "--split", split, "--model", policy]
            command += ["--out", str(done), *options]
            parts.append(Part(f"evaluate {arm} on {dataset}", command, done / "summary.json"))

    sft, grpo = ["train_sft.py"], ["train_grpo.py"]
    short_sft, warm_start = (str(first / name / "policy") for name in ("short_sft", "warm_start"))
    counted = ["-m", "mtsql.extras.curriculum"]
    if seed == 0:
        evaluate("base", model)
        train("short_sft", sft, model, *no_tools, *GOLD, resume)
        evaluate("short_sft", short_sft, *no_tools)
        train("warm_start", sft, model, *GOLD, resume)
        evaluate("warm_start", warm_start)
        round_2 = train("sft", sft, warm_start, *SELF_TAUGHT, resume)
        evaluate("round_1", str(folder / "sft" / "policies" / "round_1"))
        evaluate("round_2", round_2)
        train("short_counts", counted, short_sft, *no_tools, done="counts.jsonl")
        train("counts", counted, warm_start, done="counts.jsonl")
    of_short, of_long = (
        ("--curriculum", str(first / name / "counts.jsonl"), resume) for name in ("short_counts", "counts")
    )
    short_rl = train("short_rl", grpo, short_sft, *no_tools, "--rewards", "outcome", *of_short)
    evaluate("short_rl", short_rl, *no_tools)
    outcome = train("rl_outcome", grpo, warm_start, "--rewards", "outcome", *of_long)
    evaluate("rl_outcome", outcome)
    final = train("rl", grpo, warm_start, "--rewards", "process", *of_long)
    evaluate("rl", final)
    for tools in ("no_execution", "no_memory"):
        evaluate(f"rl_{tools}", final, "--tools", tools)
    evaluate("rl_predicted", final, "--history", "predicted")
    return parts
