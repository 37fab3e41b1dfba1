"""The dataset of another engine: a row for each question that can be scored and whose prompt is not too long.

python -m mtsql.extras.bridges.rows --engine verl --config C --model M --data DATA --out OUT
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mtsql.config import option, read_options, user_errors
from mtsql.errors import UserError
from mtsql.extras.bridges.task import BridgeConfig, load_task
from mtsql.files import json_lines, write_atomically


@dataclass(frozen=True, kw_only=True)
class RowsConfig(BridgeConfig):
    """Rows of an engine's dataset (mtsql.extras.bridges.rows); `out` is the file."""

    engine: Literal["verl", "skyrl"] = option("verl", "whose rows")
    split: Literal["train", "dev", "test", "held_out"] = option("train", "part of the data")


def main(config: RowsConfig) -> None:
    """Write the rows in the fields of an engine; all but id and split is for its logs and filters.

    The engines want a prompt in the row, which the bridge does not read: the environment renders it.
    """
    if not config.out:
        raise UserError("give --out, the file of rows to write")
    task, rows = load_task(config, config.split), []
    for name in task.playable():
        example, place = task.examples[name], {"example_id": name, "split": config.split}
        row = {"prompt": [{"role": "user", "content": example.question}], "data_source": "mtsql"}
        if config.engine == "skyrl":
            row |= {"env_class": "mtsql"} | place
        else:
            reward = {"style": "rule", "ground_truth": example.gold_sql}
            row |= {"reward_model": reward, "extra_info": place, "agent_name": "mtsql"}
        rows.append(row)
    write_atomically(Path(config.out), json_lines(rows))
    print(f"{len(rows):,} rows of {len(task.examples):,} questions in {config.out}")


if __name__ == "__main__":
    user_errors(main, read_options(RowsConfig, __doc__))
