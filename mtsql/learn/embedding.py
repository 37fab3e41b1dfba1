"""Trajectories as vectors, to be clustered in S2 of Algorithm 1 (MTSQL-R1, section 3.2.2).

The paper embeds with Qwen3-Embedding. The policy's own hidden states need no second model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

from mtsql.agent.tokens import ChatTokens
from mtsql.agent.trajectory import Trajectory
from mtsql.errors import UserError, loading
from mtsql.learn.logprobs import row_batch

if TYPE_CHECKING:
    from peft import PeftModel

MICRO_BATCH_POSITIONS = 8192  # in one forward pass, padding counted
LONGEST_TEXT = 8192  # tokens, as on Qwen3-Embedding's card; the rest of a text is cut off

Embedder = Callable[[Sequence[Trajectory]], np.ndarray]


def make_embedder(policy: PreTrainedModel | PeftModel, tokens: ChatTokens, folder: str = "") -> Embedder:
    """A function from n trajectories to their embeddings, (n, d) float32, each independent of the others.

    Without `folder`: the policy's last hidden states, averaged over the tokens that it wrote (each
    trajectory needs at least one).
    With the folder of a Qwen3-Embedding model: its L2-normalised embedding of all text after the prompt,
    on the policy's device and in its dtype. The tokenizer is loaded at once, the model when it is first
    needed. Either may raise UserError, if the folder does not hold a whole model.
    """
    if not folder:
        return lambda trajectories: _embed_with_policy(policy, trajectories)
    if not Path(folder).is_dir():
        raise UserError(_not_loadable(folder))
    with loading(_not_loadable(folder)):
        # The card pads on the left, so that the last token of all texts is at the end.
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", trust_remote_code=False)

    @cache
    def model() -> PreTrainedModel:
        with loading(_not_loadable(folder)):
            loaded, info = AutoModel.from_pretrained(
                folder, dtype=policy.dtype, output_loading_info=True, trust_remote_code=False
            )
            if info["missing_keys"]:  # they would be random
                raise ValueError(f"its weights lack {min(info['missing_keys'])}")
        return loaded.to(policy.device).eval()

    @torch.no_grad()
    def embed(trajectories: Sequence[Trajectory]) -> np.ndarray:
        texts = [tokens.decode(t.ids[t.prompt_length :]) for t in trajectories]
        limit = {"truncation": True, "max_length": LONGEST_TEXT}
        vectors = np.empty((len(texts), model().config.hidden_size), np.float32)
        for part in _micro_batches([len(ids) for ids in tokenizer(texts, **limit).input_ids]):
            # The tokenizer appends an end of text, whose hidden state is the embedding.
            inputs = tokenizer([texts[i] for i in part], padding=True, return_tensors="pt", **limit)
            hidden = model()(**inputs.to(policy.device), use_cache=False).last_hidden_state
            last = hidden[:, -1].float()  # (micro-batch, d)
            vectors[part] = nn.functional.normalize(last, dim=-1).cpu().numpy()
        return vectors

    return embed


@torch.no_grad()
def _embed_with_policy(policy: PreTrainedModel | PeftModel, trajectories: Sequence[Trajectory]) -> np.ndarray:
    was_training = policy.training
    policy.eval()
    vectors = np.empty((len(trajectories), policy.config.hidden_size), np.float32)
    for part in _micro_batches([len(t.ids) for t in trajectories]):
        batch = row_batch([trajectories[i] for i in part], policy.device)
        outputs = policy(input_ids=batch.ids, use_cache=False, output_hidden_states=True, logits_to_keep=1)
        hidden = outputs.hidden_states[-1].flatten(0, 1)  # (micro-batch x positions, d)
        written = hidden[batch.source + 1].float()  # (tokens, d); `source` is the position before
        sums = written.new_zeros(len(part), written.shape[1])  # (micro-batch, d)
        sums.index_add_(0, batch.trajectory_index, written)
        counts = torch.bincount(batch.trajectory_index, minlength=len(part))  # (micro-batch,)
        vectors[part] = (sums / counts[:, None]).cpu().numpy()
    policy.train(was_training)
    return vectors


def _micro_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of sequences of similar length, the same number at a time."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    size = max(1, MICRO_BATCH_POSITIONS // max(lengths))
    for start in range(0, len(order), size):
        yield order[start : start + size]


def _not_loadable(folder: str) -> str:
    return (
        f"no embedding model could be loaded from {folder}; give a folder with config.json, weights and "
        "tokenizer, like that of Qwen3-Embedding-0.6B"
    )
