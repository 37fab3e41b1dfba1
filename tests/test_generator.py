"""Cached, batched generation against slow and obvious references."""

from __future__ import annotations

import re
import threading
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mtsql.agent import cache, graphs
from mtsql.agent.cache import RowCache, cache_bytes_per_token, few_shapes
from mtsql.agent.generator import STATIC_WIDTH, Generator, _inverse_cdf, _nucleus
from mtsql.agent.prefix import families, shared_length
from mtsql.agent.rollout import Sampling, rollout
from mtsql.agent.trajectory import Segment, Stop, Trajectory
from mtsql.errors import UserError
from mtsql.learn.model import load_policy

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


@pytest.fixture(
    scope="module",
    params=["qwen3", "qwen2", "mistral", "llama", "smollm", "qwen3 with LoRA", "llama in 4 bits with LoRA"],
)
def model(request, tmp_path_factory) -> PreTrainedModel:
    """Every kind of decoder that the project is for, small and random."""
    torch.manual_seed(1)
    if request.param == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(tie_word_embeddings=True, **SIZES))
    if request.param == "qwen2":
        return with_random(
            Qwen2ForCausalLM(Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"})), "bias"
        )
    if request.param == "mistral":
        return MistralForCausalLM(MistralConfig(sliding_window=None, **SIZES))
    if request.param == "llama":  # every bias, and frequencies that are not the plain ones
        scaled = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
        scaled |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 10_000.0}
        biases = {"attention_bias": True, "mlp_bias": True}
        return with_random(LlamaForCausalLM(LlamaConfig(**biases, rope_parameters=scaled, **SIZES)), "bias")
    if request.param == "smollm":  # three query heads for one key head, tied, as SmolLM2-135M
        sizes = SIZES | {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 4}
        return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, rope_theta=100_000.0, **sizes))
    if request.param == "qwen3 with LoRA":
        base = Qwen3ForCausalLM(Qwen3Config(**SIZES))
        adapted = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        return with_random(adapted, "lora_B")
    folder = tmp_path_factory.mktemp("llama")
    sizes = SIZES | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    return with_random(load_policy(folder, quantise="nf4", lora_rank=4), "lora_B").eval()


def with_random(model: PreTrainedModel, which: str) -> PreTrainedModel:
    """The model with random numbers where a new one has zeros."""
    for name, parameter in model.named_parameters():
        if which in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


class ScriptedEpisode:
    """Answers every message with random ids; over after `messages` messages or 60 tokens."""

    def __init__(self, seed: int, prompt: list[int], messages: int = 3) -> None:
        self.trajectory = Trajectory(str(seed), seed, [Segment.given("prompt", prompt)])
        self.messages_left = messages
        self.stops: list[Stop] = []
        self.environment = np.random.default_rng(seed)

    def remaining_tokens(self) -> int:
        return 60 - self.trajectory.response_length

    def step(self, ids: list[int], logprobs: list[float], stop: Stop) -> list[int] | None:
        self.trajectory.segments.append(Segment.sampled(ids, logprobs))
        self.stops.append(stop)
        self.messages_left -= 1
        answer = self.environment.integers(4, VOCABULARY, self.environment.integers(1, 9)).tolist()
        if not self.messages_left or self.remaining_tokens() <= len(answer):
            return None
        self.trajectory.segments.append(Segment.given("environment", answer))
        return answer


def prompts(count: int) -> list[list[int]]:
    """Prompts of 1 to 80 tokens, two of each length."""
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
    assert {stop for e in episodes for stop in e.stops} == {Stop.END_OF_TURN, Stop.LIMIT}
    for episode in episodes:
        messages = [s.ids for s in episode.trajectory.segments if s.role == "model"]
        for ids, stop in zip(messages, episode.stops, strict=True):
            assert END not in ids[:-1]
            assert (ids[-1] == END) == (stop is Stop.END_OF_TURN)
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
        assert (recorded - expected).abs().max() < 1e-4


