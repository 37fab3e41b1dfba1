"""The Triton kernel of a decode step, where Triton is installed: interpreted here, and compiled for GPUs."""

import os
import subprocess
import sys

import pytest
import torch
from decoders import END, make_decoder

from mtsql.agent import pages
from mtsql.agent.cache import Attention
from mtsql.agent.generator import Generator, Sampling
from mtsql.agent.pages import PAGE, PagedPiece, Pages

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_interpreted")


@pytest.mark.skipif(INTERPRETED, reason="begins the process with the others")
def test_interpreted():
    """Triton has to be imported with the variable set, so the tests below run in a process of their own."""
    how = {"env": os.environ | {"TRITON_INTERPRET": "1"}, "capture_output": True, "text": True}
    ran = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__], **how)
    assert ran.returncode == 0, ran.stdout + ran.stderr


SHAPES = [("float32", 4, 2, 48), ("float32", 2, 2, 8), ("float16", 14, 2, 64), ("float32", 16, 1, 128)]


@interpreted
@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim"), SHAPES)
def test_the_kernel_is_attention(dtype, heads, kv_heads, head_dim):
    """Pages in any order; what lies behind the end of a row, in its last page and in others, is NaN."""
    from mtsql.agent.decode_kernel import PAGES_A_CHUNK, attend_pages

    torch.manual_seed(0)
    dtype, columns = getattr(torch, dtype), 2 * PAGES_A_CHUNK + 1
    lengths = torch.tensor([1, PAGE, PAGE + 1, PAGE * PAGES_A_CHUNK, columns * PAGE])  # (rows,)
    table = torch.randperm(5 * columns).view(5, columns) + 1  # (rows, columns)
    home = Pages(None, 5 * columns * PAGE)
    stored = home.store(0, torch.empty(1, kv_heads, head_dim, dtype=dtype))
    stored.copy_(torch.randn_like(stored))  # (2, pages, kv_heads, PAGE, head_dim)
    queries = torch.randn(5, heads, head_dim).to(dtype)
    piece = PagedPiece(home, [None] * 5, table, columns * PAGE, decoding=True)
    slow = Attention(piece, lengths[:, None] - 1, heads, kv_heads, dtype)
    expected = slow.attend(0, queries).view_as(queries)
    for row, length in enumerate(lengths.tolist()):
        stored[:, table[row, length // PAGE :], :, length % PAGE :] = torch.nan
        stored[:, table[row, length // PAGE + 1 :]] = torch.nan
    error = (attend_pages(queries, stored, table, lengths) - expected).abs().max()
    assert error < (1e-5 if dtype == torch.float32 else 3e-3)


@interpreted
def test_it_samples_what_attention_samples(monkeypatch):
    from mtsql.agent.decode_kernel import attend_pages

    model, messages = make_decoder("qwen3"), []
    for kernel in (None, attend_pages):
        monkeypatch.setattr(pages, "decode_kernel", lambda _, kernel=kernel: kernel)
        with Generator(model, (END,), Sampling(), make_cache=lambda _: Pages(None, 2000)) as generator:
            generator.graphs = None
            rows = generator.start([[5] * 130, [6] * 3, [5] * 130], range(3), [9] * 3)
            while any(row.decoding for row in rows):
                generator.step()
            messages.append([row.ids for row in rows])
    assert messages[0] == messages[1]


@pytest.mark.skipif(INTERPRETED, reason="is compiled in the other process")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("shape", "dtype"), [((14, 2, 64), "bf16"), ((4, 2, 48), "fp32")])
def test_it_compiles_for_a_gpu_that_is_not_here(capability, shape, dtype, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from mtsql.agent.decode_kernel import attend_chunk, sizes

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fixed = sizes(*shape, PAGE)  # of heads, key heads, a head
    kinds = dict.fromkeys(("queries", "keys", "values"), f"*{dtype}") | {"table": "*i64", "lengths": "*i64"}
    kinds |= {"partial": "*fp32", "logsums": "*fp32", "columns": "i32", "chunks": "i32", "scale": "fp32"}
    signature = {name: kinds.get(name, "constexpr") for name in attend_chunk.arg_names}
    source = ASTSource(fn=attend_chunk, signature=signature, constexprs=fixed)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"] and ("mma.sync" in compiled.asm["ptx"]) == (dtype == "bf16")
    assert compiled.metadata.shared < 99 * 1024  # of every GPU with bfloat16
