"""SQL-Trail: its prompt, table and six rewards, on numbers worked out by hand."""

from __future__ import annotations

import pytest
from conftest import GOLD
from hostile import STATEMENTS
from test_skyrl_sql import PAPER, THINK, WRONG, example_of, play, prompt_text, reward_of

from mtsql.config import read_options
from mtsql.recipes import skyrl_sql, sql_trail
from mtsql.recipes.sql_trail import bigrams, data_frame, jaccard, schema_items, turns_reward
from mtsql.sql.structure import SqlSchema
from train_grpo import Args as GrpoArgs
from train_sft import Args as SftArgs

REASON = "<reasoning>singer, country</reasoning>\n"
HARD = "SELECT name FROM singer WHERE age = (SELECT max(age) FROM singer)"
STAFF = SqlSchema({"employees": ("id", "salary"), "offices": ("id", "city")})


def trail(tiny, *messages, turns=10, rewards="", gold=GOLD):
    episode = play(tiny, *messages, module=sql_trail, turns=turns, example=example_of(gold=gold))
    return reward_of(tiny, episode, sql_trail, rewards, turns)


def query(sql=WRONG):
    return f"{REASON}<sql>{sql}</sql>"


def solution(sql=GOLD):
    return f"{REASON}<solution>{sql}</solution>"


# Prompt and table


def test_prompt_of_appendix_a(tiny):
    text = prompt_text(tiny, sql_trail, PAPER, knowledge="None is known.")
    assert text.startswith(
        "Task Overview:\nYou are a helpful text-to-SQL expert assistant. Below, you are prov"
    )
    assert f"Database Engine:\nSQLite\n\nDatabase Schema:\n{tiny.schema.text(False)}\n\nExternal Know" in text
    assert "3. In your first response, you must identify all tables and columns from the database sc" in text
    assert "1. Conduct thinking inside <reasoning>...</reasoning> blocks every time" in text
    assert (
        "4. If you find no further exploration is needed or reaches max turns, directly provide the" in text
    )
    assert "- 'products':'price'\n\nTo solve this problem" in text
    assert data_frame([["AVG(price)"], ["24.75"]]) in text  # the example shows what the environment shows


@pytest.mark.parametrize("tag", ["think", "reasoning"])
def test_both_tags_of_thoughts_count(tag):
    recipe = sql_trail.make_recipe(PAPER)
    assert recipe.parse(f"<{tag}>or <sql>SELECT 2</sql></{tag}><sql>SELECT 1</sql>").sql == "SELECT 1"
    assert recipe.parse(f"<{tag}>so</{tag}><sql>SELECT 1</sql>").well_formed
    assert not skyrl_sql.make_recipe(PAPER).parse(f"{REASON}<sql>SELECT 1</sql>").well_formed


def test_table_is_that_of_the_paper():
    assert data_frame([["AVG(price)"], ["24.75"]]) == "   AVG(price)\n0       24.75"
    cells = [["name", "n"], *([f"a{i}", str(i)] for i in range(11))]
    assert data_frame(cells).splitlines()[:2] == ["    name   n", "0     a0   0"]
    assert data_frame(cells).splitlines()[-1] == "10   a10  10"
    assert data_frame([["a", "b"]]) == "Empty DataFrame\nColumns: [a, b]\nIndex: []"


# Rewards


def test_bigrams_of_the_paper():
    gold, predicted = bigrams("SELECT name FROM student"), bigrams("SELECT name FROM teacher")
    assert gold == {("select", "name"), ("name", "from"), ("from", "student")}
    assert jaccard(predicted, gold) == 0.5


def test_bigrams_forgive_case_space_comments_and_the_end():
    gold = bigrams("SELECT name FROM student WHERE a>=1")
    assert bigrams("select  Name\nfrom student /* all */ where a >= 1; SELECT 2 -- x") == gold
    assert bigrams("") == bigrams("SELECT") == bigrams("x" * 200_000) == set()
    assert jaccard(set(), set()) == 0 and jaccard(set(), gold) == 0


def test_schema_items_of_the_paper():
    gold = schema_items("SELECT Salary FROM Employees", STAFF)
    assert gold == {("table", "employees"), ("column", "salary")}
    assert jaccard(schema_items("SELECT Wages FROM Employees", STAFF), gold) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("sql", "items"),
    [
        ("SELECT e.salary FROM employees AS e", {"employees", "salary"}),
        ("SELECT count(*) FROM employees", {"employees"}),
        ("SELECT e.* FROM employees e", {"employees"}),
        ("SELECT salary AS s FROM employees ORDER BY s", {"employees", "salary"}),
        ('SELECT salary FROM employees WHERE id = "x"', {"employees", "salary", "id"}),
        ("SELECT city FROM employees JOIN offices USING (id)", {"employees", "offices", "city", "id"}),
        ("WITH top AS (SELECT salary FROM employees) SELECT salary FROM top", {"employees", "salary"}),
        ("SELECT salary FROM", set()),
        ("PRAGMA table_info(employees)", set()),
        ("", set()),
    ],
)
def test_schema_items(sql, items):
    assert {name for _, name in schema_items(sql, STAFF)} == items