def test_shared_prompts_equal_separate_ones_and_are_computed_once(model):
    prompt = prompts(3)[2]
    widths: list[tuple[int, int]] = []

    def first_message(copies: int) -> list[list[int]]:
        with Generator(model, (END,), temperature=1.0) as generator:
            original = generator._forward

            def counted(ids, positions, pieces):
                widths.append(tuple(ids.shape))
                return original(ids, positions, pieces)

            generator._forward = counted
            rows = generator.start([prompt] * copies, list(range(copies)), [10] * copies)
            while any(row.decoding for row in rows):
                generator.step()
            return [row.ids for row in rows]

    together = first_message(4)
    prefills = [w for w in widths if w[1] > 1]
    assert prefills == [(1, len(prompt) - 1)]
    assert first_message(1) == together[:1]


def over_schemas() -> list[list[int]]:
    """Prompts of one system message, two schemas of 150 tokens, questions of 1 to 9; and odd ones."""
    draw = np.random.default_rng(1)
    system, *schemas = (draw.integers(4, VOCABULARY, n).tolist() for n in (70, 150, 150))
    questions = [draw.integers(4, VOCABULARY, n).tolist() for n in range(1, 10)]
    made = [system + schemas[i % 2] + question for i, question in enumerate(questions)]
    return [system + schemas[1], *made, made[3], [5, 6], system[:50]]


def test_what_prompts_begin_with_is_computed_once(model):
    asked, written = over_schemas(), []

    def answers(prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
        with Generator(model, (END,), temperature=1.0) as generator:
            original = generator._write

            def counted(new):
                written.append(sum(len(ids) for _, ids in new))
                return original(new)

            generator._write = counted
            rows = generator.start(prompts, range(len(prompts)), [10] * len(prompts))
            while any(row.decoding for row in rows):
                generator.step()
            return [(row.ids, row.logprobs) for row in rows]

    together = answers(asked)
    # One system message, two schemas, and no question twice; the last token of a prompt is pending.
    assert sum(written) <= 70 + 2 * 150 + sum(range(1, 10)) + 1 + 49
    for place, prompt in enumerate(asked):
        with Generator(model, (END,), temperature=1.0) as generator:
            (alone,) = generator.start([prompt], [place], [10])
            while alone.decoding:
                generator.step()
        assert alone.ids == together[place][0]
        assert np.allclose(alone.logprobs, together[place][1], atol=1e-4)


def test_families_of_prompts_are_those_of_one_schema():
    asked = [tuple(prompt) for prompt in over_schemas()]
    found = families(asked)
    assert sorted(place for _, places in found for place in places) == list(range(len(asked)))
    for shared, places in found:
        assert len({asked[place][:shared] for place in places}) == 1
    assert sorted(len(places) for _, places in found) == [1, 1, 11]  # eleven have the system message
    ((shared, places),) = [family for family in found if len(family[1]) > 1]
    behind = families([asked[place][shared:] for place in places])
    assert shared == 70 and sorted((s, len(p)) for s, p in behind) == [(150, 5), (150, 6)]
    assert families([]) == [] and shared_length([1, 2, 3], [1, 2]) == 2 and shared_length([], [1]) == 0


def test_nothing_is_prefilled_again(model):
    with Generator(model, (END,), temperature=0) as generator:
        (row,) = generator.start([[5] * 40], [0], [4])
        while row.decoding:
            generator.step()
        written, original = [], generator._forward

        def counted(ids, positions, pieces):
            written.append(tuple(ids.shape))
            return original(ids, positions, pieces)

        generator._forward = counted
        generator.append([row], [[7, 8, 9]], [4])
        assert written == [(1, 3)]  # the last sampled token and the observation but its last
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


def test_sampling_follows_the_distribution(model):
    """The draws' mean log-probability is the distribution's, within 4 standard errors, no hotter one's."""
    prompt, temperature = [5, 6, 7], 0.7
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt])).logits[0, -1].double()  # (vocabulary,)
    with Generator(model, (END,), temperature=temperature) as generator:
        rows = generator.start([prompt] * 4000, list(range(4000)), [1] * 4000)
        generator.step()
    counts = np.bincount([row.ids[0] for row in rows], minlength=VOCABULARY)

    def distance(other: float) -> float:
        expected = (logits / other).softmax(-1).numpy()
        surprise = -np.log(expected)
        mean = expected @ surprise
        error = (expected @ (surprise - mean) ** 2 / counts.sum()) ** 0.5
        return abs(counts @ surprise / counts.sum() - mean) / error

    assert distance(temperature) < 4 < min(distance(0.9 * temperature), distance(temperature / 0.9))


