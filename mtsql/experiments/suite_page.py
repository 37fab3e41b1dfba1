"""The results page of MTSQL-R1's experiments: tables, figures and raw numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from mtsql.experiments import tables
from mtsql.experiments.arms import command_of, read_arms, read_coverage
from mtsql.experiments.cases import cases
from mtsql.experiments.figures import write_figures
from mtsql.experiments.findings import Making
from mtsql.experiments.markdown import joined, made_by
from mtsql.experiments.page import write_page
from mtsql.parts import Part

FIGURES = {  # what to see in each
    "averages": "Figure 1: EX of the main arms, the mean of in and out of domain, means over seeds. See "
    "which stage overtakes the arms without tools.",
    "breakdown": "Figures 4 and 12: EX, tokens and interactions by hardness and by turn, means over seeds. "
    "See where the long horizon gains most over short-horizon SFT, and what its answers cost there.",
    "abilities": "Figures 5 and 6: the abilities and EX over the stages, means over seeds. See which ability "
    "still grows after the warm start, and whether EX follows.",
    "errors": "Figure 7: questions with an error of each kind, means over seeds. See which kinds are left.",
    "training": "Figures 8, 9, 10 and 13: the course of RL. Thick: mean over seeds; thin: each seed; "
    "dotted: the next level of the curriculum begins. See that reward and EX of the batches fall where a "
    "level begins; whether the policy got worse there only the next figure can say, whose questions stay "
    "the same.",
    "dev": "Figure 11: EX on the first dialogues of the dev split (--evaluate-dialogues) during RL, in all "
    "and by hardness. See what the policy itself gains: these questions are the same at every step. Few of "
    "them are hard or extra hard.",
}


def write_suite_page(
    runs: Path,
    path: Path,
    title: str,
    seeds: Sequence[int],
    parts: Sequence[Part],
    made_with: str,
    built_in: Mapping[tuple[str, str], Making],
    benchmark: str = "",
) -> Path:
    """Write the page, its figures <name>_*.png and raw numbers <name>.json beside it; returns `path`.

    `built_in` is as for `findings`, `benchmark` a paragraph on the embedded benchmark.
    """
    arms, coverage = read_arms(runs, seeds), read_coverage(runs, seeds)
    figures = write_figures(arms, runs, seeds, path.parent, path.stem)
    training = command_of(runs, seeds, "rl_process")
    made = made_by("the training of `rl_process`", *training) if training and figures else ""

    def figure(key: str) -> str:
        return f"![{FIGURES[key]}]({figures[key].name})\n\n{FIGURES[key]}" if key in figures else ""

    coverage_table = tables.coverage_table(coverage, seeds, command_of(runs, seeds, "sft"))
    sections = {
        "The benchmark": benchmark,
        "Findings": tables.findings_tables(arms, coverage, seeds, built_in),
        "EX and EM (Table 2)": tables.accuracy_table(arms, seeds),
        "In and out of domain (Table 3, Figure 1)": joined(tables.averages_table(arms), figure("averages")),
        "Sizes of the embedded model": tables.sizes_table(arms),
        "The two tools (Table 4)": tables.ablation_table(arms, seeds),
        "Coverage of the self-taught rounds (Table 7)": coverage_table,
        "Latency and tokens (Table 8)": tables.latency_table(arms),
        "By turn and by hardness (Figures 4 and 12)": joined(
            tables.breakdown_tables(arms), figure("breakdown")
        ),
        "The abilities (Figures 5 and 6)": joined(tables.abilities_table(arms), figure("abilities")),
        "Errors (Figure 7)": joined(tables.errors_table(arms), figure("errors")),
        "Gold against predicted history": tables.snowball_table(arms),
        "A cap on the response": tables.cap_table(arms),
        "Cases (Finding 13)": cases(runs, seeds),
        "Training (Figures 8 to 11 and 13)": joined(figure("training"), figure("dev"), made),
    }
    return write_page(path, title, arms, seeds, parts, made_with, sections)
