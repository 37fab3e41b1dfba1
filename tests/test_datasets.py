"""Datasets: official layouts of single questions (Spider, its variants, BIRD, SynSQL), real ones, the mix."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import GOLD, QUESTION, SAMPLE, TABLES, Tiny, environment_of, make_database

from evaluate import Args as EvaluateArgs
from mtsql.agent.env import Environment
from mtsql.agent.trajectory import Status, Trajectory
from mtsql.config import Data
from mtsql.data.datasets import Dataset, Example, example_after, examples, load_dataset
from mtsql.data.schema import load_schemas, read_json
from mtsql.errors import UserError
from mtsql.extras import make_mix
from mtsql.recipes import mtsql_r1
from mtsql.recipes.mtir_sql import make_reward
from mtsql.recipes.mtsql_r1_rewards import PRESETS, reward
from mtsql.report.evaluation import score_records
from mtsql.report.metrics import format_summary, summarise
from mtsql.report.records import chat_record
from mtsql.report.voting import add_votes
from mtsql.sql.execute import Executor
from mtsql.sql.grammar import SqlParseError
from mtsql.sql.score import Scorer, clause_f1, print_left_out, scorable
from mtsql.task import load_split, make_environment
from mtsql.toy import benchmark as toy
from mtsql.toy.scripted_agent import ATTENTIVE, demonstrate

SPIDER = {"db_id": "music", "question": QUESTION, "query": GOLD, "sql": {"limit": None}, "query_toks": []}
SYN = {"db_id": "music", "SpiderQuestion": QUESTION, "SpiderSynQuestion": "Which vocalists?", "query": GOLD}
BIRD = {"question_id": 7, "db_id": "music", "question": QUESTION, "SQL": GOLD, "difficulty": "moderate"}
BIRD["evidence"] = " from France refers to country = 'france' "
SYNSQL = {"db_id": "music", "question": QUESTION, "external_knowledge": "", "sql": GOLD}
SYNSQL["sql_complexity"] = "Highly Complex"
TURN = {"utterance": QUESTION, "query": GOLD}
DIALOGUE = {"database_id": "music", "interaction": [TURN]}


def lay_out(of: Path, root: Path, files: dict[str, object], databases: str) -> Path:
    """A dataset's folder: JSON files by their paths, and the databases of the folder `of` in `databases`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    shutil.copytree(of / "database", root / databases)
    return root


@pytest.fixture
def dataset_of(tiny, tmp_path) -> Callable[[object], Dataset]:
    """Loads a file of these items over the music database."""

    def read(items: object) -> Dataset:
        (tmp_path / "items.json").write_text(json.dumps(items))
        places = (tmp_path / "items.json", tiny.folder / "tables.json", tiny.folder / "database")
        return load_dataset([places])

    return read


def load(data: Path, split: str = "dev", more: Sequence[Path] = (), **options) -> Dataset:
    return load_split(Data(data=tuple(map(str, (data, *more))), out="", **options), split)


def question(text: str, source: str, knowledge: str = "", difficulty: str = "") -> Example:
    return Example("00000/0", "00000", "music", 0, text, GOLD, (), knowledge, difficulty, source)


def demonstrated(environment: Environment, asked: list[Example]) -> list[tuple[Example, Trajectory]]:
    """Each question with what the scripted agent makes of it."""
    rng = random.Random(0)
    return [(e, demonstrate(environment.episodes(e, [0])[0], [], ATTENTIVE, rng)) for e in asked]


def scored(tiny: Tiny, played: list[tuple[Example, Trajectory]], scorer: Scorer) -> list[dict]:
    reward = mtsql_r1.make_reward("", scorer, tiny.tokens.tokenizer.decode, 5)
    return score_records(played, scorer, environment_of(tiny), reward)


def test_spider_trains_on_both_of_its_files_and_has_a_test_of_its_own(tiny, tmp_path, capsys):
    elsewhere = json.loads(TABLES.replace('"music"', '"elsewhere"'))
    files = {
        "train_spider.json": [SPIDER] * 3,
        "train_others.json": [SPIDER | {"question": "Another?"}],
        "test.json": [SPIDER | {"question": "A test?"}],
        "tables.json": elsewhere,  # so that the test split passes with its own files alone
        "test_tables.json": TABLES,
    }
    root = lay_out(tiny.folder, tmp_path, files, "test_database")
    (only,) = load(root, "test").dialogues
    assert only.id == "00000" and only.turns == (question("A test?", only.turns[0].source),)
    (root / "tables.json").write_text(TABLES)
    shutil.copytree(root / "test_database", root / "database")
    capsys.readouterr()
    both = load(root, "train")
    assert "train_spider.json and train_others.json together" in capsys.readouterr().out
    assert [d.id for d in both.dialogues] == ["00000", "00001", "00002", "00003"]
    assert [d.turns[0].question for d in both.dialogues] == [QUESTION] * 3 + ["Another?"]
    assert len(load(root / "train_spider.json", "train").dialogues) == 3  # a file is taken as it is
    assert capsys.readouterr().out == ""
    with pytest.raises(UserError, match="leave some of the 1 databases of train"):
        load(root, "held_out", held_out=1)


