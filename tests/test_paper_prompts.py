"""MTSQL-R1's prompts and tool responses against the paper's own text: appendix B.0.1 and the example of D.1.

Only Markdown, quotes and white space, which the paper's listings break at will, are evened out.
"""

from __future__ import annotations

import json
import re
import sqlite3

import pytest
from conftest import ROOT

from mtsql.agent.memory import MemoryEntry, recall
from mtsql.agent.tools import make_tools
from mtsql.data.datasets import Example, HistoryTurn
from mtsql.data.schema import load_schemas
from mtsql.recipes.mtsql_r1 import MtsqlR1
from mtsql.recipes.mtsql_r1_prompts import memory_text, result_text
from mtsql.sql.execute import ExecutionResult, Executor

PAPER = ROOT.parent / "shared" / "papers" / "mtsql_r1.md"
QUESTION = "What about the number of car makers in the country USA?"
SQL = (
    "SELECT COUNT(*) FROM car_makers JOIN countries ON car_makers.Country = countries.CountryId "
    "WHERE countries.CountryName = 'usa';"
)
EARLIER = HistoryTurn(
    "Can you list the number of car makers on each continent?",
    "SELECT T1.Continent , count ( * ) FROM CONTINENTS AS T1 JOIN COUNTRIES AS T2 ON T1.ContId = "
    "T2.continent JOIN car_makers AS T3 ON T2.CountryId = T3.Country GROUP BY T1.Continent",
)
TABLES = {  # columns with their types, the first row, the foreign key: (column, table, column)
    "continents": ("ContId number, Continent text", (1, "america"), None),
    "countries": (
        "CountryId number, CountryName text, Continent number",
        (1, "usa", 1),
        ("Continent", "continents", "ContId"),
    ),
    "car_makers": (
        "Id number, Maker text, FullName text, Country text",
        (1, "amc", "American Motor Company", 1),
        ("Country", "countries", "CountryId"),
    ),
    "model_list": ("ModelId number, Maker number, Model text", (1, 1, "amc"), ("Maker", "car_makers", "Id")),
    "car_names": (
        "MakeId number, Model text, Make text",
        (1, "chevrolet", "chevrolet chevelle malibu"),
        ("Model", "model_list", "Model"),
    ),
    "cars_data": (
        "Id number, MPG text, Cylinders number, Edispl number, Horsepower text, Weight number, "
        "Accelerate number, Year number",
        (1, "18", 8, 307.0, "130", 3504, 12.0, 1970),
        ("Id", "car_names", "MakeId"),
    ),
}
# Further car makers, so that usa has 4 and the continents 4, 7 and 11.
MORE = """insert into continents values (2, 'europe'), (3, 'asia');
insert into countries values (2, 'germany', 2), (3, 'japan', 3);"""
MORE += "".join(
    f"insert into car_makers values ({number}, 'm', 'M', {country});"
    for number, country in enumerate([1] * 3 + [2] * 11 + [3] * 7, 2)
)


def even(text: str) -> str:
    """Without Markdown's marks and white space, and with straight quotes."""
    text = re.sub(r"\\([_*])", r"\1", text.replace("```", ""))
    text = re.sub(r"(?m)^(\s*)(?:\d+\. (?=\d+\. )|- (?=- ))", r"\1", text)  # lists within lists
    return re.sub(r"\s", "", re.sub("[‘’“”]", "'", text))


@pytest.fixture(scope="module")
def paper() -> str:
    if not PAPER.is_file():
        pytest.skip(f"needs the paper's text in {PAPER}")
    return PAPER.read_text()


def between(text: str, start: str, end: str) -> str:
    return text.partition(start)[2].partition(end)[0]


@pytest.fixture(scope="module")
def cars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cars")
    path = folder / "database" / "car_1" / "car_1.sqlite"
    path.parent.mkdir(parents=True)
    connection = sqlite3.connect(path)
    names, columns, types, links, keys = list(TABLES), [[-1, "*"]], ["text"], [], []
    for number, (table, (declared, row, _)) in enumerate(TABLES.items()):
        names_only = re.sub(r" \w+(?=,|$)", "", declared)  # so that the file keeps 307.0
        connection.execute(f"create table {table} ({names_only})")
        connection.execute(f"insert into {table} values ({', '.join('?' * len(row))})", row)
        keys.append(len(columns))
        for column in declared.split(", "):
            columns.append([number, column.split()[0]])
            types.append(column.split()[1])
    for number, (_, _, link) in enumerate(TABLES.values()):
        if link:
            column, table, other = link
            links.append([columns.index([number, column]), columns.index([names.index(table), other])])
    connection.executescript(MORE)
    connection.close()
    entry = {
        "db_id": "car_1", "table_names": names, "table_names_original": names, "column_names": columns,
        "column_names_original": columns, "column_types": types, "primary_keys": keys, "foreign_keys": links,
    }  # fmt: skip
    (folder / "tables.json").write_text(json.dumps([entry]))
    return load_schemas(folder / "tables.json", folder / "database")["car_1"]


EXAMPLE = Example("0/1", "0", "car_1", 1, QUESTION, SQL, (EARLIER,))
RECIPE = MtsqlR1()


