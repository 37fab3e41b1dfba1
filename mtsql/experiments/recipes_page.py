"""The page that compares the recipes: before and after RL, and each paper's own comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtsql.experiments import markdown as md
from mtsql.experiments.arms import (
    Arms,
    Seeds,
    Verdict,
    breakdown_keys,
    estimate,
    mean_over_seeds,
    measure_of,
    paired_answers,
    read_arms,
    read_json,
    read_lines,
    verdicts,
)
from mtsql.experiments.page import write_page
from mtsql.parts import Part
from mtsql.recipes import RECIPES
from mtsql.report.metrics import HARDNESS

PAPERS = {"mtsql_r1": "MTSQL-R1", "skyrl_sql": "SkyRL-SQL", "sql_trail": "SQL-Trail", "mtir_sql": "MTIR-SQL"}
SEVERAL_TURNS = "RL over several turns beats RL in a single turn"
SIX_REWARDS = "all six rewards beat the execution reward alone"
FILTER = "the filter of GRPO-Filter helps, without KL on either side"
WITHOUT_SCHEMA = "without the schema the trained agent does better than the untrained"
NEEDS_SCHEMA = "the agent needs the schema in its prompt"
BUILT_IN = {NEEDS_SCHEMA: "its first model never saw a prompt without the schema"}
CLAIMS = (  # claim, paper, better arm, worse arm
    (SEVERAL_TURNS, "SkyRL-SQL", "skyrl_sql_rl", "skyrl_sql_single_rl"),
    (SEVERAL_TURNS, "SQL-Trail, Table 2", "sql_trail_rl", "sql_trail_single_rl"),
    (SIX_REWARDS, "argued in SQL-Trail, section 3.3.2", "sql_trail_rl", "sql_trail_execution_rl"),
    (FILTER, "MTIR-SQL, Table 4, has KL", "mtir_sql_rl", "mtir_sql_unfiltered_rl"),
    (NEEDS_SCHEMA, "SkyRL-SQL, Table 4", "skyrl_sql_rl", "skyrl_sql_rl_names"),
    (WITHOUT_SCHEMA, "SkyRL-SQL, Table 4", "skyrl_sql_rl_names", "skyrl_sql_base_names"),
)


def write_recipes_page(
    runs: Path, path: Path, seeds: Sequence[int], parts: Sequence[Part], made_with: str
) -> Path:
    """Write the page and its raw numbers beside it; only what is finished is in them. Returns `path`."""
    arms = read_arms(runs, seeds)
    sections = {
        "Before and after RL": before_and_after(arms, seeds, questions_of(runs, seeds)),
        "By hardness": by_hardness(arms),
        "The papers' own comparisons": claims_table(arms, seeds),
        "Several samples an answer (SQL-Trail, section 4.3)": samples_table(arms),
    }
    return write_page(path, "Four papers on the same machinery", arms, seeds, parts, made_with, sections)


def questions_of(runs: Path, seeds: Sequence[int]) -> dict[str, int]:
    """How many different training questions each recipe learned from, in its last seed that is finished."""
    found = {(r, s): learned_from(runs / f"seed{s}" / r) for s in seeds for r in RECIPES}
    return {recipe: len(ids) for (recipe, _), ids in found.items() if ids}


def learned_from(folder: Path) -> set[str]:
    """The ids of the questions that a run of RL, and the warm start that it began from, learned from."""
    asked, run = read_json(folder / "asked.json"), read_json(folder / "run.json")
    if asked is None or run is None:
        return set()
    warm_start = Path(run["config"]["model"]).parent  # its trajectories are of what it was fine-tuned on
    is_one = "targets" in (read_json(warm_start / "run.json") or {"config": {}})["config"]
    kept = read_lines(warm_start / "trajectories.jsonl") if is_one else []
    return {*asked, *(record["example_id"] for record in kept)}


def data_efficiency(before: float, after: float, questions: int) -> float:
    """Points of EX gained per 1,000 different training questions (SQL-Trail, equation 5).

    `before` and `after` are EX as fractions.
    """
    return 100 * (after - before) / questions * 1000


def before_and_after(arms: Arms, seeds: Sequence[int], asked: Mapping[str, int]) -> str:
    """EX, interactions and tokens of each recipe, from the same untrained model."""
    rows = []
    for recipe, sides in _finished(arms).items():
        gained = paired_answers(sides[1], sides[0])
        efficiency = md.EMPTY
        if gained and recipe in asked:
            before, after = (mean_over_seeds(side, "ex", "mean") for side in sides)
            efficiency = md.decimal(data_efficiency(before, after, asked[recipe]))
        accuracies = [md.mean_and_seeds(side, seeds) for side in sides]
        effort = [_before_after(sides, key) for key in ("interactions", "sampled_tokens")]
        in_em = [md.mean_and_seeds(side, seeds, "em") for side in sides]
        rows.append([PAPERS[recipe], *accuracies, md.difference_of(gained), efficiency, *effort, *in_em])
    header = ["Recipe", "EX before", "EX after", "difference", "points for 1,000 questions"]
    header += ["interactions an answer", "tokens written an answer", "EM before", "EM after"]
    note = (
        f"EX and EM in %, greedy: mean over seeds (seeds {md.listed(seeds)}); the difference in points with "
        "its 95 % interval, as below. Points for 1,000 questions are SQL-Trail's data "
        "efficiency (Equation 5), over the different questions that warm start and RL learned from."
    )
    return md.table(header, rows, note, md.made_by_arm(arms, ("skyrl_sql_rl", *arms)))


def by_hardness(arms: Arms) -> str:
    """EX, interactions and tokens of each recipe before and after, by hardness."""
    rows = [
        [
            *(PAPERS[recipe], name),
            *(_before_after(sides, *breakdown_keys(quantity, "hardness"), h, scale=scale) for h in HARDNESS),
        ]
        for recipe, sides in _finished(arms).items()
        for name, quantity, scale in (
            ("EX in %", "ex", 100),
            ("EM in %", "em", 100),
            ("interactions", "interactions", 1),
            ("tokens written", "sampled_tokens", 1),
        )
    ]
    counted = [e.summary["questions_by_hardness"] for found in arms.values() for e in found.values()]
    header = [f"{h} ({max((c.get(h, 0) for c in counted), default=0)})" for h in HARDNESS]
    note = "Before → after RL, an answer, greedy; means over seeds. In the header, the number of questions."
    return md.table(["Recipe", "", *header], rows, note)


def claims_table(arms: Arms, seeds: Sequence[int]) -> str:
    """Each paper's headline comparison: EX of both sides and the difference."""
    compared = []
    for claim, source, better, worse in CLAIMS:
        sides = arms.get(better, {}), arms.get(worse, {})
        differences = [estimate(paired_answers(*sides, measure_of(metric))) for metric in ("ex", "em")]
        if all(differences):
            compared.append(([claim, source, f"`{better}` - `{worse}`"], sides, differences))
    rows = []
    tested = [d for cells, _, differences in compared for d in differences if cells[0] not in BUILT_IN]
    said = iter(verdicts(tested, seeds))
    for cells, sides, differences in compared:
        accuracies = [md.mean_and_seeds(side, seeds) for side in sides]
        for difference in differences:
            gained = f"{md.signed(100 * difference.mean)} {md.interval_of(difference)}"
            each = ", ".join(md.signed(100 * d) for d in difference.by_seed.values())
            verdict = Verdict("built in") if cells[0] in BUILT_IN else next(said)
            p = "" if verdict.p is None else f", p {verdict.p:.3f}"
            accuracies += [f"{gained} ({each})", f"{verdict.said}{p}"]
        sampled = ", ".join(md.percent(mean_over_seeds(side, "ex_sampled")) for side in sides)
        rows.append([*cells, *accuracies, sampled])
    header = ["claim", "where", "compared", "EX of the first", "of the second"]
    header += ["difference", "verdict", "in EM", "verdict on EM", "sampled EX of both"]
    note = (
        "95 % intervals: databases are resampled, and the spread of the seeds of RL is added as Student's t; "
        "in parentheses each seed's difference. All seeds share one first model, so that nothing is said of "
        "others. *Holds*: above 0, and p is at most 0.05 after Holm's correction over this table. *The "
        "contrary holds*: below 0 likewise. *Not beyond chance*: neither. *Untested*: without all seeds. "
        f"*Built in*: decided by construction ({'; '.join(BUILT_IN.values())}). Sampled EX "
        "(temperature 1) has no part in the verdict. The papers compare otherwise where several turns stand "
        "against one: SkyRL-SQL evaluates both agents both ways, here each has its own; SQL-Trail has no "
        "r_turns on either side, here only a single turn has none."
    )
    return md.table(header, rows, note)


