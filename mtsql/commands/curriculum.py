"""Success counts for the curriculum of RL (MTSQL-R1, section 3.3.1).

    python -m mtsql.commands.curriculum --config configs/toy.toml --model runs/sft/policy \\
        --data DATA --out OUT

samples each training question 20 times and writes OUT/counts.jsonl, one line a question: how many of
its trajectories were right by EX and EM. `train_grpo.py --curriculum OUT/counts.jsonl` trains on them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mtsql.agent.collection import sample_questions
from mtsql.agent.tokens import ChatTokens
from mtsql.config import Common, load_config, option, save_config, user_errors
from mtsql.data.datasets import examples
from mtsql.files import write_atomically
from mtsql.learn.curriculum import Count
from mtsql.learn.model import load_policy, load_tokenizer
from mtsql.learn.parallel import join_processes, leave_processes
from mtsql.recipes import load_recipe
from mtsql.recipes.rewards import is_right
from mtsql.run import load_split, make_environment, make_sampling, make_scorer, pick_device, wording_of
from mtsql.sql.score import scorable


@dataclass(frozen=True, kw_only=True)
class CurriculumConfig(Common):
    """Configuration of the counting."""

    model: str = option(..., "local folder or hub name of the policy that RL starts from")
    questions: int = option(0, "training questions in play, drawn at random; 0 is all of them")
    samples_per_question: int = option(20, "trajectories of each question (paper: 20)")
    temperature: float = option(1.0, "of these trajectories")
    correct: str = option("ex_em", "an answer is right by: ex_em, ex")


def main() -> None:
    """Count."""
    config = load_config(CurriculumConfig, "curriculum", __doc__)
    processes = join_processes()
    device = pick_device(config.device)
    tokens = ChatTokens(load_tokenizer(config.model), config.thinking)
    dataset = load_split(config, "train")
    environment = make_environment(config, dataset, tokens, config.tools)
    scorer = make_scorer(environment)
    reward = load_recipe(config.recipe).make_reward(
        "", "", scorer, tokens.tokenizer.decode, wording_of(config)
    )
    policy = load_policy(
        config.model, config.dtype, device, attention=config.attention, quantise=config.quantise
    )
    asked = scorable(examples(dataset.dialogues, config.history), scorer, config.drop_empty)
    if config.questions:
        asked = random.Random(config.seed).sample(asked, min(config.questions, len(asked)))
    share = processes.share(list(enumerate(asked)))
    counts = []
    for example, sampled in sample_questions(
        policy,
        environment,
        share,
        config.samples_per_question,
        make_sampling(config, environment, config.temperature),
        config.rows,
        (config.seed,),
        "count",
        processes.first,
        config.cache_gib,
    ):
        right = sum(is_right(reward(t, example), config.correct) for t in sampled)
        counts += [Count(example.id, right, len(sampled))] if sampled else []
    counts = processes.gather(counts)
    if processes.first:
        save_config(config, Path(config.out))
        lines = "".join(json.dumps(vars(count)) + "\n" for count in counts)
        write_atomically(Path(config.out) / "counts.jsonl", lines)
        print(f"{len(counts)} questions, right of {config.samples_per_question} samples:")
        for right, questions in sorted(Counter(c.right for c in counts).items(), reverse=True):
            print(f"{right:>4} {questions:>6} questions")
    leave_processes(processes)


if __name__ == "__main__":
    user_errors(main)
