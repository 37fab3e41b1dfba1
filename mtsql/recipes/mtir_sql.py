"""MTIR-SQL: Multi-turn Tool-Integrated Reasoning reinforcement learning for text-to-SQL.

One tool, `sql-execute_sql_query`, is the environment's `exec_sql`; there is no memory. The loss is that of
train_grpo.py without KL; what GRPO-Filter (section 3.1) leaves out of it is not `kept` by the rewards.

Prompts (appendix C: prompts/mtir_sql.jinja, mtir_sql_tool.jinja):
- The <tools> section of C.1 is the chat template's. Qwen3's has "# Tools", "json object", {"type":
  "function", "function": ...} around the tool, and "</tool_call>" where C.1 has "##Tools", "JSON object",
  the tool alone, and "</tool_call}"; the rest is the same.
- Line breaks, lost in the paper's text, are put back, and the code block of C.2, opened and never closed, is
  closed. "{external_knowledge} + {question}?" is the two on lines of their own; questions bring their "?".
- The earlier questions of a dialogue, before the question, are our addition. The schema is this project's;
  the paper takes that of CodeS and SQL-R1, with chosen columns and matching values.
- Without the tool C.2 loses what it says of tools ("Standard Reasoning" of Table 4).
- "Direct Output" of Table 4 has no prompt in the paper; docs/how_to.md drops what C.2 says of thinking.
- --thinking native drops the <think> blocks from C.2's output format; the message may then have one.
- The compact wording, for the tiny model, is ours; it needs no thoughts.

Protocol (section 3.2, Algorithm 1):
- Algorithm 1 is Search-R1's. Where that ends, on the answer, this one says "tool response", which the
  model never writes: an episode ends with the answer.
- Section 3.2 ends the episode at a message without a call, Algorithm 1 asks to rethink; it does so here, and
  after a malformed call, of which the paper says nothing. The model gets the sentence as a tool's
  response; Algorithm 1 writes it into the model's own turn.
- N = 6 counts model messages with the answer, as Algorithm 1's B (the ablation counts "tool calling turns"):
  --max-interactions, which counts answered calls, is 5.
- The tool runs on the question's database whatever `db_name` says; `call` leaves it out.
- Results are {"columns": [...], "data": [row, ...]}. C.1 has a list of dictionaries, which would lose one of
  two columns of the same name. Beyond MAX_CHARACTERS they are cut.

Rewards (section 3.3) and training (3.1, 4.1):
- The format is right if the question is answered and every message is a thought, then calls of the tool or
  the answer in a ```sql block, and nothing else. So a rethink or a call of another tool costs it.
- R_e: the answer runs within --sql-timeout; "overly complex" has no other measure. R_r: EX.
- In sum a right answer earns 1.2, one that does not run 0, a wrong format -0.1, a wrong result -0.8: with
  less than 35 % hope of being right a broken format pays better than an answer.
- F and tau of GRPO-Filter are not defined. F is R_f + R_e, whatever their weights, and `tau` 0.1: a wrong
  format and an answer that does not run are dropped; wrong answers that run stay, or nothing would
  teach against them. What is dropped still counts in the mean and deviation of its group.
- Equation 2 divides by the reference policy, has one ratio a response without a length, and does not clip.
  train_grpo.py divides by the policy that sampled, token by token, takes each trajectory's mean, as GRPO
  does, and clips, which does nothing at one update a batch.
- The batch of 64 is read as questions. Steps, clipping and updates a batch are not given. That questions
  with an empty gold result are left out is implied by section 4.1.
- Table 5's ablations are --rewards format=0 and so on. The baseline with execution accuracy as its reward
  comes nearest with --rewards unfiltered,format=0,execution=0 --tools none --max-interactions 0, where a
  wrong result still earns -1 and SQL that fails 0. PPO is left out.
- GRPO without the filter (Table 4: --rewards unfiltered) has no KL here either; the paper's has one, of a weight
  that it does not give.
- One limit of 8,192 tokens is the paper's; the prompt's is MTSQL-R1's, and the response has what that leaves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from mtsql.agent.env import UNAVAILABLE, ModelMessage, Prompt, Recipe
from mtsql.agent.tools import EXEC_SQL, Tool
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.recipes.prompt_options import PromptOptions, compact_result, cut, read_call, render, write_call
from mtsql.recipes.rewards import Decode, RewardFunction, Rewards, chosen_rewards, ex_em, keeps_format
from mtsql.sql.execute import ExecutionResult
from mtsql.sql.score import Scorer

TOOL = "sql-execute_sql_query"
MAX_RECORDS = 10  # of a result (section 4.1)
MAX_CHARACTERS = 20_000  # of an observation: more than `Limits.max_tool_tokens` lets through
RETHINK = "My action is not correct. Let me rethink."

TOOL_SCHEMA = {
    "type": "function",
    "function": {
        "name": TOOL,
        "description": render("mtir_sql_tool") + "\n",
        "parameters": {
            "type": "object",
            "properties": {
                "db_name": {"title": "Db Name", "type": "string"},
                "sql": {"title": "Sql", "type": "string"},
            },
            "required": ["db_name", "sql"],
        },
    },
}

_ACTION = (
    r"\s*(?:(?:<tool_call>(?:(?!</?tool_call>).)*</tool_call>\s*)+"
    r"|<answer>\s*```sql\b(?:(?!```|</?answer>).)*```\s*</answer>\s*)"
)
_THOUGHT = r"(?:(?!</?think>).)*</think>"
THOUGHT_AND_ACTION = re.compile(r"\s*<think>" + _THOUGHT + _ACTION, re.DOTALL)
# A chat template may have opened the thought already.
ACTION = re.compile(rf"(?:(?:\s*<think>)?{_THOUGHT})?{_ACTION}", re.DOTALL)
BLOCK = re.compile(r"```(?:sql(?:ite)?\b)?(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


@dataclass(frozen=True)
class MtirSql(Recipe):
    """MTIR-SQL's prompts, tags and observations; with `options.compact` in short."""

    options: PromptOptions = PromptOptions()  # noqa: RUF009 (frozen)

    def prompt(self, example: Example, schema: Schema, tools: Mapping[str, Tool]) -> Prompt:
        """One user message, and the tool's schema for the chat template."""
        tool = EXEC_SQL in tools
        if self.options.compact:
            return self.options.compact_prompt(example, schema, f"calls: {'sql' if tool else 'none'}"), None
        return self.options.paper_prompt("mtir_sql", example, schema, tool), [TOOL_SCHEMA] if tool else None

    def call(self, sql: str) -> str:
        """The message that runs a query."""
        return write_call(TOOL, "sql", sql)

    def answer(self, sql: str) -> str:
        """The message that ends the episode."""
        return f"<answer>\n```sql\n{sql}\n```\n</answer>"

    def parse(self, text: str) -> ModelMessage:
        """A tool call or an answer; thinking is not read.

        Of several calls the first counts, of several answers the last; a call beside an answer counts
        before it. The SQL of an answer is that of its last code block, or all of it.
        """
        said = text.rpartition("</think>")[2]
        if "<think>" in said:  # the thinking never ended
            return ModelMessage(problem=Status.NO_ACTION, well_formed=False)
        thought_optional = self.options.compact or self.options.native_thinking
        well_formed = bool((ACTION if thought_optional else THOUGHT_AND_ACTION).fullmatch(text))
        well_formed &= "<tool_response>" not in text  # only the environment responds
        call = read_call(said, "sql")
        if call is not None:
            # The environment's own names for tools are not the paper's.
            known = call.tool == TOOL
            tool = call.tool if call.problem else EXEC_SQL if known else UNAVAILABLE
            return replace(call, tool=tool, well_formed=well_formed and known)
        before, _, _ = said.rpartition("</answer>")
        _, opened, content = before.rpartition("<answer>")
        sql = (BLOCK.findall(content) or [content])[-1].strip()
        if not opened or not sql:
            return ModelMessage(problem=Status.NO_ACTION, well_formed=False)
        return ModelMessage(answer=sql, well_formed=well_formed)

    def observe_execution(
        self, question: str, sql: str, result: ExecutionResult, check_memory: bool, messages_left: int
    ) -> str:
        """What the tool returns: column names and at most MAX_RECORDS rows as JSON, or the error."""
        if self.options.compact:
            return compact_result(result, self.options.result_characters)
        if not result.ok:
            return cut(f"Error: {result.message}", MAX_CHARACTERS)
        shown = {"columns": result.columns, "data": result.rows[:MAX_RECORDS]}
        return cut(json.dumps(shown, ensure_ascii=False, default=str), MAX_CHARACTERS)

    def observe_problem(self, problem: Status, messages_left: int) -> str:
        """The episode goes on (Algorithm 1, line 20)."""
        return RETHINK


