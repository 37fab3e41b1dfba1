"""MTSQL-R1: the texts of its prompts and tools, and its tags (appendix B.0.1 and D)."""

from __future__ import annotations

import json
import re

from mtsql.agent.env import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.sql.execute import ExecutionResult

ANSWER = re.compile(r"<answer_sql>(.*?)</answer_sql>", re.DOTALL)
VERDICT = {
    EXEC_SQL: re.compile(r"<exec_verify>\s*(pass|no_pass)\s*</exec_verify>"),
    MEMORY_RETRIEVE: re.compile(r"<memory_verify>\s*(pass|no_pass)\s*</memory_verify>"),
}

_DESCRIPTIONS = {
    EXEC_SQL: (
        "A tool for executing sql and return the query results",
        "The current generated SQL that will be executed",
    ),
    MEMORY_RETRIEVE: (
        "A tool for retrieving the historical questions and their SQL in this dialogue",
        "The current generated SQL whose coherence with the historical memory is to be verified",
    ),
}

SYSTEM = {
    "both": """You are a SQL expert. Your task is to translate a natural language question into SQL through \
step-by-step reasoning. Please follow the steps:
1. Reasoning
   - Always think step by step before calling the tool. Draft the SQL.
2. Calling 'exec_sql' tool (Please call 'exec_sql' tool at least once)
   - Call the 'exec_sql' tool to execute the current generated SQL and verify the execution results based on \
questions.
   - conclude <exec_verify>pass</exec_verify> if results are reasonable, otherwise \
<exec_verify>no_pass</exec_verify>.
   - If no_pass, refine the SQL using the execution results and repeat call 'exec_sql' tool until it passes.
Note:
1. Please call 'exec_sql' tool at least once
2. Return the final SQL enclosed in: <answer_sql> ... </answer_sql>""",
    "no_execution": """You are a SQL expert. Your task is to translate a natural language question into SQL \
through step-by-step reasoning. Please follow the steps:
1. Reasoning
   - Always think step by step before calling the tool. Draft the SQL.
2. Calling 'memory_retrieve' tool (if there are previous questions)
   - Call the 'memory_retrieve' tool to check the current generated SQL against the dialogue.
   - conclude <memory_verify>pass</memory_verify> if it is coherent, otherwise \
<memory_verify>no_pass</memory_verify>, and refine the SQL.
Note: Return the final SQL enclosed in: <answer_sql> ... </answer_sql>""",
    "none": """You are a SQL expert. Your task is to translate a natural language question into SQL through \
step-by-step reasoning. Return the final SQL enclosed in: <answer_sql> ... </answer_sql>""",
}
SYSTEM["no_memory"] = SYSTEM["both"]

EXEC_TASKS = """Now please:
1. Verify whether the SQL execution results are valid:
   - Check if the SQL runs without errors.
   - Check if the returned columns exist in the schema and are relevant to the question.
   - Check if the results contain unexpected NULL values, empty sets, or error messages.
2. After verifying, output:
   - <exec_verify>pass</exec_verify> if the results are valid and consistent with the schema.
   - <exec_verify>no_pass</exec_verify> if the results show errors, irrelevant columns, or invalid values.
3. If <exec_verify>no_pass</exec_verify>, think step by step, refine the SQL and provide a corrected SQL and \
then execute it via re-calling 'exec_sql' tool again via <tool_call>. Repeat until you get valid results.
"""
EXEC_THEN_MEMORY = """4. If <exec_verify>pass</exec_verify>, You have to call 'memory_retrieve' tool via \
<tool_call> at least once to ensure the current generated SQL is coherent with the historical memory."""
EXEC_THEN_ANSWER = """4. If <exec_verify>pass</exec_verify>, return the final SQL inside \
<answer_sql>...</answer_sql>."""

MEMORY_TASKS = """Your tasks:
1. Verify whether the Proposed SQL is coherent with the Current Question and the Memory, based on the relation \
between the Current Question and Historical Questions.
   - If the Current Question introduces changes (new columns, conditions, ordering, etc.), SQL should update \
accordingly.
   - If not, SQL must remain consistent with the Historical Questions.
Step-by-step reasoning checklist:
1. First parse the Proposed SQL into its components (SELECT, FROM, WHERE, GROUP BY, HAVING, ORDER BY, JOINs).
2. Check tables are consistent with context.
3. Check selected columns match current and historical intent.
4. Check conditions (WHERE/GROUP/HAVING) reflect the relation between current and past questions.
5. Check ordering (ORDER BY) is preserved unless explicitly changed.
6. Verify that joins and table relationships follow the established context.
7. Make sure the SQL and the execution results of the proposed SQL answer the current question while remaining \
logically coherent with the conversation history and execution results.
2. After verifying, output one of the following:
   - '<memory_verify>pass</memory_verify>' if coherent.
   - '<memory_verify>no_pass</memory_verify>' if not coherent.
3. If 'no_pass': explain issues, think step by step to refine SQL{recheck}. Repeat until you get 'pass'.
4. If 'pass': return the final SQL inside '<answer_sql>...</answer_sql>'.
Note finally you should return the final SQL inside '<answer_sql>...</answer_sql>'"""


def result_text(result: ExecutionResult | None) -> str:
    """Rows as the paper shows them, or the error; the caller truncates."""
    if result is None:
        return "not executed"
    return str([tuple(row) for row in result.rows]) if result.ok else f"Error: {result.message}"


def tool_schemas(tools: tuple[str, ...]) -> list[dict] | None:
    """The tools' JSON schemas (appendix B.0.1), or None without tools."""
    made = [
        {
            "type": "function",
            "function": {
                "name": tool,
                "description": _DESCRIPTIONS[tool][0],
                "parameters": {
                    "type": "object",
                    "properties": {"code": {"type": "string", "description": _DESCRIPTIONS[tool][1]}},
                    "required": ["code"],
                },
            },
        }
        for tool in tools
    ]
    return made or None


def tool_call(tool: str, sql: str) -> str:
    """A call in Qwen3's format."""
    call = json.dumps({"name": tool, "arguments": {"code": sql}}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def verdict(tool: str, passed: bool) -> str:
    """The verdict on what `tool` returned."""
    tag = "exec_verify" if tool == EXEC_SQL else "memory_verify"
    return f"<{tag}>{'pass' if passed else 'no_pass'}</{tag}>"


def final_answer(sql: str) -> str:
    """The answer that ends an episode."""
    return f"<answer_sql>{sql}</answer_sql>"