def samples_table(arms: Arms) -> str:
    """Greedy, the mean sample, the majority of the samples, and pass@k."""
    columns = {
        "greedy": ("ex", "mean"),
        "one sample": ("ex_sampled",),
        "majority of 8": ("ex_majority",),
        **{f"pass@{k}": ("pass_at_k", str(k)) for k in (2, 4, 8)},
    }
    rows = [
        [PAPERS[recipe], *(md.percent(mean_over_seeds(after, *keys)) for keys in columns.values())]
        for recipe, (_, after) in _finished(arms).items()
        if mean_over_seeds(after, "ex_majority") is not None
    ]
    return md.table(["Recipe", *columns], rows, "In %, means over seeds, after RL.")


def _finished(arms: Arms) -> dict[str, tuple[Seeds, Seeds]]:
    """The evaluations of each recipe before and after RL, of which at least one is there."""
    sides = {recipe: (arms.get(f"{recipe}_base", {}), arms.get(f"{recipe}_rl", {})) for recipe in RECIPES}
    return {recipe: both for recipe, both in sides.items() if any(both)}


def _before_after(sides: tuple[Seeds, Seeds], *keys: str, scale: float = 1) -> str:
    return " → ".join(md.decimal(mean_over_seeds(side, *keys, scale=scale)) for side in sides)
