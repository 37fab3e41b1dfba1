"""The tables of the reproduction's results page, after those of MTSQL-R1 (section 4, appendix C)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import correlation, fmean

from mtsql.agent.trajectory import Status
from mtsql.experiments.arms import (
    DESCRIPTIONS,
    Answer,
    Arms,
    Seeds,
    estimate,
    mean_over_seeds,
    paired_answers,
)
from mtsql.experiments.figures import MAIN_STAGES
from mtsql.experiments.findings import signed
from mtsql.report.abilities import ABILITIES
from mtsql.report.metrics import HARDNESS, TURNS, turn_name

Number = Callable[[dict], float | None]  # of a summary
EMPTY = "–"
STAGES = (
    "base",
    "base_direct",
    "short_sft",
    "short_rl",
    "round_1",
    "round_2",
    "round_3",
    "rl_outcome",
    "rl_process",
    "rl_shuffled",
)
LONG_HORIZON = ("base", "round_1", "round_2", "round_3", "rl_outcome", "rl_process", "rl_shuffled")
ABLATION = {  # with both tools: with fewer
    "base": ("base_no_execution", "base_no_memory", "base_direct"),
    "rl_process": ("rl_no_execution", "rl_no_memory"),
}
SNOWBALL = ("base", "short_sft", "round_3", "rl_process")


def accuracy_table(arms: Arms, seeds: Sequence[int]) -> str:
    """EX and EM in and out of domain: the mean over seeds, and each seed's."""
    rows = []
    for arm in STAGES:
        sides = [arms.get(arm, {}), arms.get(f"{arm}_shifted", {})]
        if any(sides):
            cells = [_mean_and_seeds(side, _mean_of(m), seeds) for side in sides for m in ("ex", "em")]
            rows.append([_label(arm), *cells])
    header = ["Arm", "EX", "EM", "EX, out of domain", "EM, out of domain"]
    note = f"In %: mean over seeds (seeds {listed(seeds)})."
    return _table_of_arms(header, rows, note, made_by_arm(arms, ("rl_process", *STAGES)))


def ablation_table(arms: Arms, seeds: Sequence[int]) -> str:
    """EX and EM with both tools, with one, and with none."""
    rows = []
    for full, variants in ABLATION.items():
        for arm in (full, *variants):
            if arm in arms:
                cells = [_mean_and_seeds(arms[arm], _mean_of(metric), seeds) for metric in ("ex", "em")]
                lost = paired_answers(arms[arm], arms.get(full, {}), lambda r: r["ex"]) if arm != full else []
                rows.append([_label(arm), *cells, shown_difference(lost)])
    header = ["Arm", "EX", "EM", "EX minus both tools"]
    note = (
        f"In %: mean over seeds (seeds {listed(seeds)}). Last column: the difference to the agent with both "
        "tools, in points with 95 % interval."
    )
    return _table_of_arms(header, rows, note, made_by_arm(arms, reversed(ABLATION["rl_process"])))


def coverage_table(
    coverage: Mapping[int, Sequence[dict]], seeds: Sequence[int], command: tuple[int, str] | None
) -> str:
    """How many training questions have a trajectory after each round."""
    if not coverage:
        return ""
    last = max(entry["round"] for rounds in coverage.values() for entry in rounds)

    def row(text: str, number: Callable[[Sequence[dict]], float | None]) -> list[str]:
        found = {seed: number(rounds) for seed, rounds in coverage.items()}
        known = [n for n in found.values() if n is not None]
        each = [EMPTY if found.get(seed) is None else f"{found[seed]:,.0f}" for seed in seeds]
        return [text, f"{fmean(known):,.0f}" if known else EMPTY, *each]

    def of_round(number: int, key: str) -> Callable[[Sequence[dict]], float | None]:
        return lambda rounds: next((entry[key] for entry in rounds if entry["round"] == number), None)

    rows = [row("all training questions", lambda rounds: rounds[0]["questions_asked"])]
    for number in range(1, last + 1):
        rows.append(row(f"with a trajectory after round {number}", of_round(number, "questions_covered")))
    rows.append(row("trajectories after the last round", lambda rounds: rounds[-1]["trajectories"]))
    header = ["Number of", "mean", *(f"seed {seed}" for seed in seeds)]
    return joined(table(header, rows), made_by("all rows", *command) if command else "")


def latency_table(arms: Arms) -> str:
    """Seconds an answer, EX and tokens of the stages."""
    numbers: tuple[tuple[str, Number, Callable], ...] = (
        ("latency, seconds an answer", lambda s: s.get("latency_seconds"), _decimal(2)),
        ("EX (%)", _mean_of("ex"), percent),
        ("tokens written an answer", lambda s: s["sampled_tokens"], _decimal(1)),
        ("tokens with the tools' responses", lambda s: s["response_tokens"], _decimal(1)),
        ("interactions an answer", lambda s: s["interactions"], _decimal(2)),
    )
    note = "Means over seeds. Latency is of one question at a time."
    return _mean_table(arms, STAGES, numbers, note, made_by_arm(arms, ("rl_process", *STAGES)))


