"""SkyRL-SQL, the recipe: prompt (appendix A, D.2), observations, reward (section 4.1), settings (5).

Each message of the agent is a thought and one action, <sql> or <solution>; what <sql> returns comes back between
<observation> tags as a message of the user. SQL-Trail took this protocol and most of its prompt from here.
Choices that hold for both:

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
  2,000 tokens (`Limits`), mostly before its 50th row, so that one long text does not fill the context.
- The limits of prompt, response and tool response are MTSQL-R1's: the papers give none. Nine long observations
  do not fit into its 8,000 tokens of response; --max-response-tokens raises that.
- The schema is MTSQL-R1's CREATE TABLE with an example row; descriptions stand there where the data has them.

Choices of its own:

- Turns: section 4 says 4 in training, section 5 says 5 in training and in evaluation. The default is 5: four
  queries, which --max-interactions counts, and the solution after them.
- Format: section 4.1 asks for thoughts, for <sql> in each turn and for a <solution>. Here each message needs a
  thought and one action, and a solution at once is valid, as it has to be in the single-turn baseline. The
  released code looks at the joined text instead (github.com/NovaSky-AI/SkyRL, skyrl-gym: one solution, a thought
  somewhere, and one after each observation). An episode out of turns or tokens has no solution: -1.
- EX is the project's, with the order of rows where the gold SQL has ORDER BY; the released code compares sets.
- Section 4 says that the agent is told the number of its turns, but the prompt of appendix A does not hold it.
  As in the released code, each observation says it.
- The table is the frame of the paper's example, its rules as wide as its columns; NULL is shown as None.
  Appendix A lost the line that starts the example and the words "I will": both are in D. The line is
  SQL-Trail's here, with one that ends the example. The released code shows results without column names. The answer
  to an invalid action is ours.
- Table 4's prompt without a schema (D.1) is an edit in docs/how_to.md. The single-turn prompt is ours.
- Rollouts are sampled with temperature 0.6 and with top_p 1, not 0.95: the loss needs the log-probabilities
  of the distribution that was sampled from.
- The number of steps (35 of 256 questions) is not set here; learning rate, questions in a step and samples of
  a question are the defaults already. KL, clip and normalisation are not given ("GRPO"): none, 0.2, 1/|M_i|.
  There is no warm start: the temperature would hold for its rollouts too.
- D.2 evaluates thinking models at temperature 0.6: evaluate.py --temperature 0.6. Without it answers are greedy.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from mtsql.agent.env import ModelMessage, Recipe
from mtsql.agent.tools import EXEC_SQL, Tool
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema, one_line
from mtsql.recipes.prompt_options import PromptOptions, compact_result, cut
from mtsql.recipes.rewards import Decode, RewardFunction, Rewards, chosen_rewards, ex_em, keeps_format
from mtsql.sql.execute import ExecutionResult
from mtsql.sql.score import Scorer

MAX_ROWS = 50  # of a table that is shown
MAX_CELL = 100  # characters
MAX_TABLE = 20_000  # characters
ANY_TAG = re.compile(r"</?(think|reasoning|sql|solution|observation)>")


@dataclass(frozen=True)
class SkyrlSql(Recipe):
    """SkyRL-SQL's prompts, tags and observations; with `options.compact` in short."""

    options: PromptOptions = PromptOptions()  # noqa: RUF009 (frozen)
    template: ClassVar[str] = "skyrl_sql"
    thought_tags: ClassVar[tuple[str, ...]] = ("think",)
    invalid: ClassVar[str] = (
        "Your previous action is invalid. Keep to the format of thinking and SQL tool, and try again."
    )
    observation_role: ClassVar[str] = "user"
    stop_strings: ClassVar[tuple[str, ...]] = ("</sql>", "</solution>")

    def table(self, cells: list[list[str]]) -> str:
        """A table between rules (appendix A); `cells` are a header and rows of the same length."""
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rule = "+".join(["", *("-" * (width + 2) for width in widths), ""])
        header, *rows = (f"| {' | '.join(map(str.ljust, row, widths))} |" for row in cells)
        return "\n".join([rule, header, rule, *rows, *([rule] if rows else [])])

    def prompt(self, example: Example, schema: Schema, tools: Mapping[str, Tool]) -> tuple[list[dict], None]:
        """One message of the user; no tool schemas, since tools are called by tags."""
        tool = EXEC_SQL in tools
        if self.options.compact:
            tags = "tags: sql solution" if tool else "tags: solution"
            return self.options.compact_prompt(example, schema, tags), None
        return self.options.paper_prompt(self.template, example, schema, tool), None

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

    def observe_execution(
        self, question: str, sql: str, result: ExecutionResult, check_memory: bool, messages_left: int
    ) -> str:
        """A table of the first 50 rows or the error, and the messages that are left."""
        if self.options.compact:
            return self._observation(compact_result(result, self.options.result_characters), messages_left)
        if not result.ok:
            return self._observation(cut(f"OperationalError: {result.message}", MAX_TABLE), messages_left)
        rows = result.rows[:MAX_ROWS]
        cells = [[_cell(value) for value in row] for row in (result.columns, *rows)]
        text = cut(self.table(cells), MAX_TABLE)
        if result.truncated or len(result.rows) > MAX_ROWS:
            text += f"\nTruncated to the first {len(rows)} rows."
        return self._observation(text, messages_left)

    def observe_problem(self, problem: Status, messages_left: int) -> str:
        """The request to try again."""
        return self._observation("invalid" if self.options.compact else self.invalid, messages_left)

    def _observation(self, text: str, messages_left: int) -> str:
        left = "{}" if self.options.compact else "You have {} turns left to complete the task."
        return f"<observation>\n{text}\n{left.format(messages_left)}\n</observation>"


make_recipe = SkyrlSql


def _cell(value: object) -> str:
    return cut(one_line(str(value).replace("\n", "\\n")), MAX_CELL)


@dataclass(frozen=True)
class RewardWeights:
    """What an invalid format and a right answer in a valid format earn (section 4.1); a wrong one earns 0."""

    invalid: float = -1.0
    ex: float = 1.0


PRESETS = {"paper": RewardWeights()}


def reward(trajectory: Trajectory, example: Example, scorer: Scorer, weights: RewardWeights) -> Rewards:
    """-1 for an invalid format, else 1 for a right answer and 0 for a wrong one (section 4.1)."""
    ex, em = ex_em(trajectory, example, scorer)
    valid = keeps_format(trajectory)
    total = weights.ex * ex if valid else weights.invalid
    return Rewards(ex, em, total, {"format": float(valid)})


def make_reward(rewards: str, scorer: Scorer, decode: Decode, turns: int) -> RewardFunction:
    """The reward of --rewards: a preset ("" is `paper`) and changed weights, "invalid=-0.5".

    Raises UserError for an unknown preset or weight.
    """
    _, weights = chosen_rewards(PRESETS, rewards)
    return lambda trajectory, example: reward(trajectory, example, scorer, weights)
