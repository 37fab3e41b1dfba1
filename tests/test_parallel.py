"""Two gloo processes on the CPU do what one does."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from conftest import data_of, rows_of, run, run_in_two
from safetensors.torch import load_file

from mtsql.learn.parallel import Processes, leave_processes


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
    torch.multiprocessing.start_processes(play, (str(tmp_path / "store"),), 3, start_method="forkserver")
    assert {p.name for p in tmp_path.glob("store.*")} == {"store.0", "store.1", "store.2"}


def assert_trained_alike(start: Path, one: Path, other: Path) -> None:
    """Both are as far from where they started, to 2 % of the way, as rounding differs where gradients are
    nearly 0 and Adam moves a weight by its rate all the same."""
    (name,) = (path.name for path in one.glob("*.safetensors"))
    a, b = (load_file(folder / name) for folder in (one, other))
    assert a.keys() == b.keys()
    if name.startswith("adapter"):  # B starts at 0, and A is small beside it
        before = {key: torch.zeros_like(weight) for key, weight in a.items() if "lora_B" in key}
    else:
        before = load_file(start / name)
    way = torch.cat([(a[key] - before[key]).flatten() for key in before])  # (parameters,)
    apart = torch.cat([(b[key] - a[key]).flatten() for key in before])  # (parameters,)
    assert way.norm() > 0 and apart.norm() <= 0.02 * way.norm()


def play_both(folder: Path, *command: object, launched: bool = False) -> tuple[Path, Path]:
    """The folders of a command in one process and in two (`launched` by torchrun): the same files."""
    one, two = folder / "one", folder / "two"
    run(*command, "--out", one)
    if launched:
        run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, *command, "--out", two)
    else:
        run_in_two(*command, "--out", two)
    files = [{path.relative_to(made) for path in made.rglob("*")} for made in (one, two)]
    assert files[0] == files[1]
    return one, two


OPTIONS = {
    "train_grpo.py": "--steps 2 --prompts-per-step 5 --samples-per-prompt 4 --save-every 1 --beta 0.01 "
    "--evaluate-every 2 --learning-rate 3e-5",
    "train_sft.py": "--questions 8 --samples-per-question 4 --rounds 2 --epochs 1 --tools none "
    "--trajectories-per-step 5 --learning-rate 3e-5 --lora-rank 4",
}


@pytest.mark.parametrize("script", OPTIONS)
def test_two_processes_train_as_one(script, work, tmp_path):
    command = [script, *data_of(work), *OPTIONS[script].split()]
    one, two = play_both(tmp_path, *command, launched=script == "train_grpo.py")
    rows = [rows_of(folder / "metrics.csv") for folder in (one, two)]
    assert len(rows[0]) == len(rows[1]) > 0
    for pair in zip(*rows, strict=True):
        a, b = ({name: float(value) for name, value in row.items()} for row in pair)
        # The log-probability gap is itself a difference by rounding.
        for name in ("logprob_gap", "logprob_gap_p99", "logprob_gap_mean"):
            assert a.pop(name, 0) < 1e-3 and b.pop(name, 0) < 1e-3
        assert b == pytest.approx(a, rel=1e-4, abs=1e-5)
    assert_trained_alike(work / "imitation", one / "policy", two / "policy")


def test_two_processes_evaluate_as_one(work, tmp_path):
    how = ["--split", "test", "--history", "predicted", "--sampled-runs", 1]
    one, two = play_both(tmp_path, "evaluate.py", *data_of(work), *how)
    assert (two / "predictions.jsonl").read_text() == (one / "predictions.jsonl").read_text()
