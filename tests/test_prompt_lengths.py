"""Prompt lengths: counted by hand on a small database, and against the chat template on SParC."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from test_tokens import CHATML, QWEN3, character_tokenizer
from transformers import AutoTokenizer

from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import make_tools
from mtsql.config import EvaluateConfig, read_options, user_errors
from mtsql.data.datasets import Dataset, examples, load_dataset
from mtsql.experiments.prompt_lengths import (
    LengthsConfig,
    main,
    measure_prompts,
    summarise_lengths,
    summarise_prompts,
)
from mtsql.recipes import RECIPES
from mtsql.recipes.mtsql_r1 import MtsqlR1
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.task import load_split, make_environment

REAL = QWEN3.parent
PROMPT = """label(id:1, city:paris)
singer(id:1, name:Anna, country:, age:31, label_id=label.id)
now: How many?
tools: exec_sql"""
FRAME = 19  # <|im_start|>, "user\n", <|im_end|>, "\n", <|im_start|>, "assistant\n": 1 + 5 + 1 + 1 + 1 + 10
FIRST = len(PROMPT) + FRAME
SECOND = FIRST + len("1. How many?\nSELECT 1\n") + len("Who?") - len("How many?")


@pytest.fixture(scope="module")
def data(tiny, tmp_path_factory) -> Path:
    """Two dialogues over the music database and one over a database that is not there."""
    ask = [{"utterance": "How many?", "query": "SELECT 1"}, {"utterance": "Who?", "query": "SELECT 2"}]
    dialogues = [("music", ask), ("music", ask[:1]), ("gone", ask)]
    path = tmp_path_factory.mktemp("lengths") / "dialogues.json"
    path.write_text(json.dumps([{"database_id": d, "interaction": turns} for d, turns in dialogues]))
    return path


def test_lengths_by_hand(tiny, data):
    dataset = load_dataset(data, tiny.folder / "tables.json", tiny.folder / "database", allow_missing=True)
    tokens = ChatTokens(character_tokenizer(CHATML))
    measured = measure_prompts(
        dataset, MtsqlR1(PromptOptions(compact=True)), tokens, make_tools("no_memory"), "gold"
    )
    assert [(e.id, n) for e, n in measured] == [
        ("00000/0", FIRST), ("00000/1", SECOND), ("00001/0", FIRST)
    ]  # fmt: skip
    summary = summarise_prompts(measured, limit=FIRST)
    assert summary["by_turn"]["1"] == dict(
        questions=2, mean=FIRST, median=FIRST, p90=FIRST, p95=FIRST, p99=FIRST, longest=FIRST, over=0
    )
    assert summary["by_turn"]["2"]["over"] == summary["all"]["over"] == 1
    assert summary["longest"] == {"id": "00000/1", "database": "music", "tokens": SECOND}
    assert summary["databases_over"] == {"music": {"over": 1, "questions": 3}}
    assert summarise_prompts(measured, limit=SECOND)["databases_over"] == {}


def test_percentiles_are_lengths_that_occur():
    lengths = [*range(1, 100), 1000]
    assert summarise_lengths(lengths, 98) == dict(
        questions=100, mean=59.5, median=50, p90=90, p95=95, p99=99, longest=1000, over=2
    )
    only = dict.fromkeys(("mean", "median", "p90", "p95", "p99", "longest"), 7)
    assert summarise_lengths([7], 7) == dict(questions=1, over=0) | only


@pytest.fixture
def command(tiny, data, tmp_path):
    """Call the command line with some options changed."""
    tiny.tokens.tokenizer.save_pretrained(tmp_path / "tokenizer")
    options = {
        "--tokenizer": tmp_path / "tokenizer", "--data": data, "--tables": tiny.folder / "tables.json",
        "--databases": tiny.folder / "database", "--json": tmp_path / "lengths.json",
    }  # fmt: skip

    def call(changed: dict[str, object]) -> None:
        words = [str(w) for pair in (options | changed).items() for w in pair]
        user_errors(main, read_options(LengthsConfig, "", words))

    return call


def test_command_prints_what_it_writes(command, tmp_path, capsys):
    command({"--max-prompt-tokens": 1, "--tools": "none"})
    written = json.loads((tmp_path / "lengths.json").read_text())
    assert written["all"]["over"] == written["all"]["questions"] == 3
    assert written["skipped"] == 1
    printed = capsys.readouterr().out
    assert "over 1 tokens: 3 of 3 questions\n  music: 3 of its 3\n" in printed
    assert f"longest: {written['all']['longest']:,} tokens, 00000/1 over music" in printed
    assert "database is missing: 1" in printed


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_measured_as_they_are_played(name, command, data, tmp_path, tiny):
    command({"--recipe": name})
    written = json.loads((tmp_path / "lengths.json").read_text())
    options = ["--data", data, "--tables", tiny.folder / "tables.json", "--allow-missing", "--recipe", name]
    options += ["--databases", tiny.folder / "database", "--model", "", "--out", ""]
    config = read_options(EvaluateConfig, "", [str(option) for option in options])
    dataset = load_split(config, "dev")
    played = make_environment(config, dataset, tiny.tokens, config.tools)
    lengths = [played.episodes(e, [0])[0].trajectory.prompt_length for e in examples(dataset.dialogues)]
    assert written["all"]["mean"] == sum(lengths) / 3 and written["longest"]["tokens"] == max(lengths)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"--data": "nowhere.json"}, "nowhere.json is not there"),
        ({"--tables": "nowhere.json"}, "nowhere.json is not a file"),
        ({"--databases": "nowhere"}, "nowhere is not a folder"),
        ({"--tokenizer": "./nowhere"}, "nowhere is not a folder"),
        ({"--max-prompt-tokens": 0}, "--max-prompt-tokens should be at least 1, not 0"),
        ({"--recipe": "sparc_sql"}, "--recipe sparc_sql is unknown; choose from"),
        ({"--history": "predicted"}, "--history predicted is unknown"),
    ],
)
def test_wrong_input_is_one_sentence(command, capsys, changed, sentence):
    with pytest.raises(SystemExit) as stopped:
        command(changed)
    assert stopped.value.code == 2
    assert sentence in capsys.readouterr().err.splitlines()[-1]


def test_no_prompt_of_sparc_is_cut():
    if not (REAL / "sparc").is_dir():
        pytest.skip(f"needs SParC's dev split in {REAL}")
    tokenizer = AutoTokenizer.from_pretrained(QWEN3)
    recipe, tools = MtsqlR1(), make_tools("both")
    dataset = load_dataset(REAL / "sparc/dev.json", REAL / "sparc/tables.json", REAL / "database")
    dialogues = tuple(random.Random(0).sample(dataset.dialogues, 20))
    chosen = Dataset(dialogues, dataset.schemas, 0)
    measured = measure_prompts(chosen, recipe, ChatTokens(tokenizer), tools, "gold")
    assert len(measured) >= 50
    for example, length in measured:
        messages, tool_schemas = recipe.prompt(example, dataset.schemas[example.db_id], tools)
        text = tokenizer.apply_chat_template(
            messages, tools=tool_schemas, tokenize=False, add_generation_prompt=True, enable_thinking=True
        )
        ids = ChatTokens(tokenizer).prompt_ids(messages, tool_schemas)
        assert length == len(ids)
        assert tokenizer.decode(ids) == text
        assert example.question in text and all(turn.sql in text for turn in example.history)
