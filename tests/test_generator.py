"""Cached, batched generation against slow and obvious references."""

import re
import threading
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from decoders import END, KINDS, VOCABULARY, make_decoder, random_model
from peft import LoraConfig, get_peft_model
from test_learn import reference_logprobs
from torch import Tensor
from transformers import PreTrainedModel

from mtsql.agent import cache, pages
from mtsql.agent import rollout as rollout_module
from mtsql.agent.cache import RowCache, cache_bytes_per_token
from mtsql.agent.generator import Generator, Row, _inverse_cdf, _nucleus, new_cache
from mtsql.agent.pages import DecodeGraphs, Pages
from mtsql.agent.rollout import Sampling, rollout
from mtsql.agent.trajectory import Segment, Stop, Trajectory
from mtsql.errors import UserError

TOKENS = SimpleNamespace(end_of_turn_ids=(END,))
SEEDS = range(12)


@pytest.fixture(scope="module", params=KINDS)
def any_model(request, tmp_path_factory) -> PreTrainedModel:
    """For what depends on the kind of decoder."""
    return make_decoder(request.param, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    """For what does not."""
    return make_decoder("qwen3")


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
    model: PreTrainedModel, temperature: float = 1.0, order: Sequence[int] = SEEDS, max_rows: int = 64
) -> dict[int, ScriptedEpisode]:
    """Episodes by seed, played in the given order of seeds."""
    all_prompts = prompts(12)
    episodes = [ScriptedEpisode(seed, all_prompts[seed]) for seed in order]
    sampling = Sampling(temperature=temperature, max_turn_tokens=20)
    trajectories = rollout(model, TOKENS, episodes, sampling, max_rows)
    assert [t.seed for t in trajectories] == list(order)
    return {seed: episode for seed, episode in sorted(zip(order, episodes, strict=True))}


def play_ids(model: PreTrainedModel, *how: object) -> dict[int, list[int]]:
    """The ids of `play` by seed."""
    return {seed: episode.trajectory.ids for seed, episode in play(model, *how).items()}


def finish(generator: Generator, rows: Sequence[Row]) -> list[list[int]]:
    """Sample until the rows' messages are complete; their ids."""
    while any(row.decoding for row in rows):
        generator.step()
    return [row.ids for row in rows]


def watch(monkeypatch: pytest.MonkeyPatch, of: type, method: str, see: Callable) -> None:
    """Call `see` with what a method is called with, before it."""
    original = getattr(of, method)

    def watched(self, *given):
        see(self, *given)
        return original(self, *given)

    monkeypatch.setattr(of, method, watched)


def test_greedy_equals_generate_with_full_reprefill(any_model):
    for seed, episode in play(any_model, 0, range(6)).items():
        segments = episode.trajectory.segments
        before: list[int] = []
        for segment in segments:
            if segment.role == "model":
                prefix = torch.tensor([before])  # (1, positions)
                how = {"attention_mask": torch.ones_like(prefix), "do_sample": False}
                longest = min(20, 60 - (len(before) - len(segments[0].ids)))
                full = any_model.generate(prefix, max_new_tokens=longest, **how)
                assert full[0, len(before) :].tolist() == list(segment.ids), seed
            before += segment.ids


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_a_plain_forward(any_model, temperature):
    for episode in play(any_model, temperature, SEEDS, 7).values():
        trajectory = episode.trajectory
        recorded = torch.tensor(trajectory.logprobs)[torch.tensor(trajectory.loss_mask).bool()]
        expected, _ = reference_logprobs(any_model.eval(), trajectory, temperature)  # (sampled tokens,)
        assert (recorded - expected).abs().max() < 1e-4
        ended = [s.ids[-1] == END for s in trajectory.segments if s.role == "model"]
        assert episode.stops == [Stop.END_OF_TURN if end else Stop.LIMIT for end in ended]


