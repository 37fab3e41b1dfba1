"""How long are the prompts? Tokens of the whole prompt of every question of a data file.

    python -m mtsql.experiments.prompt_lengths --tokenizer Qwen/Qwen3-1.7B --data sparc/dev.json \
        --databases database --recipe mtsql_r1

A prompt is rendered as in a run: the recipe's messages and tool schemas in the tokenizer's chat template.
One longer than --max-prompt-tokens is not cut: evaluation counts the question as out_of_tokens, and
training leaves it out. Dialogues and single questions whose database is missing are skipped, and counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from tqdm import tqdm

from mtsql.agent.env import Recipe
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import Tool, make_tools
from mtsql.config import PolicyOptions, option, read_options, user_errors
from mtsql.data.datasets import Dataset, Example, examples
from mtsql.files import write_atomically
from mtsql.model_folder import load_tokenizer
from mtsql.recipes import load_recipe
from mtsql.task import load_split, prompt_options

COLUMNS = ("questions", "mean", "median", "p90", "p95", "p99", "longest", "over")


def measure_prompts(
    dataset: Dataset, recipe: Recipe, tokens: ChatTokens, tools: Mapping[str, Tool], history: str
) -> list[tuple[Example, int]]:
    """Every question with the tokens of its prompt, generation prompt included."""
    measured = []
    for example in tqdm(examples(dataset.dialogues, history), desc="prompts", unit=" questions"):
        messages, tool_schemas = recipe.prompt(example, dataset.schemas[example.db_id], tools)
        measured.append((example, len(tokens.prompt_ids(messages, tool_schemas))))
    return measured


def summarise_lengths(lengths: Sequence[int], limit: int) -> dict[str, float]:
    """COLUMNS of some lengths in tokens; percentiles are lengths that occur (nearest rank)."""
    percentiles = np.percentile(lengths, (50, 90, 95, 99), method="inverted_cdf").tolist()
    over = sum(length > limit for length in lengths)
    values = (len(lengths), float(np.mean(lengths)), *percentiles, max(lengths), over)
    return dict(zip(COLUMNS, values, strict=True))


def summarise_prompts(measured: Sequence[tuple[Example, int]], limit: int) -> dict:
    """Lengths over all and by turn (from 1), the longest prompt, and the databases over the limit."""
    longest, length = max(measured, key=lambda pair: pair[1])
    turns = sorted({example.turn_index for example, _ in measured})
    asked = Counter(example.db_id for example, _ in measured)
    over = Counter(example.db_id for example, tokens in measured if tokens > limit)
    return {
        "all": summarise_lengths([tokens for _, tokens in measured], limit),
        "by_turn": {
            str(turn + 1): summarise_lengths([n for e, n in measured if e.turn_index == turn], limit)
            for turn in turns
        },
        "longest": {"id": longest.id, "database": longest.db_id, "tokens": length},
        "databases_over": {
            name: {"over": count, "questions": asked[name]} for name, count in over.most_common()
        },
    }


def format_prompts(summary: dict, limit: int) -> str:
    """The summary as text."""
    lines = [f"{'':8}" + "".join(f"{name:>10}" for name in COLUMNS)]
    rows = {"all": summary["all"], **{f"turn {k}": v for k, v in summary["by_turn"].items()}}
    lines += [f"{name:8}" + "".join(f"{row[c]:10,.0f}" for c in COLUMNS) for name, row in rows.items()]
    longest, over = summary["longest"], summary["all"]["over"]
    lines.append(f"longest: {longest['tokens']:,} tokens, {longest['id']} over {longest['database']}")
    lines.append(f"over {limit:,} tokens: {over} of {summary['all']['questions']:,} questions")
    for name, count in summary["databases_over"].items():
        lines.append(f"  {name}: {count['over']} of its {count['questions']}")
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class LengthsConfig(PolicyOptions):
    """Options of the measurement."""

    SECTION: ClassVar = "common"
    model: str = option("", "not used")

    tokenizer: str = option(..., "local folder or hub name")
    json: str = option("", "file to write the same numbers to")
    split: str = option("dev", "train, dev or test, if the data is a folder")
    out: str = option("", "not used")
    allow_missing: bool = option(True, "skip dialogues whose database is missing")


def main(config: LengthsConfig) -> None:
    """Measure."""
    tokens = ChatTokens(load_tokenizer(config.tokenizer))
    dataset = load_split(config, config.split)
    recipe = load_recipe(config.recipe).make_recipe(prompt_options(config))
    measured = measure_prompts(dataset, recipe, tokens, make_tools(config.tools), config.history)
    summary = summarise_prompts(measured, config.max_prompt_tokens)
    print(format_prompts(summary, config.max_prompt_tokens))
    print(f"dialogues skipped because their database is missing: {dataset.skipped}")
    if config.json:
        content = {**summary, "skipped": dataset.skipped}
        write_atomically(Path(config.json), json.dumps(content, indent=1))


if __name__ == "__main__":
    user_errors(main, read_options(LengthsConfig, __doc__))
