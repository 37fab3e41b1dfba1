"""The suites of `reproduce.py`: tables of trainings and of arms, each one command.

Options are written as in a shell. In them {data} and {other} stand for --data and --other, {rank} for the
rank of LoRA in [sft].
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mtsql.extras.reproduce import Part
from mtsql.recipes import RECIPES

Names = tuple[str, ...]
SFT, GRPO = "train_sft.py", "train_grpo.py"
IMITATE, COUNT = "-m mtsql.toy.imitation", "-m mtsql.extras.curriculum"
DONE = {SFT: "policy", GRPO: "policy", COUNT: "counts.jsonl", IMITATE: "run.json"}
BASE = "base"  # not a training: the model that the suite begins with, given or what `imitation` makes
NO_TOOLS, PREDICTED = "--tools none", "--history predicted"
TOY_BENCHMARK = "-m mtsql.toy.benchmark {data} --seed 1"  # whose train models/toy have seen
TOY_SETS = {split: f"--data {{data}} --split {split}" for split in ("test", "test_themes")}
OUTCOME, PROCESS = "--rewards outcome", "--rewards process"


class Training(NamedTuple):
    """A command that makes a policy, or counts for the curriculum."""

    script: str
    start: str = BASE  # the training whose policy it begins with
    options: str = ""
    counts: str = ""  # the training whose counts are its curriculum


class Arm(NamedTuple):
    """What is evaluated: a row of the page."""

    what: str
    policy: str  # a training, or a folder below it
    options: str = ""  # of evaluate.py
    sets: Names = ()  # that it answers; () is all


class Suite(NamedTuple):
    """All commands of a suite, and the pairs of arms whose difference its page shows."""

    title: str
    config: str  # files with blanks between
    trained_on: str  # the data of every training
    sets: Mapping[str, str]  # name: the options of evaluate.py that ask it
    trainings: Mapping[str, Training]
    arms: Mapping[str, Arm]
    pairs: tuple[tuple[str, str, str], ...]  # what it compares, one arm, and the arm that is subtracted
    seeds: tuple[int, ...] = (0,)
    once: Names = ()  # trainings, or BASE, that seed 0 has made for all seeds
    benchmark: str = ""  # makes {data}, where the suite has its own
    files: Names = ()  # that --data holds
    corrected: bool = False  # whether the intervals of differences are widened for their number

    def is_once(self, arm: str) -> bool:
        """Whether the arm is one for all seeds."""
        return arm in self.arms and self.arms[arm].policy.partition("/")[0] in self.once

    def benchmark_part(self, out: Path) -> Part:
        """The command that makes the suite's own data."""
        data = out / "benchmark"
        return Part("benchmark", filled(self.benchmark, {"data": str(data)}), data)


def filled(options: str, places: Mapping[str, str]) -> list[str]:
    """The words of some options, with what stands for {names} in them."""
    return shlex.split(options.format(**{name: shlex.quote(value) for name, value in places.items()}))


