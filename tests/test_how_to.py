"""Every block of Python in docs/how_to.md runs as it stands, and does what the page says."""

import json
import re
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from conftest import EXAMPLE, GOLD, QUESTION, ROOT, SAMPLE, Tiny, data_of, environment_of, rows_of, say
from jinja2 import ChoiceLoader, DictLoader

import train_grpo
from mtsql.agent.env import Episode, Recipe
from mtsql.agent.tools import make_tools
from mtsql.agent.trajectory import Status
from mtsql.config import Data, read_options
from mtsql.data import datasets
from mtsql.data.datasets import load_dataset
from mtsql.data.schema import load_schemas
from mtsql.extras.chat.conversation import read_schema
from mtsql.learn.samples import Sample
from mtsql.recipes import prompt_options
from mtsql.recipes.mtsql_r1 import make_recipe, tool_call
from mtsql.recipes.prompt_options import PromptOptions
from mtsql.recipes.rewards import Rewards
from mtsql.task import load_split
from train_grpo import Args as GrpoArgs

PAGE = (ROOT / "docs" / "how_to.md").read_text(encoding="utf-8")
BLOCKS = {
    heading: re.findall(r"```(?:python|diff)\n(.*?)```", section, re.DOTALL)
    for heading, section in re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
}
WRONG = "SELECT name FROM singer WHERE country = 'France'"
COMPACT = PromptOptions(compact=True)
ABLATIONS = "An ablation of a paper"


def run_block(heading: str, number: int = 0) -> dict:
    """The names that a block defines."""
    namespace = {"__name__": "how_to"}
    exec(compile(BLOCKS[heading][number], f"how_to.md, {heading}", "exec", dont_inherit=True), namespace)
    return namespace


def episode_of(tiny: Tiny, recipe: Recipe, tools: str = "no_memory") -> Episode:
    return environment_of(tiny, tools, recipe=recipe).episodes(EXAMPLE, [0])[0]


def corrected(tiny: Tiny) -> Episode:
    """An episode with one wrong query, one right one, and the answer."""
    episode = episode_of(tiny, make_recipe(COMPACT))
    assert say(episode, tool_call("exec_sql", WRONG))
    assert say(episode, "<exec_verify>no_pass</exec_verify>" + tool_call("exec_sql", GOLD))
    assert not say(episode, f"<exec_verify>pass</exec_verify><answer_sql>{GOLD}</answer_sql>")
    return episode


def test_a_variant_of_the_loss_by_hand(tiny):
    page = run_block("A variant of the loss")
    # Trajectory 0 has log ratios 0.2 and 0, trajectory 1 has 0.1.
    ratios = page["gspo"](torch.tensor([0.2, 0.0, 0.1]), torch.tensor([0, 0, 1]))
    assert ratios.tolist() == pytest.approx([0.1, 0.1, 0.1])
    objective, advantage = torch.tensor([-5.0, -2.0, 1.2]), torch.tensor([-1.0, -1.0, 1.0])
    assert page["dual_clip"](objective, advantage).tolist() == pytest.approx([-3, -2, 1.2])
    logprobs = torch.tensor([-1.5], requires_grad=True)
    estimate = page["k2"](logprobs, torch.tensor([-1.0]))
    estimate.backward()
    assert (estimate.item(), logprobs.grad.item()) == pytest.approx((0.125, -0.5))
    trajectory = corrected(tiny).trajectory
    sample = Sample(trajectory, EXAMPLE, Rewards(1, 1, 2, {}))
    assert page["overlong"](sample)
    trajectory.status = Status.OUT_OF_TOKENS
    assert not page["overlong"](sample)


@pytest.mark.parametrize("heading", BLOCKS)
def test_no_more_than_fifteen_lines_of_code_and_eight_of_an_edit(heading):
    blocks = [[line for line in block.splitlines() if line.strip()] for block in BLOCKS[heading]]
    if heading == ABLATIONS:
        assert all(sum(line[0] in "+-" and line[:3] != "---" for line in block) <= 8 for block in blocks)
    else:
        assert 0 < sum(map(len, blocks)) <= 15


