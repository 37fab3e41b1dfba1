"""The same episodes under other engines: their ids, loss masks, rewards and gradients are ours."""

import asyncio
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import ENVIRONMENT, ROOT, free_port, json_lines, run_in_two
from transformers import PreTrainedTokenizerBase, TrainerCallback

from mtsql.agent.rollout import Sampling, rollout, trajectory_seed
from mtsql.agent.trajectory import Status
from mtsql.config import read_options
from mtsql.errors import UserError
from mtsql.extras.bridges.rows import RowsConfig
from mtsql.extras.bridges.rows import main as write_rows
from mtsql.extras.bridges.task import completion, load_task, play_in_lockstep, read_line
from mtsql.extras.http_client import Server
from mtsql.extras.served import ServedPolicy, find_protocol
from mtsql.learn.logprobs import row_batch, token_logprobs
from mtsql.learn.loss import group_advantages, grpo_loss, informative_groups, loss_denominator
from mtsql.learn.model import load_policy
from mtsql.model_folder import load_tokenizer
from mtsql.recipes.mtsql_r1 import final_answer
from train_grpo import Args as GrpoArgs

GREEDY = 0.0


@pytest.fixture(scope="module")
def model(work):
    return str(work / "imitation")


@pytest.fixture(scope="module")
def line(work, model, tmp_path_factory):
    """The options, as an engine's configuration has them."""
    out = tmp_path_factory.mktemp("bridges") / "out"
    places = f"--data {work}/benchmark --model {model} --out {out}"
    return f"--config {ROOT}/configs/toy.toml {places} --max-turn-tokens 120"


@pytest.fixture(scope="module")
def task(line):
    return load_task(read_line(line))


@pytest.fixture(scope="module")
def policy(model):
    return load_policy(model).eval()


@pytest.fixture(scope="module")
def played(task, policy):
    """Greedy trajectories of all questions, as train_grpo.py and evaluate.py play them."""
    episodes = [task.episode(name, 0) for name in task.playable()]
    sampling = Sampling(GREEDY, task.sampling.max_turn_tokens, task.sampling.stop_strings)
    return rollout(policy, task.tokens, episodes, sampling)


@pytest.fixture
def trl():
    """The bridge to TRL."""
    pytest.importorskip("trl", reason="requirements-bridges.txt is not installed")
    from mtsql.extras.bridges import trl

    return trl


@torch.no_grad()
def write_greedily(task, policy, ids, limit):
    """What a server would: the next message's ids and their log-probabilities, one forward pass a token."""
    written, logprobs = [], []
    while len(written) < limit and not (written and written[-1] in task.tokens.end_of_turn_ids):
        distribution = policy(torch.tensor([[*ids, *written]])).logits[0, -1].log_softmax(0)  # (vocabulary,)
        written.append(distribution.argmax().item())
        logprobs.append(distribution[written[-1]].item())
    return written, logprobs


def write_all(task, policy, prompts):
    messages = [write_greedily(task, policy, ids, task.sampling.max_turn_tokens) for ids in prompts]
    return [ids for ids, _ in messages], [logprobs for _, logprobs in messages]


def test_an_engine_that_writes_message_by_message_plays_the_same_trajectories(task, policy, played):
    expected, asked = played[:8], []
    episodes = [task.episode(t.example_id, 0) for t in expected]

    def write(prompts):
        asked.append(len(prompts))
        return write_all(task, policy, prompts)

    play_in_lockstep(task, episodes, write)
    assert asked[0] == len(expected) and len(asked) > 1
    for episode, trajectory in zip(episodes, expected, strict=True):
        assert completion(episode.trajectory)[:3] == completion(trajectory)[:3]
        assert completion(episode.trajectory)[3] == pytest.approx(completion(trajectory)[3], abs=1e-3)
        assert episode.trajectory.status == trajectory.status
        assert task.rewards(episode.trajectory) == task.rewards(trajectory)


def test_threads_that_ask_at_once_load_once(line, monkeypatch):
    loaded, config = [], read_line(f"{line} --seed 7")  # which no other test has loaded

    def load_slowly(name: str) -> PreTrainedTokenizerBase:
        loaded.append(name)
        time.sleep(0.2)
        return load_tokenizer(name)

    monkeypatch.setattr("mtsql.extras.bridges.task.load_tokenizer", load_slowly)
    with ThreadPoolExecutor(8) as pool:
        tasks = list(pool.map(load_task, [config] * 8))
    assert len(loaded) == 1 and all(task is tasks[0] for task in tasks)