def parts_of(suite: Suite, out: Path, seed: int, places: Mapping[str, str]) -> list[list[Part]]:
    """The trainings of one seed, each followed by the evaluations of what it made.

    `places` has what stands for data, other and rank in the options, and the model; `imitation` makes one if
    that is "". A later --config takes the place of an earlier one.
    """
    chains: list[list[Part]] = []
    places = {**places, "config": suite.config}
    shared = ["--config", *suite.config.split(), "--seed", str(seed)]

    def folder(policy: str) -> Path:
        return out / f"seed{0 if policy.partition('/')[0] in suite.once else seed}" / policy

    def made(policy: str) -> str:
        if policy == BASE:
            return places["model"] or str(folder("imitation"))
        script = suite.trainings[policy].script if policy in suite.trainings else IMITATE
        return str(folder(policy) if script == IMITATE else folder(policy) / DONE[script])

    for name in sorted((BASE, *suite.trainings), key=lambda name: name != "imitation"):
        if name in suite.once and seed != 0:
            continue
        chains.append(parts := [])
        if name != BASE and not (name == "imitation" and places["model"]):
            script, start, options, counts = suite.trainings[name]
            command = [*script.split(), *shared, *filled(suite.trained_on, places)]
            command += ["--out", str(folder(name))]
            command += ["--model", made(start)] if script != IMITATE else []
            command += [*filled(options, places), *(["--curriculum", made(counts)] if counts else [])]
            command += ["--resume"] if script not in (COUNT, IMITATE) else []
            parts.append(Part(name, command, folder(name) / DONE[script]))
        for arm, (_, policy, options, sets) in suite.arms.items():
            for asked in sets or suite.sets if policy.partition("/")[0] == name else ():
                if "{other}" not in suite.sets[asked] or places["other"]:
                    done = folder(name).parent / "evaluation" / asked / arm
                    command = ["evaluate.py", *shared, *filled(suite.sets[asked], places)]
                    command += ["--model", made(policy), "--out", str(done), *filled(options, places)]
                    parts.append(Part(f"evaluate {arm} on {asked}", command, done / "summary.json"))
    return chains


def authors_suite(title: str, config: str, sets: Mapping[str, str], gold: int, caps: Names) -> Suite:
    """Every arm of MTSQL-R1's own method and its baselines of the same model (Tables 2 to 4).

    All RL runs have the same questions, steps and samples. `gold` is how many questions fine-tuning on gold
    SQL has, 0 for all; `caps` are the response tokens of the capped arms.
    """
    at_home = tuple(sets)[:1]
    trainings = {
        "short_sft": Training(SFT, BASE, f"{NO_TOOLS} --targets gold --rounds 1 --questions {gold}"),
        "sft": Training(SFT),
        "curriculum": Training(COUNT, "sft"),
        "short_rl": Training(GRPO, BASE, f"{NO_TOOLS} --lora-rank {{rank}} {OUTCOME}", "curriculum"),
        "rl_outcome": Training(GRPO, "sft", OUTCOME, "curriculum"),
        "rl_process": Training(GRPO, "sft", PROCESS, "curriculum"),
    }
    arms = {
        "base": Arm("untrained, both tools", BASE),
        "base_direct": Arm("untrained, no tools", BASE, NO_TOOLS),
        "short_sft": Arm("fine-tuned on gold SQL, no tools", "short_sft", NO_TOOLS),
        "short_rl": Arm("RL from the base, no tools", "short_rl", NO_TOOLS),
        "round_1": Arm("warm start, round 1", "sft/policies/round_1"),
        "round_2": Arm("warm start, round 2", "sft/policies/round_2"),
        "round_3": Arm("warm start, round 3", "sft"),
        "rl_outcome": Arm("RL, outcome rewards", "rl_outcome"),
        "rl_process": Arm("RL, outcome and process rewards: the final agent", "rl_process"),
    }
    for tools, lost in (("no_execution", "EXECUTE"), ("no_memory", "MEMORY-VERIFY")):
        without, trained = f"--tools {tools}", f"rl_{tools}_trained"
        trainings[f"sft_{tools}"] = Training(SFT, BASE, without)
        trainings[trained] = Training(GRPO, f"sft_{tools}", f"{without} {PROCESS}", "curriculum")
        arms[f"base_{tools}"] = Arm(f"untrained, without {lost}", BASE, without)
        arms[f"rl_{tools}"] = Arm(f"final agent, {lost} taken away", "rl_process", without)
        arms[trained] = Arm(f"warm start and RL without {lost}", trained, without)
    for arm in ("base", "short_sft", "round_3", "rl_process"):
        _, policy, options, _ = arms[arm]
        own = "with its own earlier answers in the history"
        arms[f"{arm}_predicted"] = Arm(f"`{arm}` {own}", policy, f"{options} {PREDICTED}", at_home)
    for cap in caps:
        what = f"final agent, at most {cap} response tokens"
        arms[f"rl_cap_{cap}"] = Arm(what, "rl_process", f"--max-response-tokens {cap}", at_home)
    pairs = (
        ("tools, untrained (Finding 2)", "base", "base_direct"),
        ("long-horizon warm start against short-horizon SFT (Table 2)", "round_3", "short_sft"),
        ("second round (Finding 7)", "round_2", "round_1"),
        ("third round (Finding 7)", "round_3", "round_2"),
        ("RL beside its warm start (Finding 8)", "rl_outcome", "round_3"),
        ("process rewards beside outcome alone (Finding 9)", "rl_process", "rl_outcome"),
        ("long against short horizon in RL (Table 2)", "rl_outcome", "short_rl"),
        ("final agent against short-horizon SFT (Finding 6)", "rl_process", "short_sft"),
        ("EXECUTE: taken away (Finding 10)", "rl_process", "rl_no_execution"),
        ("EXECUTE: trained without", "rl_process", "rl_no_execution_trained"),
        ("MEMORY-VERIFY: taken away (Finding 10)", "rl_process", "rl_no_memory"),
        ("MEMORY-VERIFY: trained without", "rl_process", "rl_no_memory_trained"),
        ("gold history against its own answers", "rl_process", "rl_process_predicted"),
    )
    return Suite(title, config, "--data {data}", sets, trainings, arms, pairs, once=(BASE,))