def test_the_policy_is_not_touched_and_its_weights_are_those_of_the_moment(any_model):
    any_model.train()
    any_model.lm_head.eval()
    kept = {name: weight.clone() for name, weight in any_model.state_dict().items()}
    before = play_ids(any_model, 0.0, [0, 1, 2])
    assert any_model.training and not any_model.lm_head.training
    assert all(torch.equal(weight, kept[name]) for name, weight in any_model.state_dict().items())
    name, norm = next((n, p) for n, p in any_model.named_parameters() if n.endswith("model.norm.weight"))
    norm.data.copy_(torch.linspace(-2, 2, len(norm)))
    assert play_ids(any_model, 0.0, [0, 1, 2]) != before
    norm.data.copy_(kept[name])
    assert play_ids(any_model, 0.0, [0, 1, 2]) == before


def test_batch_composition_and_order_do_not_matter(model):
    played, again = (play(model) for _ in range(2))
    for seed in SEEDS:  # to the bit
        assert played[seed].trajectory.segments == again[seed].trajectory.segments
    together = {seed: episode.trajectory.ids for seed, episode in played.items()}
    assert play_ids(model, 1.0, SEEDS, 1) == together
    assert play_ids(model, 1.0, SEEDS[::-1], 5) == together
    assert play_ids(model, 1.0, [7, 2, 10]) == {seed: together[seed] for seed in (2, 7, 10)}


def foretell(monkeypatch: pytest.MonkeyPatch, histories: Collection[list[int]]) -> None:
    """Let rows draft what they are going to say, now and then with a wrong last token."""

    def draft(row: Row, most: int) -> list[int]:
        most = max(0, min(most, row.room - len(row.history), row.limit - len(row.ids) - 1))
        known = [ids for ids in histories if ids[: len(row.history)] == row.history]
        coming = known[0][len(row.history) :][:most] if known else []
        wrong = len(row.history) % 3 == 0
        return [*coming[:-1], *((token + wrong) % VOCABULARY for token in coming[-1:])]

    monkeypatch.setattr(Row, "draft", draft)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_the_number_of_steps_and_nothing_else(any_model, monkeypatch, temperature):
    steps = []
    watch(monkeypatch, Generator, "_draw", lambda *_: steps.append(1))

    def sampled() -> list[Row]:
        steps.clear()
        with Generator(any_model, (END,), Sampling(temperature)) as generator:
            rows = generator.start(prompts(3), range(3), [60] * 3)
            finish(generator, rows)
            generator.append(rows, [[7, 8]] * 3, [30] * 3)
            finish(generator, rows)
            return rows

    plain = sampled()
    before = len(steps)
    foretell(monkeypatch, [row.history for row in plain])
    drafted = sampled()
    assert len(steps) < before / 2
    for row, other in zip(drafted, plain, strict=True):
        assert row.history == other.history and row.stop == other.stop
        assert np.abs(np.subtract(row.logprobs, other.logprobs)).max() < 1e-4
        assert row.length == len(row.history) - 1


def test_a_draft_is_what_followed_the_last_three_tokens_before():
    row = Row([1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 1, 2, 3], None, 20)
    row.room = 64
    assert row.draft(8) == [5, 6, 1, 2, 3] and row.draft(2) == [5, 6] and row.draft(0) == []
    row.history += [4]
    assert row.draft(3) == [9, 1, 2]
    row.history += [7]
    assert row.draft(3) == []
    row.history += [1, 2, 3]
    row.room = len(row.history) + 2
    assert row.draft(8) == [4, 7]
    row.limit = 2
    assert row.draft(8) == [4]


def over_schemas() -> list[list[int]]:
    """Prompts of one system message, two schemas of 150 tokens, questions of 1 to 9; and odd ones."""
    draw = np.random.default_rng(1)
    system, *schemas = (draw.integers(4, VOCABULARY, n).tolist() for n in (70, 150, 150))
    questions = [draw.integers(4, VOCABULARY, n).tolist() for n in range(1, 10)]
    made = [system + schemas[i % 2] + question for i, question in enumerate(questions)]
    return [system + schemas[1], *made, made[3], [5, 6], system[:50]]


