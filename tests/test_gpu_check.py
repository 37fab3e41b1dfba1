"""The self-check, on a CPU."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import run

from mtsql import gpu_check
from mtsql.agent.head import float32_logits
from mtsql.gpu_check import GAP, check_gap, gaps, random_qwen3, sample


def test_on_a_cpu_all_rows_that_can_run_pass(tmp_path):
    printed = run("-m", "mtsql.gpu_check", "--device", "cpu", "--json", tmp_path / "check.json")
    found = json.loads((tmp_path / "check.json").read_text())
    verdicts = {row["check"]: row["verdict"] for row in found["rows"]}
    assert len(verdicts) == len(gpu_check.all_checks()) == len(found["rows"])
    missing = {name for name, verdict in verdicts.items() if verdict == "not available"}
    assert missing == {"graphs on and off", "flash-attn's gradient", "peak of a training step"}
    assert set(verdicts.values()) == {"pass", "not available"}
    assert f"0 of {len(verdicts)} failed" in printed
    shares = [row["measured"] for row in found["rows"] if row["check"].startswith("decoding")]
    assert len(shares) == 6 and all("% of the floor" in text for text in shares)


def test_what_is_wrong_fails_with_the_number(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setitem(GAP, "bfloat16", 1e-9)
    assert not check_gap("bfloat16")(cpu).passed

    def broken(device: torch.device) -> None:
        raise RuntimeError("no kernel image is available\nand more")

    monkeypatch.setattr(gpu_check, "all_checks", lambda: [("a kernel", "runs", broken)])
    (outcome,) = gpu_check.make_checks(cpu, lambda outcome: None)
    assert outcome.verdict == "fail" and outcome.measured == "RuntimeError: no kernel image is available"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sampler_and_trainer_have_the_heads_logits_in_float32(dtype, monkeypatch):
    """Rounded to half precision on both sides, the two would be several times as far apart."""
    model = random_qwen3(torch.device("cpu"), dtype, initializer_range=0.2)
    exact = gaps(model, sample(model))
    for module in ("generator", "logprobs"):
        package = "agent" if module == "generator" else "learn"
        rounded = lambda hidden, weight: (hidden @ weight.t()).float()  # noqa: E731
        monkeypatch.setattr(f"mtsql.{package}.{module}.float32_logits", rounded)
    assert exact.mean() < gaps(model, sample(model)).mean()
    hidden, weight = torch.randn(3, 8).to(model.dtype), torch.randn(5, 8).to(model.dtype)
    assert torch.equal(float32_logits(hidden, weight), hidden.float() @ weight.float().t())
