"""Merges a LoRA adapter into its base: an ordinary Hugging Face folder.

python -m mtsql merge runs/sft/policy runs/sft/policy_merged
"""

from __future__ import annotations

import argparse
from pathlib import Path

from mtsql.config import user_errors


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("adapter", type=Path, help="folder of the adapter")
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
    dtypes = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=dtypes, default="float32", help="of the weights [float32]")
    return parser.parse_args()


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    CHOSEN = read_arguments()

from mtsql.files import refuse_filled
from mtsql.learn.model import merge_adapter, save_policy
from mtsql.model_folder import load_tokenizer


def main(chosen: argparse.Namespace) -> None:
    """Merge. The base is loaded unquantised, on the CPU. Raises UserError if the folder to write exists."""
    refuse_filled(chosen.out)
    save_policy(merge_adapter(chosen.adapter, chosen.dtype), load_tokenizer(chosen.adapter), chosen.out)
    print(f"merged policy: {chosen.out}")


if __name__ == "__main__":
    user_errors(main, CHOSEN)
