"""Writes a trained LoRA adapter as a small folder to give away: bfloat16, and its base by a relative path.

python -m mtsql.extras.ship runs/real/seed0/rl/policy models/smollm2-135m-sql \\
    --base ../smollm2-135m-instruct

Half the size of what training saves, without tokenizer and optimizer. Other files of the folder stay.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save

from mtsql.config import user_errors
from mtsql.errors import UserError, loading
from mtsql.files import write_atomically
from mtsql.model_folder import ADAPTER_FILE

WEIGHTS = "adapter_model.safetensors"


def main() -> None:
    """Write the two files of the adapter. Raises UserError if there is none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("adapter", type=Path, help="policy folder of a training run")
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--base", required=True, help="of the adapter, seen from the folder to write")
    chosen = parser.parse_args()
    if not all((chosen.adapter / name).is_file() for name in (ADAPTER_FILE, WEIGHTS)):
        raise UserError(f"{chosen.adapter} holds no LoRA adapter: {ADAPTER_FILE} and {WEIGHTS}")
    with loading(f"{chosen.adapter} holds no LoRA adapter that can be read"):
        config = json.loads((chosen.adapter / ADAPTER_FILE).read_text(encoding="utf-8"))
        weights = load_file(chosen.adapter / WEIGHTS)
    halved = {name: weight.to(torch.bfloat16).contiguous() for name, weight in weights.items()}
    chosen.out.mkdir(parents=True, exist_ok=True)
    write_atomically(chosen.out / WEIGHTS, save(halved, metadata={"format": "pt"}))
    config["base_model_name_or_path"] = chosen.base
    config["target_modules"] = sorted(config["target_modules"])  # a set, saved in any order
    write_atomically(chosen.out / ADAPTER_FILE, json.dumps(config, indent=2, sort_keys=True) + "\n")
    size = (chosen.out / WEIGHTS).stat().st_size / 1e6
    print(f"adapter: {chosen.out}, {size:.1f} MB")


if __name__ == "__main__":
    user_errors(main)
