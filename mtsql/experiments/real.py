"""The whole recipe with a real language model on real dialogues: the parts of `reproduce.py --suite real`.

The data is one folder: real/train_mix.json (SParC's format, with databases of Spider's training data),
{sparc,cosql}/{dev,tables}.json, spider/dev.json and database/. Settings are in configs/real_smollm2.toml,
those for Qwen3 on a GPU in configs/real_qwen3.toml.
"""

from __future__ import annotations

from pathlib import Path

from mtsql.errors import UserError
from mtsql.parts import Part

CONFIG = "configs/real_smollm2.toml"  # of the page in docs/results
# Every arm answers the dev sets of DATASETS. By the held-out databases of the mix an agent is chosen, among
# all arms that could be it. Spider's dev set has single questions, with no dialogue to check against.
DATASETS = ("sparc", "cosql")
HELD_OUT = "held_out"
NO_CANDIDATES = ("base", "rl_no_execution", "rl_no_memory", "rl_predicted")
SPIDER = "spider"
SINGLE_QUESTIONS = ("short_sft", "short_rl", "rl")
# Beside CONFIG, which is for two cores: fine-tuning on a thousand trajectories, where gold SQL has 16,350,
# and RL with tools, whose steps take many times as long as those without: few of them, so only on questions
# that the policy solves now and then, and from `demonstrations`, since the rounds lost points.
SMALL_STEPS = ("--trajectories-per-step", "8", "--learning-rate", "5e-4")
DEMONSTRATED = ("--epochs", "0.6")  # of 2,220 conversations
TOOLS_BUDGET = ("--steps", "20", "--prompts-per-step", "12")
SOLVABLE = ("--balanced", "240", "--exploration", "0")  # all right in some samples, wrong in others
ARMS = {
    "base": "untrained, both tools",
    "short_sft": "fine-tuned on gold SQL, no tools",
    "demonstrations": "then shown the protocol, both tools",
    "round_1": "then round 1 of Algorithm 1",
    "round_2": "then round 2",
    "short_rl": "`short_sft`, then RL without tools",
    "rl_outcome": "the warm start with tools, then RL with outcome rewards",
    "rl": "the warm start with tools, then RL with outcome and process rewards",
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
    """Training and evaluation of one seed; one above 0 has RL of its own, from the warm start of seed 0.

    `dtype` is every command's --dtype, if it is not to be that of `config`.
    """
    folder, first = out / f"seed{seed}", out / "seed0"
    parts: list[Part] = []
    mix = ["--data", str(data / "real/train_mix.json"), "--tables", str(data / "sparc/tables.json")]
    mix += ["--databases", str(data / "database")]
    shared = ["--config", config, "--seed", str(seed)]
    shared += ["--dtype", dtype] if dtype else []
    small = config == CONFIG
    small_steps, tools_budget, part = (SMALL_STEPS, TOOLS_BUDGET, DEMONSTRATED) if small else ((), (), ())
    warm_start, counted = ("demonstrations", "chosen") if small else ("sft", "curriculum")
    warm = str(first / warm_start / "policy")
    no_tools, once, resume = ("--tools", "none"), ("--rounds", "1"), "--resume"

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
    if seed == 0:
        evaluate("base", model)
        gold = ("--targets", "gold", "--lora-rank", "32", "--questions", "0")
        short_sft = train("short_sft", sft, model, *no_tools, *once, *gold, resume)
        evaluate("short_sft", short_sft, *no_tools)
        showing = ["-m", "mtsql.commands.demonstrations"]
        shown = train("shown", showing, short_sft, done="demonstrations.jsonl")
        taught = ("--targets", "teacher", "--teacher", shown, "--questions", "0", "--correct", "ex")
        demonstrations = train("demonstrations", sft, short_sft, *once, *taught, *small_steps, *part, resume)
        evaluate("demonstrations", demonstrations)
        round_2 = train("sft", sft, demonstrations, "--rounds", "2", *small_steps, resume)
        evaluate("round_1", str(folder / "sft" / "policies" / "round_1"))
        evaluate("round_2", round_2)
        counts = train("curriculum", ["-m", "mtsql.commands.curriculum"], warm, done="counts.jsonl")
        if small:
            choice = ["-m", "mtsql.commands.hard_yet_solvable", *shared[:4], *mix, "--counts", counts]
            chosen = folder / "chosen"
            choice += [*SOLVABLE, "--out", str(chosen)]
            parts.append(Part("chosen", choice, chosen / "counts.jsonl"))
    short_sft = str(first / "short_sft" / "policy")
    curriculum = ("--curriculum", str(first / counted / "counts.jsonl"), resume)
    drawn = (resume,) if small else curriculum  # of the few that are chosen 60 steps would make many passes
    short_rl = train("short_rl", grpo, short_sft, *no_tools, "--rewards", "outcome", *drawn)
    evaluate("short_rl", short_rl, *no_tools)
    outcome = train("rl_outcome", grpo, warm, "--rewards", "outcome", *tools_budget, *curriculum)
    evaluate("rl_outcome", outcome)
    final = train("rl", grpo, warm, "--rewards", "process", *tools_budget, *curriculum)
    evaluate("rl", final)
    for tools in ("no_execution", "no_memory"):
        evaluate(f"rl_{tools}", final, "--tools", tools)
    evaluate("rl_predicted", final, "--history", "predicted")
    return parts