def breakdown_tables(arms: Arms) -> str:
    """EX, tokens and interactions by turn and by hardness."""
    kinds: tuple[tuple[str, Callable[[dict, str], dict], Callable], ...] = (
        ("EX in %", lambda s, by: s["ex"][f"by_{by}"], percent),
        ("Tokens the model wrote, an answer", lambda s, by: s[f"sampled_tokens_by_{by}"], _decimal(1)),
        ("Interactions an answer", lambda s, by: s[f"interactions_by_{by}"], _decimal(2)),
    )
    asked = [e.summary for arm in MAIN_STAGES for e in arms.get(arm, {}).values()]
    columns = [(by, n) for by, names in (("turn", TURNS), ("hardness", HARDNESS)) for n in names]
    columns = [(by, n) for by, n in columns if any(s[f"questions_by_{by}"].get(n) for s in asked)]
    parts = []
    for title, of, shown in kinds:
        numbers = [
            (
                f"{'turn ' if by == 'turn' else ''}{n} ({asked[0][f'questions_by_{by}'].get(n, 0)})",
                lambda s, by=by, n=n, of=of: of(s, by).get(n),
                shown,
            )
            for by, n in columns
        ]
        parts += [f"{title}, means over seeds:", _mean_table(arms, MAIN_STAGES, numbers)]
    note = "In parentheses the number of questions. The command below makes a row of all three tables."
    return joined(*parts, note, made_by_arm(arms, ("rl_process", *MAIN_STAGES))) if columns else ""


def abilities_table(arms: Arms) -> str:
    """The five abilities of section 4.3, greedy and at temperature 1."""
    keys = {text: ("abilities", ability) for ability, text in ABILITIES.items()} | {"EX": ("ex", "mean")}
    rows = []
    for arm in LONG_HORIZON:
        if arm in arms:
            cells = []
            for key, name in keys.values():
                greedy = mean_over_seeds(arms[arm], lambda s, k=key, n=name: s[k].get(n))
                at_1 = mean_over_seeds(arms[arm], lambda s, k=key, n=name: _sampled(s, k, n))
                cells.append(percent(greedy) + (f" ({percent(at_1)})" if at_1 is not None else ""))
            rows.append([_label(arm), *cells])
    note = "In %, from 0 to 100, means over seeds: greedy, and in parentheses sampled at temperature 1."
    made = made_by_arm(arms, ("rl_process", *LONG_HORIZON))
    return _table_of_arms(["Arm", *keys], rows, note, _correlations(arms), made)


def _correlations(arms: Arms) -> str:
    """Finding 12: Pearson's correlation of each ability with EX over the agents, arms times seeds."""
    agents = [e.summary for arm in LONG_HORIZON for e in arms.get(arm, {}).values()]
    found = []
    for ability, text in ABILITIES.items():
        pairs = [(s["abilities"][ability], s["ex"]["mean"]) for s in agents]
        pairs = [pair for pair in pairs if pair[0] is not None]
        if len({x for x, _ in pairs}) > 1 and len({y for _, y in pairs}) > 1:
            found.append(f"{text} {correlation(*zip(*pairs, strict=True)):.2f}")
    if not found:
        return ""
    return f"Finding 12, correlation with EX, greedy, over {len(agents)} agents: {', '.join(found)}."


def errors_table(arms: Arms) -> str:
    """The share of questions with an error of each kind."""
    summaries = [e.summary for arm in STAGES for e in arms.get(arm, {}).values()]
    kinds = list(dict.fromkeys(kind for summary in summaries for kind in summary["errors"]))
    numbers = [(k.replace("_", " "), lambda s, k=k: s["errors"].get(k), percent) for k in kinds]
    note = "In % of all questions, means over seeds. A wrong answer can show several kinds."
    return _mean_table(arms, STAGES, numbers, note, made_by_arm(arms, ("rl_process", *STAGES)))


def snowball_table(arms: Arms) -> str:
    """EX by turn with gold SQL, and with the policy's own answers, in the history."""
    rows = []
    for arm in SNOWBALL:
        both = arms.get(arm, {}).keys() & arms.get(f"{arm}_predicted", {}).keys()
        gold, predicted = (
            ({s: arms[name][s] for s in sorted(both)} for name in (arm, f"{arm}_predicted"))
            if both
            else ({}, {})
        )
        differences = paired_answers(predicted, gold, lambda record: record["ex"])
        if not differences:
            continue
        for text, side in (("gold", gold), ("predicted", predicted)):
            numbers = [_mean_of("ex"), *(lambda s, t=t: s["ex"]["by_turn"].get(t) for t in TURNS)]
            rows.append([_label(arm), text, *(percent(mean_over_seeds(side, n)) for n in numbers)])
        by_turn = [[a for a in differences if turn_name(a.record["turn_index"]) == t] for t in TURNS]
        cells = map(shown_difference, (differences, *by_turn))
        rows.append(["", "difference", *cells])
    header = ["Arm", "history", "all turns", *(f"turn {t}" for t in TURNS)]
    note = (
        "EX in %, means over the seeds that have both. Difference: predicted minus gold in points, with 95 % "
        "interval. If it falls from turn to turn, errors snowball."
    )
    if not rows:
        return ""
    names = [f"{arm}_predicted" for arm in reversed(SNOWBALL)]
    return joined(table(header, rows), note, made_by_arm(arms, names))


