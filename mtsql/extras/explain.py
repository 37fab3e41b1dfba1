"""One step of GRPO, shown whole: what was sampled, what it earned, and what the step did to each token.

    mtsql explain
    mtsql explain --question ID --divide-by none --html step.html
    mtsql explain --config configs/qwen3_1.7b_lora.toml --data sparc --model runs/sft/policy

Options are those of train_grpo.py, whose functions do the work, on one question. Without --config, --model
and --data it is the tiny model of models/toy on a few questions of the embedded benchmark. Without --question
it is the first question drawn whose trajectories do not all earn the same.

p is the probability of a sampled token. Its weight in the loss is 1 / (G |M_i|), or as --aggregate says; in a
step of several questions G counts the trajectories of all. Pull is -dL/d log p: weight times advantage, as
long as the ratio is 1. The step moves weights that all tokens share, so a token may go another way than it
is pulled. p after over p before would be the ratio of a second
update, which is clipped beyond the bounds on the side of the advantage. AdamW divides by the size of the
gradient, so that its first step goes equally far whatever the scale of the advantages.
"""

from __future__ import annotations

import argparse
import sys

from mtsql.config import command_line, read_options, user_errors
from mtsql.files import shipped, write_atomically

CONFIG, MODEL = "configs/toy.toml", "models/toy/seed0"


