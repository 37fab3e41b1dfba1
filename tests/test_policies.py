"""Folders of policies, adapters and tokenizers: saved, loaded, merged, shipped; and the KL reference."""

import io
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import run
from decoders import VOCABULARY, make_decoder, with_random
from peft import PeftModel
from safetensors.torch import load_file, save
from test_learn import make_groups
from torch import Tensor

from mtsql.config import Agent
from mtsql.errors import UserError
from mtsql.extras.merge import give_away, merge
from mtsql.learn.logprobs import shared_prompt_batch, token_logprobs
from mtsql.learn.model import Reference, load_policy, save_policy
from mtsql.model_folder import PACKAGED, load_tokenizer
from mtsql.task import chosen_policy


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_policy_folders_round_trip(tmp_path, tokenizer):
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    save_policy(make_decoder("qwen3"), tokenizer, base)
    assert load_tokenizer(base).get_vocab() == tokenizer.get_vocab()
    policy = load_policy(base)
    torch.testing.assert_close(weights(policy), weights(make_decoder("qwen3")), rtol=0, atol=0)
    assert all(p.requires_grad for p in policy.parameters())
    lora = with_random(load_policy(base, "bfloat16", lora_rank=3), ".lora_B")
    names = {name.split(".lora_")[0] for name in weights(lora) if ".lora_" in name}
    assert len(names) == 2 * 7  # every linear layer of both blocks, not the head
    assert lora.peft_config["default"].lora_alpha == 6
    save_policy(lora, tokenizer, adapter)
    again = load_policy(adapter, "bfloat16")
    torch.testing.assert_close(weights(again), weights(lora), rtol=0, atol=0)
    for loaded in (lora, again):
        for name, parameter in loaded.named_parameters():
            expected = (True, torch.float32) if ".lora_" in name else (False, torch.bfloat16)
            assert (parameter.requires_grad, parameter.dtype) == expected
    with pytest.raises(ValueError, match="LoRA adapter already"):
        load_policy(adapter, lora_rank=2)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"lora_dropout": 0.9}))
    batch = shared_prompt_batch(make_groups())
    with_dropout, without = (token_logprobs(load_policy(folder), batch)[0] for folder in (adapter, adapter))
    torch.testing.assert_close(with_dropout, without, rtol=0, atol=0)  # the sampler has none
    path = base / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_dropout": 0.9}))
    assert not any(getattr(module, "attention_dropout", 0) for module in load_policy(base).modules())


def test_a_policy_that_cannot_be_written_leaves_the_old_one(tmp_path, tokenizer):
    folder, failing = tmp_path / "policy", SimpleNamespace(save_pretrained=lambda _: 1 / 0)
    save_policy(make_decoder("qwen3"), tokenizer, folder)
    before = sorted(p.name for p in folder.iterdir())
    with pytest.raises(ZeroDivisionError):
        save_policy(make_decoder("llama"), failing, folder)
    assert sorted(p.name for p in folder.iterdir()) == before
    torch.testing.assert_close(weights(load_policy(folder)), weights(make_decoder("qwen3")), rtol=0, atol=0)


def test_what_cannot_be_loaded_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which has no models/
    (tmp_path / "empty").mkdir()
    for load in (load_policy, load_tokenizer):
        for packaged in PACKAGED:
            path = f"models/{packaged}-x"
            with pytest.raises(UserError, match=f"{path} is not a folder; make it: .* {packaged} {path}"):
                load(path)
        for name in ("no/such/folder", "./nowhere", "models/nowhere", "empty/nowhere"):
            with pytest.raises(ValueError, match=f"{name} is not a folder; give"):
                load(name)
        with pytest.raises(ValueError, match=r"could be loaded from .*empty; give"):
            load(tmp_path / "empty")


OWN_CODE = b"open('%s', 'w')\nclass Config: pass\nclass ModelForCausalLM: pass\n"
PICKLE = b"cbuiltins\nopen\n(V%s\nVw\ntR."  # leaves a file when it is read


