"""Ask a database questions: a dialogue with a trained agent, in the terminal or in a browser.

    python -m mtsql chat --database my.sqlite
    python -m mtsql chat --database my.sqlite --config C --model runs/grpo/policy --port 8080
    python -m mtsql chat --database my.sqlite --address URL --api-model NAME --tokenizer FOLDER

The agent reads the schema from the file itself, and its memory is its own earlier answers. Each step is
shown as it comes: what it proposes, executes, sees, judges, recalls and corrects; then the SQL and its
result. Where it ends without SQL, eight answers are sampled, and the one whose rows most have is shown, which
takes minutes (--fallback). :help lists the commands. With --port the same is a page at 127.0.0.1.

Without --model and --config it is the agent in models/qwen2.5-coder-0.5b-sql with the settings that it was
trained with; a processor without bfloat16 arithmetic computes in float32. Its base is fetched once, after
asking. It is small, and often wrong. The file is only read, by the executor of all of mtsql. Where a schema
is too long for the prompt, the agent sees the tables that the question seems to be about, and that is said.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import ClassVar

from mtsql.config import Agent, Served, option, read_options, user_errors
from mtsql.files import json_lines, shipped, write_atomically


@dataclass(frozen=True, kw_only=True)
class Args(Served, Agent):
    """A dialogue over one's own database (mtsql.extras.chat)."""

    SECTION: ClassVar = "chat"
    database: str = option(..., "SQLite file; it is only read")
    model: str = option("", "local folder or hub name; without it and --config: the agent in models/")
    port: int = option(0, "serve a page at 127.0.0.1 on this port; 0: a dialogue in the terminal", least=0)
    temperature: float = option(0.0, "of the answers; 0 is greedy", least=0)
    fallback: int = option(8, "answers to sample where the first has no SQL, to vote in its place", least=0)
    yes: bool = option(False, "fetch the base of the agent in models/ without asking")


SHIPPED, ITS_BASE = "models/qwen2.5-coder-0.5b-sql", "qwen2.5-coder-0.5b"
ITS_CONFIG = "configs/real_qwen.toml"


def chat_options(argv: list[str]) -> Args:
    """The options; without --model and --config those of the agent that comes with the project."""
    names = {argument.partition("=")[0] for argument in argv}
    if not names & {"--model", "--address", "--config", "--help", "-h"}:
        argv = ["--config", ITS_CONFIG, "--model", str(shipped(SHIPPED)), *argv]
    return read_options(Args, __doc__, argv)


if __name__ == "__main__":  # before torch is imported, so that --help and wrong options are answered at once
    OPTIONS = chat_options(sys.argv[1:])

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mtsql.agent.decoder import Decoder
from mtsql.agent.env import Episode
from mtsql.agent.rollout import rollout
from mtsql.agent.tokens import ChatTokens
from mtsql.data.datasets import Dataset
from mtsql.errors import UserError, printable
from mtsql.extras.chat.conversation import Answer, Conversation, Event, read_schema, value_text
from mtsql.extras.chat.server import serve
from mtsql.extras.served import check_policy, play_served, served_policy
from mtsql.model_folder import load_tokenizer
from mtsql.sql.execute import ExecutionResult
from mtsql.task import chosen_policy, make_environment, make_sampling, pick_device, without_bfloat16

COMMANDS = """:schema            the database as the agent reads it
:history           the dialogue so far
:undo              forget the last question
:new               forget all of them, for a question that has nothing to do with them
:save FILE.jsonl   the trajectories, for python -m mtsql view
:quit              end (as does Ctrl-D)
Ctrl-C stops an answer; behind an address it waits for the message on its way"""
LABELS = {
    "propose": "proposes",
    "self_correct": "corrects",
    "execute": "executes",
    "observe": "sees",
    "recall": "recalls",
    "e_verify": "judges the result",
    "m_verify": "checks the memory",
    "finalize": "answers",
    "note": "note",
}
SHOWN_ROWS, SHOWN_WIDTH = 20, 40  # of a result: rows, and characters of a cell


