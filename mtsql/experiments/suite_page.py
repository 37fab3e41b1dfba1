"""The results page of MTSQL-R1's experiments: tables, figures and raw numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mtsql.experiments import tables
from mtsql.experiments.arms import command_of, read_arms, read_coverage
from mtsql.experiments.figures import write_figures
from mtsql.experiments.markdown import joined, made_by
from mtsql.experiments.page import write_page
from mtsql.parts import Part

FIGURES = {
    "breakdown": "Figures 4 and 12: EX, tokens and interactions by hardness and by turn, means over seeds.",
    "abilities": "Figures 5 and 6: the five abilities and EX over the stages, means over seeds.",
    "errors": "Figure 7: questions with an error of each kind, means over seeds.",
    "training": "Figures 8, 9, 10 and 13: the course of RL. Thick: mean over seeds; thin: each seed; "
    "dotted: the next level of the curriculum begins.",
    "dev": "Figure 11: EX on the dev split during RL, in all and by hardness.",
}


def write_suite_page(
    runs: Path, path: Path, title: str, seeds: Sequence[int], parts: Sequence[Part], made_with: str
) -> Path:
    """Write the page, its figures <name>_*.png and raw numbers <name>.json beside it; returns `path`."""
    arms, coverage = read_arms(runs, seeds), read_coverage(runs, seeds)
    figures = write_figures(arms, runs, seeds, path.parent, path.stem)
    training = command_of(runs, seeds, "rl_process")
    made = made_by("the training of `rl_process`", *training) if training and figures else ""

    def figure(key: str) -> str:
        return f"![{FIGURES[key]}]({figures[key].name})\n\n{FIGURES[key]}" if key in figures else ""

    coverage_table = tables.coverage_table(coverage, seeds, command_of(runs, seeds, "sft"))
    sections = {
        "Findings": tables.findings_table(arms, coverage, seeds),
        "EX and EM (Tables 2 and 3)": tables.accuracy_table(arms, seeds),
        "The two tools (Table 4)": tables.ablation_table(arms, seeds),
        "Coverage of the self-taught rounds (Table 7)": coverage_table,
        "Latency and tokens (Table 8)": tables.latency_table(arms),
        "By turn and by hardness (Figures 4 and 12)": joined(
            tables.breakdown_tables(arms), figure("breakdown")
        ),
        "The five abilities (Figures 5 and 6)": joined(tables.abilities_table(arms), figure("abilities")),
        "Errors (Figure 7)": joined(tables.errors_table(arms), figure("errors")),
        "Gold against predicted history": tables.snowball_table(arms),
        "A cap on the response": tables.cap_table(arms),
        "Training (Figures 8 to 11 and 13)": joined(figure("training"), figure("dev"), made),
    }
    return write_page(path, title, arms, seeds, parts, made_with, sections)
