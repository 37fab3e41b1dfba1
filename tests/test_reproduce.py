"""The suites: their commands are valid and in order, and are not run twice; a page is made of rows."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from conftest import ROOT, run, write_lines
from matplotlib.image import imread

from evaluate import Args as EvaluateArgs
from mtsql.config import read_options
from mtsql.errors import UserError
from mtsql.extras import curriculum
from mtsql.extras.reproduce import Part, refuse_other_options, run_part
from mtsql.extras.reproduce.page import estimate, signed, with_interval, write_page
from mtsql.extras.reproduce.suites import SUITES, Arm, Suite, Training, parts_of
from mtsql.recipes import RECIPES
from mtsql.toy.benchmark import MODELS_SEED
from mtsql.toy.imitation import ImitationConfig
from train_grpo import Args as GrpoArgs
from train_sft import Args as SftArgs

PAGES = [p for name in ("real", "recipes", "suite_*") for p in sorted(ROOT.glob(f"docs/results/{name}.json"))]

SCRIPTS = {"train_sft.py": SftArgs, "train_grpo.py": GrpoArgs, "evaluate.py": EvaluateArgs}
SCRIPTS |= {"mtsql.toy.imitation": ImitationConfig, "mtsql.extras.curriculum": curriculum.Args}
SETS = {"test": "", "themes": ""}
TRAININGS = {"rl": Training("train_grpo.py"), "sft": Training("train_sft.py")}
ARMS = {"warm": Arm("warm start", "sft"), "rl": Arm("after RL", "rl"), "cut": Arm("cut", "rl", "", ("test",))}
PAIRS = (("what RL is worth", "rl", "warm"),)
SMALL = Suite("A small suite", "", "", SETS, TRAININGS, ARMS, PAIRS, once=("sft",), benchmark="made")
PAGE_OF = "python reproduce.py --suite small"


def listed(*words) -> list[list[str]]:
    """The commands that reproduce.py --list shows, as words."""
    lines = run("reproduce.py", "--list", *words).splitlines()
    assert all(line.startswith(("to do  python ", "done   python ")) for line in lines)
    return [line[14:].split() for line in lines]


@pytest.mark.parametrize("name", SUITES)
def test_commands_are_valid_and_come_after_what_they_need(name, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [] if SUITES[name].benchmark else ["--data", "D", "--model", "base"]
    words += ["--other", "O"] if name == "sparc" else []
    made = {"base", "models/toy/seed0"}
    asked, budgets, evaluated = {}, set(), []
    for command in listed("--suite", name, *words, "--seeds", 0, 3, "--out", tmp_path):
        words = command[1:] if command[0] == "-m" else command
        if words[0] == "mtsql.toy.benchmark":
            made.add(words[1])
            continue
        config = read_options(SCRIPTS[words[0]], "", words[1:])
        assert f"seed{config.seed}/" in config.out
        assert {*config.data} <= made or config.data[0].startswith(("D", "O"))
        assert words[0] == "mtsql.toy.imitation" or config.model in made, command
        assert getattr(config, "curriculum", "") in {*made, ""}, command
        made |= {config.out, *(f"{config.out}/{done}" for done in ("policy", "counts.jsonl"))}
        made |= {f"{config.out}/policies/round_{n}" for n in range(1, getattr(config, "rounds", 0))}
        if isinstance(config, EvaluateArgs):
            *_, dataset, arm = config.out.split("/")
            asked.setdefault(arm, []).append(dataset)
            evaluated.append(replace(config, out=""))
        elif isinstance(config, GrpoArgs):
            budgets.add((config.steps, config.prompts_per_step, config.samples_per_prompt))
    assert len(set(evaluated)) == len(evaluated)  # each arm is one of its own
    arms, sets = SUITES[name].arms, SUITES[name].sets
    there = [dataset for dataset in sets if name != "cosql" or dataset == "cosql"]
    assert asked.keys() == arms.keys() and len(budgets) == 1
    assert all({*asked[arm]} == {*(spec.sets or there)} & {*there} for arm, spec in arms.items())
    assert all(pair[1] in arms and pair[2] in arms for pair in SUITES[name].pairs)


def configs(name: str, model: str = "base") -> dict:
    """The parsed options of every part of a seed, by title."""
    places = {"data": "data", "other": "other", "model": model, "rank": "16"}
    parts = parts_of(SUITES[name], Path("runs"), 0, places)
    words = {part.title: part.command[part.command[0] == "-m" :] for part in parts}
    return {title: read_options(SCRIPTS[found[0]], "", found[1:]) for title, found in words.items()}


def test_arms_differ_in_what_they_are_named_after(monkeypatch):
    monkeypatch.chdir(ROOT)
    parts = configs("toy")
    assert (parts["rl_outcome"].rewards, parts["rl_process"].rewards) == ("outcome", "process")
    assert (parts["short_rl"].lora_rank, parts["rl_process"].lora_rank) == (16, 0)  # that of the warm start
    for tools in ("no_execution", "no_memory"):
        trained = f"rl_{tools}_trained"
        assert {parts[f"sft_{tools}"].tools, parts[trained].tools} == {tools}
        assert parts[trained].model == f"runs/seed0/sft_{tools}/policy"
    final = parts["evaluate rl_process on test"]
    for arm, field, value in (
        ("rl_no_execution", "tools", "no_execution"),
        ("rl_process_predicted", "history", "predicted"),
        ("rl_cap_60", "max_response_tokens", 60),
        ("rl_no_memory_trained", "tools", "no_memory"),
    ):
        other = parts[f"evaluate {arm} on test"]
        different = {key for key in vars(final) if vars(final)[key] != vars(other)[key]}
        assert getattr(other, field) == value
        assert different == {field, "out", *(["model"] if "trained" in arm else [])}
    for name in ("quick", "toy"):
        # models/toy have seen train of this one
        assert SUITES[name].benchmark.endswith(f" --seed {MODELS_SEED}")


def test_the_recipes_have_their_own_settings(monkeypatch):
    monkeypatch.chdir(ROOT)
    parts = configs("recipes", "")
    for recipe, interactions in zip(RECIPES, (4, 4, 9, 5), strict=True):
        config = parts[f"{recipe}_rl"]
        assert config.recipe == parts[f"evaluate {recipe}_rl on test"].recipe == recipe
        assert config.max_interactions == interactions and config.model == "runs/seed0/imitation"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["toy", "--data", "D"], "--suite toy makes its own data"),
        (["sparc", "--data", "D"], "--suite sparc needs --data and --model"),
        (["real", "--data", "D", "--model", "M"], "--data D lacks real/train_mix.json, sparc/dev.json, "),
        (["recipes", "--page"], "has no finished evaluation of this suite yet"),
    ],
)
def test_wrong_input_is_answered_before_any_part_runs(words, said, tmp_path):
    printed = run("reproduce.py", "--suite", *words, "--out", tmp_path / "out", expect=2)
    assert said in printed and printed.count("\n") == 1 and not (tmp_path / "out").exists()


def test_estimates_by_hand():
    values = [("a", 1), ("a", 0), ("b", 1), ("b", 1)]
    found = estimate({0: values})
    # Drawn means 1/2, 3/4 and 1, the ends more than 2.5 % each, widened by the root of 2 for two databases.
    assert found.mean == 0.75 and found.by_seed == {0: 0.75}
    assert found.interval == pytest.approx((0.75 - 0.25 * 2**0.5, 0.75 + 0.25 * 2**0.5))
    assert found.sure and not estimate({0: [("a", 1), ("b", -1)]}).sure
    assert estimate({0: [("a", 1), ("a", 0)]}).interval is None
    assert estimate({0: values, 1: values}, other_seeds=True).interval == pytest.approx(found.interval)
    # Seeds of 0 and 1, databases alike: 12.7 standard errors of 1/2 with one degree of freedom.
    seeds = {0: [("a", 0), ("b", 0)], 1: [("a", 1), ("b", 1)]}
    assert estimate(seeds).interval == (0.5, 0.5)
    low, high = estimate(seeds, other_seeds=True, draws=100_000).interval
    assert (low, high) == pytest.approx((0.5 - 12.71 / 2, 0.5 + 12.71 / 2), rel=0.06)
    gained = [("a", 100), ("a", 0), ("b", 0), ("b", 0)]
    assert with_interval(estimate({0: gained}), signed) == "+25.0 [-10.4, +60.4]"


def lay_out(out: Path, arm: str, bits: str, seed: int = 0, dataset: str = "test") -> Path:
    """A finished evaluation over two databases, whose EM is that of the first question alone."""
    folder = out / f"seed{seed}" / "evaluation" / dataset / arm
    folder.mkdir(parents=True)
    ids = zip("aabbb", bits, strict=False)
    records = [{"db_id": db, "ex": int(bit), "em": int(bit) * (n == 0)} for n, (db, bit) in enumerate(ids)]
    means = {key: {"mean": sum(r[key] for r in records) / len(records)} for key in ("ex", "em")}
    write_lines(folder / "predictions.jsonl", records)
    (folder / "summary.json").write_text(json.dumps({"questions": len(records), **means}))
    (folder / "run.json").write_text(json.dumps({"commit": "abc", "hardware": "two cores"}))
    return folder


def cells(page: str, *starts: str) -> list[str]:
    """The cells after the first ones of the only table row that starts with them."""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    (found,) = [row[len(starts) :] for row in rows if row[: len(starts)] == list(starts)]
    return found


def test_a_page_is_made_of_what_is_finished_and_again_of_its_rows(tmp_path):
    lay_out(tmp_path, "warm", "10000")
    for seed in (0, 1):
        lay_out(tmp_path, "rl", ("11000", "11110")[seed], seed)
        training = tmp_path / f"seed{seed}" / "rl"
        training.mkdir()
        (training / "dev.csv").write_text(f"step,ex,em\n9,0.{seed}5,0\n19,0.5,0\n")
    lay_out(tmp_path, "rl", "111", dataset="themes")
    shutil.copytree(tmp_path / "seed0", tmp_path / "seed0_1")  # a copy is no seed
    cut_off = lay_out(tmp_path, "cut", "11111") / "predictions.jsonl"
    cut_off.write_text(cut_off.read_text()[:-60])
    page = write_page(SMALL, PAGE_OF, tmp_path / "small.md")
    rows = json.loads((tmp_path / "small.json").read_text())
    assert [(r["dataset"], r["arm"], r["seed"], r["ex"], r["right"], r["exact"]) for r in rows] == [
        ("test", "warm", 0, 20.0, "10000", "10000"), ("test", "rl", 0, 40.0, "11000", "10000"),
        ("test", "rl", 1, 80.0, "11110", "10000"), ("themes", "rl", 0, 100.0, "111", "100"),
    ]  # fmt: skip
    assert [r["curve"] for r in rows] == [[], [[10, 5.0], [20, 50.0]], [[10, 15.0], [20, 50.0]], []]
    assert rows[0]["databases"] == [["a", 2], ["b", 3]] and rows[0]["commit"] == "abc"
    text = page.read_text()
    what, ex, em, seeds = cells(text.split("## themes")[0], "`rl`")
    assert what == "after RL" and ex.startswith("60.0 [") and em.startswith("20.0 [")
    assert seeds == "0: 40.0, 1: 80.0"
    # The warm start of seed 0 stands beside both seeds of RL.
    arms, ex, seeds, em = cells(text, "what RL is worth")
    assert (arms, seeds, em) == ("`rl` - `warm`", "0: +20.0, 1: +60.0", "+0.0 [+0.0, +0.0]")
    assert ex.startswith("+40.0 [-")  # two seeds that differ say little
    assert "**Not measured** on test: `cut`\n" in text and "on themes: `warm`\n" in text
    assert "Seeds: 0, 1." in text and "## themes: 3 questions" in text and str(tmp_path) not in text
    for name in ("small_bars.png", "small_curves.png"):
        assert f"({name})" in text and imread(tmp_path / name).ndim == 3
    kept = {path.name: path.read_bytes() for path in tmp_path.glob("small*")}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "small.json").write_bytes(kept["small.json"])
    write_page(SMALL, PAGE_OF, elsewhere / "small.md")
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == kept


def test_a_page_has_the_parts_of_the_summaries_as_means_of_the_seeds(tmp_path):
    for seed, by_turn in enumerate([{"1": 0.5, ">4": None}, {"1": 1.0, ">4": 0.25}]):
        path = lay_out(tmp_path, "rl", "11000", seed) / "summary.json"
        summary = json.loads(path.read_text())
        summary["ex"]["by_turn"], summary["errors"] = by_turn, {"join_path": 0.125 * (seed + 1)}
        path.write_text(json.dumps(summary))
    lay_out(tmp_path, "warm", "10000")
    text = write_page(SMALL, PAGE_OF, tmp_path / "small.md", base="qwen").read_text()
    assert cells(text, "EX by turn") == ["1", ">4"]
    by_turn, errors = (next(p for p in text.split("\n\n") if of in p) for of in ("| EX by turn", "| errors"))
    assert by_turn.splitlines()[2:] == ["| `rl` | 75.0 | 25.0 |"]  # `warm` has none
    assert errors.splitlines()[2:] == ["| `rl` | 18.8 |"]
    assert "- Base: qwen. Dates" in text and "| errors, of all questions | join path |" in text
    assert "- Base: qwen. Dates" in write_page(SMALL, PAGE_OF, tmp_path / "small.md").read_text()


def test_rows_of_other_machines_stay_and_other_questions_are_refused(tmp_path):
    lay_out(tmp_path, "warm", "10000")
    old = {"dataset": "test", "arm": "old", "seed": 2, "ex": 50.0, "em": 25.0, "curve": []}
    old |= {"questions": 5, "databases": [["a", 2], ["b", 3]]}
    (tmp_path / "small.json").write_text(json.dumps([old]))
    text = write_page(SMALL, PAGE_OF, tmp_path / "small.md").read_text()
    assert cells(text, "`old`") == ["", "50.0", "25.0", "2: 50.0"]  # no interval: its answers were not kept
    before = (tmp_path / "small.json").read_bytes()
    lay_out(tmp_path, "rl", "1111")
    with pytest.raises(UserError, match="test: rl, seed 0, has other questions than warm, seed 0"):
        write_page(SMALL, PAGE_OF, tmp_path / "small.md")
    assert (tmp_path / "small.json").read_bytes() == before


def test_the_mean_of_sparc_and_cosql_is_of_arms_with_the_same_seeds_on_both(tmp_path):
    for arm, sparc, cosql in (("warm", "10000", "110"), ("rl", "11000", "111"), ("cut", "11111", "")):
        for dataset, bits in (("sparc", sparc), ("cosql", cosql)):
            if bits:
                lay_out(tmp_path, arm, bits, dataset=dataset)
    lay_out(tmp_path, "rl", "11111", seed=1, dataset="sparc")
    text = write_page(SMALL, PAGE_OF, tmp_path / "small.md").read_text()
    # EX: (20 + 66.7) / 2; EM: (20 + 33.3) / 2.
    assert cells(text.split("## Mean of sparc and cosql")[1], "`warm`") == ["43.3", "26.7"]
    mean = text.split("## Mean of sparc and cosql")[1].split("\n## ")[0]
    assert "`rl`" not in mean and "`cut`" not in mean


@pytest.mark.parametrize("rows", PAGES, ids=lambda path: path.stem)
def test_the_committed_pages_are_those_of_their_rows(rows):
    """But for the intervals, which another numpy may draw otherwise."""
    by_arm = defaultdict(list)
    for row in json.loads(rows.read_text()):
        by_arm[row["dataset"], row["arm"]].append(row)
    parts = rows.with_suffix(".md").read_text().split("\n## ")[1:]
    tables = {part.partition(":")[0]: part.split("\n\n")[1] for part in parts}
    for (dataset, arm), seeds in by_arm.items():
        _, *means, each = cells(tables[dataset], f"`{arm}`")
        assert each == ", ".join(f"{row['seed']}: {row['ex']:.1f}" for row in seeds)
        for metric, shown in zip(("ex", "em"), means, strict=True):
            assert float(shown.split()[0]) == pytest.approx(fmean(row[metric] for row in seeds), abs=0.051)


def runner_of(part: str, folder: Path) -> subprocess.Popen:
    """A process that runs a program as a part of a suite."""
    program = (
        "import signal; from pathlib import Path; from mtsql.extras.reproduce import run_part\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # what starts the tests may ignore it
        f"run_part('trains', ['-c', {part!r}], Path(r'{folder}/part/done'))"
    )
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, start_new_session=True, **pipes)


def test_a_part_that_is_interrupted_has_time_to_save(tmp_path):
    """As Ctrl-C in a terminal, which reaches the program and its part."""
    part = (
        "import signal, time\nfrom mtsql.learn.checkpoint import finish_step_on_interrupt\n"
        "with finish_step_on_interrupt() as interrupted:\n"
        "    print('begun', flush=True)\n"
        "    interrupted.wait()\n"
        "    time.sleep(0.5)\n"
        f"open(r'{tmp_path}/saved', 'w')"
    )
    with runner_of(part, tmp_path) as process:
        while process.stdout.readline() != "begun\n":
            pass
        os.killpg(process.pid, signal.SIGINT)
        said = process.communicate()[1]
    assert process.returncode == 130 and (tmp_path / "saved").exists()
    assert "then saving" in said and "goes on from here" in said and "Traceback" not in said


def test_a_runner_that_is_terminated_takes_its_part_along(tmp_path):
    with runner_of("import os, time; print(os.getpid(), flush=True); time.sleep(60)", tmp_path) as runner:
        while not (said := runner.stdout.readline()).strip().isdecimal():
            pass
        runner.terminate()
        assert runner.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(said), 0)


def test_who_needs_a_part_that_another_runs_waits(tmp_path):
    part = (
        f"open(r'{tmp_path}/runs', 'a').write('x')\nimport os, time; time.sleep(1)\n"
        f"os.makedirs(r'{tmp_path}/part'); open(r'{tmp_path}/part/done', 'w')"
    )
    runners = [runner_of(part, tmp_path) for _ in range(2)]
    said = "".join(runner.communicate(timeout=30)[0] for runner in runners)
    assert [runner.returncode for runner in runners] == [0, 0]
    assert (tmp_path / "runs").read_text() == "x" and said.count("is there already") == 1


def test_a_part_runs_once(tmp_path):
    done = tmp_path / "part" / "done"
    count = f"open(r'{tmp_path}/runs', 'a').write('x')"
    with pytest.raises(SystemExit) as stop:
        run_part("fails", ["-c", f"{count}; raise SystemExit(3)"], done)
    assert stop.value.code == 3 and not done.exists()
    with pytest.raises(SystemExit) as stop:
        run_part("makes nothing", ["-c", count], done)
    assert stop.value.code == 1
    done.parent.mkdir()
    for _ in range(2):
        run_part("works", ["-c", f"{count}; open(r'{done}', 'w')"], done)
    assert (tmp_path / "runs").read_text() == "xxx"
    (done.with_name("run.json")).write_text(json.dumps({"command": ["train.py", "--model", "a"]}))
    refuse_other_options(Part("same", ["train.py", "--model", "a"], done))
    refuse_other_options(Part("as a module", ["-m", "train", "--model", "a"], done))
    with pytest.raises(UserError, match="is of other options; give another --out"):
        refuse_other_options(Part("other", ["train.py", "--model", "b"], done))