def quick_suite() -> Suite:
    """The recipe in small: one round of Algorithm 1, then GRPO with both kinds of rewards, no curriculum."""
    known = ("test",)
    arms = {
        "imitation": Arm("untrained, both tools", BASE, "", known),
        "short_horizon": Arm("untrained, no tools", BASE, NO_TOOLS),
        "warm_start": Arm("warm start", "sft"),
        "rl": Arm("after RL", "grpo"),
        "rl_no_execution": Arm("after RL, EXECUTE taken away", "grpo", "--tools no_execution", known),
        "rl_no_memory": Arm("after RL, MEMORY-VERIFY taken away", "grpo", "--tools no_memory", known),
    }
    pairs = (
        ("RL beside its warm start", "rl", "warm_start"),
        ("the recipe beside the model without tools", "rl", "short_horizon"),
        ("EXECUTE", "rl", "rl_no_execution"),
        ("MEMORY-VERIFY", "rl", "rl_no_memory"),
    )
    return Suite(
        "The recipe in small on the embedded benchmark",
        "configs/toy.toml",
        "--data {data}",
        TOY_SETS,
        {"imitation": Training(IMITATE), "sft": Training(SFT), "grpo": Training(GRPO, "sft")},
        arms,
        pairs,
        benchmark=TOY_BENCHMARK,
    )


def toy_suite() -> Suite:
    """MTSQL-R1's arms on the embedded benchmark, with models of half and twice its layers in seed 0."""
    suite = authors_suite(
        "MTSQL-R1's arms on the embedded benchmark", "configs/toy_suite.toml", TOY_SETS, 1500, ("90", "60")
    )
    gold = suite.trainings["short_sft"].options
    trainings, arms, once = {"imitation": Training(IMITATE), **suite.trainings}, dict(suite.arms), []
    for layers in (2, 8):
        of = f"layers_{layers}_"
        own = {
            f"{of}base": Training(IMITATE, "", f"--layers {layers}"),
            f"{of}short_sft": Training(SFT, f"{of}base", gold),
            f"{of}round_3": Training(SFT, f"{of}base"),
            f"{of}curriculum": Training(COUNT, f"{of}round_3"),
            f"{of}rl_process": Training(GRPO, f"{of}round_3", PROCESS, f"{of}curriculum"),
        }
        trainings |= own
        once += own
        for arm in ("base", "short_sft", "round_3", "rl_process"):
            like = suite.arms[arm]
            arms[of + arm] = Arm(f"{layers} layers: {like.what}", of + arm, like.options)
    return suite._replace(
        trainings=trainings, arms=arms, seeds=tuple(range(5)), once=tuple(once), benchmark=TOY_BENCHMARK
    )


