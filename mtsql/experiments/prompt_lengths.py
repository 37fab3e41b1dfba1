"""How long are the prompts? Tokens of the whole prompt of every question of a data file.

    python -m mtsql.experiments.prompt_lengths --tokenizer Qwen/Qwen3-1.7B --data sparc/dev.json \
        --tables sparc/tables.json --databases database --recipe mtsql_r1

A prompt is rendered as in a run: the recipe's messages and tool schemas in the tokenizer's chat template.
One longer than --max-prompt-tokens is not cut: evaluation counts the question as out_of_tokens, and
training leaves it out. Dialogues and single questions whose database is missing are skipped, and counted.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mtsql.agent.env import Recipe
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import Tool, make_tools
from mtsql.config import CHOICES, user_errors
from mtsql.data.datasets import Dataset, Example, examples, load_dataset
from mtsql.files import write_atomically
from mtsql.learn.model import load_tokenizer
from mtsql.recipes import RECIPES, load_recipe
from mtsql.recipes.wording import Wording

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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tokenizer", required=True, help="local folder or hub name")
    parser.add_argument("--data", type=Path, required=True, help="file of dialogues or of single questions")
    parser.add_argument("--tables", type=Path, required=True, help="tables.json")
    parser.add_argument("--databases", type=Path, required=True, help="folder of <db_id>/<db_id>.sqlite")
    parser.add_argument("--recipe", choices=RECIPES, default=RECIPES[0], help=f"the paper [{RECIPES[0]}]")
    parser.add_argument("--history", choices=("gold", "questions"), default="gold", help="[gold]")
    parser.add_argument("--tools", choices=CHOICES["tools"], help="[the recipe's own]")
    parser.add_argument("--wording", choices=CHOICES["wording"], default="paper", help="[paper]")
    parser.add_argument("--max-prompt-tokens", type=int, default=4000, help="limit [4000]", metavar="X")
    parser.add_argument("--json", type=Path, help="file to write the same numbers to")
    chosen = parser.parse_args()
    if chosen.max_prompt_tokens < 1:
        parser.error(f"--max-prompt-tokens should be positive, not {chosen.max_prompt_tokens}")
    tokens = ChatTokens(load_tokenizer(chosen.tokenizer))
    dataset = load_dataset(chosen.data, chosen.tables, chosen.databases, allow_missing=True)
    paper = load_recipe(chosen.recipe)
    recipe = paper.make_recipe(Wording(chosen.wording == "compact"))
    tools = make_tools(chosen.tools or paper.SETTINGS.get("tools", "both"))
    measured = measure_prompts(dataset, recipe, tokens, tools, chosen.history)
    summary = summarise_prompts(measured, chosen.max_prompt_tokens)
    print(format_prompts(summary, chosen.max_prompt_tokens))
    print(f"dialogues skipped because their database is missing: {dataset.skipped}")
    if chosen.json:
        write_atomically(chosen.json, json.dumps({**summary, "skipped": dataset.skipped}, indent=1))


if __name__ == "__main__":
    user_errors(main)