def test_a_message_beyond_its_limit_ends_the_episode(task):
    episode = task.episode(task.playable()[0], 0)
    limit = task.message_limit(episode)
    assert limit == 120
    assert task.take(episode, [5] * (limit + 3), [-1.0] * (limit + 3)) is None
    assert episode.trajectory.status == "out_of_tokens"
    assert episode.trajectory.segments[-1].ids == (5,) * limit
    with pytest.raises(UserError, match="no question has the id 'nobody/0'"):
        task.episode("nobody/0", 0)


def test_a_message_ends_with_a_stop_string_wherever_its_last_token_holds_it(task):
    stopping = replace(task, sampling=replace(task.sampling, stop_strings=("</answer_sql>",)))
    ids = task.tokens.message_ids(final_answer("SELECT 1") + "\n")[:-1]  # the end of turn was not sampled
    for asked, status in ((stopping, Status.ANSWERED), (task, Status.OUT_OF_TOKENS)):  # else it was cut
        episode = asked.episode(task.playable()[0], 0)
        assert asked.take(episode, ids, [-1.0] * len(ids)) is None
        assert episode.trajectory.status is status


def test_trl_with_vllm_writes_message_by_message(trl, line, task, policy, played):
    """vLLM itself needs a GPU; here stands a loop over the model with the answers of TRL's VLLMGeneration."""
    assert task.message_options() == {"stop_token_ids": list(task.tokens.end_of_turn_ids)}

    def generate(prompts, images, num_generations):
        written, logprobs = write_all(task, policy, prompts)
        return prompts, written, [[[value] for value in values] for values in logprobs], None

    trainer = SimpleNamespace(use_vllm=True, vllm_generation=SimpleNamespace(generate=generate))
    trainer.state, trainer.accelerator = SimpleNamespace(global_step=0), SimpleNamespace(process_index=0)
    expected = played[:8]
    fields = trl.make_rollout(task, read_line(line))([t.example_id for t in expected], trainer)
    assert fields["reward"] == [task.rewards(t).total for t in expected]
    ids = zip(fields["prompt_ids"], fields["completion_ids"], fields["env_mask"], strict=True)
    assert list(ids) == [completion(t)[:3] for t in expected]


def test_trl_options_that_are_wrong_or_would_wait_forever_are_one_sentence(trl, line, model, tmp_path):
    config = read_line(line)
    with pytest.raises(UserError, match=r"behind --: .*--max_stepz"):
        trl.make_trainer(config, ["--max_stepz", "3"])
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": model}))
    with pytest.raises(UserError, match="leave out --use_peft"):
        trl.make_trainer(replace(config, model=str(tmp_path / "adapter")), ["--use_peft", "true"])
    fine = {"use_vllm": True, "world_size": 2, "vllm_mode": "colocate", "vllm_tensor_parallel_size": 1}
    fine |= {"vllm_enable_sleep_mode": False}
    trl.check_vllm(SimpleNamespace(**fine))
    for bad in ({"vllm_mode": "server"}, {"vllm_tensor_parallel_size": 2}, {"vllm_enable_sleep_mode": True}):
        trl.check_vllm(SimpleNamespace(**fine | bad | {"world_size": 1}))
        with pytest.raises(UserError, match="wait forever"):
            trl.check_vllm(SimpleNamespace(**fine | bad))


