"""A suite: many parts, each one command, that are run in order and described by one page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from mtsql.parts import Part, run_part


def command_line(part: Part) -> str:
    """A part's command as one types it."""
    return "python " + " ".join(part.command)


def suite_parser(description: str, out: str, seeds: Sequence[int]) -> argparse.ArgumentParser:
    """The options of every suite; `out` is the default run folder, `seeds` are the default seeds."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=Path(out), help=f"run folder [{out}]")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help=f"seeds {list(seeds)}")
    parser.add_argument("--list", action="store_true", help="show the commands and what is done, and stop")
    parser.add_argument("--page", action="store_true", help="write the page of what is there, and stop")
    return parser


def run_suite(parts: Sequence[Part], chosen: argparse.Namespace) -> bool:
    """Run what is missing, or with --page nothing; whether to write the page, which --list does not."""
    for part in parts:
        if chosen.list:
            print(f"{'done' if part.done.exists() else 'to do':<6} {command_line(part)}")
        elif not chosen.page:
            run_part(*part)
    return not chosen.list
