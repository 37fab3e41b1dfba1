"""Puts a LoRA adapter into its base, as an ordinary Hugging Face folder; or makes it ready to be given away.

    python -m mtsql merge runs/sft/policy runs/sft/policy_merged
    python -m mtsql merge runs/sft/policy models/my-agent --base ../my-base

With --base nothing is merged. The folder gets the adapter alone, in bfloat16, which is half of what training
saves, without tokenizer, and with its base by this path, seen from the folder. Other files in it stay.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from mtsql.config import command_line, user_errors
from mtsql.errors import UserError, loading
from mtsql.files import refuse_filled, write_atomically

WEIGHTS = "adapter_model.safetensors"


def main() -> None:
    """The command. Raises UserError if there is no adapter, or the folder to merge into exists."""
    parser = command_line(__doc__)
    parser.add_argument("adapter", type=Path, help="folder of the adapter")
    parser.add_argument("out", type=Path, help="folder to write; one that is merged must not exist")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the merged weights [float32]")
    parser.add_argument("--base", default="", help="merge nothing; the adapter's base, seen from the folder")
    chosen = parser.parse_args()
    if chosen.base:
        give_away(chosen.adapter, chosen.out, chosen.base)
    else:
        merge(chosen.adapter, chosen.out, chosen.dtype)


def merge(adapter: Path, out: Path, dtype: str) -> None:
    """Merge. The base is loaded as it was saved, on the CPU.

    Raises UserError if `adapter` holds no adapter, or one of a base that was saved quantised.
    """
    from mtsql.learn.model import has_adapter, load_policy, save_policy  # so late that --help needs no torch
    from mtsql.model_folder import load_tokenizer

    refuse_filled(out)
    policy = load_policy(adapter, dtype)
    if not has_adapter(policy):
        raise UserError(f"{adapter} holds no LoRA adapter, so there is nothing to merge")
    if getattr(policy.base_model.model, "is_quantized", False):
        raise UserError("mtsql.extras.merge needs a base that is not quantised; this one is in nf4")
    save_policy(policy.merge_and_unload(), load_tokenizer(adapter), out)
    print(f"merged policy: {out}")


def give_away(adapter: Path, out: Path, base: str) -> None:
    """Write the adapter's two files, in bfloat16, over `base`. Raises UserError for its own folder."""
    import torch
    from safetensors.torch import load_file, save

    from mtsql.model_folder import ADAPTER_FILE

    if os.path.realpath(out) == os.path.realpath(adapter):
        raise UserError(f"{out} is the adapter's own folder, whose weights would be rounded; name another")
    with loading(f"{adapter} holds no LoRA adapter that can be read"):
        config = json.loads((adapter / ADAPTER_FILE).read_text(encoding="utf-8"))
        weights = load_file(adapter / WEIGHTS)
        config["base_model_name_or_path"] = base
        if not isinstance(config["target_modules"], str):  # a set, saved in any order
            config["target_modules"] = sorted(config["target_modules"])
    halved = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    write_atomically(out / WEIGHTS, save(halved, metadata={"format": "pt"}))
    write_atomically(out / ADAPTER_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")
    print(f"adapter: {out}, {(out / WEIGHTS).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    user_errors(main)
