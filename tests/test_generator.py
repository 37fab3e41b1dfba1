"""Cached, batched generation against slow and obvious references."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mtsql.agent.generator import Generator
from mtsql.agent.rollout import Sampling, rollout
from mtsql.agent.trajectory import Segment, Trajectory

VOCABULARY, END = 97, 3
TOKENS = SimpleNamespace(end_of_turn_ids=(END,))
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "eos_token_id": END,
    "pad_token_id": 0,
}


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def model(request) -> PreTrainedModel:
    torch.manual_seed(1)
    if request.param == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **SIZES))
    return LlamaForCausalLM(LlamaConfig(**SIZES))


class ScriptedEpisode:
    """Answers every message with random ids; over after `messages` messages or 60 tokens."""

    def __init__(self, seed: int, prompt: list[int], messages: int = 3) -> None:
        self.trajectory = Trajectory(str(seed), seed, [Segment.given("prompt", prompt)])
        self.messages_left = messages
        self.ended: list[bool] = []
        self.environment = np.random.default_rng(seed)

    def remaining_tokens(self) -> int:
        return 60 - self.trajectory.response_length

    def step(self, ids: list[int], logprobs: list[float], ended: bool) -> list[int] | None:
        self.trajectory.segments.append(Segment.sampled(ids, logprobs))
        self.ended.append(ended)
        self.messages_left -= 1
        answer = self.environment.integers(4, VOCABULARY, self.environment.integers(1, 9)).tolist()
        if not self.messages_left or self.remaining_tokens() <= len(answer):
            return None
        self.trajectory.segments.append(Segment.given("environment", answer))
        return answer


def prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 80 tokens, each given twice."""
    draw = np.random.default_rng(0)
    lengths = [1, 80, *draw.integers(2, 80, count)][: (count + 1) // 2]
    return [draw.integers(4, VOCABULARY, n).tolist() for n in lengths for _ in range(2)][:count]


def play(
    model: PreTrainedModel, order: list[int], temperature: float, max_rows: int = 64
) -> dict[int, ScriptedEpisode]:
    """Episodes by seed, played in the given order of seeds."""
    all_prompts = prompts(12)
    episodes = [ScriptedEpisode(seed, all_prompts[seed]) for seed in order]
    sampling = Sampling(temperature=temperature, max_turn_tokens=20)
    trajectories = rollout(model, TOKENS, episodes, sampling, max_rows)
    assert [t.seed for t in trajectories] == order
    return dict(zip(order, episodes, strict=True))


def ids_by_seed(episodes: dict[int, ScriptedEpisode]) -> dict[int, list[int]]:
    return {seed: episodes[seed].trajectory.ids for seed in sorted(episodes)}


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, trajectory: Trajectory, temperature: float) -> torch.Tensor:
    """Log-probabilities (sampled tokens,) from one plain forward over the whole trajectory."""
    ids = torch.tensor([trajectory.ids])  # (1, positions)
    logprobs = (model.eval()(ids).logits.float() / temperature).log_softmax(-1)[0, :-1]
    of_next = logprobs.gather(-1, ids[0, 1:, None])[:, 0]  # (positions - 1,)
    return of_next[torch.tensor(trajectory.loss_mask[1:], dtype=torch.bool)]


def test_greedy_equals_generate_with_full_reprefill(model):
    for seed, episode in play(model, list(range(12)), temperature=0).items():
        segments = episode.trajectory.segments
        before: list[int] = []
        for segment in segments:
            if segment.role == "model":
                prefix = torch.tensor([before])  # (1, positions)
                longest = min(20, 60 - (len(before) - len(segments[0].ids)))
                full = model.generate(
                    prefix,
                    attention_mask=torch.ones_like(prefix),
                    do_sample=False,
                    max_new_tokens=longest,
                )
                assert full[0, len(before) :].tolist() == list(segment.ids), seed
            before += segment.ids


def test_messages_stop_at_an_end_of_turn_or_at_their_limit(model):
    episodes = play(model, list(range(12)), temperature=1.0).values()
    flags = [flag for e in episodes for flag in e.ended]
    assert True in flags and False in flags
    for episode in episodes:
        messages = [s.ids for s in episode.trajectory.segments if s.role == "model"]
        for ids, ended in zip(messages, episode.ended, strict=True):
            assert END not in ids[:-1]
            assert (ids[-1] == END) == ended
            assert len(ids) <= 20
        assert episode.trajectory.response_length <= 60


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_batch_composition_and_order_do_not_matter(model, temperature):
    together = ids_by_seed(play(model, list(range(12)), temperature))
    assert ids_by_seed(play(model, list(range(12)), temperature, max_rows=1)) == together
    assert ids_by_seed(play(model, list(range(12))[::-1], temperature, max_rows=5)) == together
    some = ids_by_seed(play(model, [7, 2, 10], temperature))
    assert some == {seed: together[seed] for seed in (2, 7, 10)}


def test_a_run_repeats_bit_for_bit(model):
    first, second = (play(model, list(range(12)), 1.0, max_rows=5) for _ in range(2))
    for seed in first:
        assert first[seed].trajectory.segments == second[seed].trajectory.segments


