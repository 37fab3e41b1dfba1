"""The page that compares the recipes: before and after RL, and each paper's own comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from mtsql.experiments.arms import Arms, estimate, mean_over_seeds, paired_answers, read_arms, read_json
from mtsql.experiments.page import Commands, command_list, heading, minutes_table, raw_numbers
from mtsql.experiments.tables import EMPTY, joined, listed, made_by_arm, percent, shown_difference, table
from mtsql.files import write_atomically
from mtsql.recipes import RECIPES
from mtsql.report.metrics import HARDNESS, data_efficiency

PAPERS = {"mtsql_r1": "MTSQL-R1", "skyrl_sql": "SkyRL-SQL", "sql_trail": "SQL-Trail", "mtir_sql": "MTIR-SQL"}
CLAIMS = (  # claim, paper, better arm, worse arm
    ("RL over several turns beats RL in a single turn", "SkyRL-SQL", "skyrl_sql_rl", "skyrl_sql_single_rl"),
    (
        "RL over several turns beats RL in a single turn",
        "SQL-Trail, Table 2",
        "sql_trail_rl",
        "sql_trail_single_rl",
    ),
    (
        "all six rewards beat the execution reward alone",
        "SQL-Trail, section 3.3.2",
        "sql_trail_rl",
        "sql_trail_execution_rl",
    ),
    ("GRPO-Filter beats GRPO", "MTIR-SQL, Table 4", "mtir_sql_rl", "mtir_sql_unfiltered_rl"),
    ("the agent needs the schema in its prompt", "SkyRL-SQL, Table 4", "skyrl_sql_rl", "skyrl_sql_rl_names"),
    (
        "without the schema the trained agent does better than the untrained",
        "SkyRL-SQL, Table 4",
        "skyrl_sql_rl_names",
        "skyrl_sql_base_names",
    ),
)


def write_recipes_page(
    runs: Path,
    seeds: Sequence[int],
    folder: Path,
    hardware: str,
    date: str,
    made_with: str,
    commands: Commands,
) -> Path:
    """Write recipes.md and recipes.json; only what is finished is in them.

    `commands` are (title, command line, path that exists once it is done).
    """
    arms = read_arms(runs, seeds)
    sections = [
        (
            "# Four papers on the same machinery",
            heading(arms, seeds, commands, hardware, date, made_with, folder / "recipes_notes.md"),
        ),
        ("## Before and after RL", before_and_after(arms, seeds, questions_of(runs, seeds))),
        ("## By hardness", by_hardness(arms)),
        ("## The papers' own comparisons", claims_table(arms, seeds)),
        ("## Several samples an answer (SQL-Trail, section 4.3)", samples_table(arms)),
        ("## Minutes", minutes_table(commands, seeds)),
        ("## Commands", command_list(commands, seeds)),
    ]
    raw = ",\n".join(map(json.dumps, raw_numbers(arms)))
    write_atomically(folder / "recipes.json", f"[\n{raw}\n]\n")
    page = folder / "recipes.md"
    write_atomically(page, "\n\n".join(f"{head}\n\n{body}" for head, body in sections if body) + "\n")
    return page


def questions_of(runs: Path, seeds: Sequence[int]) -> dict[str, int]:
    """The training questions that each recipe's RL asked, as run.json has them: steps times prompts."""
    asked = {}
    for recipe in RECIPES:
        for seed in seeds:
            run = read_json(runs / f"seed{seed}" / recipe / "run.json")
            if run:
                asked[recipe] = run["config"]["steps"] * run["config"]["prompts_per_step"]
    return asked


def before_and_after(arms: Arms, seeds: Sequence[int], asked: Mapping[str, int]) -> str:
    """EX, interactions and tokens of each recipe, from the same untrained model."""
    rows = []
    for recipe in RECIPES:
        base, rl = arms.get(f"{recipe}_base", {}), arms.get(f"{recipe}_rl", {})
        gained = paired_answers(rl, base, lambda r: r["ex"])
        before, after = (mean_over_seeds(side, lambda s: s["ex"]["mean"]) for side in (base, rl))
        efficiency = EMPTY
        if gained and recipe in asked:
            efficiency = f"{data_efficiency(before, after, asked[recipe]):.1f}"
        cells = [_ex(base, seeds), _ex(rl, seeds), shown_difference(gained), efficiency]
        for key in ("interactions", "sampled_tokens"):
            numbers = [mean_over_seeds(side, lambda s, k=key: s[k]) for side in (base, rl)]
            cells.append(" → ".join(EMPTY if n is None else f"{n:.1f}" for n in numbers))
        if base or rl:
            rows.append([PAPERS[recipe], *cells])
    header = [
        "Recipe",
        "EX before",
        "EX after",
        "difference",
        "points for 1,000 questions",
        "interactions an answer",
        "tokens written an answer",
    ]
    note = (
        f"EX in %, greedy: mean over seeds (seeds {listed(seeds)}); the difference in points with its 95 % "
        "interval, which resamples questions. Points for 1,000 questions are SQL-Trail's data efficiency "
        "(Equation 5)."
    )
    return joined(table(header, rows), note, made_by_arm(arms, ("skyrl_sql_rl", *arms))) if rows else ""