def recipes_suite() -> Suite:
    """Four papers on the same machinery: the same tiny model, questions and budget, one recipe each.

    RL asks what the first model does not always get right, counted with SQL-Trail's prompts. Beside them are
    comparisons after the papers'.
    """
    single = f"{NO_TOOLS} --max-interactions 0"
    trainings = {
        "imitation": Training(IMITATE, "", "--all-recipes"),
        "counts": Training(COUNT, BASE, "--config configs/sql_trail.toml {config}"),
    }
    arms = {}
    trained = {recipe: (recipe, "", "", "") for recipe in RECIPES} | {
        "skyrl_sql_single": ("skyrl_sql", ", a single turn", single, ""),
        "sql_trail_single": ("sql_trail", ", a single turn", single, "--rewards turns=0"),
        "sql_trail_execution": ("sql_trail", ", the execution reward alone", "", "--rewards execution"),
        "mtir_sql_unfiltered": ("mtir_sql", ", no filter", "", "--rewards unfiltered"),
    }
    for name, (recipe, how, both, training) in trained.items():
        paper = "" if recipe == RECIPES[0] else f"--config configs/{recipe}.toml {{config}}"
        options = f"{paper} {both}"
        if both or name == recipe:
            arms[f"{name}_base"] = Arm(f"`{recipe}` before RL{how}", BASE, options)
        trainings[f"{name}_rl"] = Training(GRPO, BASE, f"{options} {training}", "counts")
        arms[f"{name}_rl"] = Arm(f"`{recipe}` after RL{how}", f"{name}_rl", options)
    pairs = (
        *((f"RL with {recipe}", f"{recipe}_rl", f"{recipe}_base") for recipe in RECIPES),
        ("several turns against one (SkyRL-SQL)", "skyrl_sql_rl", "skyrl_sql_single_rl"),
        ("several turns against one (SQL-Trail, Table 2)", "sql_trail_rl", "sql_trail_single_rl"),
        ("six rewards against execution alone (SQL-Trail, 3.3.2)", "sql_trail_rl", "sql_trail_execution_rl"),
        ("GRPO-Filter (MTIR-SQL, Table 4)", "mtir_sql_rl", "mtir_sql_unfiltered_rl"),
    )
    return Suite(
        "Four papers on the same machinery",
        "configs/recipes.toml",
        "--data {data}",
        {"test": "--data {data} --split test"},
        trainings,
        arms,
        pairs,
        seeds=(0, 1, 2),
        once=(BASE, "imitation", "counts"),
        benchmark="-m mtsql.toy.benchmark {data} --single",
    )