def main(config: Args) -> None:
    """Load, then talk."""
    if not config.port:
        sys.stdin.reconfigure(errors="replace")  # a byte that is not UTF-8 is no reason to end
    check_policy(config)
    schema = read_schema(Path(config.database))
    if Path(config.model) == shipped(SHIPPED):
        fetch_base(Path(config.model).with_name(ITS_BASE), config.yes)
        if without_bfloat16(pick_device()):
            config = replace(config, dtype="float32")  # less than half the time where a schema is long
    tokens = ChatTokens(load_tokenizer(config.model or config.tokenizer), config.thinking != "off")
    environment = make_environment(config, Dataset((), {schema.db_id: schema}), tokens, config.tools)
    if config.address:
        answer = partial(play_served, served_policy(config, tokens), concurrency=config.fallback or 1)
    else:
        answer = partial(rollout, Decoder(chosen_policy(config, tokens)), tokens)

    def play(episodes: Sequence[Episode], temperature: float) -> None:
        answer(episodes, sampling=make_sampling(environment, temperature))

    conversation = Conversation(environment, schema, play, config.seed, config.temperature, config.fallback)
    if config.port:
        serve(conversation, config.port)
    else:
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


def converse(conversation: Conversation) -> None:
    """Read questions and commands until the end of the input."""
    print(f"{conversation.schema.path}: {len(conversation.schema.tables)} tables. Ask a question, or :help")
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(:quit ends the dialogue)")
            continue
        if line == ":quit":
            return
        try:
            if line.startswith(":"):
                print(run_command(conversation, line))
            elif line:
                print(format_answer(conversation.ask(line, show_event)))
        except UserError as error:
            print(f"error: {printable(str(error))}")
        except KeyboardInterrupt:
            print("\nstopped; the question is forgotten")


def run_command(conversation: Conversation, line: str) -> str:
    """What a line that begins with a colon prints. Raises UserError for an unknown one, or a wrong FILE."""
    name, _, argument = line.partition(" ")
    if name == ":help":
        return COMMANDS
    if name == ":schema":
        return printable(conversation.schema.text(compact=False))
    if name == ":history":
        lines = [
            f"{number}. {answer.question}\n   {answer.sql or f'({answer.problem})'}"
            for number, answer in enumerate(conversation.answers, 1)
        ]
        return printable("\n".join(lines)) or "nothing was asked yet"
    if name == ":undo":
        question = conversation.undo()
        return "nothing was asked yet" if question is None else f"forgotten: {printable(question)}"
    if name == ":new":
        conversation.answers.clear()
        return "a new dialogue"
    if name == ":save":
        if not argument.strip():
            raise UserError("say where: :save FILE.jsonl")
        path = Path(os.path.expanduser(argument.strip()))  # what is no user's home stays as it is
        if path.suffix != ".jsonl":  # nor may it be the database
            raise UserError(f"{path} should end in .jsonl")
        write_atomically(path, json_lines(conversation.records()))
        return f"{len(conversation.answers)} trajectories in {path}"
    raise UserError(f"{name} is no command; :help lists them")


def show_event(event: Event) -> None:
    """One line of what the agent does or sees."""
    verdict = {True: "pass", False: "no pass", None: ""}[event.passed]
    text = " ".join(printable(": ".join(filter(None, (verdict, event.text)))).split())
    width = max(40, shutil.get_terminal_size().columns - 22)
    cut = text if len(text) <= width else f"{text[: width - 4]} ..."
    print(f"  {LABELS.get(event.kind, event.kind):<18}{cut}", flush=True)


def format_answer(answer: Answer) -> str:
    """The SQL and its result as a table, or why there is none."""
    if answer.sql is None or answer.result is None:
        return f"\nno answer: {answer.problem}"
    return f"\n{printable(answer.sql)}\n\n{format_result(answer.result)}"


def format_result(result: ExecutionResult) -> str:
    """A result as a table of at most SHOWN_ROWS rows, or the error."""
    if not result.ok:
        return f"it fails: {printable(result.message)}"
    header = [_cell(name) for name in result.columns]
    rows = [[_cell(value) for value in row] for row in result.rows[:SHOWN_ROWS]]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    rule = ["-" * width for width in widths]
    table = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (header, rule, *rows)]
    number, more = len(result.rows), len(result.rows) - len(rows)
    count = f"{number}{' or more' if result.truncated else ''} row{'s' * (number != 1 or result.truncated)}"
    return "\n".join([*table, f"({count}{f', {more} not shown' if more else ''})"])


def _cell(value: object) -> str:
    text = "NULL" if value is None else value_text(value)
    text = printable(text.replace("\n", " ").replace("\t", " "))
    return text if len(text) <= SHOWN_WIDTH else text[: SHOWN_WIDTH - 3] + "..."


if __name__ == "__main__":
    user_errors(main, OPTIONS)
