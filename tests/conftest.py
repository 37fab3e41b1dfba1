"""A small database, a tiny tokenizer and episodes over them, shared by the tests."""

import csv
import json
import multiprocessing
import os
import runpy
import shutil
import socket
import sqlite3
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
from decoders import VOCABULARY, WIDER, random_model
from filelock import FileLock
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mtsql.agent.env import Environment, Episode, Limits, Recipe
from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import make_tools
from mtsql.agent.trajectory import Stop
from mtsql.data.datasets import Example, HistoryTurn
from mtsql.data.schema import Schema, load_schemas
from mtsql.learn.model import save_policy
from mtsql.recipes.mtsql_r1 import MtsqlR1
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.sql.execute import Executor
from mtsql.sql.score import Scorer
from mtsql.toy import benchmark as toy
from mtsql.toy.tiny import train_tokenizer

ROOT = Path(__file__).parents[1]
SAMPLE = ROOT / "tests" / "data" / "sparc"
SHARED = ROOT.parent / "shared"  # real data and papers, not there on most machines
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
TOY = ["--config", "configs/toy.toml"]
CLOCKS = {"minutes", "rollout_seconds", "train_seconds", "sampled_tokens_per_second"}
FORKS = multiprocessing.get_context("forkserver")  # of a process that has imported what takes seconds
FORKS.set_forkserver_preload(["mtsql.task", "mtsql.learn.samples", "mtsql.extras.plot", "peft"])
QUESTION = "Which singers are from France?"
GOLD = "SELECT name FROM singer WHERE country = 'france'"
EXAMPLE = Example("00000/0", "00000", "music", 0, QUESTION, GOLD, ())
TABLES = """[{"db_id": "music", "primary_keys": [1, 3], "foreign_keys": [[7, 1]],
 "table_names": ["label", "singer"], "table_names_original": ["label", "singer"],
 "column_names": [[-1, "*"], [0, "label id"], [0, "city"], [1, "singer id"], [1, "name"], [1, "country"],
  [1, "age"], [1, "label id"]], "column_names_original": [[-1, "*"], [0, "id"], [0, "city"], [1, "id"],
  [1, "name"], [1, "country"], [1, "age"], [1, "label_id"]],
 "column_types": ["text", "number", "text", "number", "text", "text", "number", "number"]}]"""


@dataclass(frozen=True)
class Tiny:
    """What the tests need to make an episode."""

    folder: Path
    schema: Schema
    tokens: ChatTokens
    executor: Executor
    scorer: Scorer


@pytest.fixture(scope="session")
def qwen3() -> PreTrainedTokenizerBase:
    """The real tokenizer of Qwen3."""
    folder = SHARED / "data" / "tokenizer_qwen3"
    if not folder.exists():
        pytest.skip(f"needs the real Qwen3 tokenizer in {folder}")
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    folder = tmp_path_factory.mktemp("music")
    path = folder / "database" / "music" / "music.sqlite"
    path.parent.mkdir(parents=True)
    script = """create table label (id integer primary key, city text);
        create table singer (id integer primary key, name text, country text, age integer, label_id integer
            references label(id)); insert into label values (1, 'paris'), (2, 'rome');
        insert into singer values (1, 'Anna', null, 31, 1), (2, 'Bruno', 'france', 45, 1),
            (3, 'Carla', 'italy', 27, 2);"""
    make_database(path, script)
    (folder / "tables.json").write_text(TABLES)
    schema = load_schemas(folder / "tables.json", folder / "database")["music"]
    texts = [GOLD, QUESTION, schema.text(compact=True), "SELECT count(*) FROM singer AS t1 JOIN label AS t2"]
    tokens, executor = ChatTokens(train_tokenizer(texts * 3, 300)), Executor()
    return Tiny(folder, schema, tokens, executor, Scorer({"music": schema}, executor))


def make_database(path: Path, script: str) -> Path:
    """The file, after the statements of the script."""
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)
    return path


def make_episode(tiny: Tiny, history: bool = False, gold_history: bool = True, **options) -> Episode:
    """An episode for QUESTION, after one earlier question if `history`; `options` of `environment_of`."""
    sql = "SELECT count(*) FROM singer" if gold_history else None
    earlier = HistoryTurn("How many singers are there?", sql)
    example = Example("00000/1", "00000", "music", 1, QUESTION, GOLD, (earlier,) if history else ())
    return environment_of(tiny, **options).episodes(example, [0])[0]


def environment_of(
    tiny: Tiny,
    tools: str = "both",
    limits: Limits = Limits(),  # noqa: B008 (frozen)
    compact: bool = True,
    result_characters: int = 40,
    error_hints: bool = False,
    recipe: Recipe | None = None,
) -> Environment:
    """The environment of the tiny database, by default MTSQL-R1's."""
    recipe = recipe or MtsqlR1(PromptOptions(compact, result_characters))
    schemas, chosen = {"music": tiny.schema}, make_tools(tools)
    return Environment(schemas, recipe, tiny.tokens, tiny.executor, limits, chosen, error_hints)


def say(episode: Episode, text: str) -> bool:
    """Send one whole message; whether the episode goes on."""
    return answer_to(episode, text) is not None