@pytest.mark.parametrize(("train", "dev"), [("train/", "dev_20240627/"), ("", ""), ("train/", "")])
def test_bird_layouts(tiny, tmp_path, train, dev):
    plain = {k: v for k, v in BIRD.items() if k not in ("difficulty", "question_id")}  # as in its train
    files = {f"{train}train.json": [plain], f"{train}train_tables.json": TABLES}
    files |= {f"{dev}dev.json": [BIRD], f"{dev}dev_tables.json": TABLES}
    lay_out(tiny.folder, tmp_path, files, f"{train}train_databases")
    shutil.copytree(tmp_path / f"{train}train_databases", tmp_path / f"{dev}dev_databases")
    evidence = "from France refers to country = 'france'"
    for split, difficulty in (("train", ""), ("dev", "moderate")):
        dataset = load(tmp_path, split)
        (turn,) = dataset.dialogues[0].turns
        assert turn == question(QUESTION, turn.source, evidence, difficulty)
        assert f"{split}_databases" in str(dataset.schemas["music"].path)
        assert examples(dataset.dialogues) == [example_after(dataset.dialogues[0], [])] == [turn]
    with pytest.raises(UserError, match="has no test split"):
        load(tmp_path, "test")


def test_other_layouts(tiny, tmp_path):
    cases = {  # folder: split, files, folder of databases, question, difficulty
        "synsql": ("train", {"data.json": [SYNSQL]}, "databases", QUESTION, "Highly Complex"),
        "syn": ("train", {"train_spider.json": [SYN]}, "database", "Which vocalists?", ""),
        "dk": ("dev", {"Spider-DK.json": [SPIDER | {"type": 1}]}, "database", QUESTION, ""),
        "realistic": ("dev", {"spider-realistic.json": [SPIDER]}, "database", QUESTION, ""),
        "sparc": ("dev", {"dev.json": [DIALOGUE]}, "database", QUESTION, ""),
        "cosql": ("dev", {"sql_state_tracking/cosql_dev.json": [DIALOGUE]}, "database", QUESTION, ""),
    }
    for name, (split, files, databases, asked, difficulty) in cases.items():
        root = lay_out(tiny.folder, tmp_path / name, files | {"tables.json": TABLES}, databases)
        expected = question(asked, str(root / next(iter(files))), "", difficulty)
        assert load(root, split).dialogues[0].turns == (expected,), name
        assert load(root / next(iter(files)), split).dialogues[0].turns == (expected,), name
    mixed = tmp_path / "mixed.json"  # as in SkyRL-SQL's training set, of SynSQL and Spider
    mixed.write_text(json.dumps([SYNSQL, SPIDER, DIALOGUE]))
    chosen = {"tables": str(tiny.folder / "tables.json"), "databases": str(tiny.folder / "database")}
    assert [d.turns[0].gold_sql for d in load(mixed, **chosen).dialogues] == [GOLD] * 3
    root = tmp_path / "sparc"
    (root / "tables.json").write_text("[]")  # named ones win over those beside the data
    assert load(root, **chosen).schemas["music"].path == tiny.schema.path
    (root / "tables.json").unlink()
    with pytest.raises(UserError, match=r"tables\.json: No such file"):
        load(root)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "holds no dialogue or question"),
        ([SPIDER, "text"], "item 1, is no dialogue or question"),
        ([SPIDER, 7], "item 1, is no dialogue or question"),
        ([SPIDER, {}], "item 1, is no .*none of interaction, SpiderSynQuestion, SQL, query, sql"),
        ([{k: v for k, v in SYN.items() if k != "query"}], "item 0, is no .*'query'"),
        ([BIRD | {"SQL": None}], "item 0, is no .*SQL is no text"),
        ([SPIDER, SPIDER | {"db_id": "../music"}], r"item 1: database '\.\./music' is not in"),
        ({"data": [SPIDER]}, "should hold a list"),
        ([DIALOGUE | {"interaction": []}], "item 0, is no .*interaction is empty"),
        ([DIALOGUE | {"interaction": [TURN, {"utterance": "a"}]}], "item 0, is no .*'query'"),
    ],
)
def test_hostile_items_are_named(dataset_of, content, message):
    with pytest.raises(UserError, match=message) as error:
        dataset_of(content)
    assert "items.json" in str(error.value) and "\n" not in str(error.value)