def test_seeds_matter(model):
    same = [5] * 20
    episodes = [ScriptedEpisode(seed, same, messages=1) for seed in range(4)]
    rollout(model, TOKENS, episodes, Sampling(max_turn_tokens=20))
    assert len({tuple(e.trajectory.ids) for e in episodes}) == 4


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_plain_forward(model, temperature):
    for episode in play(model, list(range(12)), temperature, max_rows=7).values():
        trajectory = episode.trajectory
        loss_mask = np.array(trajectory.loss_mask, dtype=bool)
        recorded = torch.tensor(trajectory.logprobs)[loss_mask]  # (sampled tokens,)
        expected = reference_logprobs(model, trajectory, temperature)
        assert torch.allclose(recorded, expected, atol=1e-4, rtol=0)


def test_shared_prompts_equal_separate_ones_and_are_computed_once(model):
    prompt = prompts(3)[2]
    widths: list[tuple[int, int]] = []

    def first_message(copies: int) -> list[list[int]]:
        with Generator(model, (END,), temperature=1.0) as generator:
            original = generator._forward

            def counted(slots, ids, lengths):
                widths.append((len(ids), max(map(len, ids))))
                return original(slots, ids, lengths)

            generator._forward = counted
            rows = generator.start([prompt] * copies, list(range(copies)), [10] * copies)
            while any(row.decoding for row in rows):
                generator.step()
            return [row.ids for row in rows]

    together = first_message(4)
    prefills = [w for w in widths if w[1] > 1]
    assert prefills == [(1, len(prompt) - 1)]
    assert first_message(1) == together[:1]


def test_nothing_is_prefilled_again(model):
    with Generator(model, (END,), temperature=0) as generator:
        (row,) = generator.start([[5] * 40], [0], [4])
        while row.decoding:
            generator.step()
        written, original = [], generator._forward

        def counted(slots, ids, lengths):
            written.append(sum(map(len, ids)))
            return original(slots, ids, lengths)

        generator._forward = counted
        generator.append([row], [[7, 8, 9]], [4])
        assert written == [3]  # the last sampled token and the observation but its last
        assert row.length == 40 + len(row.ids) + 4 + 3 - 1


def test_an_empty_observation_continues_the_row(model):
    prompt = prompts(3)[2]
    with Generator(model, (), temperature=0) as generator:
        (row,) = generator.start([prompt], [0], [3])
        while row.decoding:
            generator.step()
        first = row.ids
        generator.append([row], [[]], [3])
        while row.decoding:
            generator.step()
        (whole,) = generator.start([prompt], [0], [6])
        while whole.decoding:
            generator.step()
    assert first + row.ids == whole.ids


def test_top_p_keeps_the_smallest_sufficient_set(model):
    prompt = [5, 6, 7]
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt])).logits[0, -1]  # (vocabulary,)
    logprobs = logits.log_softmax(-1)
    ordered, order = logprobs.exp().sort(descending=True)
    kept = order[: int((ordered.cumsum(-1) < 0.4).sum()) + 1].tolist()
    with Generator(model, (END,), temperature=1.0, top_p=0.4) as generator:
        rows = generator.start([prompt] * 200, list(range(200)), [1] * 200)
        generator.step()
    assert {row.ids[0] for row in rows} <= set(kept)
    assert len({row.ids[0] for row in rows}) > len(kept) // 2
    assert rows[0].logprobs[0] == pytest.approx(float(logprobs[rows[0].ids[0]]), abs=1e-4)


def test_sampling_follows_the_distribution(model):
    prompt = [5, 6, 7]
    with torch.no_grad():
        expected = model.eval()(torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    with Generator(model, (END,), temperature=1.0) as generator:
        rows = generator.start([prompt] * 4000, list(range(4000)), [1] * 4000)
        generator.step()
    counts = np.bincount([row.ids[0] for row in rows], minlength=VOCABULARY)
    assert np.abs(counts / 4000 - expected).max() < 0.03


def test_training_flags_are_restored(model):
    model.train()
    model.lm_head.eval()
    with Generator(model, (END,)):
        assert not any(m.training for m in model.modules())
    assert model.training and not model.lm_head.training


def test_progress_counts_to_the_end(model):
    seen = []
    episodes = [ScriptedEpisode(seed, [5, 6], messages=1) for seed in range(5)]
    rollout(
        model,
        TOKENS,
        episodes,
        Sampling(max_turn_tokens=3),
        max_rows=2,
        progress=lambda done, total, stats: seen.append((done, total, stats)),
    )
    assert seen[-1][:2] == (5, 5)
    assert seen[-1][2]["tokens_per_second"] > 0


def test_errors_of_the_environment_reach_the_caller(model):
    episode = ScriptedEpisode(0, [5, 6])
    episode.step = lambda ids, logprobs, ended: 1 / 0
    with pytest.raises(ZeroDivisionError):
        rollout(model, TOKENS, [episode], Sampling(max_turn_tokens=3))


def test_sliding_window_models_are_refused():
    config = Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    with pytest.raises(ValueError, match="only full attention"):
        Generator(Qwen3ForCausalLM(config), (END,))


def test_attention_without_an_explicit_mask_is_refused(model):
    config = type(model.config)(**{**SIZES, "attn_implementation": "eager"})
    with pytest.raises(ValueError, match="load it with 'sdpa'"):
        Generator(type(model)(config), (END,))


def test_bfloat16_runs(model):
    half = type(model)(model.config).to(torch.bfloat16)
    episodes = [ScriptedEpisode(seed, [5, 6, 7]) for seed in range(3)]
    for trajectory in rollout(half, TOKENS, episodes, Sampling(max_turn_tokens=5)):
        assert all(np.isfinite(trajectory.logprobs))
