"""MTSQL-R1: its texts and tags as the paper prints them (appendix B.0.1 and D).

They follow the tools that there are: the paper shows both tools, and appendix D.1's baseline without any (D.2's
has other words). Where its listings differ from each other, or we from them:

- Line breaks and the request to call 'exec_sql' again after a failed M-VERIFY are B.0.1's; D says "you can call".
  Quotes are straight throughout, as in D.
- Turns are shown as in D.1; D.2 writes "User: " before the quoted question.
- The instructions are the message of the system, the rest that of the user; D prints them as one text.
- Without earlier questions the schema comes first and 'exec_sql' asks for the answer, as in the authors' code.
  With --history questions the earlier turns have no SQL. External knowledge (BIRD) is our addition.
- The results of earlier turns are cut to a quarter of the characters of a result, 50 of 200, as D says of them;
  D.2 shows all 17 rows of one. A result is cut with its first words, as in D.2, where 200 characters hold both.
- "Ground-Truth SQL" and "correct SQL" stand there with --history predicted too: the agent is not told otherwise.
- D.1 shows two results as [[0,]] and [[4,]], which in Python, as elsewhere in D, are [(0,)] and [(4,)]; of the
  parsed elements those of FROM end in a bracket, not in a brace; one full stop of the first task is missing.
- An earlier SQL that the official grammar cannot read has no elements.
- What the paper does not show: an error as a result, the prompt without 'exec_sql', responses without the other tool.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from mtsql.agent.memory import MemoryEntry
from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.data.datasets import Example
from mtsql.sql.execute import ExecutionResult

VERDICT = {
    EXEC_SQL: re.compile(r"<exec_verify>\s*(pass|no_pass)\s*</exec_verify>"),
    MEMORY_RETRIEVE: re.compile(r"<memory_verify>\s*(pass|no_pass)\s*</memory_verify>"),
}


def enclosed(text: str, opening: str, closing: str) -> list[tuple[str, int]]:
    """What stands between a match of `opening` and the next `closing`, and where that ends.

    It is what re.finditer finds of "opening(.*?)closing", which takes square time where an end is missing.
    """
    found, at, opens = [], 0, re.compile(opening)
    while (start := opens.search(text, at)) and (end := text.find(closing, start.end())) >= 0:
        at = end + len(closing)
        found.append((text[start.end() : end], at))
    return found


def answers(text: str) -> list[str]:
    """The SQL of all answers in a text."""
    return [sql for sql, _ in enclosed(text, "<answer_sql>", "</answer_sql>")]


BASELINE = """You are a SQL expert. You are given a question and you need to translate it to SQL step by step. \
Reasoning step by step. Once you feel you are ready for the final SQL, directly return the SQL inside <answer_sql> \
and </answer_sql> at the end of your response."""
TASK = """You are a SQL expert. Your task is to translate a natural language question into SQL through \
step-by-step reasoning. Please follow the steps:
1. Reasoning
   - Always think step by step before calling the tool. Draft the SQL."""
EXEC_STEP = """2. Calling 'exec_sql' tool (Please call 'exec_sql' tool at least once)
   - Call the 'exec_sql' tool to execute the current generated SQL and verify the execution results based on \
questions.
   - conclude <exec_verify>pass</exec_verify> if results are reasonable, otherwise \
<exec_verify>no_pass</exec_verify>.
   - If no_pass, refine the SQL using the execution results and repeat call 'exec_sql' tool until it passes.
Note:
1. Please call 'exec_sql' tool at least once
2."""
MEMORY_STEP = """2. Calling 'memory_retrieve' tool (if there are previous questions)
   - Call the 'memory_retrieve' tool to verify that the current generated SQL is coherent with the dialogue.
   - conclude <memory_verify>pass</memory_verify> if it is coherent, otherwise \
<memory_verify>no_pass</memory_verify>.
   - If no_pass, refine the SQL using the memory and repeat call 'memory_retrieve' tool until it passes.
Note:"""
FINAL_NOTE = "Return the final SQL enclosed in: <answer_sql> ... </answer_sql>"
QUESTION = """Now please translate the following question to SQL step by step
Question: {question} (Note you only need to translate the question to SQL instead answer the question. Once you feel \
you are ready for the final SQL, directly return the SQL inside <answer_sql> and </answer_sql> at the end of your \
response.{note})"""
EXEC_NOTE = "\nNote please call 'exec_sql' tool at least once"

EXEC_RESPONSE = """Recap:
- Current question: Question: {question}
- Generated SQL: {sql}
- SQL execution results (truncated to {limit} characters): {result}

Now please:
1. Verify whether the SQL execution results are valid:
   - Check if the SQL runs without errors.
   - Check if the returned columns exist in the schema and are relevant to the question.
   - Check if the results contain unexpected NULL values, empty sets, or error messages.

2. After verifying, output:
   - <exec_verify>pass</exec_verify> if the results are valid and consistent with the schema.
   - <exec_verify>no_pass</exec_verify> if the results show errors, irrelevant columns, or invalid values.

3. If <exec_verify>no_pass</exec_verify>, think step by step, refine the SQL and provide a corrected SQL and \
then execute it via re-calling 'exec_sql' tool again via <tool_call>. Repeat until you get valid results.