def real_suite() -> Suite:
    """The whole recipe with a small language model on real dialogues. Seeds differ in RL alone.

    An agent is chosen by the held-out databases of the mix. Spider's dev set has single questions, with no
    dialogue to check against. short_rl, rl_outcome and rl have the same steps, groups and samples, each on
    the questions that its own warm start solves now and then.
    """
    databases = "--databases {data}/database"
    schemas = "--tables {data}/sparc/tables.json"  # SParC's are Spider's databases
    mix = f"--data {{data}}/real/train_mix.json {schemas} {databases}"
    sets = {
        "sparc": f"--data {{data}}/sparc/dev.json {databases} --split dev",
        "cosql": f"--data {{data}}/cosql/dev.json {databases} --split dev",
        "held_out": f"{mix} --split held_out",
        "spider": f"--data {{data}}/spider/dev.json {schemas} {databases} --split dev",
    }
    dev, chosen = ("sparc", "cosql"), ("sparc", "cosql", "held_out")
    gold = "--targets gold --rounds 1"  # of either fine-tuning: the same questions and passes
    self_taught = "--targets self --rounds 2 --questions 4000 --lora-rank 0"
    trainings = {
        "short_sft": Training(SFT, BASE, f"{NO_TOOLS} {gold}"),
        "warm_start": Training(SFT, BASE, gold),
        "sft": Training(SFT, "warm_start", self_taught),
        "short_counts": Training(COUNT, "short_sft", NO_TOOLS),
        "counts": Training(COUNT, "warm_start"),
        "short_rl": Training(GRPO, "short_sft", f"{NO_TOOLS} {OUTCOME}", "short_counts"),
        "rl_outcome": Training(GRPO, "warm_start", OUTCOME, "counts"),
        "rl": Training(GRPO, "warm_start", PROCESS, "counts"),
    }
    arms = {
        "base": Arm("untrained, both tools", BASE, "", dev),
        "short_sft": Arm("fine-tuned on gold SQL, no tools", "short_sft", NO_TOOLS),
        "warm_start": Arm("fine-tuned on gold SQL with the protocol shown, both tools", "warm_start"),
        "round_1": Arm("then round 1 of Algorithm 1", "sft/policies/round_1", "", chosen),
        "round_2": Arm("then round 2", "sft", "", chosen),
        "short_rl": Arm("`short_sft`, then RL without tools", "short_rl", NO_TOOLS),
        "rl_outcome": Arm("`warm_start`, then RL with outcome rewards", "rl_outcome", "", chosen),
        "rl": Arm("`warm_start`, then RL with outcome and process rewards", "rl"),
        "rl_no_execution": Arm("`rl` without EXECUTE", "rl", "--tools no_execution", dev),
        "rl_no_memory": Arm("`rl` without MEMORY-VERIFY", "rl", "--tools no_memory", dev),
        "rl_predicted": Arm("`rl` with its own earlier answers in the history", "rl", PREDICTED, dev),
    }
    pairs = (
        ("RL without tools, beside its warm start", "short_rl", "short_sft"),
        ("the protocol shown, beside gold SQL alone", "warm_start", "short_sft"),
        ("two rounds, beside gold SQL alone", "round_2", "short_sft"),
        ("RL (outcome and process), beside gold SQL alone", "rl", "short_sft"),
        ("RL (outcome), beside its warm start", "rl_outcome", "warm_start"),
        ("RL (outcome and process), beside its warm start", "rl", "warm_start"),
        ("process rewards, beside outcome alone", "rl", "rl_outcome"),
        ("long horizon, beside short-horizon RL", "rl_outcome", "short_rl"),
        ("EXECUTE", "rl", "rl_no_execution"),
        ("MEMORY-VERIFY", "rl", "rl_no_memory"),
        ("gold history, beside its own answers", "rl", "rl_predicted"),
    )
    files = tuple(f"{folder}/{name}.json" for folder in dev for name in ("dev", "tables"))
    return Suite(
        "The recipe with a small language model on SParC and CoSQL",
        "configs/real_qwen.toml",
        mix,
        sets,
        trainings,
        arms,
        pairs,
        once=(BASE, "short_sft", "warm_start", "sft", "short_counts", "counts"),
        files=("real/train_mix.json", *files, "spider/dev.json", "database"),
    )


def dataset_suite(name: str, other: str) -> Suite:
    """MTSQL-R1's arms on SParC or CoSQL, and on the dev set of the other of the two."""
    sets = {name: "--data {data} --split dev", other: "--data {other} --split dev"}
    config = f"configs/{name}_qwen3_1.7b_lora.toml"
    return authors_suite(f"MTSQL-R1's arms, trained on {name}", config, sets, 0, ("4000", "2000"))


SUITES = {
    "quick": quick_suite(),
    "toy": toy_suite(),
    "sparc": dataset_suite("sparc", "cosql"),
    "cosql": dataset_suite("cosql", "sparc"),
    "real": real_suite(),
    "recipes": recipes_suite(),
}
