"""MTSQL-R1: prompts and tags (appendix B.0.1 and D); its rewards are in mtsql_r1_rewards.py.

Two wordings of the same prompts: `paper`, and `compact` for the tiny model, for which the paper's are
ten times too long. The compact prompt names the earlier questions and leaves their SQL to the memory
tool; its tool responses do not repeat the question and the SQL that stand right before them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from mtsql.agent.env import EXEC_SQL, MEMORY_RETRIEVE, TOOL_SETS, ModelMessage
from mtsql.agent.memory import MemoryEntry
from mtsql.agent.trajectory import Status
from mtsql.data.datasets import Example
from mtsql.data.schema import Schema
from mtsql.sql.execute import ExecutionResult

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
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

_SYSTEM = {
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
_SYSTEM["no_memory"] = _SYSTEM["both"]

_EXEC_TASKS = """Now please:
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
_EXEC_THEN_MEMORY = """4. If <exec_verify>pass</exec_verify>, You have to call 'memory_retrieve' tool via \
<tool_call> at least once to ensure the current generated SQL is coherent with the historical memory."""
_EXEC_THEN_ANSWER = """4. If <exec_verify>pass</exec_verify>, return the final SQL inside \
<answer_sql>...</answer_sql>."""

_MEMORY_TASKS = """Your tasks:
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


def _result_text(result: ExecutionResult | None) -> str:
    """Rows as the paper shows them, or the error; the caller truncates."""
    if result is None:
        return "not executed"
    return str([tuple(row) for row in result.rows]) if result.ok else f"Error: {result.message}"


def _compact_result(result: ExecutionResult | None, limit: int) -> str:
    if result is None:
        return "?"
    if not result.ok:
        return f"error: {result.message}"[: 2 * limit]
    cells = ["|".join("null" if v is None else str(v) for v in row) for row in result.rows]
    text = " ; ".join(cells) or "empty"
    return text if len(text) <= limit else text[:limit] + " ..."


def _truncated(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[:limit] + "..."


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


@dataclass(frozen=True)
class MtsqlR1:
    """The recipe; `compact` chooses the wording, `result_characters` cuts results (paper: 200)."""

    compact: bool = False
    result_characters: int = 200

    def prompt(
        self, example: Example, schema: Schema, tools: tuple[str, ...]
    ) -> tuple[list[dict], list[dict] | None]:
        """System and user message, and the tool schemas for the chat template."""
        if self.compact:
            # The schema comes first: prompts over one database share it as a prefix.
            lines = [schema.text(compact=True)]
            lines += [f"{i}. {turn.question}" for i, turn in enumerate(example.history, 1)]
            lines += [f"now: {example.question}", "tools: " + (" ".join(tools) or "none")]
            return [_message("user", "\n".join(lines))], None
        name = next(name for name, choice in TOOL_SETS.items() if choice == tools)
        return [
            _message("system", _SYSTEM[name]),
            _message("user", self._paper_question(example, schema, tools)),
        ], tool_schemas(tools)

    def _paper_question(self, example: Example, schema: Schema, tools: tuple[str, ...]) -> str:
        lines = []
        schema_text = f"Database schema:\n{schema.text(compact=False)}\n"
        if example.history:
            lines.append("Here are previous question and corresponding correct SQL in this dialogue:")
            if example.history[0].sql is None:
                lines[0] = "Here are the previous questions in this dialogue:"
            for i, turn in enumerate(example.history, 1):
                lines.append(f'## Turn {i} ##\n"{schema_text if i == 1 else ""}Question: {turn.question}"')
                if turn.sql is not None:
                    lines.append(f'Corresponding Correct SQL: "{turn.sql}"')
            lines.append("")
        else:
            lines.append(schema_text)
        lines.append("Now please translate the following question to SQL step by step")
        note = "Note please call 'exec_sql' tool at least once" if EXEC_SQL in tools else ""
        lines.append(
            f"Question: {example.question} (Note you only need to translate the question to SQL instead "
            "answer the question. Once you feel you are ready for the final SQL, directly return the SQL "
            f"inside <answer_sql> and </answer_sql> at the end of your response. {note})"
        )
        return "\n".join(lines)

    def read(self, text: str) -> ModelMessage:
        """Verdicts, and a tool call or an answer; thinking is not read.

        Of several calls the first counts; a call beside an answer counts before it.
        """
        if "<think>" in text.rpartition("</think>")[2]:
            return ModelMessage(problem=Status.NO_ACTION)  # the thinking never ended
        text = text.rpartition("</think>")[2]
        verdicts = {
            tool: (found[-1] == "pass") if (found := pattern.findall(text)) else None
            for tool, pattern in VERDICT.items()
        }
        seen = {"exec_verdict": verdicts[EXEC_SQL], "memory_verdict": verdicts[MEMORY_RETRIEVE]}
        if "<tool_call>" in text:
            call = _CALL.search(text)
            try:
                content = json.loads(call.group(1))
                tool, sql = content["name"], content["arguments"]["code"]
            except (AttributeError, json.JSONDecodeError, KeyError, TypeError):
                return ModelMessage(**seen, problem=Status.MALFORMED_CALL)
            if not isinstance(tool, str) or not isinstance(sql, str) or not sql.strip():
                return ModelMessage(**seen, problem=Status.MALFORMED_CALL)
            return ModelMessage(**seen, tool=tool, sql=sql.strip())
        answers = ANSWER.findall(text)
        if not answers or not answers[-1].strip():
            return ModelMessage(**seen, problem=Status.NO_ACTION)
        return ModelMessage(**seen, answer=answers[-1].strip())

    def observe_execution(self, question: str, sql: str, result: ExecutionResult, history: int) -> str:
        """What `exec_sql` returns: a recap and the next tasks (appendix B.0.1)."""
        if self.compact:
            return _compact_result(result, self.result_characters)
        shown = _truncated(_result_text(result), self.result_characters)
        recap = (
            f"Recap:\n- Current question: {question}\n- Generated SQL: {sql}\n"
            f"- SQL execution results (truncated to {self.result_characters} characters): {shown}\n"
        )
        return recap + _EXEC_TASKS + (_EXEC_THEN_MEMORY if history else _EXEC_THEN_ANSWER)

    def observe_memory(
        self,
        question: str,
        sql: str,
        result: ExecutionResult | None,
        memory: tuple[MemoryEntry, ...],
    ) -> str:
        """What `memory_retrieve` returns: every earlier turn, and the checklist (appendix B.0.1)."""
        if self.compact:
            lines = [
                f"{i}. {entry.sql or '?'} -> {_compact_result(entry.result, self.result_characters // 2)}"
                for i, entry in enumerate(memory, 1)
            ]
            return "\n".join(lines) or "empty"
        lines = [
            "You are a coherence verifier for Multi-turn Text2SQL.",
            f"Current Question: {question}",
            f"Proposed SQL: {sql}",
            "The execution results of the proposed SQL: "
            + _truncated(_result_text(result), self.result_characters),
            "Memory (historical information in order):",
        ]
        for i, entry in enumerate(memory):
            lines.append(f"== Turn {i} ==\nQuestion: {entry.question}")
            if entry.sql is not None:
                lines.append(f"SQL: {entry.sql}")
                lines.append(f"Parsed Elements for each term: {entry.elements}")
                shown = _truncated(_result_text(entry.result), self.result_characters)
                lines.append(f"SQL Results (truncated to {self.result_characters} characters): {shown}")
        recheck = ", and then please call 'exec_sql' tool again via <tool_call> to check the corrected SQL"
        return "\n".join(lines) + "\n" + _MEMORY_TASKS.format(recheck=recheck if result else "")


def _message(role: str, content: str) -> dict:
    return {"role": role, "content": content}