def test_several_sources_are_one_dataset(tiny, tmp_path, capsys):
    files = {"dev.json": [SPIDER], "tables.json": TABLES}
    folder, mix = lay_out(tiny.folder, tmp_path / "spider", files, "database"), tmp_path / "mix.json"
    gone, bird = SPIDER | {"db_id": "gone", "source": "spider"}, BIRD | {"evidence": None}
    mix.write_text(json.dumps([DIALOGUE | {"source": "sparc"}, gone, bird]))
    where = {"tables": str(tiny.folder / "tables.json"), "databases": str(tiny.folder / "database")}
    where["allow_missing"] = True
    dataset = load(folder, more=[mix], **where)
    assert [d.id for d in dataset.dialogues] == ["00000", "00001", "00003"]
    sources = [str(folder / "dev.json"), "sparc", str(mix)]
    assert [(e.source, e.knowledge) for e in examples(dataset.dialogues)] == [(s, "") for s in sources]
    assert dict(dataset.missing) == {"spider": 1}
    assert capsys.readouterr().out == "left out 1 dialogues of spider: their database is missing\n"
    mix.write_text(json.dumps([gone]))
    with pytest.raises(UserError, match="no dialogue or question whose database"):
        load(mix, **where)
    another = lay_out(tiny.folder, tmp_path / "other", files, "database")
    someone = "insert into singer values (0, 'someone', 'peru', 30, 1)"
    make_database(another / "database/music/music.sqlite", someone)
    with pytest.raises(UserError, match="two sources have different databases 'music'"):
        load(folder, more=[another])


def test_what_cannot_be_scored_is_counted_by_source(dataset_of, capsys):
    good, bad = SPIDER | {"source": "a"}, SPIDER | {"source": "b", "query": "SELECT"}
    dataset = dataset_of([good, good, bad, good | {"source": "b"}])
    asked, why = examples(dataset.dialogues), "their gold SQL does not run"
    kept = scorable(asked, Scorer(dataset.schemas, Executor()))
    assert len(kept) == 3
    print_left_out(asked, kept, why)
    assert capsys.readouterr().out == f"left out 1 of 2 questions of b: {why}\n"


def test_gold_that_ex_repairs_runs(tiny):
    assert tiny.scorer.runs("music", "SELECT name FROM singer WHERE age > = 30")


def test_broken_tables_are_named(tiny, tmp_path):
    entry = json.loads(TABLES)[0]
    lacking = {k: v for k, v in entry.items() if k != "foreign_keys"}
    for broken in ([3], [{}], [lacking], [entry | {"foreign_keys": [[1, 2, 3]]}]):
        tables = tmp_path / "tables.json"
        tables.write_text(json.dumps(broken))
        with pytest.raises(UserError, match=r"tables\.json, item 0: expected a database"):
            load_schemas(tables, tiny.folder / "database")


def test_what_is_no_json_is_named(tmp_path):
    path = tmp_path / "odd.json"
    for text in ("{", "[" + "1" * 5_000 + "]", "[" * 200_000):
        path.write_text(text)
        with pytest.raises(UserError, match=r"odd\.json is not valid JSON"):
            read_json(path)


def test_bird_descriptions_stand_behind_their_columns_in_the_paper_text_only(tiny, tmp_path):
    root = lay_out(tiny.folder, tmp_path, {"tables.json": TABLES}, "database")
    folder = root / "database" / "music" / "database_description"
    folder.mkdir()
    header = "original_column_name,column_name,column_description,data_format,value_description\n"
    rows = "id,,id,integer,\nName ,,The stage name.,text,\nlabel_id,Label ID,,integer,\n"
    rows += 'country,,,text,"commonsense evidence:\n• none: unknown"\n'
    rows += f"age,,{'years ' * 40},integer,\nabsent,,A column that the table lacks,text,\n"
    # As released: a byte order mark, other bytes than UTF-8, other capitals, cells over several lines.
    (folder / "Singer.csv").write_bytes(b"\xef\xbb\xbf" + (header + rows).encode() + b"x,\x96,,,\n")
    (folder / "labels.csv").write_text(header + "city,,A file under another name,text,\n")
    schema = load_schemas(root / "tables.json", root / "database")["music"]
    assert schema.text(compact=True) == tiny.schema.text(compact=True)
    described = schema.text(compact=False)
    for line in (
        "    name text, -- The stage name.",
        "    country text, -- commonsense evidence: • none: unknown",
        f"    age number, -- {('years ' * 40)[:97]}...",
    ):
        assert line in described.splitlines()
    assert described.count(" -- ") == 3
    plain = [line.split(" -- ")[0] for line in described.splitlines()]
    assert plain == tiny.schema.text(compact=False).splitlines() and " -- " not in tiny.schema.text(False)
    (folder / "label.csv").write_text(header + "city,," + "x" * 200_000)
    with pytest.raises(UserError, match=r"label\.csv is not valid CSV"):
        load_schemas(root / "tables.json", root / "database")


