"""The paper's embeddings for the clusters of Algorithm 1, S2: Qwen3-Embedding (MTSQL-R1, section 3.2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory
from mtsql.errors import UserError, loading
from mtsql.learn.selection import Embedder, micro_batches_of
from mtsql.model_folder import Policy

LONGEST_TEXT = 8192  # tokens, as on Qwen3-Embedding's card; the rest of a text is cut off


def text_embedder(folder: str, policy: Policy, tokens: ChatTokens) -> Embedder:
    """A function from n trajectories to the L2-normalised embeddings of all text after the prompt, (n, d)
    float32, by the Qwen3-Embedding model in `folder`, on the policy's device and in its dtype.

    Raises UserError if the folder does not hold a whole model.
    """
    problem = (
        f"no embedding model could be loaded from {folder}; give a folder with config.json, weights and "
        "tokenizer, like that of Qwen3-Embedding-0.6B"
    )
    if not Path(folder).is_dir():
        raise UserError(problem)
    with loading(problem):
        # The card pads on the left, so that the last token of all texts is at the end.
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)
        model, info = AutoModel.from_pretrained(
            folder, dtype=policy.dtype, output_loading_info=True, trust_remote_code=False
        )
        if info["missing_keys"]:  # they would be random
            raise ValueError(f"its weights lack {min(info['missing_keys'])}")
    model = model.to(policy.device).eval()

    @torch.no_grad()
    def embed(trajectories: Sequence[Trajectory]) -> np.ndarray:
        texts = [tokens.decode(t.ids[t.prompt_length :]) for t in trajectories]
        limit = {"truncation": True, "max_length": LONGEST_TEXT}
        vectors = np.empty((len(texts), model.config.hidden_size), np.float32)
        for part in micro_batches_of([len(ids) for ids in tokenizer(texts, **limit).input_ids]):
            # The tokenizer appends an end of text, whose hidden state is the embedding.
            inputs = tokenizer([texts[i] for i in part], padding=True, return_tensors="pt", **limit)
            hidden = model(**inputs.to(policy.device), use_cache=False).last_hidden_state
            vectors[part] = nn.functional.normalize(hidden[:, -1].float(), dim=-1).cpu().numpy()
        return vectors

    return embed