def test_prompt_of_d1(paper, cars):
    messages, schemas = RECIPE.prompt(EXAMPLE, cars, make_tools("both"))
    printed = between(paper, "PROMPT FOR OURS", "## RESPONSE FROM OURS")
    assert even("\n".join(m["content"] for m in messages)) == even(printed)
    assert [m["role"] for m in messages] == ["system", "user"]
    listings = even(between(paper, "## B.0.1", "## Tool-Related Hyperparameters"))
    for schema in schemas:
        function = schema["function"]
        described = [function["description"], function["parameters"]["properties"]["code"]["description"]]
        assert f'name:"{function["name"]}"' in listings
        for text in described:
            assert even(f'description: "{text}"') in listings


def test_prompt_of_the_baseline_of_d1(paper, cars):
    """Its listing lost the brackets of tags, a quote and the start of a comment: the schema is left out."""
    messages, schemas = RECIPE.prompt(EXAMPLE, cars, {})
    printed = even(between(paper, "PROMPT FOR QWEN3-4B", "RESPONSE FROM QWEN3-4B"))
    printed = printed.replace("`answer_sql`and`/answer_sql`", "<answer_sql>and</answer_sql>")
    printed = printed.replace(r"[answer\_sql](#)and[/answer\_sql](#)", "<answer_sql>and</answer_sql>")
    ours = even("\n".join(m["content"] for m in messages))
    start, end = "##Turn1##", "Question:Canyoulist"
    assert ours.partition(start)[0] == printed.partition(start)[0].lstrip()
    assert ours.partition(end)[2] == printed.partition(end)[2].removesuffix("##✖")
    assert schemas is None and "tool" not in ours


def test_execution_response(paper, cars):
    result = Executor().execute(cars.path, SQL)
    ours = even(RECIPE.observe_execution(QUESTION, SQL, result, True, 3))
    printed = even(between(between(paper, "'usa';\"}}", "## Thought"), "response>", "</tool"))
    assert ours == printed
    template = even(
        between(paper, "return message of the “exec\\_sql” tool is:", "For interacting with memory")
    )
    said = {"{current_q}": f"Question: {QUESTION}", "{code}": SQL}
    for name, value in (said | {"{return_msg}": "The sql results example is: [(4,)]"}).items():
        template = template.replace(name, even(value))
    assert ours == template.removeprefix("###TOOLCONFIGURATION")


def test_memory_response(paper, cars):
    executor = Executor()
    memory = recall(EXAMPLE, cars, executor)
    ours = even(RECIPE.observe_memory(QUESTION, SQL, executor.execute(cars.path, SQL), memory))
    printed = even(between(between(paper, 'memory_retrieve", "arg', "## Thought"), "response>", "</tool"))
    described = {  # in mtsql_r1_prompts.py: where D differs from B.0.1 or from Python
        "[[4,]]": "[(4,)]",
        "None)]],'select'": "None)]},'select'",
        "updateaccordingly-": "updateaccordingly.-",
        "andyoucancall": "andthenpleasecall",
        "resultsuntilyouget'pass'": "results.Repeatuntilyouget'pass'",
    }
    for theirs, configured in described.items():
        assert theirs in printed
        printed = printed.replace(theirs, configured)
    assert ours == printed
    template = even(between(paper, "return message of the “memory\\_retrieve” tool is:", "## Tool-Related"))
    shown = ours.partition("(historicalinformationinorder):")[2].partition("Yourtasks")[0]
    said = {"{current_q}": f"Question: {QUESTION}", "{code}": SQL, "{memory_str}": shown}
    for name, value in (said | {"{execution_results}": "The sql results example is: [(4,)]"}).items():
        template = template.replace(name, even(value))
    assert ours == template.removeprefix("###TOOLCONFIGURATION")


def test_cuts_of_d2():
    """A result with its first words within 200 characters, those of earlier turns within 50."""
    rows = tuple((f"form {i}", i) for i in range(100))
    result = ExecutionResult("rows", ("a", "b"), rows, False)
    assert result_text(result, 200) == f"The sql results example is: {list(rows)}"[:200]
    text = memory_text("Q?", "SELECT 1", result, (MemoryEntry("P?", "SELECT 2", None, result),), 200)
    assert f"SQL Results (truncated to 50 characters): {str(list(rows))[:50]}\n== Turn 0 ==" in text


def test_a_gold_turn_that_ex_repairs_has_its_result_in_the_memory(tiny):
    turn = HistoryTurn("And?", "SELECT DISTINCT name FROM singer WHERE age > = 30")
    (entry,) = recall(Example("0/1", "0", "music", 1, "Who?", "", (turn,)), tiny.schema, tiny.executor)
    assert entry.sql == turn.sql and entry.result.rows == (("Anna",), ("Bruno",))


@pytest.mark.parametrize(
    ("sql", "select", "limit"),
    [
        ("SELECT name FROM singer ORDER BY age LIMIT 5", ["__singer.name__"], 5),
        ("SELECT count(*), max(age - id) FROM singer", ["__all__", "__singer.age__", "__singer.id__"], None),
    ],
)
def test_elements_of_an_earlier_query(tiny, sql, select, limit):
    example = Example("0/1", "0", "music", 1, "Who?", "SELECT 1", (HistoryTurn("And?", sql),))
    text = RECIPE.observe_memory("Who?", "SELECT 1", None, recall(example, tiny.schema, tiny.executor))
    assert f"'select': {select}, 'where': []" in text and f"'limit': {limit}, " in text
    assert text.index("'from': ") < text.index("'select': ")