def module_of(name: str, source: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the changed source of one of the project's files makes."""
    module = ModuleType(f"{name}_of_the_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
    return module


def edited(number: int, path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of `path` after one of the page's edits, which may change prompts as well."""
    files = {path: (ROOT / path).read_text(encoding="utf-8")}
    for part in re.split(r"^--- ", BLOCKS[ABLATIONS][number], flags=re.MULTILINE)[1:]:
        name, _, changes = part.strip("\n").partition("\n")
        text = files.get(name) or (ROOT / name).read_text(encoding="utf-8")
        for change in changes.split("\n\n"):
            lines = change.splitlines()
            before, after = ([line[1:] for line in lines if line[0] in kinds] for kinds in (" -", " +"))
            old = "\n".join(before if after else [*before, ""])
            assert text.count(old) == 1
            text = text.replace(old, "\n".join(after))
        files[name] = text
    prompts = DictLoader({name.rpartition("/")[2]: text for name, text in files.items()})
    templates = prompt_options.TEMPLATES
    overlaid = templates.overlay(loader=ChoiceLoader([prompts, templates.loader]))
    monkeypatch.setattr(prompt_options, "TEMPLATES", overlaid)
    return module_of(path, files[path], monkeypatch)


@pytest.mark.parametrize(
    ("number", "name", "told", "no_longer"),
    [
        (0, "sql_trail", "\n3. Before generating the final", ["identify all tables and"]),
        (1, "sql_trail", "<observation>\n0       24.75\n</observation>", ["AVG(price)\n0"]),
        (2, "sql_trail", " label, singer\n\nExternal", ["label_id", "a database schema", "In your first"]),
        (3, "skyrl_sql", " label, singer\n\nExternal", ["label_id", "a database schema", "This schema"]),
        (4, "mtir_sql", "assistant.\nYou provide the final SQL", ["think", "Correctness", "tool"]),
    ],
)
def test_an_edit_changes_the_prompt(tiny, monkeypatch, number, name, told, no_longer):
    module = edited(number, f"mtsql/recipes/{name}.py", monkeypatch)
    tools = make_tools("none" if name == "mtir_sql" else "no_memory")
    (message,), _ = module.make_recipe(PromptOptions()).prompt(EXAMPLE, tiny.schema, tools)
    assert told in message["content"]
    assert [words for words in no_longer if words in message["content"]] == []


def test_edits_change_how_a_result_is_shown_and_an_answer_is_read(monkeypatch):
    table = edited(1, "mtsql/recipes/sql_trail.py", monkeypatch).make_recipe(PromptOptions()).table
    assert table([["name", "n"], ["Anna", "1"], ["Bo", "12"]]) == "0  Anna   1\n1    Bo  12"
    assert table([["name"]]) == "Empty DataFrame"
    direct = edited(4, "mtsql/recipes/mtir_sql.py", monkeypatch).make_recipe(PromptOptions())
    assert direct.parse(direct.answer(GOLD)).well_formed


@pytest.mark.parametrize(("step", "total"), [(0, 1.0), (3, 1.5)])
def test_process_rewards_from_the_second_level(monkeypatch, step, total):
    module = edited(5, "train_grpo.py", monkeypatch)
    config = GrpoArgs(data=(), out="", model="", steps=4, prompts_per_step=1)
    earned = Rewards(1.0, 0.0, 1.5, {"proposal": 1.0})

    task = SimpleNamespace(
        processes=SimpleNamespace(share=list, gather=list),
        sample=lambda numbered, count, *_: [(example, [None] * count) for _, example in numbered],
    )
    ((paid, *_),) = module.sample_groups(config, task, lambda t, e: earned, [[EXAMPLE], [EXAMPLE]], step)
    assert (paid.rewards.total, paid.rewards.parts) == (total, earned.parts)


def test_edits_choose_questions_and_set_the_optimizer(tiny, monkeypatch):
    empty = replace(EXAMPLE, gold_sql="SELECT name FROM singer WHERE age > 99")
    assert edited(6, "mtsql/sql/score.py", monkeypatch).scorable([EXAMPLE, empty], tiny.scorer) == [EXAMPLE]
    optimizer = edited(7, "mtsql/learn/model.py", monkeypatch)
    made = optimizer.make_optimizer(torch.nn.Linear(1, 1), 0.1).defaults
    assert (made["betas"], made["weight_decay"]) == ((0.9, 0.95), 0.01)
    assert optimizer.cosine_rate(1.0, 0.05) == pytest.approx(0.5, abs=0.01)


def test_other_questions_take_the_place_of_groups_without_variance(work, tmp_path, monkeypatch):
    words = [*data_of(work), "--temperature", "0.3", "--steps", 1, "--prompts-per-step", 4]
    words += ["--samples-per-prompt", 2]
    informative = []
    for number, module in enumerate((train_grpo, edited(8, "train_grpo.py", monkeypatch))):
        out = tmp_path / str(number)
        assert module.main(read_options(GrpoArgs, "", [*map(str, words), "--out", str(out)])) == 0
        informative += [float(row["informative_groups"]) for row in rows_of(out / "metrics.csv")]
    assert informative[0] < informative[1]


@pytest.mark.parametrize("compact", [True, False])
def test_a_tool(tiny, monkeypatch, compact):
    source, tools = (ROOT / "mtsql" / "agent" / "tools.py").read_text(encoding="utf-8"), "\nTOOLS = (\n"
    assert source.count(tools) == 1
    source = source.replace(tools, f"\n{BLOCKS['A tool'][0]}\n{tools}    COLUMN_VALUES,\n")
    chosen = module_of("tools", source, monkeypatch).make_tools("both")
    assert set(chosen) == {*make_tools("both"), "column_values"}
    (episode,) = replace(environment_of(tiny, compact=compact), tools=chosen).episodes(EXAMPLE, [0])
    assert "column_values" in tiny.tokens.decode(episode.trajectory.ids)
    assert say(episode, tool_call("column_values", "singer.country"))
    assert say(episode, tool_call("column_values", "singer.continent"))
    shown, unknown = episode.trajectory.observations
    assert shown.text == "None, france, italy" and "continent" in unknown.text
    assert episode.trajectory.actions == []  # its argument is no candidate
    assert say(episode, tool_call("exec_sql", GOLD))
    assert not say(episode, f"<exec_verify>pass</exec_verify><answer_sql>{GOLD}</answer_sql>")
    assert (episode.trajectory.answer_sql, episode.trajectory.off_protocol) == (GOLD, 0)


def test_a_recipe(tiny):
    module = run_block("A recipe")
    recipe = module["make_recipe"](PromptOptions())
    reward = module["make_reward"]("", tiny.scorer, None, 4)
    episode = episode_of(tiny, recipe)
    assert say(episode, "<think>Who is there?</think><sql>SELECT name, age FROM singer</sql>")
    assert "name,age\nAnna,31\nBruno,45\nCarla,27" in episode.trajectory.observations[0].text
    assert not say(episode, f"<think>France.</think><solution>{GOLD}</solution>")
    assert reward(episode.trajectory, EXAMPLE).total == 1


def test_a_reward(tiny):
    reward = run_block("A reward")["make_reward"]("", tiny.scorer, tiny.tokens.decode, 5)
    right = reward(corrected(tiny).trajectory, EXAMPLE)
    assert (right.ex, right.em, right.parts) == (1, 1, {"interactions": 2})
    assert right.total == pytest.approx(0.8)
    wrong = episode_of(tiny, make_recipe(COMPACT), "none")
    assert not say(wrong, f"<answer_sql>{WRONG}</answer_sql>")
    assert reward(wrong.trajectory, EXAMPLE).total == 0


def test_an_advantage():
    rewards = torch.tensor([[0.0, 1.0, 2.0, 1.0], [0.5, 0.5, 0.5, 0.5]])
    advantages = run_block("An advantage")["by_range"](rewards)
    assert advantages.tolist() == [[-0.5, 0.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]]


def test_a_metric(tiny):
    first_try = run_block("A metric")["first_try"]
    assert first_try(corrected(tiny).trajectory, EXAMPLE, tiny.scorer) == 0
    at_once = episode_of(tiny, make_recipe(COMPACT), "none")
    assert first_try(at_once.trajectory, EXAMPLE, tiny.scorer) == 0
    assert not say(at_once, f"<answer_sql>{GOLD}</answer_sql>")
    assert first_try(at_once.trajectory, EXAMPLE, tiny.scorer) == 1


def test_data_efficiency_counts_a_question_once(tmp_path):
    kept = [json.dumps({"example_id": name}) for name in ("00000/0", "00000/0", "00001/0")]
    (tmp_path / "trajectories.jsonl").write_text("\n".join(kept))
    (tmp_path / "asked.json").write_text('["00001/0", "00002/0", "00003/0"]')
    evaluations = [tmp_path / "before", tmp_path / "after"]
    for folder, mean in zip(evaluations, (0.5, 0.52), strict=True):
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps({"ex": {"mean": mean}}))
    found = run_block("Data efficiency")["data_efficiency"](*evaluations, tmp_path, tmp_path)
    assert found == pytest.approx(2 / 4 * 1000)  # two points by four questions


def test_a_tracker(tmp_path, monkeypatch):
    sent = []
    run = SimpleNamespace(log=lambda row, step: sent.append((step, row)))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None, init=lambda **how: run))
    run_block("A tracker")["TrackedLog"](tmp_path / "metrics.csv").append({"step": 3, "reward": 0.5})
    assert sent == [(3, {"metrics/step": 3, "metrics/reward": 0.5})]
    assert (tmp_path / "metrics.csv").read_text() == "step,reward\n3,0.5\n"