def test_hostile_sql_never_raises():
    schema = SqlSchema({"singer": ("singer_id", "name", "country", "age"), "number": ("n",)})
    gold = "SELECT n FROM number"
    gold_items, gold_bigrams = schema_items(gold, schema), bigrams(gold)
    hostile = [sql for _, sql, _ in STATEMENTS if len(sql) < 10_000]
    hostile += ["SELECT " + "(" * 3_000 + "1" + ")" * 3_000, "'" * 99_999, "\x00", "a " * 200_000]
    for sql in hostile:
        assert 0 <= jaccard(schema_items(sql, schema), gold_items) <= 1
        assert 0 <= jaccard(bigrams(sql), gold_bigrams) <= 1


@pytest.mark.parametrize(
    ("hardness", "turn", "ex", "reward"),
    [
        ("easy", 2, 0, 1),
        ("easy", 3, 1, 0),
        ("medium", 3, 0, 1),
        ("medium", 4, 1, 0),
        ("hard", 9, 1, 1),
        ("hard", 10, 1, 0),
        ("extra", 1, 0, 0),
        ("extra", 9, 1, 1),
    ],
)
def test_turns_reward(hardness, turn, ex, reward):
    assert turns_reward(hardness, turn, 10, ex) == reward


def test_everything_right_earns_eleven(tiny):
    rewards = trail(tiny, query(), solution())
    assert rewards.parts == {"turns": 1, "schema": 1, "bigram": 1, "syntax": 1, "format": 1}
    assert (rewards.ex, rewards.total) == (1, 5 + 2 + 4)


def test_wrong_value(tiny):
    # select name from singer where country = 'france': 7 pairs; two answers differ in the last of them
    rewards = trail(tiny, query(), solution(WRONG))
    bigram = pytest.approx(6 / 8)
    assert rewards.parts == {"turns": 1, "schema": 1, "bigram": bigram, "syntax": 1, "format": 1}
    assert rewards.total == pytest.approx(2 + 1 + 0.75 + 1 + 1)


def test_hallucinated_column_does_not_run(tiny):
    # gold: singer, name, country; the answer: singer, nam. Pairs: 2 of 3 differ, "from singer" is shared
    rewards = trail(tiny, solution("SELECT nam FROM singer"))
    assert rewards.parts["schema"] == pytest.approx(1 / 4)
    assert rewards.parts["bigram"] == pytest.approx(1 / 9)
    assert (rewards.ex, rewards.parts["syntax"], rewards.parts["turns"]) == (0, 0, 1)
    assert rewards.total == pytest.approx(2 + 1 / 4 + 1 / 9 + 0 + 1)


def test_hard_question_pays_for_a_right_answer_before_the_last_turn(tiny):
    assert trail(tiny, query(), query(), solution(HARD), gold=HARD, turns=4).parts["turns"] == 1
    assert trail(tiny, query(), query(), solution(HARD), gold=HARD, turns=3).parts["turns"] == 0
    assert trail(tiny, solution(WRONG), gold=HARD, turns=4).parts["turns"] == 0


def test_no_answer_raises(tiny):
    for sql in ("'", "DROP TABLE singer", "PRAGMA table_info(singer)", "SELECT (" * 2_000, "\x00", ";"):
        rewards = trail(tiny, solution(sql))
        assert (rewards.ex, rewards.parts["schema"]) == (0, 0)


def test_format_counts_every_message(tiny):
    assert trail(tiny, f"<sql>{WRONG}</sql>", solution()).parts["format"] == 0
    assert trail(tiny, f"{THINK}<sql>{WRONG}</sql>", solution()).parts["format"] == 1


def test_no_solution_earns_nothing(tiny):
    for messages in ((), [query(GOLD)], [query(GOLD)] * 10, ["what?"]):
        rewards = trail(tiny, *messages)
        assert (rewards.total, set(rewards.parts.values())) == (0, {0.0})


def test_presets_and_weights(tiny):
    messages = query(), solution()
    assert trail(tiny, *messages, rewards="execution").total == 5
    assert trail(tiny, query(), solution(WRONG), rewards="execution").total == 0
    assert trail(tiny, *messages, rewards="turns=0,ex=1,bigram=0.5").total == 1 + 1 + 0.5 + 1 + 1
    with pytest.raises(ValueError, match="one of ex, turns, schema, bigram, syntax, format"):
        trail(tiny, *messages, rewards="exec=1")


def test_the_warm_start_has_its_own_optimizer():
    """Appendix A.5: of SFT alone; what a --config or the command line says comes first."""
    words = ["--data=d", "--model=m", "--out=o"]
    paper = ["--config", "configs/sql_trail.toml", *words]
    names = ("learning_rate", "beta2", "weight_decay", "warmup", "epochs", "trajectories_per_step")
    sft = read_options(SftArgs, "", paper)
    assert [getattr(sft, name) for name in names] == [1e-5, 0.95, 0.01, 0.1, 2, 128]
    grpo = read_options(GrpoArgs, "", paper)
    assert [getattr(grpo, name) for name in names[:3]] == [1e-6, 0.99, 0]
    assert read_options(SftArgs, "", [*paper, "--beta2=0.9"]).beta2 == 0.9
    of_mtsql_r1 = read_options(SftArgs, "", words)
    assert [getattr(of_mtsql_r1, name) for name in names[:4]] == [5e-6, 0.999, 0, 0.03]