def test_top_p_draws_from_the_likeliest_tokens_alone(model):
    rows = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.05, 0.9, 0.05, 0.0]])
    kept = [[0, 0.4, 0, 0.3], [0, 0.9, 0, 0]]  # 0.4 alone is not 0.6
    assert torch.equal(_nucleus(rows, 0.6), torch.tensor(kept))
    assert torch.equal(_nucleus(rows, 1.0), rows)
    with torch.no_grad():
        expected = model.eval()(torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1)
    with Generator(model, (END,), temperature=1.0, top_p=0.3) as generator:
        rows = generator.start([[5, 6, 7]] * 300, list(range(300)), [1] * 300)
        generator.step()
    likely = set(_nucleus(expected[None], 0.3)[0].nonzero()[:, 0].tolist())
    assert {row.ids[0] for row in rows} <= likely and len(likely) < VOCABULARY / 2
    for row in rows[:5]:  # log-probabilities are of the whole distribution
        assert row.logprobs[0] == pytest.approx(expected[row.ids[0]].log().item(), abs=1e-4)


@pytest.mark.parametrize("vocabulary", [1, 97, 768, 151_936])
def test_a_token_is_the_one_of_the_plain_inverse_cdf(vocabulary):
    """Blocks and then tokens find what adding up the whole vocabulary finds; never a token without mass."""
    torch.manual_seed(0)
    logits = torch.randn(200, vocabulary) * torch.linspace(0.1, 30, 200)[:, None]  # (rows, vocabulary)
    logits.masked_fill_(torch.rand(200, vocabulary) < 0.5, -torch.inf)
    logits[:, torch.randint(vocabulary, ())] = 0.0  # so that some token can come
    probabilities = logits.softmax(-1)
    uniforms = torch.rand(200, 1, dtype=torch.float64)
    uniforms[:4, 0] = torch.tensor([0.0, 1 - 2**-53, 0.0, 1 - 2**-53])
    chosen = _inverse_cdf(probabilities, uniforms)[:, 0]
    cdf = probabilities.double().cumsum(-1)
    at = torch.arange(200)
    assert (probabilities[at, chosen] > 0).all()
    share = uniforms[:, 0] * cdf[:, -1]
    assert (cdf[at, chosen] >= share - 1e-6).all()
    assert (cdf[at, chosen] - probabilities[at, chosen] <= share + 1e-6).all()
    plain = torch.searchsorted(cdf, share[:, None], right=True)[:, 0]
    assert (plain == chosen).float().mean() > 0.97


def test_the_policy_is_not_touched(model):
    model.train()
    model.lm_head.eval()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    play(model, [0, 1, 2], 1.0)
    assert model.training and not model.lm_head.training
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_titled_rollout_shows_its_progress(model, capsys):
    episodes = [ScriptedEpisode(seed, [5, 6], messages=3) for seed in range(5)]
    rollout(model, TOKENS, episodes, Sampling(max_turn_tokens=3), 2, "evaluate")
    assert re.search(r"evaluate: 100%.* 5/5 .*tokens/s, 2 rows a step", capsys.readouterr().err)


def test_errors_of_the_environment_reach_the_caller(model):
    episode = ScriptedEpisode(0, [5, 6])
    episode.step = lambda ids, logprobs, stop: 1 / 0
    with pytest.raises(ZeroDivisionError):
        rollout(model, TOKENS, [episode], Sampling(max_turn_tokens=3))


def test_other_architectures_are_refused():
    sizes = {k: SIZES[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
    windows = Qwen3Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
    others = [MistralForCausalLM(MistralConfig(sliding_window=8, **SIZES)), Qwen3ForCausalLM(windows)]
    for other in [*others, GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, intermediate_size=48))]:
        with pytest.raises(
            UserError, match="rollouts are for Llama, Mistral, Qwen2 and Qwen3 with only full"
        ):
            Generator(other, (END,))
    dora = LoraConfig(r=4, use_dora=True, target_modules="all-linear")
    with pytest.raises(UserError, match="linear layers and for LoRA"):
        Generator(get_peft_model(Qwen3ForCausalLM(Qwen3Config(**SIZES)), dora), (END,))


