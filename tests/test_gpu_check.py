"""The self-check, on a CPU."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import run

from mtsql import gpu_check
from mtsql.agent.cache import cache_bytes_per_token
from mtsql.agent.head import float32_logits
from mtsql.gpu_check import (
    GAP,
    check_gap,
    decode_speed,
    gaps,
    random_qwen3,
    sample,
    some_prompts,
    without_tf32,
)
from mtsql.task import pick_device


def test_on_a_cpu_all_rows_that_can_run_pass(tmp_path):
    printed = run("-m", "mtsql.gpu_check", "--device", "cpu", "--json", tmp_path / "check.json")
    found = json.loads((tmp_path / "check.json").read_text())
    verdicts = {row["check"]: row["verdict"] for row in found["rows"]}
    assert len(verdicts) == len(gpu_check.all_checks()) == len(found["rows"])
    missing = {name for name, verdict in verdicts.items() if verdict == "not available"}
    assert missing == {
        "graphs on and off", "log-probability gap, TF32", "flash-attn's gradient", "peak of a training step",
    }  # fmt: skip
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


def test_decoding_speed_counts_the_rows_that_decode():
    model = random_qwen3(torch.device("cpu"), num_hidden_layers=1).eval()
    prompts = some_prompts([40] * 8)
    gib = 3.4 * 512 * cache_bytes_per_token(model) / 2**30
    few, every = (decode_speed(model, prompts, 4, True, cache_gib=size) for size in (gib, 0.0))
    assert (few.rows, every.rows) == (3, 8)
    assert min(few.share_of_floor, every.share_of_floor) > 0


def test_tf32_is_off_where_ids_have_to_be_the_same():
    found = []
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        without_tf32()(lambda: found.append(torch.get_float32_matmul_precision()))()
        found.append(torch.get_float32_matmul_precision())
    finally:
        torch.set_float32_matmul_precision(before)
    assert found == ["highest", "high"]


def test_a_gpu_gets_tf32_and_no_cudnn_attention(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        assert pick_device("auto") == torch.device("cuda", 1)
        assert torch.get_float32_matmul_precision() == "high"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert pick_device("cpu") == torch.device("cpu")
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.backends.cuda.enable_cudnn_sdp(cudnn)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sampler_and_trainer_have_the_heads_logits_in_float32(dtype, monkeypatch):
    """Rounded to half precision on both sides, the two would be several times as far apart."""
    model = random_qwen3(torch.device("cpu"), dtype, initializer_range=0.2)
    exact = gaps(model, sample(model))
    for module in ("generator", "logprobs"):
        package = "agent" if module == "generator" else "learn"
        rounded = lambda hidden, weight: (hidden @ weight.t().to(hidden.dtype)).float()  # noqa: E731
        monkeypatch.setattr(f"mtsql.{package}.{module}.float32_logits", rounded)
    assert exact.mean() < gaps(model, sample(model)).mean()
    hidden, weight = torch.randn(64, 256).to(model.dtype), torch.randn(512, 256).to(model.dtype)
    sums = hidden.double() @ weight.double().t()
    torch.testing.assert_close(float32_logits(hidden, weight).double(), sums, atol=1e-4, rtol=0)
    first = float32_logits(torch.ones(1, 256), torch.full((1, 256), 1 / 3))  # float32 is not rounded after it
    torch.testing.assert_close(first.item(), 256 / 3, atol=1e-3, rtol=0)