def test_what_prompts_begin_with_is_computed_once(model, monkeypatch):
    asked, written = over_schemas(), []
    watch(monkeypatch, Generator, "_write", lambda _, new: written.extend(len(ids) for _, ids in new))
    with Generator(model, (END,), Sampling()) as generator:
        together = generator.start(asked, range(len(asked)), [10] * len(asked))
        # One system message, two schemas, no question twice, and the odd ones; what is the last token of a
        # prompt is pending there, and so one schema's is written with each of its four other questions.
        assert sum(written) == 70 + 150 + 149 + sum(range(9)) + 4 + 1 + 49
        finish(generator, together)
    for place, prompt in enumerate(asked):
        with Generator(model, (END,), Sampling()) as generator:
            (alone,) = generator.start([prompt], [place], [10])
            finish(generator, [alone])
        assert alone.ids == together[place].ids
        assert np.allclose(alone.logprobs, together[place].logprobs, atol=1e-4)


def test_nothing_is_prefilled_again(model, monkeypatch):
    with Generator(model, (END,), Sampling(0)) as generator:
        (row,) = generator.start([[5] * 40], [0], [4])
        finish(generator, [row])
        written = []
        watch(monkeypatch, Generator, "_forward", lambda _, ids, *rest: written.append(tuple(ids.shape)))
        generator.append([row], [[7, 8, 9]], [4])
        assert written == [(1, 3)]  # the last sampled token and the observation but its last
        assert row.length == 40 + len(row.ids) + 4 + 3 - 1


def test_sampling_follows_the_distribution(model):
    """The draws' mean log-probability is the distribution's, within 4 standard errors, no hotter one's."""
    prompt, temperature = [5, 6, 7], 0.7
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt])).logits[0, -1].double()  # (vocabulary,)
    with Generator(model, (END,), Sampling(temperature)) as generator:
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
    with Generator(model, (END,), Sampling(top_p=0.3)) as generator:
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


def test_a_titled_rollout_shows_its_progress(model, capsys):
    episodes = [ScriptedEpisode(seed, [5, 6], messages=3) for seed in range(5)]
    rollout(model, TOKENS, episodes, Sampling(max_turn_tokens=3), 2, "evaluate")
    assert re.search(r"evaluate: 100%.* 5/5 .*tokens/s", capsys.readouterr().err)


def test_errors_of_the_environment_reach_the_caller(model):
    episode = ScriptedEpisode(0, [5, 6])
    episode.step = lambda ids, logprobs, stop: 1 / 0
    with pytest.raises(ZeroDivisionError):
        rollout(model, TOKENS, [episode], Sampling(max_turn_tokens=3))