def test_bfloat16_runs():
    half = Qwen3ForCausalLM(Qwen3Config(**SIZES)).to(torch.bfloat16)
    episodes = [ScriptedEpisode(seed, [5, 6, 7]) for seed in range(3)]
    for trajectory in rollout(half, TOKENS, episodes, Sampling(max_turn_tokens=5)):
        loss_mask = torch.tensor(trajectory.loss_mask).bool()
        recorded = torch.tensor(trajectory.logprobs)[loss_mask]  # (sampled tokens,)
        assert (recorded - reference_logprobs(half, trajectory, 1.0)).abs().max() < 0.1  # 8 bits of mantissa


def greedy(
    model: PreTrainedModel, static_shapes: bool, graphs: graphs.DecodeGraphs | None = None
) -> list[list[int]]:
    """First and second messages of seven rows."""
    with Generator(model, (END,), temperature=0, static_shapes=static_shapes) as generator:
        generator.graphs = graphs
        rows = generator.start(prompts(7), list(range(7)), [9] * 7)
        while any(row.decoding for row in rows):
            generator.step()
        first = [row.ids for row in rows]
        generator.release([rows[1], rows[4]])
        rest = [rows[i] for i in (0, 2, 3, 5, 6)]
        generator.append(rest, [[7, 8]] * 5, [9] * 5)
        while any(row.decoding for row in rest):
            generator.step()
    return first + [row.ids for row in rest]


def test_static_shapes_change_nothing(model):
    assert greedy(model, static_shapes=True) == greedy(model, static_shapes=False)


def test_the_decode_step_has_few_static_shapes(model):
    shapes = set()
    with Generator(model, (), temperature=0, static_shapes=True) as generator:
        original = generator._forward

        def counted(ids, positions, pieces):
            if ids.shape[1] == 1:
                shapes.update((p.tier.capacity, p.count, p.reach) for p in pieces)
            else:
                assert ids.shape[1] % STATIC_WIDTH == 0
            return original(ids, positions, pieces)

        generator._forward = counted
        generator.start([[5] * 30] * 13, list(range(13)), [600] * 13)
        for count in range(580):
            generator.step()
            if count % 25 == 24 and len(generator.rows) > 1:
                generator.release([generator.rows[-1]])
    assert {count for _, count, _ in shapes} <= {16, 12, 8, 6, 4, 3, 2, 1}
    assert {(capacity, reach) for capacity, _, reach in shapes} == {(512, 256), (512, 512), (1024, 768)}


def free_positions(monkeypatch, model: PreTrainedModel, count: int) -> None:
    """Let the device have memory for a cache of so many positions."""
    size = (count + 0.5) * cache_bytes_per_token(model) / cache.SHARE_OF_FREE
    monkeypatch.setattr(cache, "free_memory", lambda device: size)


