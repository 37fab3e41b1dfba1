"""Ask a database questions: a dialogue with a trained agent, in the terminal or in a browser.

    python -m mtsql chat --database my.sqlite
    python -m mtsql chat --database my.sqlite --config C --model runs/grpo/policy --port 8080
    python -m mtsql chat --database my.sqlite --address URL --api-model NAME --tokenizer FOLDER

The agent reads the schema from the file itself, and its memory is its own earlier answers. Each step is
shown as it comes: what it proposes, executes, sees, judges, recalls and corrects; then the SQL and its
result. :help lists the commands. With --port the same is a page at 127.0.0.1.

Without --model and --config it is the agent in models/qwen2.5-coder-0.5b-sql with the settings that it was
trained with. Its base is fetched once, after asking. It is small, and often wrong. The file is only read, by
the executor of all of mtsql. Where a schema is too long for the prompt, the agent sees the tables that the
question seems to be about, and that is said.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar

from mtsql.config import Agent, Count, NotNegative, Served, option, read_options, user_errors


@dataclass(frozen=True, kw_only=True)
class Args(Served, Agent):
    """A dialogue over one's own database (mtsql.extras.chat)."""

    SECTION: ClassVar = "chat"
    database: str = option(..., "SQLite file; it is only read")
    model: str = option("", "local folder or hub name; without it and --config: the agent in models/")
    port: Count = option(0, "serve a page at 127.0.0.1 on this port; 0: a dialogue in the terminal")
    temperature: NotNegative = option(0.0, "of the answers; 0 is greedy")
    yes: bool = option(False, "fetch the base of the agent in models/ without asking")


SHIPPED, ITS_BASE, ITS_CONFIG = (
    "models/qwen2.5-coder-0.5b-sql",
    "qwen2.5-coder-0.5b",
    "configs/real_qwen.toml",
)


def chat_options(argv: list[str]) -> Args:
    """The options; without --model and --config those of the agent that comes with the project."""
    names = {argument.partition("=")[0] for argument in argv}
    if not names & {"--model", "--address", "--config", "--help", "-h"}:
        argv = ["--config", ITS_CONFIG, "--model", SHIPPED, *argv]
    return read_options(Args, __doc__, argv)


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = chat_options(sys.argv[1:])

from functools import partial
from pathlib import Path

from mtsql.agent.rollout import rollout
from mtsql.agent.tokens import ChatTokens
from mtsql.data.datasets import Dataset
from mtsql.errors import UserError
from mtsql.extras.chat.conversation import Conversation, read_schema
from mtsql.extras.chat.server import serve
from mtsql.extras.chat.terminal import converse
from mtsql.extras.served import check_policy, play_served, served_policy
from mtsql.model_folder import load_tokenizer
from mtsql.task import chosen_policy, make_environment, make_sampling


def main(config: Args) -> None:
    """Load, then talk."""
    check_policy(config)
    schema = read_schema(Path(config.database))
    if config.model == SHIPPED:
        fetch_base(Path(SHIPPED).with_name(ITS_BASE), config.yes)
    tokens = ChatTokens(load_tokenizer(config.model or config.tokenizer), config.thinking != "off")
    environment = make_environment(config, Dataset((), {schema.db_id: schema}), tokens, config.tools)
    sampling = make_sampling(config, environment, config.temperature)
    if config.address:
        play = partial(play_served, served_policy(config, tokens), sampling=sampling, concurrency=1)
    else:
        play = partial(rollout, chosen_policy(config, tokens), tokens, sampling=sampling, max_rows=1)
    conversation = Conversation(environment, schema, play, config.seed)
    if config.port:
        serve(conversation, config.port)
    else:
        sys.stdin.reconfigure(errors="replace")  # a byte that is not UTF-8 is no reason to end
        converse(conversation)


def fetch_base(base: Path, yes: bool) -> None:
    """Make the base of the agent in models/ where it is missing, once the user agrees; UserError if not."""
    if base.is_dir():
        return
    print(f"the agent needs its base in {base}: 0.5 GB to download, 1 GB on the disk, some two minutes")
    if not yes:
        print("fetch it? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise UserError(f"no base, no answer; make it: python -m mtsql pretrained {ITS_BASE} {base}")
    from mtsql.pretrained import main as make_pretrained

    make_pretrained(ITS_BASE, base)


if __name__ == "__main__":
    user_errors(main, OPTIONS)
