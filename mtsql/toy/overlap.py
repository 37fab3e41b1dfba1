"""How much of one split stands in another: `python -m mtsql.toy.overlap FOLDER`.

For every pair of splits of the toy benchmark (or of a folder with the same files), the share of the second's
questions, gold SQL, sets of tables, whole schemas, and words of questions and of schemas that stand in the
first, in %. Case and white space do not count. Questions and SQL are counted as often as they are asked,
schemas by database, words once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean

from mtsql.config import user_errors
from mtsql.data.schema import read_json
from mtsql.errors import UserError
from mtsql.extras.reproduce.page import decimal, table

SPLITS = ("train", "dev", "test", "test_themes")
KINDS = ("questions", "gold SQL", "sets of tables", "schemas", "words of questions", "words of schemas")


def contents(folder: Path, split: str) -> dict[str, list]:
    """What a split holds of every kind. Raises UserError if the folder has no such split."""
    path = folder / f"{split}.json"
    if not path.is_file():
        raise UserError(f"{path} is not there; give what mtsql.toy.benchmark wrote without --single")
    dialogues = read_json(path)
    turns = [turn for dialogue in dialogues for turn in dialogue["interaction"]]
    databases = {dialogue["database_id"] for dialogue in dialogues}
    entries = [entry for entry in read_json(folder / "tables.json") if entry["db_id"] in databases]
    questions, queries = (
        [" ".join(turn[key].lower().split()) for turn in turns] for key in ("utterance", "query")
    )
    tables = [list(map(str.lower, entry["table_names_original"])) for entry in entries]
    columns = [  # (table, column) pairs of each database
        [(named[at], name.lower()) for at, name in entry["column_names_original"] if at >= 0]
        for entry, named in zip(entries, tables, strict=True)
    ]
    names = [name for schema in columns for pair in schema for name in pair]
    return {
        "questions": questions,
        "gold SQL": queries,
        "sets of tables": list(map(frozenset, tables)),
        "schemas": list(map(frozenset, columns)),
        "words of questions": _words(questions),
        "words of schemas": _words(names),
    }


def _words(texts: Sequence[str]) -> list[str]:
    """Every word of some texts, once."""
    return sorted({word for text in texts for word in re.findall(r"[a-z]+", text)})


def overlap(known: Mapping[str, Sequence], other: Mapping[str, Sequence]) -> dict[str, float]:
    """The share of what `other` holds that `known` holds too, by kind, from 0 to 1."""
    there = {kind: set(known[kind]) for kind in KINDS}
    return {kind: fmean(item in there[kind] for item in other[kind]) for kind in KINDS}


def overlap_table(folder: Path) -> str:
    """The table of all pairs of splits."""
    held = {split: contents(folder, split) for split in SPLITS}
    rows = []
    for known, other in combinations(SPLITS, 2):
        shares = overlap(held[known], held[other]).values()
        rows.append([f"{other} in {known}", *(decimal(100 * share) for share in shares)])
    return table(["share of", *KINDS], rows)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of a benchmark")
    print(overlap_table(parser.parse_args().folder))


if __name__ == "__main__":
    user_errors(main)