def by_hardness(arms: Arms) -> str:
    """EX, interactions and tokens of each recipe before and after, by hardness."""
    measures = (  # name, where a summary has it, scale
        ("EX in %", lambda s: s["ex"]["by_hardness"], 100),
        ("interactions", lambda s: s["interactions_by_hardness"], 1),
        ("tokens written", lambda s: s["sampled_tokens_by_hardness"], 1),
    )
    rows = []
    for recipe in RECIPES:
        sides = [arms.get(f"{recipe}_{stage}", {}) for stage in ("base", "rl")]
        for name, measure, scale in measures if any(sides) else ():
            cells = []
            for hardness in HARDNESS:
                means = [mean_over_seeds(s, lambda x, m=measure, h=hardness: m(x).get(h)) for s in sides]
                cells.append(" → ".join(EMPTY if m is None else f"{scale * m:.1f}" for m in means))
            rows.append([PAPERS[recipe], name, *cells])
    counted = [e.summary["questions_by_hardness"] for found in arms.values() for e in found.values()]
    header = [f"{h} ({max((c.get(h, 0) for c in counted), default=0)})" for h in HARDNESS]
    note = "Before → after RL, an answer, greedy; means over seeds. In the header, the number of questions."
    return joined(table(["Recipe", "", *header], rows), note) if rows else ""


def claims_table(arms: Arms, seeds: Sequence[int]) -> str:
    """Each paper's headline comparison: EX of both sides and the difference."""
    rows = []
    for claim, source, better, worse in CLAIMS:
        sides = arms.get(better, {}), arms.get(worse, {})
        gained = paired_answers(*sides, lambda r: r["ex"])
        if gained:
            low, high = estimate(gained).interval
            verdict = "holds" if low > 0 else "does not hold" if high < 0 else "not beyond chance"
            compared = f"`{better}` - `{worse}`"
            sampled = ", ".join(percent(mean_over_seeds(s, lambda x: x.get("ex_sampled"))) for s in sides)
            both = [_ex(s, seeds) for s in sides]
            rows.append([claim, source, compared, *both, shown_difference(gained), verdict, sampled])
    header = ["The paper finds that", "where", "compared", "EX of the first", "of the second"]
    header += ["difference", "verdict", "sampled EX of both"]
    note = (
        "*Holds*: the whole interval is above 0; *does not hold*: it is below 0. Sampled EX (temperature 1) "
        "has no part in the verdict. In a single turn SQL-Trail's r_turns is off (section 5.1)."
    )
    return joined(table(header, rows), note) if rows else ""


def samples_table(arms: Arms) -> str:
    """Greedy, the mean sample, the majority of the samples, and pass@k."""
    rows = []
    for recipe in RECIPES:
        side = arms.get(f"{recipe}_rl", {})
        if any("ex_majority" in e.summary for e in side.values()):
            numbers = (
                lambda s: s["ex"]["mean"],
                lambda s: s.get("ex_sampled"),
                lambda s: s.get("ex_majority"),
                *(lambda s, k=k: s.get("pass_at_k", {}).get(k) for k in ("2", "4", "8")),
            )
            rows.append([PAPERS[recipe], *(percent(mean_over_seeds(side, n)) for n in numbers)])
    header = ["Recipe", "greedy", "one sample", "majority of 8", "pass@2", "pass@4", "pass@8"]
    return joined(table(header, rows), "In %, means over seeds, after RL.") if rows else ""


def _ex(side: Mapping, seeds: Sequence[int]) -> str:
    each = ", ".join(percent(side[s].summary["ex"]["mean"]) if s in side else EMPTY for s in seeds)
    return f"{percent(mean_over_seeds(side, lambda s: s['ex']['mean']))} ({each})" if side else EMPTY
