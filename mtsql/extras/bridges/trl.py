"""TRL as the engine: its GRPOTrainer with our episodes, loss masks and rewards, through `rollout_func`.

    python -m mtsql.extras.bridges.trl --config C --model M --data DATA --out OUT -- --max_steps 3
    accelerate launch --num_processes 8 -m mtsql.extras.bridges.trl ... -- --use_peft true

What stands behind -- are options of TRL's GRPOConfig, and of its ModelConfig those for LoRA (use_peft,
lora_r). They replace those of `defaults`, with which TRL's loss is train_grpo.py's. The policy plays in our
generator, or with --use_vllm true --vllm_mode colocate in vLLM, one message of all episodes at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import HfArgumentParser
from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config

from mtsql.agent.env import Episode
from mtsql.agent.rollout import rollout, trajectory_seed
from mtsql.config import read_options, save_config, user_errors
from mtsql.errors import UserError
from mtsql.extras.bridges.task import BridgeConfig, Task, Write, completion, load_task, play_in_lockstep
from mtsql.learn.model import load_policy
from mtsql.model_folder import ADAPTER_FILE
from mtsql.task import pick_device

# A trajectory in TRL's names, and what it earned.
FIELDS = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "reward", "ex", "em")


def defaults(config: BridgeConfig) -> list[str]:
    """TRL's options for MTSQL-R1's loss: a mean over each trajectory's tokens, then over trajectories; no KL.

    A message that ends with a stop string counts as truncated for TRL, so none of those is left out.
    """
    options = {
        "output_dir": config.out,
        "seed": config.seed,
        "loss_type": "grpo",
        "scale_rewards": "group",
        "beta": 0.0,
        "mask_truncated_completions": False,
        "max_completion_length": config.max_response_tokens,
        "bf16": config.dtype == "bfloat16",
        "lora_r": 32,
        "lora_alpha": 64,
        "lora_dropout": 0.0,
        "lora_target_modules": "all-linear",
        "use_cpu": pick_device().type == "cpu",
        "report_to": "none",
        "logging_steps": 1,
    }
    return [text for name, value in options.items() for text in (f"--{name}", str(value))]


def rollout_fields(task: Task, episodes: Sequence[Episode]) -> dict[str, list]:
    """What a `rollout_func` returns of finished episodes: a list for each of FIELDS, one entry an episode.

    The reward, EX and EM reach the reward functions.
    """
    rows = []
    for episode in episodes:
        earned = task.rewards(episode.trajectory)
        rows.append((*completion(episode.trajectory), earned.total, earned.ex, earned.em))
    return dict(zip(FIELDS, map(list, zip(*rows, strict=True)), strict=True))


def make_rollout(
    task: Task, config: BridgeConfig, write: Write | None = None
) -> Callable[[list[str], GRPOTrainer], dict[str, list]]:
    """TRL's `rollout_func`: one trajectory for each prompt, which is a question's id.

    Messages come from `write`, else from TRL's vLLM if it is used, else from this project's engine.
    """

    def play(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        numbers = (config.seed, trainer.state.global_step, trainer.accelerator.process_index)
        episodes = [task.episode(name, trajectory_seed(*numbers, i)) for i, name in enumerate(prompts)]

        def vllm(ids: list[list[int]]) -> tuple[list[list[int]], list[list[float]]]:
            _, written, logprobs, _ = trainer.vllm_generation.generate(ids, None, num_generations=1)
            return written, [[of_token[0] for of_token in message] for message in logprobs]

        if write or trainer.use_vllm:
            play_in_lockstep(task, episodes, write or vllm)
        else:
            policy = trainer.accelerator.unwrap_model(trainer.model)
            sampling = replace(task.sampling, temperature=trainer.temperature)
            rollout(policy, task.tokens, episodes, sampling, config.rows)
        return rollout_fields(task, episodes)

    return play


def earned(name: str) -> Callable[..., list[float]]:
    """A reward function of TRL's: what the rollout found as `name`."""

    def read(**fields: Any) -> list[float]:
        return fields[name]

    read.__name__ = name  # under which TRL logs it
    return read


def make_trainer(config: BridgeConfig, options: list[str]) -> GRPOTrainer:
    """TRL's trainer over the training questions; `options` are TRL's own.

    Raises UserError for options that TRL refuses, and for settings in which it would wait forever.
    """
    try:
        parser = HfArgumentParser((GRPOConfig, ModelConfig))
        given, model = parser.parse_args_into_dataclasses([*defaults(config), *options])
    except ValueError as error:
        raise UserError(f"behind --: {error}") from None
    check_vllm(given)
    task = load_task(config)
    if given.use_vllm:
        limit = {"max_tokens": task.sampling.max_turn_tokens}
        given.generation_kwargs = (given.generation_kwargs or {}) | limit | task.message_options()
    given.reward_weights = [1.0, 0.0, 0.0]  # EX and EM are only logged
    new_adapter = get_peft_config(model)
    is_adapter = (Path(config.model) / ADAPTER_FILE).is_file()
    if new_adapter and is_adapter:
        raise UserError(f"{config.model} is a LoRA adapter, and goes on as it is: leave out --use_peft")
    # In bfloat16 most updates of whole weights would be rounded away.
    dtype = config.dtype if new_adapter or is_adapter else "float32"
    return GRPOTrainer(
        load_policy(config.model, dtype, given.device, quantise=config.quantise),
        [earned(name) for name in ("reward", "ex", "em")],
        given,
        Dataset.from_list([{"prompt": name} for name in task.playable()]),
        processing_class=task.tokens.tokenizer,
        peft_config=new_adapter,
        rollout_func=make_rollout(task, config),
    )


def check_vllm(given: GRPOConfig) -> None:
    """Raise UserError if processes would wait for each other at each message: their numbers differ."""
    alone = given.vllm_mode == "colocate" and given.vllm_tensor_parallel_size == 1
    if given.use_vllm and given.world_size > 1 and not (alone and not given.vllm_enable_sleep_mode):
        raise UserError(
            "with several processes choose --vllm_mode colocate, --vllm_tensor_parallel_size 1 and no "
            "--vllm_enable_sleep_mode: episodes differ in their messages, and TRL would wait forever"
        )


def main() -> None:
    """Train, and save the policy as an ordinary folder."""
    given = [*sys.argv[1:], "--"]
    end = given.index("--")
    config = read_options(BridgeConfig, __doc__, given[:end])
    if not config.out:
        raise UserError("give --out, the run folder to write")
    trainer = make_trainer(config, given[end + 1 : -1])
    if trainer.is_world_process_zero():
        save_config(config, Path(config.out))
    trainer.train(resume_from_checkpoint=trainer.args.resume_from_checkpoint)
    trainer.save_model(f"{config.out}/policy")
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # which takes the processes apart


if __name__ == "__main__":
    user_errors(main)
