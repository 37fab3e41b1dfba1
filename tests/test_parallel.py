"""Two gloo processes on the CPU do what one does."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import TOY, run
from safetensors.torch import load_file

from mtsql.learn.parallel import Processes, join_processes, leave_processes

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
CLOCKS = {"minutes", "rollout_seconds", "train_seconds", "sampled_tokens_per_second"}


def fork(check: Callable[[int, str], None], path: Path, processes: int = 2) -> None:
    """Run a check in each of several processes; the first that fails fails the test."""
    torch.multiprocessing.start_processes(
        check, args=(str(path),), nprocs=processes, start_method="forkserver"
    )


def play(rank: int, store: str) -> None:
    """One of three processes: its checks fail the whole."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
    processes = Processes(rank, 3)
    assert processes.is_main == (rank == 0)
    for count in (0, 1, 2, 7):
        items = [f"item {i}" for i in range(count)]
        assert processes.gather(processes.share(items)) == items
    assert processes.all_gather(rank * 10) == [0, 10, 20]
    parameters = [torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))]
    parameters[0].grad = torch.full((2, 3), float(rank + 1))
    if rank == 1:  # the others have no micro-batch that reaches it
        parameters[1].grad = torch.arange(4.0)
    processes.sum_gradients(parameters)
    assert torch.equal(parameters[0].grad, torch.full((2, 3), 6.0))
    assert torch.equal(parameters[1].grad, torch.arange(4.0))
    leave_processes(processes)
    Path(f"{store}.{rank}").touch()


def test_shares_come_back_in_order_and_gradients_add_up(tmp_path):
    fork(play, tmp_path / "store", processes=3)
    assert {p.name for p in tmp_path.glob("store.*")} == {"store.0", "store.1", "store.2"}


def test_alone_without_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    processes = join_processes()
    assert processes == Processes(0, 1)
    assert processes.gather(processes.share([1, 2, 3])) == [1, 2, 3]
    leave_processes(processes)


def rows_of(path: Path) -> list[dict[str, float]]:
    with path.open(newline="") as file:
        return [{k: float(v) for k, v in row.items() if k not in CLOCKS} for row in csv.DictReader(file)]


def assert_trained_alike(start: Path, one: Path, other: Path) -> None:
    """Both are as far from where they started, to 2 % of the way, as rounding differs where gradients are
    nearly 0 and Adam moves a weight by its rate all the same."""
    if (one / "adapter_model.safetensors").is_file():  # where B starts at 0, and A is small beside it
        a, b = (load_file(folder / "adapter_model.safetensors") for folder in (one, other))
        assert a.keys() == b.keys()
        a, b = ({name: w for name, w in of.items() if "lora_B" in name} for of in (a, b))
        before = {name: torch.zeros_like(weight) for name, weight in a.items()}
    else:
        before, a, b = (load_file(folder / "model.safetensors") for folder in (start, one, other))
        assert before.keys() == a.keys() == b.keys()
    way = torch.cat([(a[name] - before[name]).flatten() for name in a])  # (parameters,)
    apart = torch.cat([(b[name] - a[name]).flatten() for name in a])  # (parameters,)
    assert way.norm() > 0 and apart.norm() <= 0.02 * way.norm()


def files_of(folder: Path) -> set[str]:
    return {str(Path(root, name).relative_to(folder)) for root, _, names in os.walk(folder) for name in names}


@pytest.mark.parametrize(
    ("script", "options"),
    [
        (
            "train_grpo.py",
            ["--steps", 2, "--prompts-per-step", 5, "--samples-per-prompt", 4, "--save-every", 1,
             "--evaluate-every", 2, "--evaluate-dialogues", 3, "--resample-rounds", 1, "--beta", 0.01,
             "--learning-rate", 3e-5],
        ),
        (
            "train_sft.py",
            ["--questions", 8, "--samples-per-question", 4, "--rounds", 2, "--epochs", 1, "--tools", "none",
             "--trajectories-per-step", 5, "--learning-rate", 3e-5, "--lora-rank", 4],
        ),
    ],
)  # fmt: skip
def test_two_processes_train_as_one(script, options, work, tmp_path):
    base = [script, *TOY, "--data", work / "benchmark", "--model", work / "imitation", *options]
    run(*base, "--out", tmp_path / "one")
    run(*TORCHRUN, *base, "--out", tmp_path / "two")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    one, two = rows_of(tmp_path / "one" / "metrics.csv"), rows_of(tmp_path / "two" / "metrics.csv")
    assert len(one) == len(two) > 0
    for a, b in zip(one, two, strict=True):
        # The log-probability gap is itself a difference by rounding.
        for name in ("logprob_gap", "logprob_gap_p99", "logprob_gap_mean"):
            assert a.pop(name, 0) < 1e-3 and b.pop(name, 0) < 1e-3
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)
    assert_trained_alike(work / "imitation", tmp_path / "one" / "policy", tmp_path / "two" / "policy")


def test_two_processes_evaluate_as_one(work, tmp_path):
    base = [
        "evaluate.py",
        *TOY,
        "--data",
        work / "benchmark",
        "--model",
        work / "imitation",
        "--split",
        "test",
    ]
    base += ["--history", "predicted", "--sampled-runs", 1]
    run(*base, "--out", tmp_path / "one")
    run(*TORCHRUN, *base, "--out", tmp_path / "two")
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    one, two = ((tmp_path / name / "predictions.jsonl").read_text() for name in ("one", "two"))
    assert [json.loads(line) for line in two.splitlines()] == [json.loads(line) for line in one.splitlines()]
