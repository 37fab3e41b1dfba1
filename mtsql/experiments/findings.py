"""The findings of MTSQL-R1 (section 4) as differences between arms, each with its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple, TypeAlias

from mtsql.experiments.arms import (
    Answer,
    Arms,
    Difference,
    Measure,
    Verdict,
    answers,
    contrast,
    estimate,
    look_up,
    measure_of,
    paired_answers,
    verdicts,
)
from mtsql.experiments.markdown import signed
from mtsql.report.abilities import ABILITIES

COMPARISONS = (  # claim, where in the paper if it is not ours, better arm, worse arm
    ("an untrained small model answers better without the tools", "Finding 2", "base_direct", "base"),
    ("the long-horizon warm start beats short-horizon SFT", "Table 2: EX, 1.7B", "round_3", "short_sft"),
    ("a second self-taught round helps", "Finding 7", "round_2", "round_1"),
    ("a third self-taught round helps", "Finding 7", "round_3", "round_2"),
    ("RL improves on the warm start", "Finding 8", "rl_outcome", "round_3"),
    ("process rewards help beside outcome rewards", "Finding 9", "rl_process", "rl_outcome"),
    ("long-horizon RL beats short-horizon RL", "Table 2, by its review", "rl_outcome", "short_rl"),
    ("the agent beats short-horizon SFT", "Table 2, Finding 6", "rl_process", "short_sft"),
    ("the agent needs EXECUTE: taken away", "Finding 10", "rl_process", "rl_no_execution"),
    ("the agent needs EXECUTE: trained without", "Finding 10", "rl_process", "rl_no_execution_trained"),
    ("the agent needs MEMORY-VERIFY: taken away", "Finding 10", "rl_process", "rl_no_memory"),
    ("the agent needs MEMORY-VERIFY: trained without", "Finding 10", "rl_process", "rl_no_memory_trained"),
    ("RL needs the curriculum's order", "ours, of section 3.3.1", "rl_process", "rl_shuffled"),
)
PRESCRIBED = "Equation 1 asks for MEMORY-VERIFY from the second turn on"
COVERED = "a question that has a trajectory keeps it, so that the set cannot shrink"
SCRIPTED = "the scripted agent that the base imitates "
LONGER = "the gold SQL of harder questions is longer"
LATER = "harder questions come later in a dialogue, where Equation 1 asks for MEMORY-VERIFY"


class Making(NamedTuple):
    """Why a benchmark's making decides a comparison, and whether that in EM too."""

    reason: str
    in_em: bool = True


HIDDEN = Making(
    "first rows hide the form of most values, which only EXECUTE shows and EM does not look at", False
)
HABIT = Making("an agent that was trained with a tool goes on calling it when it is gone")
UNSEEN = Making(SCRIPTED + "makes mistakes that only the memory shows, and without it never repairs them")
EMBEDDED = {  # by better and worse arm
    ("base_direct", "base"): Making(
        SCRIPTED
        + "answers with the gold SQL without tools, and errs first with them, so that arms with tools start "
        "lower, in EM too"
    ),
    ("round_3", "base"): Making(
        SCRIPTED + "skips tools and overlooks faults, so that these abilities can grow"
    ),
    ("round_3", "short_sft"): HIDDEN,
    ("rl_outcome", "short_rl"): HIDDEN,
    ("rl_process", "short_sft"): HIDDEN,
    ("rl_process", "rl_no_execution"): HABIT,
    ("rl_process", "rl_no_execution_trained"): HIDDEN,
    ("rl_process", "rl_no_memory"): HABIT,
    ("rl_process", "rl_no_memory_trained"): UNSEEN,
}
STAGES = ("base", "round_3", "rl_outcome")  # of the abilities: process rewards would pay for them
Where = Callable[[dict], bool]  # whether a record counts
Place: TypeAlias = tuple[int, int, str]  # list, finding in it, and which of its differences
CONTRASTS: dict[str, tuple[tuple[str, Where], tuple[str, Where]]] = {
    "later turns": (
        ("turns from 4 on", lambda r: r["turn_index"] >= 3),
        ("turn 1", lambda r: r["turn_index"] == 0),
    ),
    "harder questions": (
        ("hard and extra", lambda r: r["hardness"] in ("hard", "extra")),
        ("easy", lambda r: r["hardness"] == "easy"),
    ),
}