def cap_table(arms: Arms) -> str:
    """The final agent with less room for its response."""
    caps = [arm for arm in arms if re.fullmatch(r"rl_cap_\d+", arm)]
    if not caps:
        return ""
    names = [arm for arm in ("rl_process",) if arm in arms]
    names += sorted(caps, key=lambda arm: -int(arm.rpartition("_")[2]))
    rows = []
    for arm in names:
        cap = next(iter(arms[arm].values())).response_cap
        cap = int(arm.rpartition("_")[2]) if arm in caps else cap
        shares = [mean_over_seeds(arms[arm], n) for n in (_mean_of("ex"), _mean_of("em"), _cut_share)]
        tokens = mean_over_seeds(arms[arm], lambda s: s["response_tokens"])
        shown = EMPTY if cap is None else f"{cap:,}"
        rows.append([f"`{arm}`", shown, *map(percent, shares), _decimal(1)(tokens)])
    header = ["Arm", "cap, tokens", "EX (%)", "EM (%)", "cut by a limit (%)", "response tokens an answer"]
    return joined(table(header, rows), "Means over seeds.", made_by_arm(arms, reversed(names)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns of numbers, signs and intervals are aligned right, the others left."""
    numbers = [all(re.match(r"[-+\[\d–]", cell) for cell in column) for column in zip(*rows, strict=True)]
    rule = ["---:" if number else "---" for number in numbers]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *rows))


def percent(share: float | None) -> str:
    """A fraction in percent with one decimal."""
    return EMPTY if share is None else f"{100 * share:.1f}"


def with_seed_placeholder(line: str, seed: int) -> str:
    """A command line with SEED for its seed."""
    return re.sub(rf"(--seed[ =]|\bseed){seed}\b", r"\1SEED", line)


def _mean_table(
    arms: Arms, names: Sequence[str], numbers: Sequence[tuple[str, Number, Callable]], *notes: str
) -> str:
    """One row an arm, one column a number: its heading, the number, and how it is shown."""
    rows = [
        [_label(arm), *(shown(mean_over_seeds(arms[arm], number)) for _, number, shown in numbers)]
        for arm in names
        if arm in arms
    ]
    return _table_of_arms(["Arm", *(heading for heading, _, _ in numbers)], rows, *notes)


def _table_of_arms(header: Sequence[str], rows: Sequence[Sequence[str]], *notes: str) -> str:
    return joined(table(header, rows), *notes) if rows else ""


def made_by_arm(arms: Arms, names: Iterable[str]) -> str:
    """The command of the first of these arms that is finished."""
    for arm in names:
        for seed, evaluation in arms.get(arm, {}).items():
            if evaluation.command:
                return made_by(f"the row of `{arm}`", seed, evaluation.command)
    return ""


def made_by(what: str, seed: int, line: str) -> str:
    """The line below a table that names the command of one of its rows."""
    return f"Command of {what}: `{with_seed_placeholder(line, seed)}`"


def _mean_and_seeds(side: Seeds, number: Number, seeds: Sequence[int]) -> str:
    each = ", ".join(percent(number(side[s].summary)) if s in side else EMPTY for s in seeds)
    return f"{percent(mean_over_seeds(side, number))} ({each})" if side else EMPTY


def shown_difference(found: Sequence[Answer]) -> str:
    """The mean of differences in points, with its interval."""
    difference = estimate(found)
    if difference is None:
        return EMPTY
    low, high = (signed(100 * bound) for bound in difference.interval)
    return f"{signed(100 * difference.mean)} [{low}, {high}]"


def _mean_of(metric: str) -> Number:
    return lambda summary: summary[metric]["mean"]


def _sampled(summary: dict, key: str, name: str) -> float | None:
    """A number of the summary at temperature 1; EX stands there alone."""
    found = summary.get(f"{key}_sampled")
    return found.get(name) if isinstance(found, dict) else found


def _cut_share(summary: dict) -> float | None:
    return summary["status"].get(Status.OUT_OF_TOKENS)


def _decimal(places: int) -> Callable[[float | None], str]:
    return lambda number: EMPTY if number is None else f"{number:,.{places}f}"


def _label(arm: str) -> str:
    return f"`{arm}`: {DESCRIPTIONS[arm]}"


def listed(seeds: Sequence[int]) -> str:
    """The seeds in a sentence."""
    return ", ".join(map(str, seeds))


def joined(*parts: str) -> str:
    """The parts that are not empty, as paragraphs."""
    return "\n\n".join(part for part in parts if part)