def test_what_a_library_cannot_load_is_one_sentence_and_runs_no_code(base, tmp_path, monkeypatch):
    """Cut, noise, a pointer of Git LFS, a pickle, other shapes, code of its own (with "y" typed)."""
    ran = tmp_path / "ran"
    whole = (base / "model.safetensors").read_bytes()
    config = json.loads((base / "config.json").read_text())
    code = {"model_type": "own", "auto_map": {f"Auto{n}": f"own.{n}" for n in ("Config", "ModelForCausalLM")}}
    lacking = load_file(base / "model.safetensors")
    del lacking["model.norm.weight"]
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
    cases = {
        "pointer of Git LFS": {"model.safetensors": pointer},
        "bin is only a pointer": {"model.safetensors": None, "pytorch_model.bin": pointer},
        "config.json is only a pointer": {"config.json": pointer},
        "incomplete metadata": {"model.safetensors": whole[:5000]},
        "lack model.norm.weight": {"model.safetensors": save(lacking, {"format": "pt"})},
        "UnpicklingError": {"model.safetensors": None, "pytorch_model.bin": PICKLE % bytes(ran)},
        "no model could be loaded": {"config.json": json.dumps(config | {"vocab_size": 3}).encode()},
        "custom code": {"config.json": json.dumps(config | code).encode(), "own.py": OWN_CODE % bytes(ran)},
        "RecursionError": {"config.json": b"[" * 100_000},
    }
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    for number, (problem, contents) in enumerate(cases.items()):
        folder = shutil.copytree(base, tmp_path / str(number))
        for name, content in contents.items():
            (folder / name).unlink(missing_ok=True)
            if content is not None:
                (folder / name).write_bytes(content)
        with pytest.raises(UserError, match=problem) as error:
            load_policy(folder)
        assert "\n" not in str(error.value) and str(folder) in str(error.value)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")  # is no tokenizer either
    for content in (pointer, b"", b"[]", b"\xff", None):
        (folder / "tokenizer.json").unlink()
        if content is not None:
            (folder / "tokenizer.json").write_bytes(content)
        with pytest.raises(UserError, match=r"no tokenizer could be loaded|pointer of Git LFS"):
            load_tokenizer(folder)
    assert not ran.exists()


def test_a_tokenizer_with_more_ids_than_the_model_has_is_refused(base):
    tokens, config = SimpleNamespace(tokenizer=load_tokenizer(base)), Agent(model=str(base))
    assert chosen_policy(config, tokens) is not None
    tokens.tokenizer.add_tokens(["<new>"])
    with pytest.raises(UserError, match=f"{VOCABULARY + 1} ids, and its model embeddings for {VOCABULARY}"):
        chosen_policy(config, tokens)


def test_bfloat16_on_a_processor_without_it_is_said_to_be_slow(base, monkeypatch, capsys):
    tokens = SimpleNamespace(tokenizer=load_tokenizer(base))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    there = torch.cpu.get_capabilities() | {"architecture": "x86_64", "avx512_bf16": False, "amx_bf16": False}
    cases = [({}, "bfloat16", True), ({}, "float32", False), ({"amx_bf16": True}, "bfloat16", False)]
    for of_cpu, dtype, said in [*cases, ({"architecture": "aarch64"}, "bfloat16", False)]:
        monkeypatch.setattr("torch.cpu.get_capabilities", lambda now=there | of_cpu: now)
        chosen_policy(Agent(model=str(base), dtype=dtype), tokens)
        assert ("--dtype float32" in capsys.readouterr().out) is said