def test_synsql_comments_are_descriptions(tiny, tmp_path):
    (entry,) = json.loads(TABLES)
    entry["ddls"] = ["CREATE TABLE ..."]
    entry["column_names"][2][1] = "Where the label has its seat"
    entry["primary_keys"] = [1, [3, 4]]  # SynSQL's form of a key of two columns
    (tmp_path / "tables.json").write_text(json.dumps([entry]))
    text = load_schemas(tmp_path / "tables.json", tiny.folder / "database")["music"].text(compact=False)
    assert "    city text, -- Where the label has its seat\n    primary key (id)\n)" in text
    assert "    country text,\n" in text and "primary key (id, name)" in text


def test_an_evaluation_of_bird_reports_its_ex_by_name(tiny, tmp_path):
    ordered = BIRD | {"SQL": "SELECT country FROM singer ORDER BY age"}
    lay_out(tiny.folder, tmp_path, {"dev.json": [BIRD, ordered], "dev_tables.json": TABLES}, "dev_databases")
    config = EvaluateArgs(model="", out="", data=(str(tmp_path),))
    dataset = load_split(config, "dev")
    environment = make_environment(config, dataset, tiny.tokens, "both")
    scorer = Scorer(environment.schemas, environment.executor)
    asked = examples(dataset.dialogues)
    played = demonstrated(environment, asked)
    example, trajectory = played[1]
    trajectory.answer_sql = "SELECT country FROM singer ORDER BY name DESC"  # another order: wrong in Spider
    records = scored(tiny, played, scorer)
    assert [(r["ex"], r["ex_bird"]) for r in records] == [(1, 1), (0, 1)]
    by_bird = Scorer(environment.schemas, environment.executor, "bird")
    sampled = [scored(tiny, pairs, by_bird) for pairs in (played, [(e, played[0][1]) for e in asked])]
    assert [[r["ex"] for r in run] for run in sampled] == [[1, 1], [1, 0]]
    assert summarise(sampled[0])["ex"]["by_difficulty"] == {"moderate": 1}
    assert add_votes(sampled[0], sampled, by_bird)["pass_at_k"] == {"1": 0.75, "2": 1}
    rewards = (make_reward("", s, tiny.tokens.tokenizer.decode, 6) for s in (scorer, by_bird))
    assert [reward(trajectory, example).ex for reward in rewards] == [0, 1]
    shown = [" ".join(line.split()) for line in format_summary(summarise(records)).splitlines()]
    assert "EX of BIRD (set of rows) 100.0 %" in shown


def test_a_gold_sql_that_sqlglot_cannot_read_is_trained_on_and_scored(tiny, dataset_of):
    """As SQLite runs it; EX stands in for its clause F1."""
    golds = ["VALUES (1)", "SELECT CAST(age AS unsigned big int) FROM singer"]
    golds.append("SELECT age AS 'n' -- only\n FROM singer")
    dataset = dataset_of([SPIDER | {"query": sql} for sql in golds])
    scorer = Scorer(dataset.schemas, Executor())
    asked = scorable(examples(dataset.dialogues), scorer)
    assert [e.gold_sql for e in asked] == golds
    for sql in golds[:2]:
        with pytest.raises(SqlParseError):
            clause_f1(sql, sql, scorer.schemas["music"])
        assert scorer.clause_f1("music", sql, sql) == 1.0
        assert scorer.clause_f1("music", sql, "SELECT name FROM singer") == 0.0
    played = demonstrated(environment_of(tiny), asked)
    assert [(r["ex"], r["gold_problem"]) for r in scored(tiny, played, scorer)] == [(1, None)] * 3
    played.append((replace(asked[0], gold_sql="SELECT nothing"), played[0][1]))  # one that does not run
    assert summarise(scored(tiny, played, scorer))["ex"]["mean"] == 0.75


