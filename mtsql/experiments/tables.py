"""The tables of the reproduction's results page, after those of MTSQL-R1 (section 4, appendix C)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import correlation, fmean

from mtsql.agent.trajectory import Status
from mtsql.experiments import markdown as md
from mtsql.experiments.arms import (
    DESCRIPTIONS,
    Arms,
    Difference,
    Verdict,
    ability_keys,
    both_sides,
    breakdown_keys,
    elsewhere,
    least_effect,
    look_up,
    mean_over_seeds,
    measure_of,
    paired_answers,
)
from mtsql.experiments.figures import MAIN_STAGES
from mtsql.experiments.findings import Finding, Judged, Making, findings, judged
from mtsql.report.errors import ERRORS
from mtsql.report.metrics import HARDNESS, TURNS, turn_name

Cell = Callable[[str], str]  # of an arm
FINAL = "rl_process"  # its command stands below a table, where it is finished
STAGES = tuple(arm for arm in DESCRIPTIONS if "_no_" not in arm)
LONG_HORIZON = tuple(arm for arm in STAGES if arm != "base_direct" and not arm.startswith("short"))
ABLATION = {  # arm: the same policy, or one of the same training, with both tools
    "base": "",
    "base_no_execution": "base",
    "base_no_memory": "base",
    "base_direct": "base",
    "rl_process": "",
    "rl_no_execution": "rl_process",
    "rl_no_memory": "rl_process",
    "rl_no_execution_trained": "rl_process",
    "rl_no_memory_trained": "rl_process",
}
SNOWBALL = ("base", "short_sft", "round_3", "rl_process")


def findings_tables(
    arms: Arms,
    coverage: Mapping[int, Sequence[dict]],
    seeds: Sequence[int],
    built_in: Mapping[tuple[str, str], Making],
) -> str:
    """For the test split and for elsewhere, a row a finding: the difference, its interval and the verdict.

    `built_in` is as for `findings`.
    """
    found = {
        "On the test split:": findings(arms, coverage, built_in),
        "Elsewhere (unseen themes, or the other data set):": findings(elsewhere(arms), {}, built_in),
    }
    said_of_all, (first, second) = judged(list(found.values()), seeds)
    paragraphs = []
    for (title, held), said in zip(found.items(), said_of_all, strict=True):
        rows = [_finding_row(*pair, seeds) for pair in zip(held, said, strict=True)]
        header = ["claim", "where in the paper", "compared", "difference", f"seeds {md.listed(seeds)}"]
        header += ["verdict", "in EM", f"EM, seeds {md.listed(seeds)}", "verdict on EM", "at temperature 1"]
        paragraphs += [title, md.table(header, rows)] if rows else []
    if not paragraphs:
        return ""
    least = [f"{least_effect(len(seeds), tests):.1f}" for tests in (first, second) if tests]
    needs = f": the first to hold needs a mean of {' and '.join(least)} of their deviations" if least else ""
    note = (
        "Differences on the same questions, in points (of EX, of EM, of the ability, of all training "
        "questions) unless a unit is given. 95 % intervals: databases are resampled, and the spread of the "
        "seeds (on the embedded benchmark each with a first model of its own) is added as Student's t "
        "(drawn_means in mtsql/experiments/arms.py); with one seed they say nothing of others, and they are "
        "not corrected for the number of claims. p is, by Holm's method, in two families that were named "
        "before any arm was evaluated: the claims on correctness on the test split, in EX or, where that is "
        f"built in, in EM ({first} tests), and all others ({second}). *Holds*: above 0, and p at most 0.05, "
        "also at the upper end of its own Monte-Carlo error. "
        "*The contrary holds*: below 0 likewise. *Not beyond chance*: neither. *Built in*: "
        "how the benchmark and its agents are made decides it, in whichever direction; no evidence, and not "
        "tested. *Untested*: a seed is not finished, or has no answers to compare. So few seeds show "
        f"large effects alone{needs}. At temperature 1: the same mean of sampled answers. All RL runs have "
        "the same questions, those of the counted ones that `round_3` with both tools does not always get "
        "right, as many steps and samples; the long-horizon ones come after three rounds."
    )
    reasons = dict.fromkeys(f.built_in for held in found.values() for f in held if f.built_in)
    why = "Built in: " + "; ".join(reasons) + "." if reasons else ""
    return md.joined(*paragraphs, note, why, md.made_by_arm(arms, (FINAL, *arms)))


def _finding_row(finding: Finding, said: Judged, seeds: Sequence[int]) -> list[str]:
    scale, unit = (100, "") if finding.unit == "points" else (1, f" {finding.unit}")
    places = 2 if finding.unit == "interactions" else 1

    def number(value: float | None) -> str:
        return md.EMPTY if value is None else md.signed(scale * value, places)

    def cells(difference: Difference | None, verdict: Verdict) -> list[str]:
        if difference is None:
            return [md.EMPTY] * 3
        interval = "" if difference.interval is None else f" {md.interval_of(difference, scale, places)}"
        each = ", ".join(number(difference.by_seed.get(seed)) for seed in seeds)
        tested = "" if verdict.p is None else f", p {verdict.p:.3f}"
        text = f"**{verdict.said}**{tested}" if verdict.said else md.EMPTY
        return [number(difference.mean) + unit + interval, each, text]

    of_ex, of_em = cells(finding.difference, said.difference), cells(finding.em, said.em)
    return [finding.claim, finding.source, finding.compared, *of_ex, *of_em, number(finding.sampled)]


def accuracy_table(arms: Arms, seeds: Sequence[int]) -> str:
    """EX and EM on the test split and elsewhere: the mean over seeds, and each seed's."""
    away = elsewhere(arms)

    def cell(where: Arms, metric: str) -> Cell:
        return lambda arm: md.mean_and_seeds(where.get(arm, {}), seeds, metric)

    names = [arm for arm in DESCRIPTIONS if arm in arms or arm in away]
    columns = {"EX": cell(arms, "ex"), "EM": cell(arms, "em")}
    columns |= {"EX elsewhere": cell(away, "ex"), "EM elsewhere": cell(away, "em")}
    note = f"In %: mean over seeds (seeds {md.listed(seeds)})."
    return _table_by_arm(names, columns, note, md.made_by_arm(arms, (FINAL, *STAGES)))