def test_rows_give_way_in_a_cache_of_a_third_of_the_need(model, monkeypatch):
    monkeypatch.setattr(cache, "TIER_STEP", 16)
    free = ids_by_seed(play(model, list(range(12)), 1.0))
    need, most, again, youngest, playing = [], [], [], [], []
    enter = Generator.__enter__

    def entered(self):
        playing.append(self)
        return enter(self)

    monkeypatch.setattr(Generator, "__enter__", entered)
    admit, lift, drop = RowCache.admit, RowCache.lift, RowCache.drop

    def watched(self, row, new):
        done = admit(self, row, new)
        again.append(done and bool(row.ids))
        most.append(self.reserved)
        return done

    def lifted(self, row, new):
        done = lift(self, row, new)
        most.append(self.reserved)
        return done

    def dropped(self, rows):
        need.append(sum(row.tier.capacity for tier in self.tiers.values() for row in tier.rows))
        inside = [row for row in playing[-1].rows if row.tier is not None]
        if len(rows) == 1 and rows[0].decoding:  # it gives its place back
            youngest.append(rows[0] is inside[-1])
        drop(self, rows)

    monkeypatch.setattr(RowCache, "admit", watched)
    monkeypatch.setattr(RowCache, "lift", lifted)
    monkeypatch.setattr(RowCache, "drop", dropped)
    assert ids_by_seed(play(model, list(range(12)), 1.0)) == free
    assert not any(again)  # with room for all no row gives its place back
    third = max(need) // 3
    need.clear(), most.clear(), again.clear()
    free_positions(monkeypatch, model, third)
    assert ids_by_seed(play(model, list(range(12)), 1.0)) == free
    assert max(most) <= third and max(need) > third // 2
    assert any(again)  # in the middle of a message
    assert youngest and all(youngest)
    free_positions(monkeypatch, model, third // 30)
    with pytest.raises(UserError, match="lower --max-response-tokens"):
        play(model, [1], 1.0)


def test_rows_that_wait_give_way_to_those_that_can_go_on(model, monkeypatch):
    """All first messages are there although the cache holds one row, and nobody answers any before."""
    monkeypatch.setattr(cache, "TIER_STEP", 16)
    asked = [prompt for prompt in prompts(12) if len(prompt) > 20][::2]

    def first_messages(positions: int) -> list[list[int]]:
        free_positions(monkeypatch, model, positions)
        with Generator(model, (END,), 1.0, longest=100) as generator:
            rows = generator.start(asked, range(len(asked)), [12] * len(asked))
            for _ in range(12 * len(asked)):
                generator.step()
            generator.append(rows, [[7]] * len(asked), [3] * len(asked))
            for _ in range(3 * len(asked)):
                generator.step()
            assert not any(row.decoding for row in rows)
            return [row.history for row in rows]

    assert first_messages(100) == first_messages(100_000)


@pytest.mark.parametrize("fails", [2, 20, 50])
def test_out_of_memory_halves_the_cache_and_changes_nothing(model, monkeypatch, capsys, fails):
    free = ids_by_seed(play(model, list(range(12)), 1.0))
    passes, original = [], Generator._forward

    def short(self, ids, positions, pieces):
        passes.append(self.cache.positions)
        if len(passes) in (fails, fails + 1):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, ids, positions, pieces)

    monkeypatch.setattr(Generator, "_forward", short)
    assert ids_by_seed(play(model, list(range(12)), 1.0)) == free
    assert passes[-1] <= passes[fails] // 2 < passes[0] // 2
    assert capsys.readouterr().err.count("out of memory: the rollout goes on with") == 2
    monkeypatch.setattr(Generator, "_forward", lambda *_: np.zeros(1 << 50))
    with pytest.raises(ValueError, match="the device's memory does not hold one trajectory"):
        play(model, [0], 1.0)


def test_after_out_of_memory_the_longest_row_has_room(model, monkeypatch, capsys):
    """The cache is halved while rows are short; they grow beyond that half."""
    monkeypatch.setattr(cache, "TIER_STEP", 16)
    passes, original = [], Generator._forward

    def messages() -> list[list[int]]:
        with Generator(model, (), 1.0, longest=100) as generator:
            rows = generator.start([[5, 6, 7], [8, 9]], [0, 1], [90, 90])
            for _ in range(400):
                generator.step()
                if not any(row.decoding for row in rows):
                    return [row.ids for row in rows]
        pytest.fail("the rows never end")

    free = messages()

    def short(self, ids, positions, pieces):
        passes.append(self.cache.reserved)
        if len(passes) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, ids, positions, pieces)

    monkeypatch.setattr(Generator, "_forward", short)
    assert messages() == free
    assert passes[2] <= 2 * 16 and max(passes) <= 100
    assert "out of memory: the rollout goes on with" in capsys.readouterr().err


def test_the_cache_takes_a_share_of_what_the_device_has_free(model, monkeypatch):
    token = cache_bytes_per_token(model)
    monkeypatch.setattr(cache, "free_memory", lambda device: 1000 * token)
    assert cache.cache_positions(model, 100) == int(cache.SHARE_OF_FREE * 1000)
    monkeypatch.undo()
    cuda = SimpleNamespace(
        memory_reserved=lambda device: 7_000, memory_allocated=lambda device: 3_000,
        mem_get_info=lambda device: (20_000, 90_000),
    )  # fmt: skip
    monkeypatch.setattr(torch, "cuda", cuda)
    assert cache.free_memory(torch.device("cuda")) == 20_000 + 4_000  # what torch keeps for itself is free