4. If <exec_verify>pass</exec_verify>, {then}"""
THEN_MEMORY = (
    "You have to call 'memory_retrieve' tool via <tool_call> at least once to ensure the current generated SQL "
    "is coherent with the historical memory."
)
THEN_ANSWER = "return the final SQL inside <answer_sql>...</answer_sql>."

MEMORY_RESPONSE = """You are a coherence verifier for Multi-turn Text2SQL.

Current Question: Question: {question}
Proposed SQL: {sql}
{result}
Memory (historical information in order):
{memory}

Your tasks:
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
7. {last_check}

2. After verifying, output one of the following:
   - '<memory_verify>pass</memory_verify>' if coherent.
   - '<memory_verify>no_pass</memory_verify>' if not coherent.

3. If 'no_pass': explain issues, think step by step to refine SQL, and then please call {recheck}. Repeat until you \
get 'pass'.

4. If 'pass': return the final SQL inside '<answer_sql>...</answer_sql>'.

Note finally you should return the final SQL inside '<answer_sql>...</answer_sql>"""
WITH_RESULT = {
    "last_check": "Make sure the SQL and the execution results of the proposed SQL answer the current question while "
    "remaining logically coherent with the conversation history and execution results.",
    "recheck": "'exec_sql' tool again via <tool_call> to check the corrected SQL and get the execution results",
}
WITHOUT_RESULT = {
    "last_check": "Make sure the SQL answers the current question while remaining logically coherent with the "
    "conversation history.",
    "recheck": "'memory_retrieve' tool again via <tool_call> to check the corrected SQL",
}


def system_text(tools: Collection[str]) -> str:
    """The instructions; those for the memory stand here only where no execution's response gives them."""
    if EXEC_SQL in tools:
        return f"{TASK}\n{EXEC_STEP} {FINAL_NOTE}"
    if MEMORY_RETRIEVE in tools:
        return f"{TASK}\n{MEMORY_STEP} {FINAL_NOTE}"
    return f"{TASK}\nNote: {FINAL_NOTE}" if tools else BASELINE


def question_text(example: Example, schema_text: str, tools: Collection[str]) -> str:
    """The dialogue so far with the schema, and the question."""
    schema_text, blocks = f"Database schema:\n{schema_text}\n", []
    for i, turn in enumerate(example.history, 1):
        shown = f'## Turn {i} ##\n"{schema_text if i == 1 else ""}Question: {turn.question} "'
        blocks.append(shown + (f'\nCorresponding Correct SQL: "{turn.sql}"' if turn.sql is not None else ""))
    if any(turn.sql is not None for turn in example.history):
        blocks[0] = f"Here are previous question and corresponding correct SQL in this dialogue:\n{blocks[0]}"
    elif blocks:
        blocks[0] = f"Here are the previous questions in this dialogue:\n{blocks[0]}"
    else:
        blocks = [schema_text.strip()]
    if example.knowledge:
        blocks.append(f"External Knowledge: {example.knowledge}")
    note = EXEC_NOTE if EXEC_SQL in tools else ""
    return "\n\n".join([*blocks, QUESTION.format(question=example.question, note=note)])


def execution_text(question: str, sql: str, result: ExecutionResult, check_memory: bool, limit: int) -> str:
    """What `exec_sql` returns: a recap and the next tasks."""
    then = THEN_MEMORY if check_memory else THEN_ANSWER
    shown = result_text(result, limit)
    return EXEC_RESPONSE.format(question=question, sql=sql, limit=limit, result=shown, then=then)


def memory_text(
    question: str, sql: str, result: ExecutionResult | None, memory: tuple[MemoryEntry, ...], limit: int
) -> str:
    """What `memory_retrieve` returns: every earlier turn, and the checklist."""
    shown, tasks = "", WITHOUT_RESULT
    if result is not None:
        shown = f"The execution results of the proposed SQL: {result_text(result, limit)}\n"
        tasks = WITH_RESULT
    turns = "\n".join(_turn_text(i, entry, limit // 4) for i, entry in enumerate(memory))
    return MEMORY_RESPONSE.format(question=question, sql=sql, result=shown, memory=turns, **tasks)


def _turn_text(number: int, entry: MemoryEntry, limit: int) -> str:
    lines = [f"== Turn {number} ==", f"Question: Question: {entry.question}"]
    if entry.sql is not None:
        lines += [
            f"Ground-Truth SQL: {entry.sql}",
            f"Parsed Elements for each term: {entry.elements and _flat_elements(entry.elements)}",
            f"SQL Results (truncated to {limit} characters): {_rows_text(entry.result)[:limit]}",
        ]
    return "\n".join([*lines, f"== Turn {number} =="])


def _flat_elements(elements: dict) -> dict:
    """FROM first and SELECT as a list of its columns, without aggregates: so the paper prints them."""
    _, selected = elements["select"]
    units = [unit for _, (_, left, right) in selected for unit in (left, right) if unit is not None]
    return {"from": elements["from"], "select": [column for _, column, _ in units]} | {
        name: value for name, value in elements.items() if name not in ("from", "select")
    }


def result_text(result: ExecutionResult, limit: int) -> str:
    """Rows as the paper shows them, or the error, within `limit` characters."""
    introduced = "The sql results example is: " * result.ok
    return f"{introduced}{_rows_text(result)}"[:limit]


def _rows_text(result: ExecutionResult) -> str:
    return str([tuple(row) for row in result.rows]) if result.ok else f"Error: {result.message}"


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
