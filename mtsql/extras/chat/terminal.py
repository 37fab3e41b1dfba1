"""The dialogue in a terminal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from mtsql.errors import UserError, printable
from mtsql.extras.chat.conversation import Answer, Conversation, Event
from mtsql.files import write_atomically
from mtsql.sql.execute import ExecutionResult

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
        path = Path(argument.strip())
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in conversation.records()))
        return f"{len(conversation.answers)} trajectories in {path}"
    raise UserError(f"{name} is no command; :help lists them")


def show_event(event: Event) -> None:
    """One line of what the agent does or sees."""
    verdict = {True: "pass", False: "no pass", None: ""}[event.passed]
    text = " ".join(printable(f"{verdict} {event.text}").split())
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
    table = [
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, ["-" * width for width in widths], *rows)
    ]
    number, more = len(result.rows), len(result.rows) - len(rows)
    count = "1 row" if number == 1 else f"{number}{' or more' if result.truncated else ''} rows"
    return "\n".join([*table, f"({count}{f', {more} not shown' if more else ''})"])


def _cell(value: object) -> str:
    text = "NULL" if value is None else f"{len(value)} bytes" if isinstance(value, bytes) else str(value)
    text = printable(text.replace("\n", " ").replace("\t", " "))
    return text if len(text) <= SHOWN_WIDTH else text[: SHOWN_WIDTH - 3] + "..."
