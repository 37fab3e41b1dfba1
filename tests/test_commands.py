"""The command mtsql: what it lists, one GRPO step explained, grids of trainings."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ROOT, data_of, json_lines, rows_of, run

from evaluate import Args as EvaluateArgs
from mtsql.__main__ import COMMANDS
from mtsql.config import read_options
from mtsql.errors import UserError
from mtsql.extras import ablate, explain
from mtsql.extras.reproduce import python
from mtsql.task import begin_task, training_questions
from train_grpo import Args as GrpoArgs


def test_what_there_is_and_what_is_not():
    listed = run("-m", "mtsql")
    assert all(f"\n  {name} " in listed for name in COMMANDS)
    said = run("-m", "mtsql", "train", expect=2)
    assert said.startswith("error: mtsql train is unknown; choose from explain,")


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_a_command_does_without_importing_torch(name):
    code = f"import sys; sys.argv = ['mtsql', {name!r}, '--help']\nimport mtsql.__main__ as m\n"
    code += "try: m.main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.endswith("False\n") and len(done.stdout) > 200, done.stdout + done.stderr


STEP = f"--steps {explain.DRAWS} --prompts-per-step 1 --samples-per-prompt 6 --temperature 1.5 --seed 4"


@pytest.fixture(scope="module")
def explained(work, tmp_path_factory):
    """Options, and the step that they make."""
    given = [*data_of(work), "--out", tmp_path_factory.mktemp("e"), *STEP.split()]
    config = read_options(GrpoArgs, None, list(map(str, given)))
    task = begin_task(config, "train")
    return config, explain.one_step(config, task, training_questions(config, task)), task


def test_the_step_explained_is_the_step_that_is_trained(explained, work, tmp_path):
    _, step, _ = explained
    run("train_grpo.py", *data_of(work), "--out", tmp_path, *STEP.split())
    trained = next(r for r in rows_of(tmp_path / "metrics.csv") if float(r["informative_groups"]))
    for name in ("gradient_norm", "entropy", "learning_rate", "logprob_gap"):
        assert step.statistics[name] == pytest.approx(float(trained[name]), rel=1e-4, abs=1e-6), name
    records = json_lines(tmp_path / "trajectories.jsonl")
    records = [record for record in records if record["step"] == int(trained["step"])]
    assert [s.rewards.total for s in step.group] == pytest.approx([r["reward"] for r in records])


def test_pulls_are_advantages_over_lengths_and_add_up(explained):
    _, step, task = explained
    assert {sample.trajectory.advantage > 0 for sample in step.group} == {True, False}
    total = 0.0
    for sample, tokens in zip(step.group, step.tokens, strict=True):
        trajectory = sample.trajectory
        assert len(tokens) == trajectory.trained_length
        pull = trajectory.advantage / (len(step.group) * len(tokens))
        assert [token.pull for token in tokens] == pytest.approx([pull] * len(tokens), rel=1e-4)
        text = task.tokens.tokenizer.decode
        trained = [i for i, bit in zip(trajectory.ids, trajectory.loss_mask, strict=True) if bit]
        assert [token.text for token in tokens] == [text([i]).translate(explain.MARKS) for i in trained]
        total += sum(token.pull for token in tokens)
    assert step.loss == pytest.approx(-total, abs=1e-6)
    (best, *_), (worst, *_), *_ = step.shown()
    assert step.group[best].rewards.total > step.group[worst].rewards.total
    assert step.moved(best) > step.moved(worst)


def test_text_and_page_show_each_number(explained):
    config, step, task = explained
    decode = task.tokens.tokenizer.decode
    text, page = (explain.rendered(f"explain.{form}", config, step, decode) for form in ("txt", "html"))
    for shown in (text, page):
        assert step.group[0].example.gold_sql.split("'")[0] in shown
        assert f"{step.statistics['gradient_norm']:.4f}" in shown
        assert all(f"{sample.trajectory.advantage:+.3f}" in shown for sample in step.group)
    assert "\033" not in text and "\033[32m" in explain.rendered("explain.txt", config, step, decode, True)
    places = [places[0] for places in step.different()]
    assert "<script" not in page and page.count('class="token"') == sum(len(step.tokens[p]) for p in places)


def test_explaining_what_cannot_be_is_one_sentence(explained, work):
    config, _, task = explained
    calm = replace(config, temperature=1e-4)
    with pytest.raises(UserError, match="earn the same, so the step does nothing"):
        explain.one_step(calm, task, training_questions(config, task)[:1])
    said = run("-m", "mtsql.extras.explain", *data_of(work), "--question", "none/0", expect=2)
    assert "--question none/0 is not in the data" in said


GRID = ["--vary", "divide_by=group,none", "--vary", "tools=both,none", "--seeds", "0", "1", "--data", "D"]


def test_a_grid_is_commands_that_its_scripts_read(tmp_path):
    more = ["--out", str(tmp_path), "--steps", "3", "--history=predicted", "--dialogues", "7"]
    chosen, rest = ablate.read_arguments([*GRID, *more])
    cells = ablate.cells_of(chosen.vary)
    suite = ablate.suite_of(chosen, rest, cells)
    assert list(suite.arms)[:3] == ["start", "divide_by=group,tools=both", "divide_by=group,tools=none"]
    assert suite.sets.keys() == {"dev"}
    assert [pair[0] for pair in suite.pairs] == ["tools", "divide_by", "divide_by, tools"]
    parts = ablate.parts_of_grid(chosen, suite, cells)
    assert len(parts) == 1 + 2 * 8 and parts[0].title == "evaluate start on dev"
    training, evaluation = parts[-2:]
    config = read_options(GrpoArgs, None, training.command[1:])
    assert (config.seed, config.divide_by, config.tools, config.steps) == (1, "none", "none", 3)
    asked = read_options(EvaluateArgs, None, evaluation.command[1:])
    assert (asked.tools, asked.history, asked.split, asked.dialogues) == ("none", "predicted", "dev", 7)
    assert asked.model == f"{config.out}/policy"
    options = ablate.cells_of(["rewards=process|process,verify=0.2"]).values()
    assert list(options) == [{"rewards": "process"}, {"rewards": "process,verify=0.2"}]
    with pytest.raises(UserError, match="give --seeds"):
        ablate.suite_of(chosen, ["--seed", "3"], cells)
    cells = ablate.cells_of(["divide_by=group,nonsense"])
    with pytest.raises(SystemExit):  # before anything runs
        ablate.parts_of_grid(chosen, ablate.suite_of(chosen, rest, cells), cells)
    wrong = {"steps=3,3": "different values", "data=sparc,cosql": "a grid has one --data"}
    for vary, said in (wrong | {"steps": "--vary steps should be an option, =, and different"}).items():
        with pytest.raises(UserError, match=said):
            ablate.cells_of([vary])
    cells = ablate.cells_of(["model=models/toy/seed0,models/toy/seed1"])  # what each made is evaluated
    *_, evaluation = ablate.parts_of_grid(chosen, ablate.suite_of(chosen, rest, cells), cells)
    asked = read_options(EvaluateArgs, None, evaluation.command[1:])
    assert asked.model == f"{tmp_path}/seed1/model=models-toy-seed1/policy"


def test_a_branch_is_a_value(tmp_path, monkeypatch):
    def git(*words):
        subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *words], check=True, cwd=tmp_path)

    git("init", "-q", "-b", "main")
    for branch in ("main", "my-reward"):
        git("checkout", "-q", "-B", branch)
        (tmp_path / "train_grpo.py").write_text(branch)
        git("add", ".")
        git("commit", "-qm", branch)
    monkeypatch.chdir(tmp_path)
    given = ["--config", f"{ROOT}/configs/toy.toml", "--data", "D", "--out", "out"]
    chosen, rest = ablate.read_arguments(["--vary", "branch=main,my-reward", *given])
    cells = ablate.cells_of(chosen.vary)
    for cell in cells.values():
        ablate.clone(cell["branch"], chosen.out)
    parts = ablate.parts_of_grid(chosen, ablate.suite_of(chosen, rest, cells), cells)
    scripts = [Path(part.command[0]) for part in parts[1::2]]
    assert [script.read_text() for script in scripts] == ["main", "my-reward"]
    lacking = str(scripts[0].with_name("train_sft.py"))
    assert python([lacking])[1:] == [lacking]  # and not the module that is installed
    (tmp_path / "train_grpo.py").write_text("better")
    git("commit", "-aqm", "better")  # a run goes on with what was committed, or begins anew
    main, ours = ablate.cells_of(chosen.vary)
    assert main in cells and ours not in cells
    with pytest.raises(UserError, match="branch=none: git has no such branch"):
        ablate.cells_of(["branch=main,none"])
    git("branch", "same")
    with pytest.raises(UserError, match="two of these branches are one commit; commit the change"):
        ablate.cells_of(["branch=my-reward,same"])


def test_a_grid_is_made_into_a_page(work, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(ablate, "run_part", lambda _, command, done: done.exists() or run(*command))
    out = tmp_path / "o"
    given = "--vary divide_by=group,none --steps 1 --prompts-per-step 2 --samples-per-prompt 2 --dialogues 2"
    given = [*map(str, data_of(work)), "--out", str(out), *given.split()]
    ablate.main(*ablate.read_arguments([*given, "--dry-run"]))
    shown = capsys.readouterr().out
    assert shown.count("to do  python train_grpo.py") == 2 and shown.count("to do  python evaluate.py") == 3
    assert not out.exists()
    ablate.main(*ablate.read_arguments(given))
    page, rows = (out / "ablation.md").read_text(), (out / "ablation.json").read_bytes()
    assert "| `start` | what all begin with |" in page
    assert "| divide_by | `divide_by=none` - `divide_by=group` |" in page
    assert "of one seed none is in bold" in page and "**+" not in page.split("## dev")[1]
    assert "## During RL" in page
    ablate.main(*ablate.read_arguments(given))  # nothing is left to do
    with pytest.raises(UserError, match="is of other options; give another --out"):
        ablate.main(*ablate.read_arguments([*given, "--learning-rate", "0.5"]))
    ablate.main(*ablate.read_arguments([*given, "--page"]))
    assert (out / "ablation.json").read_bytes() == rows