def test_toy_singles_are_the_first_turns_of_the_toy_dialogues(tmp_path):
    splits = {"train": {"known": (3, 4)}, "dev": {"known": (1, 2)}, "test": {"known": (1, 2)}}
    for name in ("dialogues", "single"):
        toy.write_benchmark(tmp_path / name, seed=0, single=name == "single", splits=splits)
    dialogues, single = tmp_path / "dialogues", tmp_path / "single"
    for file in ("tables.json", "database/music_train_000/music_train_000.sqlite"):
        assert (dialogues / file).read_bytes() == (single / file).read_bytes()
    item = json.loads((single / "train_spider.json").read_text())[0]
    assert item.keys() == {"db_id", "question", "query"} and not (single / "train.json").exists()
    for split in ("train", "dev", "test"):
        whole, firsts = load(dialogues, split).dialogues, load(single, split).dialogues
        assert all(len(d.turns) == 1 and d.turns[0].source.endswith(".json") for d in firsts)
        turns = [[replace(d.turns[0], source="") for d in dialogues] for dialogues in (whole, firsts)]
        assert turns[0] == turns[1]
    whole, firsts = (json.loads((at / "scripted_mistakes.json").read_text()) for at in (dialogues, single))
    assert [by_turn[:1] for by_turn in whole] == firsts and any(firsts)


# Real questions, played well by our agent; the training mix


def test_a_good_agent_earns_all_that_there_is_and_is_exported(tiny):
    """Of the sample of SParC's dev set in tests/data."""
    config = EvaluateArgs(data=(str(SAMPLE),), model="none", out="none", wording="compact")
    split = load_split(config, "dev")
    environment = make_environment(config, split, tiny.tokens, "both")
    scorer = Scorer(environment.schemas, environment.executor)
    asked = examples(split.dialogues)
    assert len(split.dialogues) == 40 and len(asked) == 115
    assert [scorer.gold_problem(e.db_id, e.gold_sql) for e in asked] == [None] * 115
    for example, trajectory in demonstrated(environment, asked):
        assert trajectory.status is Status.ANSWERED, example.id
        earned = reward(trajectory, example, scorer, PRESETS["process"])
        assert (earned.ex, earned.em, earned.parts["proposal"]) == (1, 1, 1), example.id
        if trajectory.messages <= 3:  # the agent suspects an empty result or a lone zero, and looks again
            assert trajectory.off_protocol == 0 and earned.parts["e_verify"] == 1
            assert earned.parts["m_verify"] == (1 if example.history else 0)
        record = chat_record(trajectory, example, environment)
        assert record["messages"][-1]["content"].endswith(f"<answer_sql>{example.gold_sql}</answer_sql>")


def test_the_training_mix_is_made_of_the_official_layouts(tmp_path):
    dialogues = json.loads((SAMPLE / "dev.json").read_text())
    firsts = [{"db_id": d["database_id"]} | d["interaction"][0] for d in dialogues]
    singles = [first | {"question": first["utterance"]} for first in firsts]
    turns = [len(d["interaction"]) for d in dialogues]
    cosql = json.loads(json.dumps(dialogues))
    cosql[0]["interaction"][1]["utterance"] = "I AM GPT"
    cosql[1]["interaction"][0]["utterance"] = "their ids\nExpert: WHAT ARE THEIR NAMES"
    cosql[2]["interaction"][-1]["utterance"] += "\nand no more"  # one speaker's second line
    elsewhere = singles[0] | {"db_id": "elsewhere"}
    files = {
        "spider": {"train_spider.json": [*singles, elsewhere], "train_others.json": singles},
        "sparc": {"train.json": dialogues},
        "cosql": {"sql_state_tracking/cosql_train.json": cosql},
    }
    out = tmp_path / "data" / "real" / "train_mix.json"
    options, tables = ["--out", str(out)], (SAMPLE / "tables.json").read_text()
    for name, own in files.items():
        root = lay_out(SAMPLE, tmp_path / name, own | {"tables.json": tables}, "database")
        options += [f"--{name}", str(root)]
    make_mix.main(options)
    made = json.loads(out.read_text())
    assert {key for dialogue in made for key in dialogue} == {"database_id", "interaction", "source"}
    assert Counter(d["source"] for d in made) == {"spider": 40, "sparc": 40, "cosql": 39}
    of_cosql = 115 - (turns[0] - 1) - turns[1]
    assert sum(len(d["interaction"]) for d in made) == 40 + 115 + of_cosql
    where = {"tables": str(SAMPLE / "tables.json"), "databases": str(SAMPLE / "database")}
    # As training reads it.
    assert [d.turns[0].source for d in load(out, "train", **where).dialogues] == [d["source"] for d in made]