@dataclass(frozen=True)
class Finding:
    """One claim, and the difference that should be above 0; in fractions where `unit` is "points".

    `em` is the same difference in exact match, where the claim is about EX. `built_in` says why
    construction decides it, in whichever direction, "" if it does not, and `em_built_in` whether it
    decides EM as well.
    """

    claim: str
    source: str
    compared: str
    difference: Difference
    unit: str = "points"
    sampled: float | None = None  # the same at temperature 1
    em: Difference | None = None
    built_in: str = ""
    em_built_in: bool = False
    arms: tuple[str, str] = ("", "")  # better, worse; of a comparison of two


def findings(
    arms: Arms, coverage: Mapping[int, Sequence[dict]], built_in: Mapping[tuple[str, str], Making]
) -> list[Finding]:
    """The findings whose arms are finished in at least one common seed, in the paper's order of themes.

    `built_in` says which comparisons, better and worse arm, the benchmark's making decides: EMBEDDED or none.
    """
    themes = (_accuracy, _correctness, _gains, _effort, _abilities)
    found = [*(finding for theme in themes for finding in theme(arms)), *_coverage(coverage)]
    return [
        replace(finding, built_in=making.reason, em_built_in=making.in_em)
        if (making := built_in.get(finding.arms))
        else finding
        for finding in found
    ]


class Judged(NamedTuple):
    """The verdicts on a finding's difference and on that in EM."""

    difference: Verdict
    em: Verdict


def judged(
    found: Sequence[Sequence[Finding]], seeds: Sequence[int]
) -> tuple[list[list[Judged]], tuple[int, int]]:
    """The verdicts on each finding of each list, and the numbers of tests in the two families.

    Holm's correction is over each family by itself. The first, named before any run, has the claims on
    correctness of the first list: in EX, or in EM where the making decides EX. The second has all the rest.
    What is built in is not tested.
    """
    families: tuple[dict[Place, Difference], dict[Place, Difference]] = ({}, {})
    for number, group in enumerate(found):
        for index, finding in enumerate(group):
            correctness = number == 0 and finding.em is not None
            if not finding.built_in:
                families[0 if correctness else 1][number, index, "difference"] = finding.difference
            if finding.em is not None and not finding.em_built_in:
                families[0 if correctness and finding.built_in else 1][number, index, "em"] = finding.em
    said: dict[Place, Verdict] = {}
    for family in families:
        said |= zip(family, verdicts(list(family.values()), seeds), strict=True)

    def of(number: int, index: int, metric: str) -> Verdict:
        there = getattr(found[number][index], metric) is not None
        return said.get((number, index, metric), Verdict("built in" if there else ""))

    judgements = [
        [Judged(of(number, index, "difference"), of(number, index, "em")) for index in range(len(group))]
        for number, group in enumerate(found)
    ]
    first, second = (sum(said[place].p is not None for place in family) for family in families)
    return judgements, (first, second)


def _gained(arms: Arms, better: str, worse: str, measure: Measure) -> list[Answer]:
    return paired_answers(arms.get(better, {}), arms.get(worse, {}), measure)


def _mean(difference: Difference | None) -> float | None:
    return difference and difference.mean


def _accuracy(arms: Arms) -> Iterator[Finding]:
    for claim, source, better, worse in COMPARISONS:
        ex, em, sampled = (
            estimate(_gained(arms, better, worse, measure_of(key))) for key in ("ex", "em", "ex_sampled")
        )
        if ex:
            compared = f"`{better}` - `{worse}`"
            yield Finding(claim, source, compared, ex, "points", _mean(sampled), em, arms=(better, worse))


def _correctness(arms: Arms) -> Iterator[Finding]:
    """Finding 3: short-horizon SFT imitates the form of the gold SQL, so EX gains more than EM."""
    difference, sampled = (
        estimate(_gained(arms, "rl_process", "short_sft", _ex_beyond_em(suffix)))
        for suffix in ("", "_sampled")
    )
    if difference:
        compared = "`rl_process` - `short_sft`: in EX against in EM"
        claim = "the gain over short-horizon SFT is larger in EX than in EM"
        pair = ("rl_process", "short_sft")
        yield Finding(claim, "Finding 3", compared, difference, sampled=_mean(sampled), arms=pair)


