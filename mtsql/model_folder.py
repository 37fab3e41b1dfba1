"""What stands in a model's folder, apart from its weights: a tokenizer, and an adapter's base."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mtsql.errors import UserError, loading
from mtsql.files import file_errors

if TYPE_CHECKING:  # peft takes seconds to import: only what works with adapters does it
    from peft import PeftModel

Policy: TypeAlias = "PreTrainedModel | PeftModel"  # a causal language model, or one with a LoRA adapter
ADAPTER_FILE = "adapter_config.json"
PACKAGED = ("qwen2.5-coder-0.5b", "smollm2-135m")  # what python -m mtsql pretrained makes
LFS_POINTER = b"version https://git-lfs"
WHAT_TO_GIVE = (
    "give a folder with config.json, weights and tokenizer, a PEFT adapter folder, "
    "or a hub name like Qwen/Qwen3-4B"
)


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a model folder, adapter folder or hub name; UserError if there is none.

    An adapter folder without a tokenizer has its base's.
    """
    check_exists(name_or_path)
    folder = Path(name_or_path)
    if (folder / ADAPTER_FILE).is_file() and not (folder / "tokenizer_config.json").is_file():
        name_or_path = base_of_adapter(folder)
    with loading(f"no tokenizer could be loaded from {name_or_path}; {WHAT_TO_GIVE}"):
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)
        if not tokenizer("a").input_ids:  # made from a chat template alone
            raise ValueError("it has no vocabulary")
        return tokenizer


def base_of_adapter(folder: Path) -> str:
    """The folder or hub name of an adapter's base; a relative path is looked up beside the adapter first.

    Raises UserError for a path that starts with a dot if there is no such folder, and for an unreadable file.
    """
    with loading(f"{folder / ADAPTER_FILE} is no adapter's configuration with its base"):
        adapter = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))
        name = adapter["base_model_name_or_path"] or str(folder)
        beside = os.path.normpath(folder / name)
    if Path(beside).is_dir():
        return beside
    if name.startswith(".") and not Path(name).is_dir():
        how = _how_to_make(beside) or "its README says where from"
        raise UserError(f"{folder} is an adapter of {beside}, which is not there; {how}")
    return name


def _how_to_make(folder: str) -> str | None:
    """The command that makes a folder by the name of one of PACKAGED; None for another."""
    made = next((model for model in PACKAGED if Path(folder).name.startswith(model)), None)
    return made and f"make it: python -m mtsql pretrained {made} {folder}"


def check_exists(name_or_path: str | Path) -> None:
    """Raise UserError for what can be neither a folder nor a hub name, and for a pointer of Git LFS in it."""
    folder = Path(name_or_path)
    with file_errors(folder):
        kinds = ("safetensors", "bin", "json", "jinja")
        for path in (path for kind in kinds for path in folder.glob(f"*.{kind}")):
            with path.open("rb") as file:
                if file.read(len(LFS_POINTER)) == LFS_POINTER:
                    raise UserError(f"{path} is only a pointer of Git LFS; fetch the file with git lfs pull")
        if folder.is_dir():
            return
    names = str(name_or_path).split("/")
    beside = names[0] in (".", "..", "~", "models") or os.path.isdir(names[0])  # our own folders, no owner's
    if len(names) > 2 or not all(names) or (beside and len(names) == 2):
        how = _how_to_make(str(name_or_path)) or WHAT_TO_GIVE
        raise UserError(f"{name_or_path} is not a folder; {how}")
