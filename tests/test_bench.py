"""Every script of bench/ runs from its first line to its last, at the smallest sizes.

Not what needs a GPU or TRL: decode.py runs on the CPU, vs_trl.py without TRL's side.
"""

import importlib.util
import io
import json
import re
import shutil
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ROOT, TOY, run
from safetensors.torch import load, save_file

from mtsql.config import read_options
from mtsql.extras.ablate import ARGS

BENCH = ROOT / "bench"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
SMALL |= {"vocab_size": 128, "head_dim": 16}


@pytest.fixture
def script(monkeypatch):
    """Imports a script by its name."""

    def load(name: str) -> ModuleType:
        monkeypatch.setattr(sys, "path", [str(BENCH), str(ROOT / "tests"), *sys.path])
        spec = importlib.util.spec_from_file_location(f"bench_{name}", BENCH / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look for it there
        spec.loader.exec_module(module)
        return module

    return load


def start(module: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    """Call the script's main with these arguments."""
    monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
    module.main()


@pytest.fixture
def real(work, tmp_path) -> Path:
    """A folder of data as for the real suite, of the small benchmark."""
    data = tmp_path / "data"
    for name, made in (("real/train_mix", "train"), ("sparc/dev", "dev"), ("sparc/tables", "tables")):
        (data / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(work / "benchmark" / f"{made}.json", data / f"{name}.json")
    (data / "database").symlink_to(work / "benchmark" / "database")
    return data


def test_all_scripts_are_tried_here():
    tried = Path(__file__).read_text()
    assert [path for path in BENCH.glob("*.py") if f"test_{path.stem}(" not in tried] == []


def test_decode(tmp_path):
    sizes = ["--layers", 1, "--vocabulary", 200, "--slots", 3, "--context", 32, "--steps", 2]
    run("bench/decode.py", *sizes, "--json", tmp_path / "json")
    figures = json.loads((tmp_path / "json").read_text())
    figures.pop("hf_generate_tokens_per_second")  # of a few milliseconds, less the prefill's: may be negative
    assert len(figures) == 1 + 4 * 3 and min(figures.values()) > 0


def test_gpu_queue(script, monkeypatch, capsys, real, work, tmp_path):
    queue = script("gpu_queue")
    for words in (words for commands in queue.JOBS.values() for words in commands.values()):
        if words[0] in ARGS:
            given = [word.format(data="d", out="o") for word in words[1:]]
            assert read_options(ARGS[words[0]], "", [*given, "--out", "o"]).wording in ("compact", "paper")
    small = ["--model", str(work / "imitation"), "--targets", "gold", "--rounds", "1", "--questions", "2"]
    mix = "--data {data}/real/train_mix.json --tables {data}/sparc/tables.json --databases {data}/database"
    command = ["train_sft.py", *TOY, *small, "--tools", "none", *mix.split(), "--resume"]
    monkeypatch.setattr(queue, "JOBS", {"one": {"arm": command}})
    with pytest.raises(SystemExit) as ended:
        start(queue, monkeypatch, "run", "one", "--data", real, "--out", tmp_path / "out")
    assert ended.value.code == 0, (tmp_path / "out" / "arm.log").read_text()
    assert "{'arm': 0}" in capsys.readouterr().out
    assert (tmp_path / "out" / "arm" / "policy" / "config.json").is_file()
    save_file({"lora_A": torch.ones(2, 3)}, tmp_path / "out" / "arm" / "policy" / "adapter_model.safetensors")
    start(queue, monkeypatch, "collect", tmp_path / "out", tmp_path / "back")
    packed = b"".join(part.read_bytes() for part in sorted((tmp_path / "back").iterdir()))
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as tar:
        assert not [name for name in tar.getnames() if "checkpoints" in name]
        assert tar.extractfile("./arm.log").read() == (tmp_path / "out" / "arm.log").read_bytes()
        returned = load(tar.extractfile("./arm/policy/adapter_model.safetensors").read())
    assert returned["lora_A"].dtype == torch.bfloat16 and returned["lora_A"].tolist() == [[1.0] * 3] * 2


def test_hostile(script, monkeypatch, capsys):
    hostile = script("hostile")
    assert len({sql for _, sql, _ in [*hostile.STATEMENTS, *hostile.MORE]}) > 900
    monkeypatch.setattr(hostile, "STATEMENTS", hostile.STATEMENTS[::40])
    monkeypatch.setattr(hostile, "MORE", hostile.MORE[::40])
    start(hostile, monkeypatch, "--seconds", 0.1)
    page = capsys.readouterr().out
    assert "- results of a wrong type: 0\n" in page and "unchanged byte for byte, and no other file" in page


def test_rollout(script, monkeypatch, tmp_path):
    bench = script("rollout")
    whole = bench.make_workload
    monkeypatch.setattr(bench, "make_workload", lambda *given: whole(2, 2, given[2], 20, 4, 4, 2))
    start(bench, monkeypatch, "--repetitions", 1, "--json", tmp_path / "json")
    figures = json.loads((tmp_path / "json").read_text())
    assert {"ratio_hf_generate", "ratio_continuous_batching"} < set(figures) and min(figures.values()) > 0


def test_size(script, monkeypatch, capsys, tmp_path):
    size = script("size")
    file = tmp_path / "small.py"
    file.write_text('"""Text."""\n\n#\ndef f(a, *, b):\n    """Text\n    of 2."""\n    return """a\n\nb"""\n')
    assert (size.code_lines(file), size.most_parameters(file)) == (4, 2)
    monkeypatch.setattr(size, "LOADED", size.LOADED.replace("train_grpo, ", ""))  # nor torch with it
    start(size, monkeypatch)
    numbers = [int(n) for n in re.findall(r"\| (\d+)", capsys.readouterr().out)]
    everything, core, imported, *_ = numbers
    assert len(numbers) == 8 and everything > core > imported > 1000 and min(numbers) > 5


def test_train_step(script, monkeypatch, tmp_path):
    bench = script("train_step")
    small = SimpleNamespace(prompt=(4, 9), text=(2, 5), plain_rows=2, positions={"sft": 60, "grpo": 60})
    small.shape, small.questions = SMALL | {"num_hidden_layers": 1}, {"sft": 3, "grpo": 2}
    monkeypatch.setattr(bench, "WORK", small)
    monkeypatch.setattr(bench, "LARGE_HEAD", small.shape)
    monkeypatch.setattr(bench, "LOSS_TOKENS", 50_000)
    monkeypatch.setattr(bench, "PLAIN_TOKENS", 40_000)
    monkeypatch.setattr(bench, "in_fresh_process", lambda function, *given: function(*given))
    start(bench, monkeypatch, "--repetitions", 1, "--json", tmp_path / "json")
    figures = json.loads((tmp_path / "json").read_text())
    assert figures["loss_ours_seconds"] > 0
    assert max(figures[f"{step}_gradient_distance"] for step in ("sft", "grpo")) < 1e-4
    assert 0 < figures["grpo_shared_prompt_positions"] < figures["grpo_packed_positions"]


def test_vs_trl(script, monkeypatch, capsys, work, tmp_path):
    bench = script("vs_trl")
    monkeypatch.setattr(bench, "timed", lambda words: len(run(*words)))
    asked = ["--model", work / "imitation", "--data", work / "benchmark", "--prompts", 2, "--samples", 2]
    with pytest.raises(SystemExit):
        start(bench, monkeypatch, *asked, "--trl-micro-batches", 3)
    assert "--trl-micro-batches should divide 4" in capsys.readouterr().err
    sizes = {"config": TOY[1], "turn_tokens": 20, "prompts": 2, "samples": 2}
    chosen = bench.argparse.Namespace(model=work / "imitation", data=[work / "benchmark"], **sizes)
    seconds, _ = bench.train_here(chosen, 1, tmp_path / "here", 0)
    assert len(seconds) == 1 and seconds[0] > 0