def _gains(arms: Arms) -> Iterator[Finding]:
    """Finding 4: the gain over short-horizon SFT is larger at later turns, and on harder questions."""
    keys = ("ex", "em", "ex_sampled")
    sides = [_gained(arms, "rl_process", "short_sft", measure_of(key)) for key in keys]
    for what, ((more, is_more), (less, is_less)) in CONTRASTS.items():
        gains, in_em, at_temperature_1 = ((_where(s, is_more), _where(s, is_less)) for s in sides)
        difference, em, sampled = contrast(*gains), contrast(*in_em), contrast(*at_temperature_1)
        if difference:
            of_more, of_less = (signed(100 * fmean(a.value for a in group)) for group in gains)
            compared = f"`rl_process` - `short_sft`: {more} ({of_more}) against {less} ({of_less})"
            claim = f"the gain over short-horizon SFT is larger on {what}"
            pair = ("rl_process", "short_sft")
            yield Finding(claim, "Finding 4", compared, difference, sampled=_mean(sampled), em=em, arms=pair)


def _effort(arms: Arms) -> Iterator[Finding]:
    """Finding 5: more tokens and interactions for later turns and harder questions."""
    for key, unit in (("sampled_tokens", "tokens"), ("interactions", "interactions")):
        asked = answers(arms.get("rl_process", {}), measure_of(key))
        for what, ((more, is_more), (less, is_less)) in CONTRASTS.items():
            difference = contrast(_where(asked, is_more), _where(asked, is_less))
            if difference:
                claim, compared = f"{what} take more {unit}", f"`rl_process`: {more} against {less}"
                built_in = PRESCRIBED if what == "later turns" else LONGER if unit == "tokens" else LATER
                yield Finding(claim, "Finding 5", compared, difference, unit, built_in=built_in)


def _abilities(arms: Arms) -> Iterator[Finding]:
    """Finding 11: each ability from stage to stage; at temperature 1 only its means are known.

    An ability "where called" is compared on the questions where both stages called the tool.
    """
    for ability, text in ABILITIES.items():
        for worse, better in pairwise(STAGES):
            pairs = _gained(arms, better, worse, lambda r, a=ability: r["abilities"][a])
            difference = estimate(pairs)
            if difference is None:
                continue
            means = [
                [look_up(arms[arm][seed].summary, "abilities_sampled", ability) for arm in (better, worse)]
                for seed in sorted(arms[better].keys() & arms[worse].keys())
            ]
            sampled = [ours - theirs for ours, theirs in means if None not in (ours, theirs)]
            claim, compared = f"ability “{text}” grows", f"`{better}` - `{worse}`"
            where_called = ability.endswith("_called")
            at_temperature_1 = fmean(sampled) if sampled and not where_called else None
            compared += f", {len(pairs)} pairs" if where_called else ""
            pair = (better, worse)
            yield Finding(claim, "Finding 11", compared, difference, sampled=at_temperature_1, arms=pair)


def _coverage(coverage: Mapping[int, Sequence[dict]]) -> Iterator[Finding]:
    """Finding 7: the share of the training questions with a trajectory, last round minus first."""
    last = min((len(rounds) for rounds in coverage.values()), default=0)  # that all seeds have
    if last > 1:
        by_seed = {
            seed: (rounds[last - 1]["questions_covered"] - rounds[0]["questions_covered"])
            / rounds[0]["questions_asked"]
            for seed, rounds in coverage.items()
        }
        difference = Difference(fmean(by_seed.values()), None, by_seed)
        claim, compared = "self-taught rounds cover more training questions", f"round {last} - round 1"
        yield Finding(claim, "Finding 7, Table 7", compared, difference, built_in=COVERED)


def _ex_beyond_em(suffix: str) -> Measure:
    """EX minus EM of a record; None without either."""

    def measure(record: dict) -> float | None:
        ex, em = record.get(f"ex{suffix}"), record.get(f"em{suffix}")
        return None if ex is None or em is None else ex - em

    return measure


def _where(found: Sequence[Answer], is_in: Where) -> list[Answer]:
    return [answer for answer in found if is_in(answer.record)]