def sizes_table(arms: Arms) -> str:
    """EX and EM by the size of the embedded model, of the seeds that have other sizes."""
    away = elsewhere(arms)
    sized = {found[1]: arm for arm in arms if (found := re.fullmatch(r"layers_(\d+)_base", arm))}
    if not sized:
        return ""
    seeds = sorted(set.intersection(*(set(arms[arm]) for arm in sized.values())))
    rows = []
    for layers in (*sorted(sized, key=int), ""):
        for arm in ("base", "short_sft", "round_3", FINAL):
            name = f"layers_{layers}_{arm}" if layers else arm
            cells = [
                md.percent(
                    mean_over_seeds({s: of[name][s] for s in seeds if s in of.get(name, {})}, m, "mean")
                )
                for of in (arms, away)
                for m in ("ex", "em")
            ]
            rows.append([f"{layers} layers" if layers else "this page's", f"`{arm}`", *cells])
    note = f"In %, seed {md.listed(seeds)}: one seed, so that nothing is said of others."
    return md.table(["Model", "arm", "EX", "EM", "EX elsewhere", "EM elsewhere"], rows, note)


def averages_table(arms: Arms) -> str:
    """Table 3 and Figure 1: EX and EM in domain, out of domain, and the mean of both."""
    here, there = both_sides(arms)

    def cell(metric: str, *sides: Arms) -> Cell:
        return lambda arm: md.percent(fmean(mean_over_seeds(of[arm], metric, "mean") for of in sides))

    names = [arm for arm in STAGES if here.get(arm)]
    columns = {
        f"{metric.upper()} {name}": cell(metric, *sides)
        for name, sides in (("in domain", (here,)), ("out of domain", (there,)), ("mean", (here, there)))
        for metric in ("ex", "em")
    }
    return _table_by_arm(names, columns, "In %, means over the seeds that have both.")


def ablation_table(arms: Arms, seeds: Sequence[int]) -> str:
    """EX and EM with both tools, with one, and with none."""

    def minus_both(metric: str) -> Cell:
        return lambda arm: md.difference_of(
            paired_answers(arms[arm], arms.get(ABLATION[arm], {}), measure_of(metric))
        )

    columns = {
        "EX": lambda arm: md.mean_and_seeds(arms[arm], seeds, "ex"),
        "EM": lambda arm: md.mean_and_seeds(arms[arm], seeds, "em"),
        "EX minus both tools": minus_both("ex"),
        "EM minus both tools": minus_both("em"),
    }
    note = (
        f"In %: mean over seeds (seeds {md.listed(seeds)}). Last columns: the difference to the agent with "
        "both tools, in points with 95 % interval. What a tool is worth when it is taken away at the end "
        "holds the habits of an agent that was trained with it. `..._trained` had neither warm start nor RL "
        "with it; its first model was shown both tools in every dialogue and each other set in a quarter of "
        "them, and mistakes that only the memory shows without their repair where there is none."
    )
    made = md.made_by_arm(arms, ("rl_no_memory", "rl_no_execution"))
    return _table_by_arm(_finished(arms, ABLATION), columns, note, made)