def test_an_adapter_of_another_base_is_one_sentence(base, tmp_path, tokenizer):
    save_policy(load_policy(base, lora_rank=2), tokenizer, tmp_path)
    path = tmp_path / "adapter_config.json"
    content = json.loads(path.read_text())
    for change in ({"r": 3}, {"peft_type": "NEW"}, {"target_modules": ["other"]}):
        path.write_text(json.dumps(content | change))
        with pytest.raises(UserError, match="does not go on its base"):
            load_policy(tmp_path)
    for broken in (json.dumps(content | {"base_model_name_or_path": 7}), '{"base_model'):
        path.write_text(broken)
        for load in (load_policy, load_tokenizer):
            (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
            with pytest.raises(UserError, match="is no adapter's configuration"):
                load(tmp_path)


def test_the_policy_at_the_start_is_its_reference(base, tmp_path, tokenizer):
    """After a LoRA warm start the reference is the warm-started model, not its base."""
    save_policy(with_random(load_policy(base, lora_rank=2), "lora_"), tokenizer, tmp_path / "warm")
    batch = shared_prompt_batch(make_groups())
    for folder in (tmp_path / "warm", base):
        policy = load_policy(folder)
        reference = Reference(policy)
        trainable = [name for name, p in policy.named_parameters() if p.requires_grad]
        with torch.no_grad():
            start = token_logprobs(policy, batch)[0]
            for parameter in (p for p in policy.parameters() if p.requires_grad):
                parameter.mul_(1.1)
            moved = token_logprobs(policy, batch)[0]
            with reference.policy() as frozen:
                got = token_logprobs(frozen, batch)[0]
            assert torch.equal(token_logprobs(policy, batch)[0], moved)
        assert torch.equal(got, start) and not torch.allclose(got, moved)
        assert [name for name, p in policy.named_parameters() if p.requires_grad] == trainable
        save_policy(policy, tokenizer, tmp_path / "saved")
        torch.testing.assert_close(weights(policy), weights(load_policy(tmp_path / "saved")), rtol=0, atol=0)


@pytest.mark.parametrize("quantise", ["none", "nf4"])
def test_merged_copy_is_an_ordinary_folder_with_the_same_policy(base, tmp_path, tokenizer, quantise):
    policy = with_random(load_policy(base, quantise=quantise, lora_rank=4), "lora_B", 0.1)
    save_policy(policy, tokenizer, tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged", "float32")
    merged = load_policy(tmp_path / "merged")
    assert not isinstance(merged, PeftModel)
    batch = shared_prompt_batch(make_groups())
    unquantised = load_policy(tmp_path / "adapter")  # the merged copy stands on the unquantised base
    with torch.no_grad():
        found, expected = (token_logprobs(policy, batch)[0] for policy in (merged, unquantised))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="nothing to merge"):
        merge(base, tmp_path / "again", "float32")


def test_an_adapter_on_a_base_that_was_saved_in_nf4_is_not_merged(base, tmp_path):
    load_policy(base, quantise="nf4").save_pretrained(tmp_path / "base")
    load_policy(tmp_path / "base", lora_rank=2).save_pretrained(tmp_path / "adapter")
    with pytest.raises(UserError, match="a base that is not quantised"):
        merge(tmp_path / "adapter", tmp_path / "merged", "float32")


def test_a_shipped_adapter_is_half_as_large_and_finds_its_base_beside(base, tmp_path, tokenizer, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the base's path is looked up from here, too, where nothing is
    policy = with_random(load_policy(base, lora_rank=4), "lora_B", 0.1).eval()
    save_policy(policy, tokenizer, tmp_path / "policy")
    out = tmp_path / "models" / "agent"
    run("-m", "mtsql.extras.merge", tmp_path / "policy", out, "--base", "../base")
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert "exists already; remove it" in run("-m", "mtsql.extras.merge", tmp_path / "policy", out, expect=2)
    sizes = [(folder / "adapter_model.safetensors").stat().st_size for folder in (tmp_path / "policy", out)]
    assert sizes[1] < 0.6 * sizes[0]
    for load in (load_policy, load_tokenizer):
        with pytest.raises(UserError, match=r"agent is an adapter of .*base, which is not there; its README"):
            load(out)
    shutil.copytree(base, tmp_path / "models" / "base")
    shipped = load_policy(Path("models/agent")).eval()
    assert load_tokenizer("models/agent").get_vocab() == tokenizer.get_vocab()
    assert all(p.dtype == torch.float32 for p in shipped.parameters())
    ids = torch.arange(4, 40)[None]
    with torch.no_grad():
        assert (shipped(ids).logits - policy(ids).logits).abs().max() < 0.1
    save_policy(shipped, tokenizer, tmp_path / "elsewhere" / "policy")
    load_policy(tmp_path / "elsewhere" / "policy")  # trained on, it still finds its base
    (tmp_path / "no").mkdir()
    for content in (None, "[]", '{"target_modules": null}'):
        shutil.copy(out / "adapter_model.safetensors", tmp_path / "no")
        if content:
            (tmp_path / "no" / "adapter_config.json").write_text(content)
        with pytest.raises(UserError, match="holds no LoRA adapter"):
            give_away(tmp_path / "no", tmp_path / "given", "x")
    with pytest.raises(UserError, match="the adapter's own folder"):
        give_away(tmp_path / "no", tmp_path / "given" / ".." / "no", "x")
