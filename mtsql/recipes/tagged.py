"""What SkyRL-SQL and SQL-Trail share: an agent that thinks and then writes one <sql> or one <solution>.

Each message is a thought and one action; what <sql> returns comes back between <observation> tags as a
message of the user. SQL-Trail took this protocol and most of its prompt from SkyRL-SQL. What differs
(thought tags, prompt, table, rewards) is in the two modules. Choices that hold for both:

- There is no memory tool: history is our addition, as a list of the earlier questions before the question.
  Only `exec_sql` counts of the tools; without it the prompt is the single-pass one, which the papers compare
  with but do not show.
- The prompt is one message of the user. `compact` is our wording for the tiny model.
- Tags count outside of thoughts only. A stop string inside a thought still ends the message; that thought
  has no end, so that nothing is run and the message is an invalid action. With native thinking, nothing before
  the last </think> is read.
- Every model message is a turn and the last one has to be the solution. The prompts name no number of turns:
  each observation says how many messages are left.
- A message without a usable action is answered, and the episode goes on; it is not in the format.
- A cell is cut to 100 characters, a table to 20,000, and an observation loses its middle beyond
  --max-tool-tokens, mostly before its 50th row, so that one long text does not fill the context.
- The limits of prompt, response and tool response are MTSQL-R1's: the papers give none. Nine long observations
  do not fit into its 8,000 tokens of response; --max-response-tokens raises that.
- The schema is MTSQL-R1's CREATE TABLE with an example row; descriptions stand there where the data has them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from mtsql.agent.env import ModelMessage, Recipe
from mtsql.agent.tools import EXEC_SQL, Tool
from mtsql.agent.trajectory import Status
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.recipes.prompt_options import PromptOptions, compact_result, truncated
from mtsql.sql.execute import ExecutionResult

MAX_ROWS = 50  # of a table that is shown
MAX_CELL = 100  # characters
MAX_TABLE = 20_000  # characters
ANY_TAG = re.compile(r"</?(think|reasoning|sql|solution|observation)>")
EXAMPLE_LINE = "{0} {1} OF EXAMPLE {0}"

# What the two prompts say in the same words.
TASK = (
    "Your task is to understand the schema and generate a valid SQL query to answer the question{limit}. You "
    "should breakdown the problem, draft your reasoning process, and generate the solution."
)
ONLY_WHAT_IS_ASKED = (
    "Make sure you only output the information that is asked in the question. If the question asks for a "
    "specific column, make sure to only include that column in the SELECT clause, nothing more.",
    "The generated query should return all of the information asked in the question without any missing or "
    "extra information.",
)
TOOL_RULES = (
    "You can use SQL tool written within a single <sql>your sql</sql> block to explore or verify. SQL tool "
    "output will be shown as dataframe inside <observation>...</observation>. Based on this observation, you "
    "can think again and refine.",
    "The returned dataframe will be truncated in 50 rows if observation is too long.",
)
UNTIL = "If you find no further exploration is needed or reaches max turns, "


@dataclass(frozen=True)
class TaggedRecipe(Recipe):
    """One of the two recipes in a wording.

    `task(options, example, schema, multi_turn)` writes the paper's prompt, `table(cells)` a header and its
    rows. `thought_tags` are the names of the tags around thoughts, `invalid` answers a message without a
    usable action.
    """

    options: PromptOptions
    thought_tags: tuple[str, ...]
    task: Callable[[PromptOptions, Example, Schema, bool], str]
    table: Callable[[list[list[str]]], str]
    invalid: str
    observation_role: ClassVar[str] = "user"
    stop_strings: ClassVar[tuple[str, ...]] = ("</sql>", "</solution>")
    verifies: ClassVar[bool] = False

    def prompt(self, example: Example, schema: Schema, tools: Mapping[str, Tool]) -> tuple[list[dict], None]:
        """One message of the user; no tool schemas, since tools are called by tags."""
        multi_turn = EXEC_SQL in tools
        if self.options.compact:
            tags = "tags: sql solution" if multi_turn else "tags: solution"
            return self.options.compact_prompt(example, schema, tags), None
        text = self.task(self.options, example, schema, multi_turn)
        return [{"role": "user", "content": text}], None

    def call(self, sql: str) -> str:
        """The message that runs a query."""
        return f"<sql>{sql}</sql>"

    def answer(self, sql: str) -> str:
        """The message that ends the episode."""
        return f"<solution>{sql}</solution>"

    def parse(self, text: str) -> ModelMessage:
        """The first <sql> or <solution> outside of thoughts.

        It is well formed if a thought that is not blank stands before it (not asked for in the compact
        wording and with native thinking), no text after it, no tag in it, and no observation anywhere.
        """
        if self.options.native_thinking:
            _, ended, text = text.rpartition("</think>")
            if not ended and not re.match(r"\s*<(sql|solution)>", text):
                return ModelMessage(problem=Status.NO_ACTION, well_formed=False)  # the thinking never ended
        thought, at = self.options.compact or self.options.native_thinking, 0
        opening = re.compile(f"<({'|'.join((*self.thought_tags, 'sql', 'solution'))})>")
        while found := opening.search(text, at):
            tag, end = found[1], text.find(f"</{found[1]}>", found.end())
            content = text[found.end() : end].strip()
            at = end + len(f"</{tag}>")
            if end >= 0 and tag in self.thought_tags:
                thought = thought or bool(content)
                continue
            if end < 0 or not content:
                break
            invented = "<observation>" in text  # only the environment observes
            well_formed = thought and not (text[at:].strip() or ANY_TAG.search(content) or invented)
            if tag == "sql":
                return ModelMessage(tool=EXEC_SQL, sql=content, well_formed=well_formed)
            return ModelMessage(answer=content, well_formed=well_formed)
        return ModelMessage(problem=Status.NO_ACTION, well_formed=False)

    def next_action(self, *_: object) -> None:
        """Any action may follow any other."""

    def observe_execution(
        self, question: str, sql: str, result: ExecutionResult, check_memory: bool, messages_left: int
    ) -> str:
        """A table of the first 50 rows or the error, and the messages that are left."""
        if self.options.compact:
            return self._observation(compact_result(result, self.options.result_characters), messages_left)
        if not result.ok:
            return self._observation(
                truncated(f"OperationalError: {result.message}", MAX_TABLE), messages_left
            )
        rows = result.rows[:MAX_ROWS]
        cells = [[_cell(value) for value in row] for row in (result.columns, *rows)]
        text = truncated(self.table(cells), MAX_TABLE)
        if result.truncated or len(result.rows) > MAX_ROWS:
            text += f"\nTruncated to the first {len(rows)} rows."
        return self._observation(text, messages_left)

    def observe_problem(self, problem: Status, messages_left: int) -> str:
        """The request to try again."""
        return self._observation("invalid" if self.options.compact else self.invalid, messages_left)

    def _observation(self, text: str, messages_left: int) -> str:
        left = "{}" if self.options.compact else "You have {} turns left to complete the task."
        return f"<observation>\n{text}\n{left.format(messages_left)}\n</observation>"


def _cell(value: object) -> str:
    return truncated(str(value).replace("\n", "\\n"), MAX_CELL)


class TaskTexts(NamedTuple):
    """What the prompts of the two papers say in words of their own.

    `bullet`, in which "{}" becomes the number, stands before each instruction and rule. `solution_rule`
    follows UNTIL; in a single pass it stands alone. `blocks` make the example.
    """

    overview: str
    schema_text: str
    instructions: Sequence[str]
    thought_rule: str
    solution_rule: str
    blocks: Sequence[str]
    bullet: str


def task_text(options: PromptOptions, example: Example, multi_turn: bool, texts: TaskTexts) -> str:
    """The prompt in the sections of both papers.

    With native thinking the rule about thoughts and the thoughts of the example are left out.
    """
    solution, native = texts.solution_rule, options.native_thinking
    rules = [] if native else [texts.thought_rule]
    rules += [*TOOL_RULES, UNTIL + solution] if multi_turn else [solution[0].upper() + solution[1:]]

    def listed(title: str, lines: Sequence[str]) -> str:
        return "\n".join([title, *(f"{texts.bullet.format(i)} {line}" for i, line in enumerate(lines, 1))])

    sample = "\n".join(b for b in texts.blocks if not (native and b.startswith("<think>")))
    history = options.history_text(example)
    sections = [
        f"Task Overview:\n{texts.overview} {TASK.format(limit=' within limited turns' if multi_turn else '')}",
        "Database Engine:\nSQLite",
        f"Database Schema:\n{texts.schema_text}",
        "\n".join(filter(None, ("External Knowledge:", example.knowledge))),
        *([history] if history else []),
        f"Question: {example.question}",
        listed("Instructions:", texts.instructions),
        listed("Format:", rules),
        "\n".join((EXAMPLE_LINE.format("-" * 24, "START"), sample, EXAMPLE_LINE.format("-" * 24, "END"))),
    ]
    return "\n\n".join(sections)