def test_other_architectures_are_refused():
    windows = random_model("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    for other in (random_model("mistral", sliding_window=8), windows, random_model("gpt_neox")):
        with pytest.raises(UserError, match="for Llama, Mistral, Qwen2 and Qwen3 with only full"):
            Generator(other, (END,), Sampling())
    dora = LoraConfig(r=4, use_dora=True, target_modules="all-linear")
    embeddings = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"])
    for adapter, said in ((dora, "linear layers and for LoRA"), (embeddings, "has it on embed_tokens")):
        with pytest.raises(UserError, match=said):
            Generator(get_peft_model(make_decoder("qwen3"), adapter), (END,), Sampling())


def greedy(model: PreTrainedModel, positions: int = 0, graphs: DecodeGraphs | None = None) -> list[list[int]]:
    """First and second messages of seven rows, in pages of so many positions or in tiers."""
    in_pages = (lambda _: Pages(None, positions)) if positions else None
    with Generator(model, (END,), Sampling(0), make_cache=in_pages) as generator:
        generator.graphs = graphs
        rows = generator.start(prompts(7), range(7), [9] * 7)
        first = finish(generator, rows)
        generator.release([rows[1], rows[4]])
        rest = [rows[i] for i in (0, 2, 3, 5, 6)]
        generator.append(rest, [[7, 8]] * 5, [9] * 5)
        return first + finish(generator, rest)


def test_pages_change_nothing(any_model, monkeypatch):
    monkeypatch.setattr(pages, "PAGE", 16)
    assert greedy(any_model, 1000) == greedy(any_model)


def test_room_is_found_for_samples_that_share_their_prompt(model):
    """32 rows of 900 tokens need 32 pages and two prompts, not 480 pages."""
    prompts = [[5] * 700 + [token] * 200 for token in (6, 7) for _ in range(16)]
    with Generator(model, (), Sampling(0), make_cache=lambda _: Pages(None, 64 * 64)) as generator:
        rows = generator.start(prompts, range(32), [20] * 32)
        assert all(row.room for row in rows)
        finish(generator, rows)
        generator.release(rows)
        assert len(generator.cache.free) == 64


def test_samples_of_a_prompt_have_its_full_pages_in_common(model, monkeypatch):
    own = Pages(None, 20 * 64)
    with Generator(model, (), Sampling(0), make_cache=lambda _: own) as generator:
        rows = generator.start([[5] * 150] * 4 + [[6] * 10], range(5), [90] * 5)
        first, *others = rows[:4]
        assert len(first.pages) == 3 and all(row.pages[:2] == first.pages[:2] for row in others)
        assert len({row.pages[2] for row in rows[:4]}) == 4
        assert len(own.free) == 20 - 2 - 4 - 1
        messages = finish(generator, rows)
        assert messages[0] == messages[1] == messages[2] == messages[3]
        generator.release(rows[:3])
        assert len(own.free) == 20 - len(rows[3].pages) - len(rows[4].pages)
        generator.release(rows[3:])
        assert sorted(own.free) == list(range(1, 21)) and not any(own.owners)
    with Generator(model, (), Sampling(0)) as generator:
        assert finish(generator, generator.start([[5] * 150], [0], [90])) == messages[:1]


def slow_kernel(queries: Tensor, stored: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """What the kernel of a GPU computes (mtsql/agent/decode_kernel.py), row by row."""
    seen = []
    for row, pages_of_row, length in zip(queries, table, lengths, strict=True):
        keys, values = stored[:, pages_of_row].transpose(1, 2).flatten(2, 3)[:, :, :length]
        heads = row.view(len(keys), -1, row.shape[-1])  # (kv_heads, shared, head_dim)
        weights = (heads @ keys.transpose(1, 2) * row.shape[-1] ** -0.5).softmax(-1)
        seen.append((weights @ values).view_as(row))
    return torch.stack(seen)


def test_with_a_kernel_the_decode_step_has_few_shapes(model, monkeypatch):
    plain = greedy(model)
    monkeypatch.setattr(pages, "decode_kernel", lambda _: slow_kernel)
    monkeypatch.setattr(Row, "draft", lambda *_: [])  # as on a GPU
    assert greedy(model, 1000) == plain
    shapes = set()

    def see(_, pending, places, numbers, pieces):
        shapes.add((len(pending), pieces[0].reach))

    watch(monkeypatch, Generator, "_sample", see)
    with Generator(model, (), Sampling(0), make_cache=lambda _: Pages(None, 20_000)) as generator:
        generator.start([[5] * 900] * 13, range(13), [600] * 13)
        for count in range(390):
            generator.step()
            if count % 25 == 24 and len(generator.rows) > 1:
                generator.release([generator.rows[-1]])
    assert {rows for rows, _ in shapes} == {16, 12, 8, 6, 4, 3, 2, 1}
    assert {reach for _, reach in shapes} == {1024, 4096}


def free_positions(monkeypatch, model: PreTrainedModel, count: int) -> None:
    """Let the device have memory for a cache of so many positions."""
    size = (count + 0.5) * cache_bytes_per_token(model) / cache.SHARE_OF_FREE
    monkeypatch.setattr(cache, "free_memory", lambda device: size)


def test_rows_give_way_in_a_cache_of_a_third_of_the_need(model, monkeypatch):
    monkeypatch.setattr(cache, "TIER_STEP", 16)
    free = play_ids(model)
    need, most, playing, again = [], [], [], []

    def see(generator, *_):
        playing.append(generator)
        need.append(sum(tier.capacity * len(tier.rows) for tier in generator.cache.tiers.values()))
        most.append(generator.cache.reserved)

    def dropped(_, rows):
        if len(rows) == 1 and rows[0].decoding:  # it gives its place back
            assert rows[0] is playing[-1].in_cache[-1]  # the youngest
            again.append(len(rows[0].ids))

    watch(monkeypatch, Generator, "_forward", see)
    watch(monkeypatch, RowCache, "drop", dropped)
    foretell(monkeypatch, free.values())
    assert play_ids(model) == free
    assert not again  # with room for all no row does
    third = max(need) // 3
    need.clear(), most.clear()
    free_positions(monkeypatch, model, third)
    assert play_ids(model) == free
    assert max(most) <= third and max(need) > third // 2
    assert any(again)  # in the middle of a message
    free_positions(monkeypatch, model, third // 30)
    with pytest.raises(UserError, match="lower --max-response-tokens"):
        play(model, 1.0, [1])


@pytest.mark.parametrize(("size", "late"), [(16, False), (64, False), (16, True)])
def test_rows_give_way_where_pages_are_few(model, monkeypatch, size, late):
    """Also where the next step is under way before the last one's tokens are looked at."""
    monkeypatch.setattr(pages, "PAGE", size)
    free, again, begun = play_ids(model), [], []
    foretell(monkeypatch, free.values())
    watch(monkeypatch, Generator, "start", lambda generator, *_: setattr(generator, "late", late))
    watch(monkeypatch, Generator, "_begin_step", lambda *given: begun.append(len(given) == 3))

    def dropped(own, rows):
        again.extend(row for row in rows if row.room and row.decoding and row.ids)

    watch(monkeypatch, Pages, "drop", dropped)
    for positions in (100_000, 3 * 160):
        monkeypatch.setattr(rollout_module, "new_cache", lambda _, most=positions, **how: Pages(160, most))
        assert play_ids(model) == free
        assert bool(again) == (positions < 1000)  # in the middle of a message
        assert (sum(begun) > len(begun) / 3) == late


def run_short(monkeypatch: pytest.MonkeyPatch, *fails: int) -> list[tuple[int, int]]:
    """Let these forward passes lack memory; before each the cache's positions and what of it is reserved."""
    passes = []

    def short(generator, *_):
        passes.append((generator.cache.positions, generator.cache.reserved))
        if len(passes) in fails:
            raise torch.OutOfMemoryError("CUDA out of memory")

    watch(monkeypatch, Generator, "_forward", short)
    return passes


@pytest.mark.parametrize(("fails", "drafted"), [(2, True), (10, True), (20, False), (50, False)])
def test_out_of_memory_halves_the_cache_and_changes_nothing(model, monkeypatch, capsys, fails, drafted):
    free = play_ids(model)
    foretell(monkeypatch, free.values() if drafted else ())
    passes = run_short(monkeypatch, fails, fails + 1)
    assert play_ids(model) == free
    passes = [positions for positions, _ in passes]
    assert passes[-1] <= passes[fails] // 2 < passes[0] // 2
    assert capsys.readouterr().err.count("out of memory: the rollout goes on with") == 2
    monkeypatch.setattr(Generator, "_forward", lambda *_: np.zeros(1 << 50))
    with pytest.raises(ValueError, match="the device's memory does not hold one trajectory"):
        play(model, 1.0, [0])


@pytest.mark.parametrize("fails", [10, 11, 12])
def test_out_of_memory_while_the_next_step_is_under_way_changes_nothing(model, monkeypatch, fails):
    free = play_ids(model)
    watch(monkeypatch, Generator, "start", lambda generator, *_: setattr(generator, "late", True))
    monkeypatch.setattr(rollout_module, "new_cache", lambda *_, **how: Pages(160, 5000))
    passes = run_short(monkeypatch, fails)
    assert play_ids(model) == free
    assert passes[-1][0] < 5000


def test_after_out_of_memory_the_longest_row_has_room(model, monkeypatch):
    """The cache is halved while rows are short; they grow beyond that half."""
    monkeypatch.setattr(cache, "TIER_STEP", 16)

    def messages() -> list[list[int]]:
        with Generator(model, (), Sampling(), make_cache=lambda model: new_cache(model, 100)) as generator:
            rows = generator.start([[5, 6, 7], [8, 9]], [0, 1], [90, 90])
            for _ in range(400):
                generator.step()
            return [row.ids for row in rows if not row.decoding]

    free = messages()
    passes = run_short(monkeypatch, 3)
    assert len(free) == 2 and messages() == free
    reserved = [of for _, of in passes]
    assert reserved[2] <= 2 * 16 and max(reserved) <= 100


def test_what_torch_keeps_for_itself_is_free(monkeypatch):
    told = {"memory_reserved": 7_000, "memory_allocated": 3_000, "mem_get_info": (20_000, 90_000)}
    for name, value in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert cache.free_memory(torch.device("cuda")) == 20_000 + 4_000


def test_logits_that_are_not_numbers_end_in_a_sentence():
    model = make_decoder("qwen3")
    model.model.norm.weight.data.fill_(torch.nan)
    with Generator(model, (), Sampling()) as generator, pytest.raises(UserError, match="NaN; take --dtype"):
        generator.start([[5, 6, 7]], [0], [10])
        generator.step()
        generator.step()


def test_a_row_takes_the_positions_that_it_uses(model):
    with Generator(model, (), Sampling(), make_cache=lambda model: new_cache(model, 12_000)) as generator:
        odd = [np.random.default_rng(n).integers(4, VOCABULARY, n).tolist() for n in (101, 100, 1000)]
        rows = generator.start(odd, range(3), [100] * 3)
        assert generator.cache.reserved == 2 * 128 + 1024
        for _ in range(30):
            generator.step()
        assert [row.tier.capacity for row in rows] == [192, 192, 1088]
        assert [row.slot for row in rows] == [0, 1, 0]
        generator.release(rows[1:])
        for _ in range(5):
            generator.step()
        assert rows[0].length == 101 + 35 - 1


def test_captured_graphs_replay_the_decode_step(model, monkeypatch):
    """With a stand-in for CUDA, whose graphs replay by computing anew from their own inputs."""
    ended = []
    cuda = mock.MagicMock(CUDAGraph=lambda: SimpleNamespace(reset=lambda: ended.append(1)))
    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(pages, "capture_stream", mock.MagicMock())
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    capture, captured = DecodeGraphs._capture, []

    def with_replay(self, compute, own):
        graph, own, result = capture(self, compute, own)
        graph.replay = lambda: result.copy_(compute(*own))
        captured.append(own[0].shape)
        return graph, own, result

    monkeypatch.setattr(DecodeGraphs, "_capture", with_replay)
    own = DecodeGraphs(model.device)
    assert greedy(model, 1000, own) == greedy(model)
    assert 1 < len(captured) == len(set(captured)) == len(ended) <= 6


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


@pytest.mark.parametrize("ready", [True, False])
def test_no_row_waits_for_anothers_slow_query(model, ready):
    """One query ends when all other episodes have: were they to wait for it, they would wait forever."""
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
