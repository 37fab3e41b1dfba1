"""A bad day, tried harder than the tests can: python bench/reliability.py fuzz kills episodes disk database

- fuzz: statements made from the hostile ones (tests/hostile.py) by exchanging, doubling, dropping and nesting
  their words, under limits of time and memory
- kills: train_grpo.py and train_sft.py, LoRA and full weights, killed by SIGKILL at random moments and
  resumed, until they have ended with the bits of a run that was left alone
- episodes: rollouts of the policy over the benchmark's questions again and again; memory has to stay flat
- disk: a disk that is full when a checkpoint is written (mounts a small one: needs root)
- database: a file that is locked, replaced, corrupt or gone between two questions

Each part writes OUT/PART.json, and --page prints what is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from hostile import STATEMENTS, STOPPED, make_database, resident_bytes
from test_resume import SCRIPTS, outcome, play

from mtsql.agent.rollout import rollout, trajectory_seed
from mtsql.config import EvaluateConfig, from_toml
from mtsql.data.datasets import examples
from mtsql.errors import MissingDatabase
from mtsql.files import write_atomically
from mtsql.sql.execute import Executor
from mtsql.task import begin_task, make_sampling

WORDS = re.compile(r"'[^']*'|\"[^\"]*\"|\w+|[<>!=|]+|[^\w\s]")


def fuzzed(rng: random.Random, corpus: list[list[str]]) -> str:
    """A statement that was never written: some words of one or two others, changed in a few places."""
    words = list(rng.choice(corpus))
    for _ in range(rng.randint(1, 3)):
        place, other = rng.randrange(len(words) + 1), rng.choice(corpus)
        start = rng.randrange(len(other))
        piece = other[start : start + rng.randint(1, 4)]
        match rng.randrange(5):
            case 0:
                words[place:place] = piece
            case 1:
                words[place : place + len(piece)] = piece
            case 2:
                del words[place : place + rng.randint(1, 5)]
            case 3:
                words[place:place] = words[place : place + rng.randint(1, 8)] * rng.randint(1, 4)
            case _:
                words = ["SELECT", "*", "FROM", "(", *words, ")", "AS", "t"]
        words = words[:400] or ["SELECT"]
    return " ".join(words)


def fuzz(options: argparse.Namespace) -> dict[str, object]:
    """--statements fuzzed statements, each with a limit of a quarter of a second."""
    corpus = [WORDS.findall(sql) for _, sql, right in STATEMENTS if right != STOPPED]
    corpus = [words for words in corpus if 0 < len(words) < 200]
    rng, statuses, wrong, longest = random.Random(options.seed), Counter(), [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "concerts.sqlite"
        make_database(database)
        before, start = hashlib.sha256(database.read_bytes()).hexdigest(), resident_bytes()
        executor, most = Executor(timeout_seconds=0.25), start
        for number in range(options.statements):
            sql, began = fuzzed(rng, corpus), time.monotonic()
            try:
                statuses[executor.execute(database, sql).status] += 1
            except Exception as error:  # what is being looked for
                wrong.append(f"{type(error).__name__}: {sql}")
            longest = max(longest, time.monotonic() - began)
            if number % 1000 == 0:
                most = max(most, resident_bytes())
        changed = hashlib.sha256(database.read_bytes()).hexdigest() != before
        files = len(list(Path(folder).iterdir()))
    return {
        "statements": options.statements,
        "statuses": dict(statuses.most_common()),
        "exceptions": wrong,
        "longest_seconds": round(longest, 2),
        "grown_mb": round((most - start) / 1e6),
        "database": "changed" if changed else "unchanged",
        "other_files": files - 1,
    }


def kills(options: argparse.Namespace) -> dict[str, object]:
    """--kills kills of each of four runs, all resumed to their ends and compared with an unbroken one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "transformers", "train_grpo", "train_sft"])
    rows = {}
    for script, arguments in SCRIPTS.items():
        for lora in (0, 4):
            plain = [str(a) for a in arguments]
            if "--lora-rank" in plain:
                place = plain.index("--lora-rank")
                del plain[place : place + 2]
            given = [
                "--config",
                "configs/toy.toml",
                "--data",
                options.data,
                "--model",
                options.model,
                "--resume",
            ]
            given += [*plain, "--lora-rank", str(lora)]
            name = f"{script}, {'LoRA' if lora else 'full weights'}"
            rows[name] = killed_runs(context, script, given, options.kills, random.Random(options.seed))
            print(name, rows[name], flush=True)
    return rows


def killed_runs(
    context: multiprocessing.context.BaseContext,
    script: str,
    given: list[str],
    kills: int,
    rng: random.Random,
) -> dict[str, int]:
    """Kills, runs that they hit, and how many of those ended with other bits."""
    found = {"kills": 0, "runs": 0, "different": 0}
    with tempfile.TemporaryDirectory() as folder:

        def start(name: str) -> multiprocessing.Process:
            process = context.Process(target=play, args=(script, [*given, "--out", str(Path(folder) / name)]))
            process.start()
            return process

        began = time.perf_counter()
        unbroken = start("unbroken")
        unbroken.join()
        duration, expected = time.perf_counter() - began, outcome(Path(folder) / "unbroken")
        while found["kills"] < kills:
            name = f"run{found['runs']}"
            while True:
                process = start(name)
                process.join(rng.uniform(0.05, 1.0) * duration if found["kills"] < kills else None)
                if process.exitcode is not None:
                    break
                process.kill()
                process.join()
                found["kills"] += process.exitcode == -signal.SIGKILL
            found["runs"] += 1
            found["different"] += process.exitcode != 0 or outcome(Path(folder) / name) != expected
    return found