def own_options(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The question and the page, and all that train_grpo.py is to read; for a shipped model its settings."""
    usage = "mtsql explain [--question ID] [--html FILE] [--OPTION-OF-TRAIN-GRPO VALUE ...]"
    parser = command_line(__doc__, usage=usage)
    parser.add_argument("--question", default="", help="id of the question, as in trajectories.jsonl")
    parser.add_argument("--html", default="", help="write a page for a browser to this file instead")
    own, rest = parser.parse_known_args(argv)
    names = {argument.partition("=")[0] for argument in rest}
    settings = [] if names & {"--config", "--data"} else ["--config", CONFIG]
    model = [] if names & {"--config", "--model"} else ["--model", str(shipped(MODEL))]
    return own, [*settings, *model, *rest]


if __name__ == "__main__":  # before torch is imported, so that --help is answered at once
    OPTIONS = own_options(sys.argv[1:])

import math
import os
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import torch
from jinja2 import Environment as Templates
from jinja2 import FileSystemLoader
from torch import Tensor

from mtsql.data.datasets import Example, examples
from mtsql.errors import UserError, printable
from mtsql.learn.checkpoint import resume
from mtsql.learn.logprobs import token_batch, token_logprobs
from mtsql.learn.loss import grpo_loss, loss_denominator, truncation_cap
from mtsql.learn.model import Reference
from mtsql.learn.samples import Sample
from mtsql.recipes import load_recipe
from mtsql.recipes.prompt_options import aligned
from mtsql.recipes.rewards import Decode, chosen_rewards
from mtsql.task import Task, begin_task, reward_function, training_questions
from mtsql.toy.benchmark import MODELS_SEED, write_benchmark
from mtsql.toy.tiny import CAPITAL, GLUE
from train_grpo import Args, clipped_step, rewards_of, sample_groups, set_advantages

FEW = {"train": {"known": (12, 4)}}  # databases and dialogues in each
DRAWS = 20  # of a question, until one has rewards that differ
MARKS = {ord(CAPITAL): None, ord(GLUE): None}  # of the tiny tokenizer, which only a whole text is rid of
MOST, LEAST = 8, 5e-4  # tokens shown of a trajectory in the terminal, and the least change of p of one
COLOURS = {"model": 32, "environment": 33, "bold": 1}  # in a terminal
TOKEN_HEADER = ["token", "p before", "p after", "after / before", "pull"]


class Token(NamedTuple):
    """A sampled token: its probabilities before and after the step, and the pull of the loss."""

    text: str
    before: float
    pull: float
    after: float

    @property
    def ratio(self) -> float:
        """What the importance ratio of a second update of the batch would be."""
        return self.after / self.before if self.before else 1.0

    @property
    def moved(self) -> float:
        """How much likelier it is after the step."""
        return self.after - self.before

    @property
    def row(self) -> list[str]:
        """Its cells below TOKEN_HEADER."""
        numbers = (f"{self.before:.4f}", f"{self.after:.4f}", f"{self.ratio:.3f}", f"{self.pull:+.2e}")
        return [repr(self.text), *numbers]


class Step(NamedTuple):
    """A step of GRPO on the group of one question. `tokens` are those of each sample in the loss."""

    group: list[Sample]
    tokens: list[list[Token]]
    loss: float
    statistics: dict[str, float]  # of `train_grpo.clipped_step`

    def moved(self, index: int) -> float:
        """The probability of a whole trajectory after the step over that before it."""
        return math.prod(token.ratio for token in self.tokens[index])

    def different(self) -> list[tuple[int, ...]]:
        """The places of the samples that have the same tokens, for each of their trajectories."""
        places: dict[tuple[int, ...], tuple[int, ...]] = {}
        for place, sample in enumerate(self.group):
            ids = tuple(sample.trajectory.ids)
            places[ids] = (*places.get(ids, ()), place)
        return list(places.values())

    def shown(self) -> list[tuple[int, ...]]:
        """Of these the one of the highest and the one of the lowest reward, then the most changed."""

        def reward(places: tuple[int, ...]) -> float:
            return self.group[places[0]].rewards.total

        ways = sorted(self.different(), key=lambda way: -abs(math.log(max(self.moved(way[0]), 1e-30))))
        return list(dict.fromkeys((max(ways, key=reward), min(ways, key=reward), *ways)))

    def most_moved(self, index: int) -> list[Token]:
        """The tokens of a sample that the step has moved most."""
        moved = sorted(self.tokens[index], key=lambda token: -abs(token.moved))[:MOST]
        return [token for token in moved if abs(token.moved) >= LEAST]


def one_step(config: Args, task: Task, asked: Sequence[Example]) -> Step:
    """The first step of `train_grpo.py` that changes the policy, if each step asks one of these questions.

    Raises UserError if of DRAWS questions all have G equal rewards.
    """
    config = replace(config, prompts_per_step=1, steps=DRAWS)
    reward = reward_function(config, task.tokens, task.scorer, config.rewards)
    reference = Reference(task.policy) if config.beta else None
    optimizer, *_ = resume(config, task.out, task.policy, task.processes)
    for number in range(min(DRAWS, len(asked))):
        groups = sample_groups(config, task, reward, [asked], number)
        informative = set_advantages(config, groups)
        if informative.any() and any(sample.rewards.kept for sample in groups[0]):
            break
    else:
        raise UserError(
            f"all {config.samples_per_prompt} trajectories of {groups[0][0].example.id}"
            f"{' and of the questions before it' * (number > 0)} earn the same, so "
            "the step does nothing; give another --question or --seed, or more --samples-per-prompt"
        )
    loss, pulls, before = pulls_of(config, task, groups[0])
    statistics = clipped_step(config, task, reference, optimizer, groups, informative, number)
    with torch.no_grad():
        _, _, after = pulls_of(config, task, groups[0])
    values = iter(zip(before.exp().tolist(), pulls.tolist(), after.exp().tolist(), strict=True))
    tokens = []
    for sample in groups[0]:
        pairs = zip(sample.trajectory.ids, sample.trajectory.loss_mask, strict=True)
        texts = [task.tokens.tokenizer.decode([i]) for i, bit in pairs if bit and sample.rewards.kept]
        tokens.append([Token(text.translate(MARKS), *next(values)) for text in texts])
    return Step(groups[0], tokens, loss, statistics)


def pulls_of(config: Args, task: Task, group: Sequence[Sample]) -> tuple[float, Tensor, Tensor]:
    """The loss, without the KL, -dL/d log p, and log p of each token of loss mask 1, (tokens,) both.

    They are ordered by sample, of those that are in the loss, and position. Without gradients the pull is 0.
    """
    trajectories = [sample.trajectory for sample in group if sample.rewards.kept]
    batch = token_batch(task.policy, [trajectories])
    logprobs, _ = token_logprobs(task.policy, batch, config.temperature)
    denominator = loss_denominator(trajectories, config.aggregate, config.max_response_tokens)
    cap = truncation_cap(task.policy)
    loss, _ = grpo_loss(logprobs, batch, denominator, replace(config, beta=0.0), tis_cap=cap)
    pulls = torch.zeros_like(logprobs)
    if loss.requires_grad:
        pulls = -torch.autograd.grad(loss, logprobs)[0]
    return loss.item(), pulls, logprobs.detach()


def rendered(template: str, config: Args, step: Step, decode: Decode, colour: bool = False) -> str:
    """The step as explain.txt has it, for a terminal, or as explain.html, a page without any script."""

    def paint(text: str, kind: str = "") -> str:
        painted = colour and kind
        return f"\033[{COLOURS[kind]}m{printable(text)}\033[0m" if painted else printable(text)

    of_text = {"trim_blocks": True, "lstrip_blocks": True, "autoescape": False}
    how = {"autoescape": True} if template.endswith(".html") else of_text
    templates = Templates(loader=FileSystemLoader(Path(__file__).parent), **how)
    templates.globals |= {"paint": paint, "aligned": aligned, "decode": decode, "header": TOKEN_HEADER}
    shown = {"config": config, "step": step, "example": step.group[0].example, "rows": reward_rows(step)}
    shown |= {"rewards": rewards_of([step.group])[0], "of_rewards": rewards_text(config)}
    return templates.get_template(template).render(shown, sentences=step_sentences(config, step))


def step_sentences(config: Args, step: Step) -> list[str]:
    """What the step as a whole was, and which options did nothing in it."""
    numbers = step.statistics
    zero = ", minus the mean advantage; its gradient is not 0" if config.aggregate == "trajectory" else ""
    return [
        f"loss {step.loss:+.6f}{zero}",
        "pull is weight x advantage; tokens share the model's weights, so that one may move against its pull",
        f"gradient norm {numbers['gradient_norm']:.4f}, learning rate {numbers['learning_rate']:.2g} in "
        f"warm-up, entropy {numbers['entropy']:.4f} nats a token",
        f"updates {config.updates_per_batch}: clipped {numbers['clip_fraction']:.4f} of all weight, KL "
        f"{numbers['kl']:.6f}; in the first the ratio is 1 and the KL 0",
    ]


def rewards_text(config: Args) -> str:
    """The rewards in use, with their weights."""
    if "." in config.rewards.partition(",")[0]:
        return config.rewards
    module = import_module(load_recipe(config.recipe).make_reward.__module__)
    preset, weights = chosen_rewards(module.PRESETS, config.rewards)
    return f"{preset} ({', '.join(f'{name} {weight:g}' for name, weight in vars(weights).items())})"


def reward_rows(step: Step) -> list[list[str]]:
    """A header and a row a trajectory; weight and pull are those of each of its tokens."""
    parts = step.group[0].rewards.parts
    rows = [["", "reward", "EX", "EM", *parts, "advantage", "tokens", "weight", "pull", "p after / before"]]
    for number, (sample, tokens) in enumerate(zip(step.group, step.tokens, strict=True)):
        given = sample.rewards
        scores = [f"{x:.3f}" for x in (given.total, given.ex, given.em, *given.parts.values())]
        pull = fmean(token.pull for token in tokens) if tokens else 0.0
        advantage = sample.trajectory.advantage
        weight = f"{pull / advantage:.2e}" if advantage else "-"
        of_tokens = [str(len(tokens)), weight, f"{pull:+.2e}", f"{step.moved(number):.3f}"]
        rows.append([f"[{number}]", *scores, f"{advantage:+.3f}", *of_tokens])
    return rows


def main(own: argparse.Namespace, rest: list[str]) -> None:
    """The command. Raises UserError for a question that is not there, and as `one_step`."""
    with tempfile.TemporaryDirectory() as folder:
        if not any(word.partition("=")[0] == "--data" for word in rest):
            rest = [*rest, "--data", f"{folder}/benchmark"]
            write_benchmark(Path(folder, "benchmark"), MODELS_SEED, splits=FEW)
        config = read_options(Args, None, [*rest, "--out", f"{folder}/run"])
        task = begin_task(config, "train")
        if own.question:
            asked = [e for e in examples(task.dataset.dialogues) if e.id == own.question]
        else:
            asked = training_questions(config, task)
        if not asked:
            raise UserError(f"--question {own.question} is not in the data; ids are as in trajectories.jsonl")
        step, decode = one_step(config, task, asked), task.tokens.tokenizer.decode
    if own.html:
        write_atomically(Path(own.html), rendered("explain.html", config, step, decode))
        print(own.html)
    else:
        colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
        print(rendered("explain.txt", config, step, decode, colour), end="")


if __name__ == "__main__":
    user_errors(main, *OPTIONS)
