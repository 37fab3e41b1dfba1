"""What the recipes ask, against the text of their papers, and their wording without tools, thoughts or paper.

Only Markdown, quotes and white space, which the papers' listings break at will, are evened out; what else
differs is listed where it is compared, and told in the docstring of the recipe.
"""

import re

import pytest
from conftest import GOLD, QUESTION, SHARED

from mtsql.agent.tokens import ChatTokens
from mtsql.agent.tools import MemoryEntry, make_tools, recall
from mtsql.data.datasets import Example, HistoryTurn
from mtsql.data.schema import load_schemas
from mtsql.recipes import RECIPES, load_recipe
from mtsql.recipes.mtsql_r1 import result_text
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.sql.execute import ExecutionResult, Executor

OTHERS = RECIPES[1:]  # with one message of the user and one tool
EARLIER = HistoryTurn("How many singers are there?", "SELECT count(*) FROM singer")


def prompt_of(tiny, name, tools="no_memory", history=(), knowledge="", **options):
    """The prompt's text, and the schemas of its tools."""
    example = Example("00000/1", "00000", "music", 1, QUESTION, GOLD, history, knowledge)
    recipe = load_recipe(name).make_recipe(PromptOptions(**options))
    messages, schemas = recipe.prompt(example, tiny.schema, make_tools(tools))
    return messages[-1]["content"], schemas


def paper_of(name):
    path = SHARED / "papers" / f"{name}.md"
    if not path.is_file():
        pytest.skip(f"needs the paper's text in {path}")
    return path.read_text()


def even(text, *changes):
    """Without Markdown's marks and white space, and with straight quotes; then changed where it differs."""
    text = re.sub(r"\\([_*])", r"\1", text.replace("```", "").replace("‘‘‘", ""))
    text = re.sub(r"(?m)^(\s*)(?:\d+\. (?=\d+\. )|- (?=- ))", r"\1", text)  # lists within lists
    text = re.sub(r"\s", "", re.sub("[‘’“”]", "'", text).replace("…", "..."))
    for theirs, ours in changes:
        assert theirs in text, theirs
        text = text.replace(theirs, ours)
    return text


def between(text, start, end):
    return text.partition(start)[2].partition(end)[0]


def filled(listing, said):
    """The evened listing with what is said in its places."""
    for place, value in said.items():
        listing = listing.replace(f"{{{place}}}", even(value))
    return listing


# The other recipes