def episodes(options: argparse.Namespace) -> dict[str, object]:
    """--episodes episodes with tools, a few hundred at a time; resident memory after each lot."""
    values = from_toml(ROOT / "configs" / "toy.toml", EvaluateConfig)
    values |= {"model": options.model, "data": (options.data,), "split": "dev", "out": str(options.out)}
    config = EvaluateConfig(**values)
    run = begin_task(config, "dev")
    sampling, asked = make_sampling(config, run.environment, 1.0), examples(run.dataset.dialogues)
    memory, played, statuses = [], 0, Counter()
    while played < options.episodes:
        now = range(played, min(played + 400, options.episodes))
        lot = [asked[i % len(asked)] for i in now]
        seeds = [trajectory_seed(options.seed, i) for i in now]
        fresh = [run.environment.episodes(e, [s])[0] for e, s in zip(lot, seeds, strict=True)]
        statuses.update(t.status.value for t in rollout(run.policy, run.tokens, fresh, sampling, 64))
        played += len(fresh)
        memory.append(round(resident_bytes() / 1e6))
    return {"episodes": played, "statuses": dict(statuses), "resident_mb": memory}


def disk(options: argparse.Namespace) -> dict[str, object]:
    """A run on a disk with room for its first checkpoint only, which goes on when there is room again."""
    with tempfile.TemporaryDirectory() as folder:
        mount = ["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", folder]
        if subprocess.run(mount, capture_output=True).returncode:
            return {"not tried": "a small disk could not be mounted"}
        try:
            command = [sys.executable, "train_grpo.py", "--config", "configs/toy.toml", "--resume"]
            command += ["--data", options.data, "--model", options.model, "--out", f"{folder}/run"]
            command += ["--steps", "3", "--save-every", "1", "--prompts-per-step", "2"]
            command += ["--samples-per-prompt", "4"]
            full = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            left = sorted(p.name for p in Path(folder, "run", "checkpoints").glob("*"))
            subprocess.run(["mount", "-o", "remount,size=2g", folder], check=True)
            again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
            policy = Path(folder, "run", "policy", "model.safetensors").is_file()
        finally:
            subprocess.run(["umount", folder], check=True)
    return {
        "exit code": full.returncode,
        "last line": full.stderr.strip().splitlines()[-1] if full.stderr.strip() else "",
        "checkpoints then": left,
        "exit code with room": again.returncode,
        "policy then": policy,
    }


def database(options: argparse.Namespace) -> dict[str, object]:
    """What a query gets from a file that something happened to."""
    found = {}
    query = "SELECT count(*) FROM singer"

    def asked(name: str, happens: Callable[[Path], object]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "concerts.sqlite"
            make_database(path)
            executor = Executor(timeout_seconds=1.0)
            assert executor.execute(path, query).rows == ((3,),)
            kept = happens(path)  # held while the query runs
            try:
                result = executor.execute(path, query + " -- again")
                found[name] = f"{result.status} {result.rows or result.message}"
            except MissingDatabase as error:
                found[name] = f"MissingDatabase: {error.args[0].replace(folder, 'FOLDER')}"
            del kept

    def locked(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, isolation_level=None)
        connection.execute("BEGIN EXCLUSIVE")
        return connection

    def replaced(path: Path) -> None:
        other = path.with_name("other")
        make_database(other)
        connection = sqlite3.connect(other)
        connection.execute("DELETE FROM singer WHERE singer_id = 3")
        connection.commit()
        connection.close()
        other.replace(path)

    asked("locked", locked)
    asked("replaced by another", replaced)
    asked("overwritten with noise", lambda path: path.write_bytes(random.Random(0).randbytes(8192)))
    asked("cut in half", lambda path: os.truncate(path, path.stat().st_size // 2))
    asked("empty", lambda path: os.truncate(path, 0))
    asked("gone", lambda path: path.unlink())
    return found


PARTS = {f.__name__: f for f in (fuzz, kills, episodes, disk, database)}


def page(out: Path) -> str:
    """What was found, as a page."""
    lines = ["# Reliability", "", f"`python bench/reliability.py PART ...`, {date.today()}.", ""]
    for name in PARTS:
        path = out / f"{name}.json"
        if path.is_file():
            found = json.loads(path.read_text())
            lines += [f"## {name}", "", PARTS[name].__doc__.splitlines()[0], ""]
            lines += [f"- {key.replace('_', ' ')}: {json.dumps(value)}" for key, value in found.items()]
            lines.append("")
    return "\n".join(lines)


def main() -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which parts")
    parser.add_argument("--out", type=Path, default=Path("runs/reliability"), help="folder of the figures")
    parser.add_argument("--model", default="runs/toy/imitation", help="a small policy")
    parser.add_argument("--data", default="runs/toy/benchmark", help="its benchmark")
    parser.add_argument("--statements", type=int, default=100_000)
    parser.add_argument("--kills", type=int, default=25, help="of each of four runs")
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--page", action="store_true", help="print the page")
    options = parser.parse_args()
    for part in options.parts:
        began = time.perf_counter()
        found = PARTS[part](options)
        found["seconds"] = round(time.perf_counter() - began)
        write_atomically(options.out / f"{part}.json", json.dumps(found, indent=1))
        print(part, json.dumps(found))
    if options.page:
        print(page(options.out))


if __name__ == "__main__":
    main()
