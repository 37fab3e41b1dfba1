"""The training mix of the real suite, from the official downloads of Spider, SParC and CoSQL.

    python -m mtsql.extras.make_mix --spider spider --sparc sparc --cosql cosql_dataset \\
        --out DATA/real/train_mix.json

Each is the folder as it was unpacked, with its tables.json and database/. The mix is one file in SParC's
format, whose dialogues say their `source`, in an
order drawn by a fixed seed: train_spider.json (not train_others.json) as dialogues of one question, and the
train files of SParC and CoSQL. A dialogue ends before CoSQL's placeholder for a question that was never
asked ("I AM GPT"), and before an utterance that runs on with another speaker's ("Expert: ..."). Questions
whose database is not there are left out, and counted. Whether the gold SQL runs is seen where one trains.

docs/training.md says in what it differs from the mix of the committed results.
"""

from __future__ import annotations

import json
import random
import re
from itertools import takewhile
from pathlib import Path

from mtsql.config import Data, command_line, user_errors
from mtsql.files import write_atomically
from mtsql.task import load_split

BROKEN = re.compile(r"\s*(I AM GPT\s*)?\Z|.*\n\s*\w+:", re.DOTALL)  # to match from the start


def main(argv: list[str] | None = None) -> None:
    """Write the mix. Raises UserError for a folder that is not the data set, or lacks its databases."""
    parser = command_line(__doc__)
    parser.add_argument("--spider", type=Path, required=True, help="folder with train_spider.json")
    parser.add_argument("--sparc", type=Path, required=True, help="folder with train.json")
    parser.add_argument("--cosql", type=Path, required=True, help="folder with sql_state_tracking/")
    parser.add_argument("--out", type=Path, required=True, help="file to write, DATA/real/train_mix.json")
    chosen = parser.parse_args(argv)
    mix = []
    files = {"spider": chosen.spider / "train_spider.json", "sparc": chosen.sparc, "cosql": chosen.cosql}
    for source, data in files.items():
        before, questions = len(mix), 0
        for dialogue in load_split(Data(data=(str(data),), out="", allow_missing=True), "train").dialogues:
            whole = takewhile(lambda turn: not BROKEN.match(turn.question), dialogue.turns)
            asked = [{"utterance": turn.question, "query": turn.gold_sql} for turn in whole]
            questions += len(asked)
            if asked:
                mix.append({"database_id": dialogue.db_id, "interaction": asked, "source": source})
        print(f"{source}: {len(mix) - before:,} dialogues, {questions:,} questions")
    random.Random(0).shuffle(mix)
    write_atomically(chosen.out, json.dumps(mix, ensure_ascii=False, indent=1) + "\n")
    print(f"{len(mix):,} dialogues: {chosen.out}")


if __name__ == "__main__":
    user_errors(main)
