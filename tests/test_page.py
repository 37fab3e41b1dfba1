"""The results page: hand-computed cells and verdicts, missing arms, figures and raw numbers."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import chain, product
from pathlib import Path
from statistics import fmean, stdev
from typing import NamedTuple

import pytest
from matplotlib.image import imread

from mtsql.experiments.arms import (
    Answer,
    contrast,
    drawn_means,
    estimate,
    holm,
    least_effect,
    read_arms,
    read_coverage,
    read_logs,
)
from mtsql.experiments.figures import level_starts
from mtsql.experiments.findings import EMBEDDED, Difference, Finding, findings, judged
from mtsql.experiments.markdown import with_seed_placeholder
from mtsql.experiments.suite_page import write_suite_page
from mtsql.parts import Part
from mtsql.report.abilities import ABILITIES
from mtsql.report.metrics import summarise
from mtsql.sql.score import FURTHER_METRICS

SEEDS = (0, 1)
EX = {  # arm -> for each seed, EX of the three turns of dialogue a, then of dialogue b
    "short_sft": ("100 100", "100 110"),
    "short_rl": ("100 100", "100 110"),
    "round_1": ("000 100", "000 100"),
    "round_2": ("110 000", None),
    "rl_process": ("110 111", "111 111"),
    "rl_shuffled": ("100 100", "100 110"),
    "rl_process_predicted": ("110 100", "110 110"),
    "rl_process_elsewhere": ("111 111", None),
    "short_sft_elsewhere": ("111 111", None),
    "rl_cap_60": ("100 000", "000 000"),
}


def make_records(verdicts: str, ability: float) -> list[dict]:
    return [
        {
            "example_id": f"{dialogue}/{turn}",
            "dialogue_id": dialogue,
            "db_id": dialogue,
            "turn_index": (0, 1, 3)[turn],
            "hardness": ("easy", "medium", "hard")[turn],
            "ex": int(verdict),
            "em": 0,
            **dict.fromkeys(FURTHER_METRICS, 0),
            "predicted": "SELECT 1",
            "pred_parses": True,
            "status": "answered" if int(verdict) else "out_of_tokens",
            "interactions": 1 + turn,
            "tool_calls": {},
            "sampled_tokens": 10 + 5 * turn,
            "response_tokens": 20,
            "abilities": dict.fromkeys(ABILITIES)
            | {
                "call_execution": ability,
                "call_memory": ability if turn else None,
                "e_verify": 0.5,
                "m_verify": None,
                "generation": ability,
            },
            "errors": [] if int(verdict) else ["join_path"],
        }
        for dialogue, block in zip("ab", verdicts.split(), strict=True)
        for turn, verdict in enumerate(block)
    ]


def write_arm(runs: Path, seed: int, arm: str, verdicts: str, ability: float = 0.0, **more) -> Path:
    folder = runs / f"seed{seed}" / "evaluation" / arm
    folder.mkdir(parents=True)
    records = make_records(verdicts, ability)
    (folder / "summary.json").write_text(json.dumps(summarise(records) | more))
    (folder / "predictions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    command = ["evaluate.py", "--seed", str(seed), "--out", f"runs/seed{seed}/evaluation/{arm}"]
    run = {"command": command, "config": {"max_response_tokens": 600}}
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def write_runs(runs: Path) -> Path:
    for arm, by_seed in EX.items():
        for seed, verdicts in enumerate(by_seed):
            if verdicts is not None:
                write_arm(runs, seed, arm, verdicts)
    for seed, ability in ((0, 0.25), (1, 0.75)):
        write_arm(runs, seed, "base", "000 000", 0.0, abilities_sampled={"generation": 0.5})
        write_arm(runs, seed, "round_3", "000 000", ability, abilities_sampled={"generation": 0.4})
    for seed, covered in ((0, (4, 6)), (1, (5, 5))):
        keys = {"sampled": 200, "right": 90, "questions_asked": 10, "questions_solved": 4, "trajectories": 12}
        rounds = [{"round": n + 1, "questions_covered": c, **keys} for n, c in enumerate(covered)]
        (runs / f"seed{seed}" / "sft" / "policy").mkdir(parents=True)
        (runs / f"seed{seed}" / "sft" / "coverage.json").write_text(json.dumps(rounds))
    for seed in SEEDS:
        log = runs / f"seed{seed}" / "rl_process"
        log.mkdir()
        rows = [f"{step},{1 + step // 3},{seed + step / 10}" for step in range(6)]
        (log / "metrics.csv").write_text("\n".join(["step,level,reward", *rows, "6,2"]))
        (log / "dev.csv").write_text("step,ex,ex_easy,ex_extra\n1,0.5,0.75,\n3,0.625,1.0,\n")
        training, evaluation = ((7.5, 1.25), (9, 0))[seed]
        (runs / f"seed{seed}" / "sft" / "coverage.json.minutes").write_text(f"{training}\n")
        (runs / f"seed{seed}" / "evaluation" / "round_1" / "summary.json.minutes").write_text(
            f"{evaluation}\n"
        )
    return runs


def make_parts(runs: Path) -> list[Part]:
    parts = [Part("benchmark", ["-m", "mtsql.toy.benchmark", "runs/benchmark"], runs / "benchmark")]
    for seed in SEEDS:
        sft = runs / f"seed{seed}" / "sft"
        command = ["train_sft.py", "--seed", str(seed), "--out", f"runs/seed{seed}/sft"]
        parts.append(Part("sft", command, sft / "coverage.json"))
        for arm in (*EX, "rl_outcome"):
            done = runs / f"seed{seed}" / "evaluation" / arm / "summary.json"
            command = ["evaluate.py", "--seed", str(seed), "--out", arm]
            parts.append(Part(f"evaluate {arm}", command, done))
    return parts


def make_page(runs: Path, folder: Path) -> str:
    path = folder / "suite.md"
    parts = make_parts(runs)
    assert write_suite_page(runs, path, "The suite", SEEDS, parts, "python x", EMBEDDED, "About it.") == path
    return path.read_text()


class Suite(NamedTuple):
    runs: Path
    folder: Path
    page: str


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    """One page for all tests that only read it: drawing its figures takes seconds."""
    folder = tmp_path_factory.mktemp("page")
    runs = write_runs(tmp_path_factory.mktemp("runs"))
    return Suite(runs, folder, make_page(runs, folder))


def cells(page: str, *starts: str) -> list[str]:
    """The cells after the first ones of the only table row that starts with them."""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    found = [row[len(starts) :] for row in rows if row[: len(starts)] == list(starts)]
    assert len(found) == 1, (starts, found)
    return found[0]


def section(page: str, title: str) -> str:
    return page.partition(f"## {title}")[2].partition("\n## ")[0]


def test_findings_by_hand(suite: Suite):
    here, _, elsewhere = section(suite.page, "Findings").partition("Elsewhere (")

    def finding(claim: str, source: str, compared: str, page: str = here) -> list[str]:
        return cells(page, claim, source, compared)

    # Each database gains 3 of 6 over the seeds, and each seed 3 of 6 over the databases: nothing varies.
    claim = "RL needs the curriculum's order"
    assert finding(claim, "ours, of section 3.3.1", "`rl_process` - `rl_shuffled`") == [
        "+50.0 [+50.0, +50.0]",
        "+50.0, +50.0",
        "**holds**, p 0.000",
        "+0.0 [+0.0, +0.0]",
        "+0.0, +0.0",
        "**not beyond chance**, p 1.000",
        "–",
    ]
    # 0 - 2/6 and 0 - 3/6: two seeds that differ say little.
    warm = "the long-horizon warm start beats short-horizon SFT"
    worse = finding(warm, "Table 2: EX, 1.7B", "`round_3` - `short_sft`")
    assert worse[0].startswith("-41.7 [") and worse[1:3] == ["-33.3, -50.0", "**built in**"]
    assert worse[5] == "**not beyond chance**, p 1.000"  # in EM, which does not look at values
    # Seed 0 alone: dialogue a gains 2 of 3, dialogue b loses 1 of 3.
    chance = finding("a second self-taught round helps", "Finding 7", "`round_2` - `round_1`")
    assert chance[0].startswith("+16.7 [-54.0, +87.4]") and chance[1:3] == ["+16.7, –", "**untested**"]
    beats = "the agent beats short-horizon SFT"
    away = finding(beats, "Table 2, Finding 6", "`rl_process` - `short_sft`", elsewhere)
    assert away[:3] == ["+0.0 [+0.0, +0.0]", "+0.0, –", "**built in**"] and away[5] == "**untested**"
    # Turn 1: no gain; turn 4: 1 of 2 in seed 0, 2 of 2 in seed 1.
    gain = finding(
        "the gain over short-horizon SFT is larger on later turns",
        "Finding 4",
        "`rl_process` - `short_sft`: turns from 4 on (+75.0) against turn 1 (+0.0)",
    )
    assert gain[0].startswith("+75.0 [") and gain[1] == "+50.0, +100.0"
    # EM is 0 throughout, so the gain in EX beyond that in EM is the whole gain.
    form = finding(
        "the gain over short-horizon SFT is larger in EX than in EM",
        "Finding 3",
        "`rl_process` - `short_sft`: in EX against in EM",
    )
    assert form[0].startswith("+50.0 [") and form[1] == "+50.0, +50.0"
    tokens = finding(
        "later turns take more tokens", "Finding 5", "`rl_process`: turns from 4 on against turn 1"
    )
    assert tokens[:3] == ["+10.0 tokens [+10.0, +10.0]", "+10.0, +10.0", "**built in**"]
    ability = finding("ability “generation, self-correction” grows", "Finding 11", "`round_3` - `base`")
    assert ability[0].startswith("+50.0 [")
    assert (ability[1], ability[2], ability[-1]) == ("+25.0, +75.0", "**built in**", "-10.0")
    covered = "self-taught rounds cover more training questions"
    coverage = finding(covered, "Finding 7, Table 7", "round 2 - round 1")
    assert coverage == ["+10.0", "+20.0, +0.0", "**built in**", "–", "–", "–", "–"]
    # On correctness here: one in EX, and in EM the two with EX built in and the two gains of Finding 4.
    tested = sum(
        suite.page.count(f"**{v}**, p") for v in ("holds", "the contrary holds", "not beyond chance")
    )
    assert f"in EM (5 tests), and all others ({tested - 5})" in suite.page.replace("\n", " ")
    assert "rl_outcome" not in here


def test_coverage_is_of_seeds_whose_warm_start_is_finished(tmp_path):
    runs = write_runs(tmp_path)
    (runs / "seed1" / "sft" / "policy").rmdir()
    assert list(read_coverage(runs, SEEDS)) == [0]


def test_tables_by_hand(suite: Suite):
    page = suite.page
    accuracy = section(page, "EX and EM")
    agent = cells(accuracy, "`rl_process`: RL, outcome + process rewards (final agent)")
    assert agent == ["91.7 (83.3, 100.0)", "0.0 (0.0, 0.0)", "100.0 (100.0, –)", "0.0 (0.0, –)"]
    assert cells(accuracy, "`round_2`: warm start, round 2") == ["33.3 (33.3, –)", "0.0 (0.0, –)", "–", "–"]
    assert (
        "Command of the row of `rl_process`: `python evaluate.py --seed SEED --out runs/seedSEED/" in accuracy
    )
    history = section(page, "Gold against predicted history")
    label = "`rl_process`: RL, outcome + process rewards (final agent)"
    assert cells(history, label, "gold") == ["0.0", "91.7", "100.0", "100.0", "–", "75.0", "–"]
    assert cells(history, label, "predicted") == ["0.0", "58.3", "100.0", "75.0", "–", "0.0", "–"]
    # Turn 2: dialogue a loses nothing, dialogue b one of its two seeds' answers.
    difference = cells(history, "", "difference")
    assert difference[:1] == ["+0.0 [+0.0, +0.0]"] and difference[2] == "+0.0 [+0.0, +0.0]"
    assert (
        difference[1].startswith("-33.3 [") and difference[3].startswith("-25.0 [") and difference[4] == "–"
    )
    covered = section(page, "Coverage")
    assert cells(covered, "all training questions") == ["10", "10", "10"]
    assert cells(covered, "with a trajectory after round 2") == ["6", "6", "5"]
    capped = section(page, "A cap on the response")
    assert cells(capped, "`rl_process`") == ["600", "91.7", "0.0", "8.3", "20.0", "–"]
    assert cells(capped, "`rl_cap_60`")[:2] == ["60", "8.3"]
    errors = section(page, "Errors")
    assert "| Arm | execution | constraint | schema linking | aggregation | join path | other |" in errors
    assert cells(errors, "`base`: untrained, both tools")[4] == "100.0"
    tokens = (
        section(page, "By turn and by hardness").split("Tokens the model wrote")[1].split("Interactions")[0]
    )
    assert "| Arm | turn 1 (2) | turn 2 (2) | turn 4 (2) | easy (2) | medium (2) | hard (2) |" in tokens
    assert cells(tokens, label) == ["10.0", "15.0", "20.0", "10.0", "15.0", "20.0"]
    able = section(page, "The abilities")  # (0.25 + 0.75) / 2; the memory's two have no first turns
    assert cells(able, "`round_3`: warm start, round 3") == [
        "50.0",
        "50.0",
        "50.0",
        "–",
        "–",
        "–",
        "50.0 (40.0)",
        "0.0",
    ]


def test_ablation_by_hand(tmp_path: Path):
    write_arm(tmp_path / "runs", 0, "rl_process", "111 100")
    write_arm(tmp_path / "runs", 0, "rl_no_memory", "100 000")
    write_arm(tmp_path / "runs", 1, "rl_no_memory", "111 111")  # has nothing to be compared with
    table = section(make_page(tmp_path / "runs", tmp_path), "The two tools (Table 4)")
    row = cells(table, "`rl_no_memory`: final agent, MEMORY-VERIFY taken away")
    assert row == ["58.3 (16.7, 100.0)", "0.0 (0.0, 0.0)", "-50.0 [-73.6, -26.4]", "+0.0 [+0.0, +0.0]"]
    assert cells(table, "`rl_process`: RL, outcome + process rewards (final agent)")[2] == "–"


def test_sizes_are_compared_on_the_same_seed(tmp_path: Path):
    for arm, verdicts in (("base", "100 000"), ("rl_process", "111 110")):
        write_arm(tmp_path / "runs", 0, arm, verdicts)
        write_arm(tmp_path / "runs", 1, arm, "000 000")  # has no other size
        write_arm(tmp_path / "runs", 0, f"layers_8_{arm}", "111 111")
    write_arm(tmp_path / "runs", 0, "layers_8_base_elsewhere", "100 100")
    table = section(make_page(tmp_path / "runs", tmp_path), "Sizes of the embedded model")
    assert cells(table, "8 layers", "`base`") == ["100.0", "0.0", "33.3", "0.0"]
    assert cells(table, "8 layers", "`short_sft`") == ["–"] * 4
    assert cells(table, "this page's", "`base`") == ["16.7", "0.0", "–", "–"]
    assert cells(table, "this page's", "`rl_process`") == ["83.3", "0.0", "–", "–"]


def test_correlation_of_abilities_by_hand(tmp_path: Path):
    for arm, verdicts, ability in (
        ("base", "000 000", 0),
        ("rl_process", "110 110", 0.5),
        ("round_3", "100 100", 1),
    ):
        write_arm(tmp_path / "runs", 0, arm, verdicts, ability)
    # Deviations (-1/2, 0, 1/2) and (-1/3, 1/3, 0): 1/6 over the root of 1/2 times 2/9.
    line = "over 3 agents: calls EXECUTE 0.50, calls MEMORY-VERIFY 0.50, generation, self-correction 0.50."
    assert line in make_page(tmp_path / "runs", tmp_path)


def test_top_names_what_is_missing(tmp_path: Path):
    runs = write_runs(tmp_path / "runs")
    folder = runs / "seed1" / "evaluation" / "short_rl"
    (folder / "predictions.jsonl").write_text('{"example_id": "a/0", "dia')  # still being written
    (runs / "seed0" / "evaluation" / "short_rl" / "run.json").write_text("{")
    page = make_page(runs, tmp_path)
    top = page.partition("## Findings")[0]
    assert re.search(r"^- Date: 20\d\d-\d\d-\d\d\n- Hardware: \d+ cores of ", top, re.MULTILINE)
    assert "\n- Seeds: 0, 1\n- Questions: 6; elsewhere 6\n- `python x` makes all" in top
    assert (
        "left out below:** `rl_outcome` (seed 0, 1), `short_rl` (seed 1), `round_2` (seed 1), "
        "`rl_process_elsewhere` (seed 1), `short_sft_elsewhere` (seed 1)\n"
    ) in top
    assert cells(section(page, "EX and EM"), "`short_rl`: short-horizon RL")[0] == "33.3 (33.3, –)"


def test_minutes_and_commands(suite: Suite):
    page = suite.page
    minutes = section(page, "Minutes")
    assert cells(minutes, "all seeds share") == ["0.0", "0.0", "0.0", "0 of 1"]
    assert cells(minutes, "seed 0") == ["7.5", "1.2", "8.8", "11 of 12"]
    assert cells(minutes, "seed 1") == ["9.0", "0.0", "9.0", "8 of 12"]
    commands = section(page, "Commands")
    assert commands.count("python train_sft.py --seed SEED --out runs/seedSEED/sft") == 1
    assert commands.count("python ") == 13
    assert "# data and training\npython -m mtsql.toy.benchmark runs/benchmark" in commands
    assert with_seed_placeholder("x.py --seed=1 --steps 1 --out r/seed1/a", 1) == (
        "x.py --seed=SEED --steps 1 --out r/seedSEED/a"
    )
    assert with_seed_placeholder("x.py --seed 10 --out r/seed10", 1) == "x.py --seed 10 --out r/seed10"


def test_raw_numbers_round_trip(suite: Suite):
    raw = json.loads((suite.folder / "suite.json").read_text())
    assert len(raw) == sum(v is not None for by_seed in EX.values() for v in by_seed) + 4
    entry = next(e for e in raw if (e["arm"], e["seed"]) == ("rl_process", 0))
    assert (entry["ex"]["mean"], entry["questions"]) == (pytest.approx(5 / 6), 6)
    command = "python evaluate.py --seed 0 --out runs/seed0/evaluation/rl_process"
    written = json.loads((suite.runs / "seed0" / "evaluation" / "rl_process" / "summary.json").read_text())
    assert entry == {"arm": "rl_process", "seed": 0, "command": command, **written}


def test_figures(suite: Suite):
    figures = {path.name for path in suite.folder.glob("*.png")}
    drawn = ("averages", "breakdown", "abilities", "errors", "training", "dev")
    assert figures == {f"suite_{key}.png" for key in drawn}
    for name in figures:
        assert f"]({name})" in suite.page
        assert (suite.folder / name).stat().st_size < 150_000
        assert imread(suite.folder / name)[..., :3].std() > 0.01
    log = read_logs(suite.runs, SEEDS, "rl_process", "metrics.csv")
    assert [row["reward"] for row in log[1]] == pytest.approx([1, 1.1, 1.2, 1.3, 1.4, 1.5])
    assert level_starts(log[0]) == [4]
    assert "ex_extra" not in read_logs(suite.runs, SEEDS, "rl_process", "dev.csv")[0][0]
    assert not [path for path in suite.folder.iterdir() if path.name.startswith(".")]


def test_nothing_is_finished(tmp_path: Path):
    page = make_page(tmp_path / "runs", tmp_path)
    assert "- Questions: none yet" in page and "`rl_process` (seed 0, 1)" in page
    assert "## Findings" not in page and "## Commands" in page
    assert json.loads((tmp_path / "suite.json").read_text()) == []
    assert not list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("arm", ["rl_process", "rl_process_predicted"])
def test_each_arm_may_be_alone_or_missing(tmp_path: Path, arm: str):
    write_arm(tmp_path / "alone", 1, arm, "110 100")
    top, _, tables = make_page(tmp_path / "alone", tmp_path).partition("## ")
    assert "- **Not there yet, and left out below:** seeds 0\n" in top and "`rl_outcome` (seed 1)" in top
    assert (f"| `{arm}`" in tables) == (arm != "rl_process_predicted")  # which is compared with gold only
    for other in {*EX, "base", "round_3"} - {arm, f"{arm}_elsewhere"}:
        write_arm(tmp_path / "missing", 0, other, "110 100")
    page = make_page(tmp_path / "missing", tmp_path)
    assert f"| `{arm}`" not in page and "| `round_3`" in page


def answers_of(values: dict[tuple[int, str], list[float]]) -> list[Answer]:
    """Answers by seed and database."""
    return [Answer(s, {"db_id": d, "dialogue_id": d}, v) for (s, d), found in values.items() for v in found]


def test_intervals_of_one_seed_resample_databases():
    """Against the slow way: every draw of three databases out of three, in its share of 27."""
    values = {"a": [1.0, 1.0, 0.0], "b": [0.0], "c": [1.0]}
    found = answers_of({(7, d): of for d, of in values.items()})
    mean = fmean(a.value for a in found)
    assert (estimate(found).mean, estimate(found).by_seed) == (
        pytest.approx(3 / 5),
        {7: pytest.approx(3 / 5)},
    )
    every = [fmean(chain(*(values[d] for d in drawn))) for drawn in product("abc", repeat=3)]
    wider = Counter(round(mean + (m - mean) * (3 / 2) ** 0.5, 6) for m in every)
    means = drawn_means(mean, estimate(found).by_seed, [found]).round(6)
    assert set(means) == set(wider)
    for m, count in wider.items():
        assert (means == m).mean() == pytest.approx(count / 27, abs=0.005)
    few = answers_of({(0, "a"): [1.0] * 9, (1, "a"): [0.0], (1, "b"): [0.0]})
    assert estimate(few).mean == 0.5  # each seed counts once
    assert contrast(found, found).mean == 0 and contrast(found, found).p == 1
    assert contrast(found, []) is None and estimate([]) is None


def test_intervals_of_seeds_alone_are_students_t():
    """Databases that are all alike leave the seeds: t of 4 degrees of freedom has 2.776 at 97.5 %."""
    of_seeds = (0.1, 0.2, 0.3, 0.4, 0.5)
    found = answers_of({(s, d): [v] for s, v in enumerate(of_seeds) for d in "abc"})
    error = stdev(of_seeds) / 5**0.5
    low, high = estimate(found).interval
    assert (low, high) == (
        pytest.approx(0.3 - 2.776 * error, abs=5e-3),
        pytest.approx(0.3 + 2.776 * error, abs=5e-3),
    )
    assert estimate(found).p == pytest.approx(0.0132, abs=2e-3)  # t = 4.243
    # Five equal signs are no evidence by themselves: resampled seeds would claim p below 0.001.
    wild = answers_of({(s, d): [v] for s, v in enumerate((0.01, 0.9, 0.02, 0.5, 0.03)) for d in "abc"})
    assert estimate(wild).p > 0.1


def test_verdicts_follow_holm():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([]) == []

    def finding(mean: float, p: float, em: float | None = None, **more: object) -> Finding:
        def of(value: float) -> Difference:
            return Difference(value, (value, value), {0: value, 1: value}, p)

        return Finding("", "", "", of(mean), em=None if em is None else of(em), **more)

    made = {"built_in": "a reason"}
    first = [
        finding(0.1, 0.02, em=-0.1),  # EX in the first family, EM in the second
        finding(0.1, 0.03, em=0.0, **made),  # EM stands for EX there
        finding(0.1, 0.001, em=0.1, **made, em_built_in=True),
        finding(0.1, 0.01),  # no claim on correctness
    ]
    second = [finding(-0.1, 0.001, em=0.2), finding(0.0, 1.0)]
    said, tests = judged([first, second], (0, 1))
    assert tests == (2, 5)
    holds, contrary, chance, built_in = "holds", "the contrary holds", "not beyond chance", "built in"
    assert [[(of.difference.said, of.em.said) for of in group] for group in said] == [
        [(holds, contrary), (built_in, chance), (built_in, built_in), (holds, "")],
        [(contrary, holds), (chance, "")],
    ]
    assert said[0][0].difference.p == pytest.approx(0.04)  # 0.02 counts twice,
    assert said[0][3].difference.p == pytest.approx(0.03)  # 0.01 three times: 0.02 and 1 are above it
    near = judged([[finding(0.1, 0.0499)], []], (0, 1))[0][0][0].difference
    assert near == (chance, 0.0499)  # other draws may put it above 0.05
    of_three, _ = judged([first], (0, 1, 2))
    assert {of.difference.said for of in of_three[0]} == {"untested", "built in"}
    alone = Finding("", "", "", Difference(0.1, (0.1, 0.1), {0: 0.1}, 0.001))
    assert judged([[alone]], (0,))[0][0][0].difference == ("one seed", None)


def test_the_least_effect_that_can_hold():
    """By tables of t: 4 degrees of freedom, p of 0.05 and of 0.005, over the root of five."""
    assert least_effect(5, 1) == pytest.approx(2.776 / 5**0.5, rel=0.01)
    assert least_effect(5, 10) == pytest.approx(5.598 / 5**0.5, rel=0.02)


def test_only_the_embedded_benchmark_has_its_findings_built_in(suite: Suite):
    arms = read_arms(suite.runs, SEEDS)
    reasons = [{(f.claim, f.compared): f.built_in for f in findings(arms, {}, of)} for of in (EMBEDDED, {})]
    grows = "ability “generation, self-correction” grows", "`round_3` - `base`"
    assert "scripted agent" in reasons[0][grows] and not reasons[1][grows]
    tokens = "later turns take more tokens", "`rl_process`: turns from 4 on against turn 1"
    assert "Equation 1" in reasons[1][tokens]


def test_cases_are_found_by_their_rule(tmp_path: Path):
    folder = write_arm(tmp_path / "runs", 0, "rl_process", "111 110")
    kinds = [
        ("error", "e_verify"),
        ("ok", "e_verify"),
        ("null", "e_verify"),
        ("null", "e_verify"),
        ("null", "m_verify"),
    ]
    rows = [
        {
            "actions": [
                {"type": verdict, "message": 1, "passed": False},
                {"type": "self_correct" if i != 3 else "propose", "message": 1, "passed": None},
            ],
            "observations": [{"tool": "exec_sql", "outcome": outcome}],
            "segments": [{"role": "model", "text": f"query {i}"}],
        }
        for i, (outcome, verdict) in enumerate([*kinds, ("null", "e_verify")])
    ]
    (folder / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for record in (records := list(map(json.loads, (folder / "predictions.jsonl").read_text().splitlines()))):
        record["gold"] = "SELECT 1"
    (folder / "predictions.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    page = section(make_page(tmp_path / "runs", tmp_path), "Cases (Finding 13)")
    assert "In all: execution failure 1, null result 1, coherence error 1." in page
    failure, _, rest = page.partition("### Null result, repaired")
    assert "query 0" in failure and "query 2" in rest and "query 4" in rest
    assert "query 3" not in page and "query 5" not in page  # not corrected; wrong
