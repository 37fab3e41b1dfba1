"""What stands in a model's folder, apart from its weights: a tokenizer, and an adapter's base."""

from __future__ import annotations

import json
import os
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mtsql.errors import UserError
from mtsql.files import recover_folder

ADAPTER_FILE = "adapter_config.json"
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
    try:
        return AutoTokenizer.from_pretrained(name_or_path)
    except (OSError, ValueError) as error:
        raise UserError(f"no tokenizer could be loaded from {name_or_path}; {WHAT_TO_GIVE}") from error


def base_of_adapter(folder: Path) -> str:
    """The folder or hub name of an adapter's base; a relative path is looked up beside the adapter first.

    Raises UserError for a path that starts with a dot if there is no such folder, and for an unreadable file.
    """
    try:
        adapter = json.loads((folder / ADAPTER_FILE).read_text(encoding="utf-8"))
        name = adapter["base_model_name_or_path"] or str(folder)
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / ADAPTER_FILE} is no adapter's configuration with its base") from None
    beside = os.path.normpath(folder / name)
    if Path(beside).is_dir():
        return beside
    if name.startswith(".") and not Path(name).is_dir():
        raise UserError(f"{folder} is an adapter of {beside}, which is not there; its README says where from")
    return name


def check_exists(name_or_path: str | Path) -> None:
    """Raise UserError for what can be neither a folder nor a hub name."""
    recover_folder(Path(name_or_path))
    if Path(name_or_path).is_dir():
        return
    names = str(name_or_path).split("/")
    if len(names) > 2 or not all(names) or names[0] in (".", "..", "~"):
        raise UserError(f"{name_or_path} is not a folder; {WHAT_TO_GIVE}")
