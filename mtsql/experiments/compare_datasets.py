"""Datasets side by side, and how hard their questions are (MTSQL-R1, Tables 5 and 6).

    python -m mtsql.experiments.compare_datasets --data cosql sparc --split dev --databases database

Each of --data, a folder or file in any known format, is one column; all else is as in `evaluate.py`. A word
is a run of letters, digits and underscores, in lower case; tables are those of the databases that are asked
about. What a file of questions does not say, unanswerable questions and user intents, is left out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Literal

from mtsql.config import DataOptions, option, read_options, user_errors
from mtsql.data.datasets import Dataset
from mtsql.experiments.markdown import decimal, table
from mtsql.files import write_atomically
from mtsql.report.metrics import HARDNESS
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer
from mtsql.task import load_split

FURTHER = "official grammar cannot read"


@dataclass(frozen=True, kw_only=True)
class DatasetsConfig(DataOptions):
    """Options of the comparison."""

    SECTION: ClassVar = "common"
    out: str = option("", "file to write the table to as well")
    split: Literal["train", "dev", "test", "held_out"] = option("dev", "part of each, where it is a folder")
    allow_missing: bool = option(True, "skip dialogues whose database is missing, and count them")


def describe(dataset: Dataset) -> dict[str, float]:
    """The rows of both tables: counts, means, and the share of questions of each hardness in %."""
    turns = [(d.db_id, turn) for d in dataset.dialogues for turn in d.turns]
    said = [re.findall(r"\w+", turn.question.lower()) for _, turn in turns]
    asked = {database: dataset.schemas[database] for database, _ in turns}
    scorer = Scorer(asked, Executor())
    levels = Counter(scorer.hardness(database, turn.gold_sql) for database, turn in turns)
    rows = {
        "dialogues": len(dataset.dialogues),
        "questions": len(turns),
        "databases": len(asked),
        "tables": sum(len(schema.tables) for schema in asked.values()),
        "words a question": sum(map(len, said)) / len(turns),
        "different words": len(set().union(*said)),
        "questions a dialogue": len(turns) / len(dataset.dialogues),
        "dialogues left out, database missing": dataset.skipped,
    }
    shares = {f"{level}, %": 100 * levels[level] / len(turns) for level in HARDNESS}
    return rows | shares | {f"{FURTHER}, %": 100 * levels["unread"] / len(turns)}


def datasets_table(described: Mapping[str, Mapping[str, float]]) -> str:
    """Both tables as one: a column a dataset."""
    rows = [
        [
            name,
            *(
                decimal(of[name], 1 if name.endswith("%") or " a " in name else 0)
                for of in described.values()
            ),
        ]
        for name in next(iter(described.values()))
    ]
    return table(["", *described], rows)


def main(config: DatasetsConfig) -> None:
    """Read each, and print the table. Raises UserError as `load_split` does."""
    described = {}
    for i, source in enumerate(config.data):
        own = {
            name: (given[i : i + 1] if len(given) == len(config.data) else given)
            for name, given in (("tables", config.tables), ("databases", config.databases))
        }
        described[source] = describe(load_split(replace(config, data=(source,), **own), config.split))
    print(shown := datasets_table(described))
    if config.out:
        write_atomically(Path(config.out), f"{shown}\n")


if __name__ == "__main__":
    user_errors(main, read_options(DatasetsConfig, __doc__))