def test_a_dataset_of_single_questions(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets, "FORMATS", dict(datasets.FORMATS))
    run_block("A dataset", 0)
    data = tmp_path / "mine.json"
    item = {"nl_question": QUESTION, "gold": GOLD, "hint": "lower case", "db_id": "music"}
    data.write_text(json.dumps([item]))
    dataset = load_dataset([(data, tiny.folder / "tables.json", tiny.folder / "database")])
    turn = dataset.dialogues[0].turns[0]
    assert (turn.question, turn.gold_sql, turn.knowledge) == (QUESTION, GOLD, "lower case")


def test_a_dataset_of_dialogues(tiny, tmp_path):
    for name in ("tables.json", "database"):
        (tmp_path / name).symlink_to(tiny.folder / name)
    turns = [("How many singers are there?", "SELECT count(*) FROM singer"), (QUESTION, GOLD)]
    run_block("A dataset", 1)["write_sparc"]([("music", turns)], tmp_path / "dev.json")
    dialogue = load_split(Data(data=(str(tmp_path),), out=""), "dev").dialogues[0]
    assert [(turn.question, turn.gold_sql) for turn in dialogue.turns] == turns


def test_tables_json_of_databases_of_ones_own(tmp_path):
    folder = SAMPLE / "database"
    files = sorted(folder.glob("*/*.sqlite"))
    entries = [run_block("A tables.json")["tables_entry"](path) for path in files]
    (tmp_path / "tables.json").write_text(json.dumps(entries))
    schemas, linked = load_schemas(tmp_path / "tables.json", folder), 0
    for path in files:
        for own, other in zip(schemas[path.stem].tables, read_schema(path).tables, strict=True):
            assert (own.name, own.columns, own.example_row) == (other.name, other.columns, other.example_row)
            assert set(own.primary_keys) == set(other.primary_keys)
            folded = [{tuple(map(str.lower, key)) for key in t.foreign_keys} for t in (own, other)]
            assert folded[0] <= folded[1]
            linked += len(folded[0])
    assert linked > 10
