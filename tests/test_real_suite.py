"""The real suite: its commands are valid and in order; its page keeps what earlier machines measured."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from conftest import ROOT, run

from mtsql.agent.tools import EXEC_SQL, MEMORY_RETRIEVE
from mtsql.config import CurriculumConfig, EvaluateConfig, GrpoConfig, SftConfig, read_options
from mtsql.errors import UserError
from mtsql.experiments.real import (
    ARMS,
    CONFIG,
    DATASETS,
    HELD_OUT,
    NO_CANDIDATES,
    SINGLE_QUESTIONS,
    real_parts,
)
from mtsql.experiments.real_page import contrast_table, paper_table, write_real_page
from mtsql.experiments.real_trajectories import KINDS, chosen
from mtsql.parts import Part
from mtsql.recipes.mtsql_r1_prompts import verdict
from mtsql.report.abilities import ABILITIES
from mtsql.report.metrics import bootstrap_interval, summarise

SCRIPTS = {
    "train_sft.py": SftConfig,
    "train_grpo.py": GrpoConfig,
    "evaluate.py": EvaluateConfig,
    "mtsql.extras.curriculum": CurriculumConfig,
}


OTHERS = ("configs/real_qwen3.toml", "configs/real_smollm2.toml")


@pytest.mark.parametrize(
    ("seed", "dtype", "path"),
    [(0, "", CONFIG), (1, "float32", CONFIG), *((seed, "", path) for path in OTHERS for seed in (0, 1))],
)
def test_commands_are_valid_and_come_after_what_they_need(seed, dtype, path, monkeypatch):
    monkeypatch.chdir(ROOT)
    first = Path("runs/real/seed0")
    earlier = [first / f"{name}/policy" for name in ("short_sft", "warm_start")]
    earlier += [first / f"{name}/counts.jsonl" for name in ("short_counts", "counts")]
    made = {"base", *(map(str, earlier) if seed else ())}
    arms, budgets = {}, set()
    for part in real_parts(Path("data"), "base", Path("runs/real"), seed, path, dtype):
        words = part.command[1:] if part.command[0] == "-m" else part.command
        config = read_options(SCRIPTS[words[0]], "", words[1:])
        assert config.seed == seed, part.title
        assert config.model in made, part.title
        assert config.dtype == (dtype or ("float32" if "smollm2" in path else "bfloat16")), part.title
        if isinstance(config, GrpoConfig):
            short = config.tools == "none"
            start, counted = ("short_sft", "short_counts") if short else ("warm_start", "counts")
            assert config.model == str(first / start / "policy")
            assert config.curriculum == str(first / counted / "counts.jsonl")
            budgets.add((config.steps, config.prompts_per_step, config.samples_per_prompt))
        assert getattr(config, "curriculum", "") in {*made, ""}
        assert (config.lora_rank > 0) == (config.model == "base") if hasattr(config, "lora_rank") else True
        made |= {str(part.done), f"{config.out}/policies/round_1"}
        if isinstance(config, EvaluateConfig):
            arms.setdefault(part.done.parent.name, []).append((config.data[0], config.split))
            assert (config.tools == "none") == part.done.parent.name.startswith("short")
    for arm, found in arms.items():
        held_out = [] if arm in NO_CANDIDATES else [("data/real/train_mix.json", "held_out")]
        single = [("data/spider/dev.json", "dev")] if arm in SINGLE_QUESTIONS else []
        assert found == held_out + [(f"data/{name}/dev.json", "dev") for name in DATASETS] + single
    assert arms.keys() == (ARMS.keys() if seed == 0 else arms.keys() & ARMS.keys())
    assert {"short_rl", "rl_outcome", "rl"} <= arms.keys() and len(budgets) == 1  # equal for both arms


def test_a_dtype_is_for_the_real_suite_alone():
    assert "--dtype is for --suite real" in run(
        "reproduce.py", "--suite", "toy", "--dtype", "bfloat16", expect=2
    )


def test_the_real_suite_keeps_its_parts_apart_from_the_toy_suites():
    listed = run("reproduce.py", "--suite", "real", "--data", "DATA", "--model", "BASE", "--list")
    outs = re.findall(r"--out (\S+)", listed)
    assert outs and all(out.startswith("runs/real/seed0/") for out in outs)


def test_the_real_suite_says_what_its_data_lacks_before_any_part_runs(tmp_path):
    for name in ("real", "sparc", "cosql", "database"):
        (tmp_path / name).mkdir()
    for name in ("real/train_mix", "sparc/dev", "sparc/tables", "cosql/dev", "cosql/tables"):
        (tmp_path / f"{name}.json").write_text("[]")
    out = tmp_path / "out"
    said = run(
        "reproduce.py", "--suite", "real", "--data", tmp_path, "--model", "BASE", "--out", out, expect=2
    )
    assert f"--data {tmp_path} lacks spider/dev.json: " in said and "== " not in said and not out.exists()


def record(number: int, db_id: str, ex: int) -> dict:
    names = ("ex_keep_distinct", "ex_bird", "em_string")
    return dict.fromkeys(names, ex) | {
        "example_id": f"{number:05d}/0", "dialogue_id": f"{number:05d}", "turn_index": 0, "db_id": db_id,
        "hardness": "easy", "ex": ex, "em": 0, "predicted": "select 1", "pred_parses": True,
        "status": "answered", "interactions": 0, "tool_calls": {}, "sampled_tokens": 3, "response_tokens": 3,
        "abilities": dict.fromkeys(ABILITIES), "errors": [],
    }  # fmt: skip


def lay_out(out: Path, dataset: str, arm: str, right: str, seed: int = 0) -> Part:
    """A finished evaluation over two databases, of which the first has two questions."""
    folder = out / f"seed{seed}" / "evaluation" / dataset / arm
    folder.mkdir(parents=True)
    records = [record(i, "aabbb"[i], int(bit)) for i, bit in enumerate(right)]
    (folder / "summary.json").write_text(json.dumps(summarise(records)))
    (folder / "predictions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "run.json").write_text(json.dumps({"commit": "abc", "config": {}}))
    return Part(f"evaluate {arm}", ["evaluate.py", "--data", "secret/dev.json"], folder / "summary.json")


def test_page_of_what_is_there_and_of_what_was_there(tmp_path):
    page = tmp_path / "real.md"
    before = [
        lay_out(tmp_path / "one", "sparc", arm, right) for arm, right in (("rl", "11110"), ("base", "00000"))
    ]
    (tmp_path / "one/seed0/rl").mkdir(parents=True)
    (tmp_path / "one/seed0/rl/dev.csv").write_text("step,ex,em\n9,0.25,0\n19,0.5,0\n")
    write_real_page({0: before}, page, "base", lambda seed: [], "make it")
    after = [
        lay_out(tmp_path / "two", "sparc", "warm_start", "01000"),
        lay_out(tmp_path / "two", HELD_OUT, "rl", "10101"),
    ]
    after[0].done.with_name("summary.json.minutes").write_text("2.54\n")  # the other was not timed
    write_real_page({0: after}, page, "base", lambda seed: [], "make it")
    rows = json.loads((tmp_path / "real.json").read_text())
    assert [r["minutes"] for r in rows if r["dataset"] == HELD_OUT or r["arm"] == "warm_start"] == [None, 2.5]
    assert [(r["dataset"], r["arm"], r["ex"], r["right"]) for r in rows] == [
        ("held_out", "rl", 60.0, "10101"), ("sparc", "base", 0.0, "00000"),
        ("sparc", "warm_start", 20.0, "01000"), ("sparc", "rl", 80.0, "11110"),
    ]  # fmt: skip
    assert [r["curve"] for r in rows] == [[], [], [], [[10, 25.0], [20, 50.0]]]
    assert rows[3]["databases"] == [["a", 2], ["b", 3]] and rows[3]["commit"] == "abc"
    low, high = bootstrap_interval([[100.0, 0.0], [100.0, 100.0, 0.0]])
    text = page.read_text()
    assert f"| `rl` - `warm_start` | **+60.0 [{low:+.1f}, {high:+.1f}]** | – | – | – |" in text
    assert "**Not measured:** SParC dev: `short_sft`, `round_1`, `round_2`, `short_rl`," in text
    assert text.count("Spider dev: `short_sft`, `warm_start`, `short_rl`, `rl`\n") == 1
    assert "`make it --seeds 0`" in text and "secret" not in text
    assert "| `rl` | 0 | 25.0 | 50.0 |" in text and "(real_curves.png)" in text
    assert (tmp_path / "real_curves.png").read_bytes().startswith(b"\x89PNG")
    assert "_trajectories_" not in text
    assert "| `rl` | 80.0 / 0.0 | 76.2 / 66.1 | 79.0 / 68.7 |" in text
    notes = tmp_path / "real_notes.md"
    notes.write_text("What was tried.\n")
    write_real_page({0: []}, page, "base", lambda seed: [], "make it")
    assert "What was tried." in page.read_text() and json.loads((tmp_path / "real.json").read_text()) == rows


def test_a_row_of_other_questions_is_refused_and_changes_nothing(tmp_path):
    page = tmp_path / "real.md"
    write_real_page(
        {0: [lay_out(tmp_path, "sparc", "rl", "11110")]}, page, "base", lambda seed: [], "make it"
    )
    before = (tmp_path / "real.json").read_bytes()
    fewer = lay_out(tmp_path, "sparc", "base", "0000")
    with pytest.raises(UserError, match="sparc: rl, seed 0, has other questions than base, seed 0"):
        write_real_page({0: [fewer]}, page, "base", lambda seed: [], "make it")
    assert (tmp_path / "real.json").read_bytes() == before


def test_commands_of_a_later_seed_are_listed_where_they_are_others(tmp_path):
    parts = {seed: [lay_out(tmp_path, "sparc", "rl", "11110", seed)] for seed in (0, 1)}
    page = tmp_path / "real.md"
    write_real_page(
        parts, page, "base", lambda seed: real_parts(Path("D"), "base", Path("R"), seed), "make it"
    )
    lines = page.read_text().splitlines()
    assert (
        "SEED stands for each of 0, 1." in lines and "- `make it --seeds 0 1`, in parts" in page.read_text()
    )
    training = [line for line in lines if line.startswith("python train_grpo.py") and "/rl --rewards" in line]
    assert ["--seed 0" in line for line in training] == [True, False]
    assert all("--model R/seed0/warm_start/policy" in line for line in training)  # the warm start of seed 0
    evaluation = [line for line in lines if "evaluation/sparc/rl" in line and "sparc/rl_" not in line]
    assert len(evaluation) == 1 and "--model R/seedSEED/rl/policy" in evaluation[0]


def test_only_a_warm_start_stands_beside_other_seeds():
    databases = [["a", 2], ["b", 3]]

    def rows(arm: str, *rights: str) -> list[dict]:
        return [{"arm": arm, "seed": s, "right": r, "databases": databases} for s, r in enumerate(rights)]

    shown = [*rows("rl", "11111", "11000", "11111"), *rows("rl_outcome", "11111", "00000")]
    table = contrast_table({"sparc": [*shown, *rows("warm_start", "00000")]})
    assert "| `rl` - `rl_outcome` | +20.0 [" in table  # of seeds 0 and 1: 0 and 40; it claims nothing
    assert "| `rl` - `warm_start` | **+80.0 [" in table  # of all three: 100, 40, 100


def played(text: str) -> dict:
    segments = [("prompt", "schema ~~~ " + "x" * 200), ("model", text), ("environment", "rows")]
    return {"segments": [{"role": role, "text": shown} for role, shown in segments]}


FAILED = {tool: verdict(tool, False) for tool in (EXEC_SQL, MEMORY_RETRIEVE)}
PASSED = verdict(EXEC_SQL, True)
PLAYED = [  # database, ex, what the model wrote, tools that it called
    ("a", 1, PASSED, [EXEC_SQL]), ("a", 1, PASSED, [EXEC_SQL]), ("b", 1, "no tool", []),
    ("c", 1, PASSED, [EXEC_SQL]), ("d", 1, PASSED, [EXEC_SQL]), ("e", 1, "no verdict", [EXEC_SQL]),
    ("a", 1, FAILED[EXEC_SQL] + PASSED, [EXEC_SQL]), ("b", 1, FAILED[MEMORY_RETRIEVE], [MEMORY_RETRIEVE]),
    ("c", 1, "".join(FAILED.values()), list(FAILED)), ("e", 0, PASSED, list(FAILED)),
    ("a", 0, "<exec_verify> pass\n</exec_verify>", [EXEC_SQL]),
    ("b", 0, FAILED[MEMORY_RETRIEVE], [MEMORY_RETRIEVE]),
    ("f", 0, PASSED, [EXEC_SQL, "no_such_tool"]), ("g", 0, PASSED, [EXEC_SQL, EXEC_SQL]),
]  # fmt: skip


def played_records() -> list[dict]:
    return [
        record(i, db_id, ex) | {"tool_calls": dict(Counter(called)), "gold": f"gold {i}"}
        for i, (db_id, ex, _, called) in enumerate(PLAYED)
    ]


def test_means_of_both_sets_stand_beside_the_papers():
    rows = {"sparc": (60.0, 41.0), "cosql": (40.0, 20.0)}
    of = {name: [{"arm": "rl_outcome", "seed": 0, "ex": ex, "em": em}] for name, (ex, em) in rows.items()}
    line = next(row for row in paper_table(of).splitlines() if "rl_outcome" in row)
    assert "| 50.0 / 30.5 | 76.4 / 64.4 |" in line
    line = next(row for row in paper_table(of | {"cosql": []}).splitlines() if "rl_outcome" in row)
    assert "| – / – | 76.4 / 64.4 |" in line


def test_trajectories_are_the_first_two_of_each_kind_from_different_databases():
    cut = record(14, "z", 0) | {"tool_calls": {EXEC_SQL: 1}, "gold": "gold 14", "status": "out_of_tokens"}
    texts = [played(text) for *_, text, _ in PLAYED] + [played(FAILED[EXEC_SQL])]
    shown = chosen([*played_records(), cut], texts)
    golds = [[int(text.split("gold: `gold ")[1].split("`")[0]) for text in shown[kind]] for kind in KINDS]
    assert golds == [[0, 3], [6, 8], [7, 8], [10], [11]]  # 5, 9, 12 and 13 have calls that they did not judge
    first = shown["Right, and every check passed"][0]
    assert "[prompt]\nschema ~ ~ ~ x" in first and f"[model]\n{PASSED}\n[environment]\nrows" in first
    assert max(map(len, first.splitlines())) == 162  # the fence in the text was spaced out after the cut


def test_the_page_links_the_trajectories_of_the_furthest_arm_and_of_earlier_machines(tmp_path):
    parts = []
    for arm in ("warm_start", "round_1"):
        parts.append(lay_out(tmp_path, "sparc", arm, "0" * 5))
        folder = parts[-1].done.parent
        (folder / "predictions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in played_records()))
        (folder / "summary.json").write_text(json.dumps(summarise(played_records())))
        lines = (json.dumps(played(text)) + "\n" for *_, text, _ in PLAYED)
        (folder / "trajectories.jsonl").write_text("".join(lines))
    page = tmp_path / "real.md"
    (tmp_path / "real_trajectories_rl.md").write_text("of another machine")
    write_real_page({0: parts}, page, "base", lambda seed: [], "make it")
    assert "`round_1`, seed 0, on SParC dev" in (tmp_path / "real_trajectories_round_1.md").read_text()
    assert not (tmp_path / "real_trajectories_warm_start.md").exists()
    text = page.read_text()
    assert "(real_trajectories_rl.md), [real_trajectories_round_1.md](real_trajectories_round_1.md)" in text