def test_trl_has_our_ids_loss_masks_and_gradient(trl, line, model, task):
    trainer = trl.make_trainer(
        read_line(line),
        "--max_steps 1 --per_device_train_batch_size 48 --num_generations 6 --max_grad_norm 0 "
        "--learning_rate 0 --gradient_checkpointing False".split(),
    )
    kept, gradients, rollout_func = {}, {}, trainer.rollout_func

    def keep(prompts, trainer):
        fields = rollout_func(prompts, trainer)
        kept.update(fields, prompts=prompts)
        return fields

    class KeepGradients(TrainerCallback):
        def on_pre_optimizer_step(self, *_, model, **__):
            gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})

    trainer.rollout_func = keep
    trainer.add_callback(KeepGradients())
    trainer.train()

    policy = load_policy(model)
    episodes = [task.episode(name, trajectory_seed(0, 0, 0, i)) for i, name in enumerate(kept["prompts"])]
    trajectories = rollout(policy, task.tokens, episodes, Sampling(1.0, 120))
    ids = zip(kept["prompt_ids"], kept["completion_ids"], kept["env_mask"], strict=True)
    assert [completion(t)[:3] for t in trajectories] == list(ids)
    rewards = torch.tensor([task.rewards(t).total for t in trajectories]).view(8, 6)  # (questions, samples)
    assert rewards.flatten().tolist() == kept["reward"]
    informative = informative_groups(rewards)  # (questions,)
    assert informative.sum() >= 1
    advantages = group_advantages(rewards, informative, eps=1e-4)  # (questions, samples); TRL's epsilon
    for trajectory, advantage in zip(trajectories, advantages.flatten().tolist(), strict=True):
        trajectory.advantage = advantage
    batch = row_batch(trajectories, "cpu")
    logprobs, _ = token_logprobs(policy, batch)  # (tokens,)
    denominator = loss_denominator(trajectories, "trajectory", 0)
    loss, _ = grpo_loss(logprobs, batch, denominator, GrpoArgs(model="", data=(), out=""))
    loss.backward()
    ours = torch.cat([p.grad.flatten() for p in policy.parameters()])  # (parameters,)
    theirs = torch.cat([gradients[name].flatten() for name, _ in policy.named_parameters()])  # (parameters,)
    assert ours.norm() > 1e-3
    assert (ours - theirs).norm() <= 1e-4 * ours.norm()


@pytest.mark.usefixtures("trl")
def test_trl_trains_in_two_processes(line, model, tmp_path):
    own = ["--max_steps", 3, "--per_device_train_batch_size", 8, "--num_generations", 4]
    command = ["-m", "mtsql.extras.bridges.trl", *line.split(), "--out", tmp_path / "out"]
    assert run_in_two(*command, "--", *own).count("'rewards/ex/mean'") == 3
    before, after = (load_policy(folder).parameters() for folder in (model, tmp_path / "out" / "policy"))
    assert not all(map(torch.equal, before, after))


class AgentLoopBase:
    """As much of verl's class as the bridge uses."""

    def __init__(self, server_manager, **_):
        self.server_manager = server_manager


def stub_verl(monkeypatch):
    """verl wants an older transformers, so only tests/verl_environment.sh has the real one."""
    for name in ("verl", "verl.experimental", "verl.experimental.agent_loop"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    stub = ModuleType("verl.experimental.agent_loop.agent_loop")
    stub.AgentLoopBase, stub.AgentLoopOutput, stub.AgentLoopMetrics = AgentLoopBase, SimpleNamespace, dict
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    monkeypatch.delitem(sys.modules, "mtsql.extras.bridges.verl", raising=False)


def test_verl_gets_our_ids_loss_masks_and_rewards(line, task, policy, played, monkeypatch):
    if find_spec("verl") is None:
        stub_verl(monkeypatch)
    from mtsql.extras.bridges.verl import MtsqlAgentLoop

    class FakeServer:
        async def generate(self, request_id, prompt_ids, sampling_params):
            ids, logprobs = write_greedily(task, policy, prompt_ids, sampling_params["max_tokens"])
            return SimpleNamespace(token_ids=ids, log_probs=logprobs)

    async def play(trajectory):
        config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=None))
        loop = MtsqlAgentLoop(
            trainer_config=SimpleNamespace(config=config), server_manager=FakeServer(), processor=None,
            tokenizer=task.tokens.tokenizer, dataset_cls=None, data_config=SimpleNamespace(config={}),
            options=line,
        )  # fmt: skip
        loop.loop = asyncio.get_running_loop()
        place = {"example_id": trajectory.example_id, "split": "train"}
        return await loop.run({"temperature": 0.0}, extra_info=place)

    for trajectory in played[:8]:
        output = asyncio.run(play(trajectory))
        ids, response, loss_mask, _ = completion(trajectory)
        assert (output.prompt_ids, output.response_ids, output.response_mask) == (ids, response, loss_mask)
        assert output.reward_score == task.rewards(trajectory).total
        assert output.extra_fields["reward_extra_info"]["ex"] == task.rewards(trajectory).ex