make_recipe = MtirSql


@dataclass(frozen=True)
class RewardWeights:
    """Factors of R_f, R_e and R_r, whose plain sum is the paper's reward, and tau of GRPO-Filter."""

    format: float = 1.0
    execution: float = 1.0
    result: float = 1.0
    tau: float = 0.1


PRESETS = {"paper": RewardWeights(), "unfiltered": RewardWeights(tau=-1.0)}  # F is at least -0.1


def reward(trajectory: Trajectory, example: Example, scorer: Scorer, weights: RewardWeights) -> Rewards:
    """Equations 5 to 7: `parts` has R_f, R_e and R_r without weights, `total` their weighted sum.

    It is kept if F exceeds tau (Equation 3).
    """
    ex, em = ex_em(trajectory, example, scorer)
    in_format = keeps_format(trajectory)
    runs = in_format and scorer.runs(example.db_id, trajectory.answer_sql)
    r_format = 0.1 if in_format else -0.1
    r_execution = 0.0 if not in_format else 0.1 if runs else -0.1
    r_result = 0.0 if not runs else 1.0 if ex else -1.0
    total = weights.format * r_format + weights.execution * r_execution + weights.result * r_result
    parts = {"format": r_format, "execution": r_execution, "result": r_result}
    return Rewards(ex, em, total, parts, kept=r_format + r_execution > weights.tau)


def make_reward(rewards: str, scorer: Scorer, decode: Decode, turns: int) -> RewardFunction:
    """The rewards of --rewards: a preset ("" is `paper`) and changed weights, "unfiltered,format=0".

    Raises UserError for an unknown preset or weight.
    """
    _, weights = chosen_rewards(PRESETS, rewards)
    return lambda trajectory, example: reward(trajectory, example, scorer, weights)