def test_a_row_takes_the_positions_that_it_uses(model):
    with Generator(model, (), longest=12_000) as generator:
        rows = generator.start([[5] * 100, [6] * 100, [7] * 1000], range(3), [100] * 3)
        assert generator.cache.reserved == 2 * 128 + 1024
        for _ in range(30):
            generator.step()
        assert [row.tier.capacity for row in rows] == [192, 192, 1088]
        assert [row.slot for row in rows] == [0, 1, 0]
        generator.release(rows[1:])
        for _ in range(5):
            generator.step()
        assert rows[0].length == 100 + 35 - 1
    assert [few_shapes(n) for n in (0, 1, 2, 3, 4, 5, 6, 7, 9, 13, 48, 49)] == [
        0, 1, 2, 3, 4, 6, 6, 8, 12, 16, 48, 64
    ]  # fmt: skip


class FakeGraph:
    """A CUDA graph that replays by computing anew; its memory pool is watched."""

    def replay(self) -> None:
        self.recorded()


class FakeCuda:
    """What DecodeGraphs takes from torch.cuda, on a CPU."""

    def __init__(self) -> None:
        self.pools = self.streams = self.captures = 0
        self.alive: dict[int, weakref.WeakSet] = {}
        self.used: set[int] = set()
        self.CUDAGraph = FakeGraph

    def current_device(self) -> int:
        return 0

    def Stream(self, device: int) -> SimpleNamespace:
        self.streams += 1
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self) -> SimpleNamespace:
        return SimpleNamespace(wait_stream=lambda other: None)

    def stream(self, stream: SimpleNamespace) -> nullcontext:
        return nullcontext()

    def graph_pool_handle(self) -> int:
        self.pools += 1
        self.alive[self.pools] = weakref.WeakSet()
        return self.pools

    def graph(self, graph: FakeGraph, pool: int, stream: SimpleNamespace) -> nullcontext:
        assert self.alive[pool] or pool not in self.used, "a pool that lost all its graphs is used again"
        self.used.add(pool)
        self.alive[pool].add(graph)
        self.captures += 1
        return nullcontext()


def test_captured_graphs_replay_the_decode_step(model, monkeypatch):
    """With a stand-in for CUDA: the same tokens, few captures, one stream, none on storage that moved."""
    plain = greedy(model, static_shapes=True)
    cuda = FakeCuda()
    monkeypatch.setattr(graphs, "torch", SimpleNamespace(cuda=cuda, Tensor=torch.Tensor))
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 1)
    capture = graphs.DecodeGraphs._capture

    def captured(self, key, compute, ids, positions, pieces):
        capture(self, key, compute, ids, positions, pieces)
        graph, own_ids, own_positions = self.captured[key]
        moves = [p.tier.moves for p in pieces]

        def recorded() -> None:
            assert [p.tier.moves for p in pieces] == moves
            self.logits[len(own_ids)].copy_(compute(own_ids, own_positions, pieces))

        graph.recorded = recorded
        assert len(self.captured) == 1

    monkeypatch.setattr(graphs.DecodeGraphs, "_capture", captured)
    graphs.capture_stream.cache_clear()
    try:
        for _ in range(2):  # two rollouts
            assert greedy(model, static_shapes=True, graphs=graphs.DecodeGraphs()) == plain
    finally:
        graphs.capture_stream.cache_clear()
    assert 2 < cuda.captures <= 12 and cuda.pools >= 2 and cuda.streams == 1


def test_stop_strings_end_a_message(model):
    letters = SimpleNamespace(end_of_turn_ids=(END,), decode=lambda ids: "".join(chr(40 + i) for i in ids))
    free = ScriptedEpisode(3, [5, 6, 7], messages=1)
    rollout(model, letters, [free], Sampling(max_turn_tokens=20))
    written = free.trajectory.segments[1].ids
    wanted = letters.decode(written[4:6])
    stopped = ScriptedEpisode(3, [5, 6, 7], messages=1)
    rollout(model, letters, [stopped], Sampling(max_turn_tokens=20, stop_strings=("no such", wanted)))
    first = letters.decode(written).index(wanted) + 2
    assert stopped.trajectory.segments[1].ids == written[:first]
    assert stopped.stops == [Stop.STOP_STRING]