def test_skyrl_gets_our_ids_and_rewards(line, task, played):
    skyrl_gym = pytest.importorskip("skyrl_gym", reason="requirements-bridges.txt is not installed")
    if "mtsql" not in skyrl_gym.envs.registration.registry:
        skyrl_gym.register("mtsql", "mtsql.extras.bridges.skyrl:MtsqlEnv")
    from omegaconf import OmegaConf

    tokenizer = task.tokens.tokenizer
    for trajectory in played[:8]:
        extras = {"example_id": trajectory.example_id, "split": "train"}
        env = skyrl_gym.make("mtsql", env_config=OmegaConf.create({"options": line}), extras=extras)
        messages, _ = env.init([])
        for text in [task.tokens.decode(s.ids) for s in trajectory.segments if s.role == "model"]:
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert ids == trajectory.ids[: len(ids)]
            step = env.step(text)
            messages = [*messages, {"role": "assistant", "content": text}, *step["observations"]]
        assert step["done"] and step["reward"] == task.rewards(trajectory).total
        assert env.get_metrics()["ex"] == task.rewards(trajectory).ex


def test_rows_are_the_questions_that_can_be_trained_on(line, task, tmp_path):
    config = read_options(RowsConfig, None, line.split())

    def rows_of(**changed: str) -> list[dict]:
        write_rows(replace(config, **{"out": str(tmp_path / "out")} | changed))
        return json_lines(tmp_path / "out")

    rows = rows_of()
    assert [row["extra_info"]["example_id"] for row in rows] == task.playable()
    assert {row["agent_name"] for row in rows} == {"mtsql"}
    dev = load_task(read_line(line), "dev")
    for row in rows_of(engine="skyrl", split="dev"):
        assert row["split"] == "dev"
        assert row["prompt"][0]["content"] == dev.examples[row["example_id"]].question
    with pytest.raises(UserError, match="give --out"):
        rows_of(out="")
    lengths = {name: len(task.episode(name, 0).trajectory.ids) for name in task.playable()}
    shortest = min(lengths.values())
    short = load_task(replace(config, max_prompt_tokens=shortest))
    assert short.playable() == [name for name, length in lengths.items() if length == shortest]
    with pytest.raises(UserError, match="every question is longer than --max-prompt-tokens"):
        rows_of(max_prompt_tokens=10)
    drawn = load_task(replace(config, questions=3))
    assert len(drawn.playable()) == 3 and set(drawn.playable()) < set(drawn.examples)


def test_transformers_serve_gives_the_ids_of_the_policy_here(model, task, played, tmp_path, monkeypatch):
    """It answers HTTP 500 to a call that is no JSON, or is cut, and drops the text beside earlier calls."""
    pytest.importorskip("openai", reason="requirements-bridges.txt is not installed")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    port = free_port()
    serve = [Path(sys.executable).with_name("transformers"), "serve", "--port", str(port), "--device", "cpu"]
    environment = os.environ | ENVIRONMENT | {"HF_HOME": str(tmp_path)}
    sampling = Sampling(GREEDY, task.sampling.max_turn_tokens)
    no_json = (Status.MALFORMED_CALL, Status.OUT_OF_TOKENS)
    compared = [t for t in played if t.status not in no_json and t.interactions < 2]
    with subprocess.Popen([*serve, "--dtype", "float32", model], env=environment) as process:
        try:
            patient = Server(f"http://127.0.0.1:{port}/v1", pauses=(0.5,) * 120)  # until it is there
            assert find_protocol(patient, model, task.tokens) == "chat"
            served = ServedPolicy(replace(patient, pauses=()), model, "chat")
            for trajectory in compared:
                episode = task.episode(trajectory.example_id, 0)
                served.play(episode, sampling)
                assert episode.trajectory.ids == trajectory.ids
        finally:
            process.kill()
    # How many there are depends on the processor that has trained the tests' model: seen were 5 and more.
    assert len(compared) >= 4 and any(t.interactions for t in compared)
