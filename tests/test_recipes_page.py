"""The comparison of the recipes: its commands, and its page on numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

from test_page import cells, section, write_arm

from mtsql.config import CurriculumConfig, EvaluateConfig, GrpoConfig, read_options
from mtsql.experiments.compare_recipes import CONFIG, seed_parts, start_parts
from mtsql.experiments.recipes_page import write_recipes_page
from mtsql.parts import Part
from mtsql.recipes import RECIPES
from mtsql.toy.imitation import ImitationConfig

SCRIPTS = {
    "mtsql.extras.curriculum": CurriculumConfig,
    "train_grpo.py": GrpoConfig,
    "evaluate.py": EvaluateConfig,
    "mtsql.toy.imitation": ImitationConfig,
}


def test_commands_are_valid_and_in_order():
    made, configs = set(), {}
    for part in start_parts(Path("runs"), CONFIG)[1:] + seed_parts(Path("runs"), CONFIG, 3):
        words = part.command[1:] if part.command[0] == "-m" else part.command
        config = read_options(SCRIPTS[words[0]], "", words[1:])
        assert config.seed == (0 if part.title in ("imitation", "curriculum") else 3), part.title
        assert config.data == ("runs/benchmark",)
        assert part.title == "imitation" or config.model in made, part.title
        made |= {str(part.done), config.out}
        configs[part.title] = config
    for recipe in RECIPES:  # the paper's own settings, but the same budget
        config = configs[recipe]
        assert config.recipe == recipe
        assert config.max_interactions == dict(zip(RECIPES, (4, 4, 9, 5), strict=True))[recipe]
        assert (config.steps, config.prompts_per_step, config.samples_per_prompt) == (36, 24, 8)
        assert Path(config.curriculum).parent == Path(configs["curriculum"].out)
    assert (configs["mtir_sql"].filter_rollouts, configs["mtir_sql_unfiltered"].filter_rollouts) == (
        True,
        False,
    )
    assert configs["skyrl_sql_single"].tools == configs["evaluate skyrl_sql_single_rl"].tools == "none"
    assert configs["sql_trail_single"].weights == "turns=0" and configs["sql_trail"].weights == ""
    assert configs["sql_trail_single"].max_interactions == 0
    assert configs["skyrl_sql"].tools == "no_memory"
    assert (configs["sql_trail"].rewards, configs["sql_trail_execution"].rewards) == ("", "execution")
    assert configs["evaluate skyrl_sql_rl_names"].schema == "names"


def test_page_by_hand(tmp_path: Path):
    runs = tmp_path / "runs"
    several = {"ex_majority": 0.75, "ex_sampled": 0.5, "pass_at_k": {"2": 0.6, "8": 1.0}}
    for arm, verdicts, more in (
        ("skyrl_sql_base", "100 000", {}),
        ("skyrl_sql_rl", "110 110", several),
        ("skyrl_sql_single_rl", "100 100", {}),
    ):
        write_arm(runs, 0, arm, verdicts, **more)
    (runs / "seed0" / "skyrl_sql").mkdir()
    sft = runs / "sft"
    sft.mkdir()
    run = {"command": ["train_grpo.py"], "config": {"model": str(sft / "policy")}}
    (runs / "seed0" / "skyrl_sql" / "run.json").write_text(json.dumps(run))
    (runs / "seed0" / "skyrl_sql" / "asked.json").write_text(json.dumps([f"{i}/0" for i in range(400)]))
    (sft / "run.json").write_text(json.dumps({"config": {"targets": "teacher"}}))
    lines = [json.dumps({"example_id": f"{i}/0"}) + "\n" for i in (*range(350, 500), 499)]
    (sft / "trajectories.jsonl").write_text("".join(lines))
    done = runs / "seed0" / "evaluation" / "mtir_sql_rl" / "summary.json"
    parts = [Part("evaluate mtir_sql_rl", ["evaluate.py", "--seed", "0"], done)]
    page = write_recipes_page(runs, tmp_path / "recipes.md", (0, 1), parts, "python x").read_text()
    assert "`mtir_sql_rl` (seed 0)" in page.partition("## ")[0]
    # 4/6 - 1/6 of 500 questions, 400 of RL and 100 more of the warm start: both dialogues gain, 1 and 2 of 3.
    before = cells(section(page, "Before and after RL"), "SkyRL-SQL")
    assert before[:3] == ["16.7 (16.7, –)", "66.7 (66.7, –)", "+50.0 [+26.4, +73.6]"]
    assert before[3:5] == ["100.0", "2.0 → 2.0"] and before[-2:] == ["0.0 (0.0, –)", "0.0 (0.0, –)"]
    # 4/6 - 2/6, one of three in each dialogue.
    claim = "RL over several turns beats RL in a single turn"
    compared = "`skyrl_sql_rl` - `skyrl_sql_single_rl`"
    found = cells(page, claim, "SkyRL-SQL", compared)
    assert found[:4] == [
        "66.7 (66.7, –)",
        "33.3 (33.3, –)",
        "+33.3 [+33.3, +33.3] (+33.3)",
        "untested",  # the second seed
    ]
    assert found[4:] == ["+0.0 [+0.0, +0.0] (+0.0)", "untested", "50.0, –"]
    alone = write_recipes_page(runs, tmp_path / "recipes.md", (0,), parts, "python x").read_text()
    assert cells(alone, claim, "SkyRL-SQL", compared)[3] == "one seed"
    samples = section(page, "Several samples an answer")
    assert cells(samples, "SkyRL-SQL") == ["66.7", "50.0", "75.0", "60.0", "–", "100.0"]
    hardness = section(page, "By hardness")
    assert "| easy (2) |" in hardness and "| extra (0) |" in hardness
    assert cells(hardness, "SkyRL-SQL", "EX in %")[:2] == ["50.0 → 100.0", "0.0 → 100.0"]
    assert cells(hardness, "SkyRL-SQL", "interactions")[:2] == ["1.0 → 1.0", "2.0 → 2.0"]
    raw = json.loads((tmp_path / "recipes.json").read_text())
    assert {(r["arm"], r["seed"]) for r in raw} == {
        (f"skyrl_sql_{a}", 0) for a in ("base", "rl", "single_rl")
    }