def coverage_table(
    coverage: Mapping[int, Sequence[dict]], seeds: Sequence[int], command: tuple[int, str] | None
) -> str:
    """How many training questions have a trajectory after each round."""
    if not coverage:
        return ""
    last = max(entry["round"] for rounds in coverage.values() for entry in rounds)

    def row(text: str, number: Callable[[Sequence[dict]], float | None]) -> list[str]:
        found = {seed: n for seed, rounds in coverage.items() if (n := number(rounds)) is not None}
        return [text, *(md.decimal(n, 0) for n in (fmean(found.values()), *map(found.get, seeds)))]

    def covered(number: int) -> Callable[[Sequence[dict]], float | None]:
        return lambda rounds: next((r["questions_covered"] for r in rounds if r["round"] == number), None)

    rows = [
        row("all training questions", lambda rounds: rounds[0]["questions_asked"]),
        *(row(f"with a trajectory after round {n}", covered(n)) for n in range(1, last + 1)),
        row("trajectories after the last round", lambda rounds: rounds[-1]["trajectories"]),
    ]
    header = ["Number of", "mean", *(f"seed {seed}" for seed in seeds)]
    return md.table(header, rows, md.made_by("all rows", *command) if command else "")


def latency_table(arms: Arms) -> str:
    """Seconds an answer, EX and tokens of the stages."""
    columns = {
        "latency, seconds an answer": _mean(arms, "latency_seconds", places=2),
        "EX (%)": _mean(arms, "ex", "mean", scale=100),
        "tokens written an answer": _mean(arms, "sampled_tokens"),
        "tokens with the tools' responses": _mean(arms, "response_tokens"),
        "interactions an answer": _mean(arms, "interactions", places=2),
    }
    note = (
        "Means over seeds. Latency is of one question at a time, a few dozen of them, and where seeds run "
        "side by side, of a machine that does other work: no more than an order of magnitude."
    )
    return _table_by_arm(_finished(arms, STAGES), columns, note, md.made_by_arm(arms, (FINAL, *STAGES)))


def breakdown_tables(arms: Arms) -> str:
    """EX, tokens and interactions by turn and by hardness."""
    asked = [e.summary for arm in MAIN_STAGES for e in arms.get(arm, {}).values()]
    groups = [(by, n) for by, names in (("turn", TURNS), ("hardness", HARDNESS)) for n in names]
    groups = [(by, n) for by, n in groups if any(look_up(s, f"questions_by_{by}", n) for s in asked)]
    paragraphs = []
    for title, quantity, scale, places in (
        ("EX in %", "ex", 100, 1),
        ("EM in %", "em", 100, 1),
        ("Tokens the model wrote, an answer", "sampled_tokens", 1, 1),
        ("Interactions an answer", "interactions", 1, 2),
    ):
        columns = {}
        for by, n in groups:
            heading = f"{'turn ' if by == 'turn' else ''}{n} ({asked[0][f'questions_by_{by}'].get(n, 0)})"
            columns[heading] = _mean(arms, *breakdown_keys(quantity, by), n, scale=scale, places=places)
        rows = _table_by_arm(_finished(arms, MAIN_STAGES), columns)
        paragraphs += [f"{title}, means over seeds:", rows]
    note = "In parentheses the number of questions. The command below makes a row of all four tables."
    return md.joined(*paragraphs, note, md.made_by_arm(arms, (FINAL, *MAIN_STAGES))) if groups else ""


def abilities_table(arms: Arms) -> str:
    """The five abilities of section 4.3, greedy and at temperature 1."""

    def cell(greedy: Cell, sampled: Cell) -> Cell:
        return lambda arm: greedy(arm) + (f" ({sampled(arm)})" if sampled(arm) != md.EMPTY else "")

    greedy, sampled = (ability_keys(is_sampled) for is_sampled in (False, True))
    columns = {
        text: cell(_mean(arms, *greedy[text], scale=100), _mean(arms, *sampled[text], scale=100))
        for text in greedy
    }
    note = "In %, from 0 to 100, means over seeds: greedy, and in parentheses sampled at temperature 1."
    made = md.made_by_arm(arms, (FINAL, *LONG_HORIZON))
    return _table_by_arm(_finished(arms, LONG_HORIZON), columns, note, _correlations(arms), made)


