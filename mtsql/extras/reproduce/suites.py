"""The suites of `reproduce.py`, which are the tables of suites.toml, and the commands that they are."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mtsql.extras.reproduce import Part

IMITATE, COUNT = "-m mtsql.toy.imitation", "-m mtsql.extras.curriculum"
DONE = {"train_sft.py": "policy", "train_grpo.py": "policy", COUNT: "counts.jsonl", IMITATE: "run.json"}
BASE = "base"  # not a training: the model that the suite begins with, given or what `imitation` makes


class Training(NamedTuple):
    """A command that makes a policy, or counts for the curriculum."""

    script: str
    start: str = BASE  # the training whose policy it begins with
    options: str = ""
    counts: str = ""  # the training whose counts are its curriculum


class Arm(NamedTuple):
    """What is evaluated: a row of the page."""

    what: str
    policy: str  # a training, or a folder below it
    options: str = ""  # of evaluate.py
    sets: Sequence[str] = ()  # that it answers; () is all


class Suite(NamedTuple):
    """All commands of a suite, and the pairs of arms whose difference its page shows."""

    title: str
    config: str  # files with blanks between
    trained_on: str  # the data of every training
    sets: Mapping[str, str]  # name: the options of evaluate.py that ask it
    trainings: Mapping[str, Training]
    arms: Mapping[str, Arm]
    pairs: Sequence[Sequence[str]]  # what it compares, one arm, and the arm that is subtracted
    seeds: Sequence[int] = (0,)
    once: Sequence[str] = ()  # trainings, or BASE, that seed 0 has made for all seeds
    benchmark: str = ""  # makes {data}, where the suite has its own
    files: Sequence[str] = ()  # that --data holds
    corrected: bool = False  # whether the intervals of differences are widened for their number

    def is_once(self, arm: str) -> bool:
        """Whether the arm is one for all seeds."""
        return arm in self.arms and self.arms[arm].policy.partition("/")[0] in self.once

    def sets_of(self, arm: str) -> Sequence[str]:
        """The sets that an arm answers."""
        return self.arms[arm].sets or list(self.sets)

    def benchmark_part(self, out: Path) -> Part:
        """The command that makes the suite's own data."""
        data = out / "benchmark"
        return Part("benchmark", filled(self.benchmark, {"data": str(data)}), data)


def filled(options: str, places: Mapping[str, str]) -> list[str]:
    """The words of some options, with what stands for {names} in them."""
    return shlex.split(options.format(**{name: shlex.quote(value) for name, value in places.items()}))


def parts_of(suite: Suite, out: Path, seed: int, places: Mapping[str, str]) -> list[Part]:
    """The trainings of one seed, each followed by the evaluations of what it made.

    `places` has what stands for data, other and rank in the options, and the model; `imitation` makes one if
    that is "". A later --config takes the place of an earlier one.
    """
    parts: list[Part] = []
    places = {**places, "config": suite.config}
    shared = ["--config", *suite.config.split(), "--seed", str(seed)]

    def folder(policy: str) -> Path:
        return out / f"seed{0 if policy.partition('/')[0] in suite.once else seed}" / policy

    def made(policy: str) -> str:
        if policy == BASE:
            return places["model"] or str(folder("imitation"))
        script = suite.trainings[policy].script if policy in suite.trainings else IMITATE
        return str(folder(policy) if script == IMITATE else folder(policy) / DONE[script])

    for name in sorted((BASE, *suite.trainings), key=lambda name: name != "imitation"):
        if name in suite.once and seed != 0:
            continue
        if name != BASE and not (name == "imitation" and places["model"]):
            script, start, options, counts = suite.trainings[name]
            command = [*script.split(), *shared, *filled(suite.trained_on, places)]
            command += ["--out", str(folder(name))]
            command += ["--model", made(start)] if script != IMITATE else []
            command += [*filled(options, places), *(["--curriculum", made(counts)] if counts else [])]
            command += ["--resume"] if script not in (COUNT, IMITATE) else []
            parts.append(Part(name, command, folder(name) / DONE[script]))
        for arm, (_, policy, options, _) in suite.arms.items():
            for asked in suite.sets_of(arm) if policy.partition("/")[0] == name else ():
                if "{other}" not in suite.sets[asked] or places["other"]:
                    done = folder(name).parent / "evaluation" / asked / arm
                    command = ["evaluate.py", *shared, *filled(suite.sets[asked], places)]
                    command += ["--model", made(policy), "--out", str(done), *filled(options, places)]
                    parts.append(Part(f"evaluate {arm} on {asked}", command, done / "run.json"))
    return parts


def read_suite(name: str) -> Suite:
    """A table of suites.toml. What it has not itself, it has of the one that it is `like`."""
    own = TABLES[name]
    like = TABLES[own["like"]] if "like" in own else {}
    suite: dict[str, Any] = like | own
    trainings, arms = (like.get(part, {}) | own.get(part, {}) for part in ("trainings", "arms"))
    home = next(iter(suite["sets"]))
    suite["trainings"] = {name: Training(**training) for name, training in trainings.items()}
    suite["arms"] = {
        name: Arm(**arm | {"sets": [asked.format(home=home) for asked in arm.get("sets", ())]})
        for name, arm in arms.items()
    }
    suite.pop("like", None)
    return Suite(**suite)


TABLES = tomllib.loads(Path(__file__).with_name("suites.toml").read_text(encoding="utf-8"))
SUITES = {name: read_suite(name) for name in TABLES if "title" in TABLES[name]}
