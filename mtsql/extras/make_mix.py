"""The training mix of the real suite, from the official downloads of Spider, SParC and CoSQL.

    python -m mtsql.extras.make_mix --spider spider --sparc sparc --cosql cosql_dataset \\
        --out DATA/real/train_mix.json

Each is the folder as it was unpacked, with its tables.json and database/ (--tables and --databases name
others, for all three). The mix is one file in SParC's format, whose dialogues say their `source`, in an
order drawn by a fixed seed: train_spider.json (not train_others.json) as dialogues of one question, and the
train files of SParC and CoSQL. A dialogue ends before CoSQL's placeholder for a question that was never
asked ("I AM GPT"), and before an utterance that runs on with another speaker's ("Expert: ..."). Questions
whose database is not there are left out, and counted. Whether the gold SQL runs is seen where one trains.

docs/training.md says in what it differs from the mix of the committed results.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from mtsql.config import Data, user_errors
from mtsql.data.datasets import Turn
from mtsql.errors import UserError
from mtsql.files import write_atomically
from mtsql.task import load_split

BROKEN = re.compile(r"\s*(I AM GPT\s*)?\Z|.*\n\s*\w+:", re.DOTALL)  # to match from the start


def main(argv: Sequence[str] | None = None) -> None:
    """Write the mix. Raises UserError for a folder that is not the data set, or lacks its databases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--spider", type=Path, required=True, help="folder with train_spider.json")
    parser.add_argument("--sparc", type=Path, required=True, help="folder with train.json")
    parser.add_argument(
        "--cosql", type=Path, required=True, help="folder with sql_state_tracking/cosql_train.json"
    )
    parser.add_argument("--tables", default="", help="tables.json for all three [beside each]")
    parser.add_argument("--databases", default="", help="folder of databases for all three [beside each]")
    parser.add_argument("--out", type=Path, required=True, help="file to write, DATA/real/train_mix.json")
    chosen = parser.parse_args(argv)
    mix: list[dict] = []
    for source, data in (
        ("spider", chosen.spider / "train_spider.json"),
        ("sparc", chosen.sparc),
        ("cosql", chosen.cosql),
    ):
        where = {name: tuple(filter(None, [getattr(chosen, name)])) for name in ("tables", "databases")}
        dialogues = load_split(
            Data(data=(str(data),), out="", allow_missing=True, **where), "train"
        ).dialogues
        kept = [(d.db_id, whole_turns(d.turns)) for d in dialogues]
        made = [dialogue(db_id, turns, source) for db_id, turns in kept if turns]
        print(f"{source}: {len(made):,} dialogues, {sum(len(turns) for _, turns in kept):,} questions")
        mix += made
    random.Random(0).shuffle(mix)
    if chosen.out.is_dir():
        raise UserError(f"{chosen.out} is a folder; give a file to write")
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(chosen.out, json.dumps(mix, ensure_ascii=False, indent=1) + "\n")
    print(f"{len(mix):,} dialogues: {chosen.out}")


def whole_turns(turns: Sequence[Turn]) -> list[Turn]:
    """The turns before the first whose utterance is a placeholder, or goes on with another speaker's."""
    return list(takewhile(lambda turn: not BROKEN.match(turn.question), turns))


def dialogue(db_id: str, turns: Sequence[Turn], source: str) -> dict:
    """A dialogue in SParC's format."""
    asked = [{"utterance": turn.question, "query": turn.gold_sql} for turn in turns]
    return {"database_id": db_id, "interaction": asked, "source": source}


if __name__ == "__main__":
    user_errors(main)