def _correlations(arms: Arms) -> str:
    """Finding 12: Pearson's correlation of each ability with EX over the agents, arms times seeds."""
    agents = [e.summary for arm in LONG_HORIZON for e in arms.get(arm, {}).values()]
    *abilities, ex = ability_keys(sampled=False).items()
    found = []
    for text, keys in abilities:
        pairs = [(look_up(s, *keys), look_up(s, *ex[1])) for s in agents]
        pairs = [pair for pair in pairs if pair[0] is not None]
        if len({x for x, _ in pairs}) > 1 and len({y for _, y in pairs}) > 1:
            found.append(f"{text} {correlation(*zip(*pairs, strict=True)):.2f}")
    if not found:
        return ""
    return (
        f"Finding 12, correlation with EX, greedy, over {len(agents)} agents: {', '.join(found)}. It "
        "describes these agents, and tests nothing: the stages of a seed depend on each other."
    )


def errors_table(arms: Arms) -> str:
    """The share of questions with an error of each kind."""
    columns = {kind.replace("_", " "): _mean(arms, "errors", kind, scale=100) for kind in ERRORS}
    note = "In % of all questions, means over seeds. A wrong answer can show several kinds."
    return _table_by_arm(_finished(arms, STAGES), columns, note, md.made_by_arm(arms, (FINAL, *STAGES)))


def snowball_table(arms: Arms) -> str:
    """EX by turn with gold SQL, and with the policy's own answers, in the history."""
    rows = []
    for arm in SNOWBALL:
        gold, predicted = arms.get(arm, {}), arms.get(f"{arm}_predicted", {})
        differences = paired_answers(predicted, gold)
        if not differences:
            continue
        both = sorted(gold.keys() & predicted.keys())
        for text, side in (("gold", gold), ("predicted", predicted)):
            shared = {seed: side[seed] for seed in both}
            keys = [("em", "mean"), ("ex", "mean"), *(("ex", "by_turn", turn) for turn in TURNS)]
            rows.append([_label(arm), text, *(md.percent(mean_over_seeds(shared, *k)) for k in keys)])
        by_turn = [[a for a in differences if turn_name(a.record["turn_index"]) == t] for t in TURNS]
        in_em = paired_answers(predicted, gold, measure_of("em"))
        rows.append(["", "difference", *map(md.difference_of, (in_em, differences, *by_turn))])
    header = ["Arm", "history", "EM, all turns", "EX, all turns", *(f"turn {t}" for t in TURNS)]
    note = (
        "EX in %, means over the seeds that have both. Difference: predicted minus gold in points, with 95 % "
        "interval. If it falls from turn to turn, errors snowball."
    )
    made = md.made_by_arm(arms, (f"{arm}_predicted" for arm in reversed(SNOWBALL)))
    return md.table(header, rows, note, made)


def cap_table(arms: Arms) -> str:
    """The final agent with less room for its response."""
    caps = {arm: int(arm[7:]) for arm in arms if re.fullmatch(r"rl_cap_\d+", arm)}
    names = sorted(caps, key=caps.__getitem__)
    uncapped = next((e.response_cap for e in arms.get(FINAL, {}).values()), None)
    rows = [
        [
            f"`{arm}`",
            md.decimal(caps.get(arm, uncapped), 0),
            *(md.percent(mean_over_seeds(arms[arm], metric, "mean")) for metric in ("ex", "em")),
            md.percent(mean_over_seeds(arms[arm], "status", Status.OUT_OF_TOKENS)),
            md.decimal(mean_over_seeds(arms[arm], "response_tokens")),
            md.decimal(mean_over_seeds(arms[arm], "latency_seconds"), 2),
        ]
        for arm in (*_finished(arms, (FINAL,)), *reversed(names))
    ]
    header = ["Arm", "cap, tokens", "EX (%)", "EM (%)", "cut by a limit (%)", "response tokens an answer"]
    header.append("latency, seconds an answer")
    return md.table(header, rows, "Means over seeds.", md.made_by_arm(arms, (*names, FINAL))) if caps else ""


def _table_by_arm(names: Iterable[str], columns: Mapping[str, Cell], *notes: str) -> str:
    """One row an arm."""
    rows = [[_label(arm), *(cell(arm) for cell in columns.values())] for arm in names]
    return md.table(["Arm", *columns], rows, *notes)


def _finished(arms: Arms, names: Iterable[str]) -> list[str]:
    return [arm for arm in names if arm in arms]


def _mean(arms: Arms, *keys: str, scale: float = 1, places: int = 1) -> Cell:
    """The mean over seeds of a number of the summaries."""
    return lambda arm: md.decimal(mean_over_seeds(arms[arm], *keys, scale=scale), places)


def _label(arm: str) -> str:
    return f"`{arm}`: {DESCRIPTIONS[arm]}"