def test_weights_changed_in_place_are_used_and_no_cache_survives(model):
    before = ids_by_seed(play(model, [0, 1, 2], 0.0))
    norm = next(m for name, m in model.named_modules() if name.endswith("model.norm"))
    kept = norm.weight.detach().clone()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(-2, 2, len(kept)))
    changed = ids_by_seed(play(model, [0, 1, 2], 0.0))
    with torch.no_grad():
        norm.weight.copy_(kept)
    assert changed != before
    assert ids_by_seed(play(model, [0, 1, 2], 0.0)) == before


class UnevenEpisode(ScriptedEpisode):
    """Random lengths, failures (over at once) and slow answers."""

    def remaining_tokens(self) -> int:
        return 20 + self.trajectory.seed % 41 - self.trajectory.response_length

    def step(self, ids: list[int], logprobs: list[float], stop: Stop) -> list[int] | None:
        if self.trajectory.seed % 97 == 0:
            time.sleep(0.02)  # a query that runs into its time limit
        answer = super().step(ids, logprobs, stop)
        return None if self.trajectory.seed % 13 == 0 else answer


@pytest.mark.parametrize("ready", [True, False])
def test_no_row_waits_for_anothers_slow_query(ready):
    """One query ends when all other episodes have: were they to wait for it, they would wait forever."""
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES))
    others_ended, ended = threading.Event(), []

    class Slow(ScriptedEpisode):
        def step(self, ids: list[int], logprobs: list[float], stop: Stop) -> list[int] | None:
            if self.trajectory.seed == 3 and self.messages_left == 3:
                assert others_ended.wait(60 if ready else 0.5) is ready
            answer = super().step(ids, logprobs, stop)
            if answer is None:
                ended.append(self.trajectory.seed)
            if len(ended) == 11:
                others_ended.set()
            return answer

    episodes = [Slow(seed, prompt) for seed, prompt in enumerate(prompts(12))]
    played = rollout(model, TOKENS, episodes, Sampling(max_turn_tokens=8), in_order=not ready)
    assert len(ended) == 12 and (ended[-1] == 3 or not ready)
    alone = [ScriptedEpisode(seed, prompt) for seed, prompt in enumerate(prompts(12))]
    rollout(model, TOKENS, alone, Sampling(max_turn_tokens=8), 1)
    assert [t.ids for t in played] == [e.trajectory.ids for e in alone]


def test_two_thousand_uneven_episodes_leak_nothing():
    torch.manual_seed(1)
    model = Qwen3ForCausalLM(Qwen3Config(**SIZES | {"num_hidden_layers": 1}))
    draw = np.random.default_rng(0)
    starts = [draw.integers(4, VOCABULARY, draw.integers(1, 60)).tolist() for _ in range(250)]
    sampling = Sampling(max_turn_tokens=12)

    def run(seeds: list[int], rows: int) -> dict[int, list[int]]:
        episodes = [UnevenEpisode(seed, starts[seed // 8], 1 + seed % 4) for seed in seeds]
        caches: list[int] = []
        original = Generator.release

        def watched(self, gone):
            original(self, gone)
            kept = [row for tier in self.cache.tiers.values() for row in tier.rows]
            assert set(kept) == set(self.rows) and len(kept) == len(self.rows)
            assert all(tier.rows[row.slot] is row for tier in self.cache.tiers.values() for row in tier.rows)
            caches.append(self.cache.reserved)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Generator, "release", watched)
            rollout(model, TOKENS, episodes, sampling, rows)
        assert max(caches) <= rows * 128 * 5 // 4 + 128  # memory is flat: slots x the longest row
        return {e.trajectory.seed: e.trajectory.ids for e in episodes}

    together = run(list(range(2_000)), 96)
    alone = run(list(range(0, 2_000, 16)), 1)
    assert alone == {seed: together[seed] for seed in alone}