def answer_to(episode: Episode, text: str) -> str | None:
    """One whole message, which ends at a stop string of the recipe's; the text behind it, None at the end."""
    ids, at_tag = episode.tokens.message_ids(text), text.endswith(episode.recipe.stop_strings)
    ids = ids[:-1] if at_tag else ids
    suffix = episode.step(ids, [-0.5] * len(ids), Stop.STOP_STRING if at_tag else Stop.END_OF_TURN)
    return None if suffix is None else episode.tokens.decode(suffix)


def run(*command, expect=0):
    """Run a script or module in the project's root on one thread; what it printed.

    It runs in a fork of a process that has imported torch and the rest: that takes longer than most commands.
    """
    with tempfile.TemporaryDirectory() as folder:
        printed = Path(folder) / "printed"
        process = start([str(word) for word in command], printed)
        process.join()
        assert process.exitcode == expect, printed.read_text()
        return printed.read_text()


def start(words: list[str], printed: Path, **environment: str) -> multiprocessing.Process:
    """Start a script or module, whose output goes to the file `printed`."""
    os.environ.update(ENVIRONMENT)
    process = FORKS.Process(target=run_here, args=(words, printed, os.environ | environment))
    process.start()
    return process


def run_in_two(*command: object) -> str:
    """Run a command in two processes, with the variables that torchrun sets; what they print."""
    own = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), WORLD_SIZE="2", TORCHELASTIC_RUN_ID="0")
    words = [str(word) for word in command]
    with tempfile.TemporaryDirectory() as folder:
        printed = [Path(folder) / rank for rank in "01"]
        processes = [start(words, path, **own, RANK=path.name, LOCAL_RANK=path.name) for path in printed]
        wait([process.sentinel for process in processes])
        for process in processes:  # one that has failed would be waited for
            process.join(60)
            process.kill()
        said = "".join(path.read_text() for path in printed)
        assert [process.exitcode for process in processes] == [0, 0], said
    return said


def free_port() -> int:
    """A port of this machine that nothing listens to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_here(words: list[str], printed: Path, environment: dict[str, str]) -> None:
    """Become the command: its arguments, its folder, its environment, its output in a file."""
    os.environ.clear()
    os.environ.update(environment)
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
    os.chdir(ROOT)
    torch.set_num_threads(1)
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = str(ROOT)
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path[0] = str((ROOT / words[0]).parent)
        runpy.run_path(words[0], run_name="__main__")


def refusal(capsys: pytest.CaptureFixture, command: Callable, *arguments: object) -> str:
    """The sentence with which a command of this process ends with exit code 2."""
    with pytest.raises(SystemExit) as stop:
        command(*arguments)
    assert stop.value.code == 2
    return capsys.readouterr().err


def json_lines(path: Path) -> list:
    """What a JSONL file holds."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def write_lines(path: Path, records: Iterable) -> Path:
    """The JSONL file of these records."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def data_of(work: Path) -> list:
    """The options of data and model of `work`."""
    return [*TOY, "--data", work / "benchmark", "--model", work / "imitation"]


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file of a run, without what is a time."""
    with path.open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in CLOCKS} for row in csv.DictReader(file)]


SLOW = (  # the second to fourth do not wait for `work`, which the first makes meanwhile
    "test_scripts.py", "test_hostile.py", "test_plan.py", "test_pretrained.py", "test_datasets.py",
    "test_parallel.py", "test_qlora.py", "test_resume.py", "test_bridges.py", "test_served.py", "test_toy.py",
    "test_demonstrations.py", "test_report.py", "test_conversation.py", "test_bench.py", "test_commands.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first, so that no core is left alone with one at the end."""
    items.sort(key=lambda item: SLOW.index(item.path.name) if item.path.name in SLOW else len(SLOW))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each id of the vocabulary of tests/decoders.py."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w3", pad_token="w0")


@pytest.fixture(scope="session")
def base(tmp_path_factory, tokenizer) -> Path:
    """An ordinary folder of a random model."""
    torch.manual_seed(1)
    folder = tmp_path_factory.mktemp("models") / "base"
    save_policy(random_model("qwen3", tie_word_embeddings=True, **WIDER), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def work(tmp_path_factory, worker_id):
    """A small benchmark and a tiny model that has learned it nearly by heart; a copy for each worker."""
    if worker_id == "master":
        return make_work(tmp_path_factory.mktemp("work"))
    shared = tmp_path_factory.getbasetemp().parent / "work"
    with FileLock(f"{shared}.lock"):
        if not shared.exists():
            make_work(shared.with_name("work_in_progress")).rename(shared)
    return shutil.copytree(shared, tmp_path_factory.mktemp("work"), dirs_exist_ok=True)


def make_work(folder: Path) -> Path:
    """Write the benchmark and the model that `work` is."""
    splits = {part: {"known": size} for part, size in (("train", (2, 5)), ("dev", (3, 2)), ("test", (3, 2)))}
    splits["test_themes"] = {"unseen": (6, 2)}
    toy.write_benchmark(folder / "benchmark", seed=0, splits=splits)
    options = "--copying-steps 60 --answer-steps 60 --agent-steps 160 --questions-per-database 4 --hidden 96 "
    options += "--layers 2 --repair-exercises 1 --skips-execution 0 --skips-memory 0"
    paths = ["--data", folder / "benchmark", "--out", folder / "imitation"]
    run("-m", "mtsql.toy.imitation", *TOY, *paths, *options.split())
    return folder