START, END = ("-" * 24 + f"{word}OFEXAMPLE" + "-" * 24 for word in ("START", "END"))
LISTINGS = {  # the prompt in the paper's text, and what differs
    "skyrl_sql": (
        "Task Overview:.*?(?=B Detailed Results)",
        ("SOLite", "SQLite"),
        ("</observation>...Based", "</observation>.Based"),
        ("</solution>.Database", f"</solution>.{START}Question:howmanypigsareinthefarm?Database"),
        ("inthefarm.begin", "inthefarm.Iwillbegin"),
        ("+----+", "+----------+"),  # as wide as the column
        ("'pig';</solution>", f"'pig';</solution>{END}"),
        ("{db_details}", "{schema}"),
    ),
    "sql_trail": ("Task Overview:.*?END OF EXAMPLE -*", ("{engine}", "SQLite")),
    "mtir_sql": (
        "You are a helpful SQL expert.*?(?=C.3 Case)",
        ("{external_knowledge}+{question}?", "{external_knowledge}{question}"),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_prompt_of_the_paper(tiny, name):
    listing, *changes = LISTINGS[name]
    printed = even(re.search(listing, paper_of(name), re.DOTALL)[0], *changes)
    schema = tiny.schema.text(compact=False)
    told = {"schema": schema, "external_knowledge": "No cities.", "question": QUESTION, "db_id": "music"}
    ours, _ = prompt_of(tiny, name, knowledge="No cities.")
    assert even(ours) == filled(printed, told)


@pytest.mark.parametrize("name", OTHERS)
def test_prompt_shows_the_dialogue_and_the_knowledge_before_the_question(tiny, name):
    text, _ = prompt_of(tiny, name, history=(EARLIER,), knowledge="No {cities}.")
    earlier = f"\nEarlier questions of this dialogue:\n1. {EARLIER.question}\n   SQL: {EARLIER.sql}\n"
    assert max(text.index(earlier), text.index("\nNo {cities}.\n")) < text.index(f"{QUESTION}\n")


@pytest.mark.parametrize("name", OTHERS)
def test_prompt_without_the_tool_and_for_a_model_that_thinks_by_itself(tiny, name):
    text, schemas = prompt_of(tiny, name, "none")
    for word in ("<sql>", "<observation>", "turns", "with the tool", "Tool calls", "through tool", "Option"):
        assert word not in text
    assert schemas is None and re.search("<(solution|answer)>", text) and "think>" in text
    text, _ = prompt_of(tiny, name, native_thinking=True)
    assert "think>" not in text and "reasoning>" not in text
    assert "</observation>\n<solution>" in text or "[Tool calls for validation]" in text


LAST = {"mtsql_r1": ("tools: exec_sql memory_retrieve", "tools: none")}
LAST["mtir_sql"] = "calls: sql", "calls: none"


@pytest.mark.parametrize("name", RECIPES)
def test_compact_prompt(tiny, name):
    last, alone = LAST.get(name, ("tags: sql solution", "tags: solution"))
    text, schemas = prompt_of(tiny, name, "both", (EARLIER,), "Use names.", compact=True)
    lines = ["1. " + EARLIER.question, EARLIER.sql, "Use names.", f"now: {QUESTION}", last]
    assert schemas is None and text == "\n".join([tiny.schema.text(compact=True), *lines])
    assert prompt_of(tiny, name, "none", compact=True)[0].endswith(f"\nnow: {QUESTION}\n{alone}")


def test_qwen3s_template_writes_the_tool_of_mtir_sql(tiny, qwen3):
    printed = even(
        between(paper_of("mtir_sql"), "System Prompt of Tool ", "\n"),
        ("##Tools", "#Tools"),
        ("JSONobject", "jsonobject"),
        ('{"name":"sql', '{"type":"function","function":{"name":"sql'),
        ('"sql"]}}', '"sql"]}}}'),
        ("</tool_call}", "</tool_call>"),
    )
    tokens = ChatTokens(qwen3)
    text, schemas = prompt_of(tiny, "mtir_sql")
    rendered = tokens.decode(tokens.prompt_ids([{"role": "user", "content": text}], schemas))
    assert even(between(rendered, "<|im_start|>system\n", "<|im_end|>").replace("\\n", "")) == printed
    # Section 3.2: results go into the user's turn.
    role = load_recipe("mtir_sql").make_recipe(PromptOptions()).observation_role
    suffix = tokens.decode(tokens.observation_suffix("[]", True, role))
    assert "<|im_start|>user\n<tool_response>\n[]\n</tool_response>" in suffix


# MTSQL-R1: appendix B.0.1 and the example of D.1

R1 = load_recipe("mtsql_r1").make_recipe(PromptOptions())
CARS_QUESTION = "What about the number of car makers in the country USA?"
SQL = "SELECT COUNT(*) FROM car_makers JOIN countries ON car_makers.Country = countries.CountryId "
SQL += "WHERE countries.CountryName = 'usa';"
BEFORE = "SELECT T1.Continent , count ( * ) FROM CONTINENTS AS T1 JOIN COUNTRIES AS T2 ON T1.ContId = "
BEFORE += "T2.continent JOIN car_makers AS T3 ON T2.CountryId = T3.Country GROUP BY T1.Continent"
CONTINENTS = HistoryTurn("Can you list the number of car makers on each continent?", BEFORE)
EXAMPLE = Example("0/1", "0", "car_1", 1, CARS_QUESTION, SQL, (CONTINENTS,))


@pytest.fixture(scope="module")
def paper():
    return paper_of("mtsql_r1")


@pytest.fixture(scope="module")
def cars():
    folder = SHARED / "data"
    if not folder.exists():
        pytest.skip(f"needs SParC in {folder}")
    return load_schemas(folder / "sparc" / "tables.json", folder / "database")["car_1"]


def test_prompt_of_d1(paper, cars):
    messages, schemas = R1.prompt(EXAMPLE, cars, make_tools("both"))
    printed = between(paper, "PROMPT FOR OURS", "## RESPONSE FROM OURS")
    assert even("\n".join(m["content"] for m in messages)) == even(printed)
    assert [m["role"] for m in messages] == ["system", "user"]
    listings = even(between(paper, "## B.0.1", "## Tool-Related Hyperparameters"))
    for schema in schemas:
        function = schema["function"]
        assert f'name:"{function["name"]}"' in listings
        for text in (function["description"], function["parameters"]["properties"]["code"]["description"]):
            assert even(f'description: "{text}"') in listings


def test_prompt_of_the_baseline_of_d1(paper, cars):
    """Its listing lost the brackets of tags, a quote and the start of a comment: the schema is left out."""
    messages, schemas = R1.prompt(EXAMPLE, cars, {})
    printed = even(
        between(paper, "PROMPT FOR QWEN3-4B", "RESPONSE FROM QWEN3-4B"),
        ("`answer_sql`and`/answer_sql`", "<answer_sql>and</answer_sql>"),
        (r"[answer\_sql](#)and[/answer\_sql](#)", "<answer_sql>and</answer_sql>"),
    )
    ours = even("\n".join(m["content"] for m in messages))
    start, end = "##Turn1##", "Question:Canyoulist"
    assert ours.partition(start)[0] == printed.partition(start)[0]
    assert ours.partition(end)[2] == printed.partition(end)[2].removesuffix("##✖")
    assert schemas is None and "tool" not in ours


def test_responses_of_the_tools(paper, cars):
    """They are those of D.1's example, and the templates of B.0.1 filled in."""
    result = Executor().execute(cars.path, SQL)
    ours = even(R1.observe_execution(CARS_QUESTION, SQL, result, True, 3))
    assert ours == even(response_behind(paper, "'usa';\"}}"))
    told = {"current_q": f"Question: {CARS_QUESTION}", "code": SQL}
    told |= dict.fromkeys(("return_msg", "execution_results"), "The sql results example is: [(4,)]")
    template = between(paper, "return message of the “exec\\_sql” tool is:", "For interacting with memory")
    assert ours == filled(even(template), told).removeprefix("###TOOLCONFIGURATION")

    ours = even(R1.observe_memory(CARS_QUESTION, SQL, result, recall(EXAMPLE, cars, Executor())))
    assert ours == even(
        response_behind(paper, 'memory_retrieve", "arg'),
        ("[[4,]]", "[(4,)]"),  # mtsql_r1.py says where D differs from B.0.1 or from Python
        ("None)]],'select'", "None)]},'select'"),
        ("updateaccordingly-", "updateaccordingly.-"),
        ("andyoucancall", "andthenpleasecall"),
        ("resultsuntilyouget'pass'", "results.Repeatuntilyouget'pass'"),
    )
    told["memory_str"] = between(ours, "(historicalinformationinorder):", "Yourtasks")
    template = between(paper, "return message of the “memory\\_retrieve” tool is:", "## Tool-Related")
    assert ours == filled(even(template), told).removeprefix("###TOOLCONFIGURATION")


def response_behind(paper, call):
    return between(between(paper, call, "## Thought"), "response>", "</tool")


def test_cuts_of_d2():
    """A result with its first words within 200 characters, those of earlier turns within 50."""
    rows = tuple((f"form {i}", i) for i in range(100))
    result = ExecutionResult("rows", ("a", "b"), rows, False)
    assert result_text(result, 200) == f"The sql results example is: {list(rows)}"[:200]
    text = R1.observe_memory("Q?", "SELECT 1", result, (MemoryEntry("P?", "SELECT 2", None, result),))
    assert f"SQL Results (truncated to 50 characters): {str(list(rows))[:50]}\n== Turn 0 ==" in text


def test_a_gold_turn_that_ex_repairs_has_its_result_in_the_memory(tiny):
    turn = HistoryTurn("And?", "SELECT DISTINCT name FROM singer WHERE age > = 30")
    (entry,) = recall(Example("0/1", "0", "music", 1, "Who?", "", (turn,)), tiny.schema, tiny.executor)
    assert entry.sql == turn.sql and entry.result.rows == (("Anna",), ("Bruno",))


def test_elements_of_an_earlier_query(tiny):
    earlier = HistoryTurn("And?", "SELECT count(*), max(age - id) FROM singer LIMIT 5")
    example = Example("0/1", "0", "music", 1, "Who?", "SELECT 1", (earlier,))
    text = R1.observe_memory("Who?", "SELECT 1", None, recall(example, tiny.schema, tiny.executor))
    assert "'select': ['__all__', '__singer.age__', '__singer.id__'], 'where': []" in text
    assert "'limit': 5, " in text and text.index("'from': ") < text.index("'select': ")
