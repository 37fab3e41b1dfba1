"""The pages name files, functions, commands and options that exist; nothing is imported to find out."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOTES = sorted((ROOT / "docs" / "results").glob("*.md"))
HAND_WRITTEN = ("suite_toy_notes.md", "recipes_notes.md")
STOP = re.compile(r"^(\d+)\. `([\w/]+\.py)`: `([\w.]+)`", re.MULTILINE)
PLACE = re.compile(r"`([\w/]+\.py)`((?:: `[\w.]+`(?:, `[\w.]+`)*)?)")
COMMAND = re.compile(r"python (?:-m (mtsql[\w.]*)|([\w/]+\.py))((?: (?!&|#|\|).*)?)")
FLAG = re.compile(r"(?<=\s)--[a-z][a-z0-9-]*")
OTHERS_FLAGS = {"--nproc-per-node", "--python", "--torch-backend"}  # torchrun's and uv's
LINK = re.compile(r"\]\((?!http)([^)#]+)[^)]*\)")


def names(path: Path) -> set[str]:
    """What a file defines: functions, classes, constants, and methods and fields as Class.name."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        found |= _assigned(node)
        if isinstance(node, ast.ClassDef):
            methods = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
            members = methods.union(*map(_assigned, node.body))
            found |= {f"{node.name}.{member}" for member in members}
    return found


def _assigned(node: ast.stmt) -> set[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def options(script: Path) -> set[str]:
    """Flags of a script: fields of its configuration and of the shared one, and what argparse is told."""
    text = script.read_text(encoding="utf-8")
    if "official" in text:
        text += (ROOT / "mtsql/extras/prediction_files.py").read_text(encoding="utf-8")
    found = set(re.findall(r'"(--[a-z][a-z0-9-]*)"', text)) | {"--help"}
    if "read_options(" in text:
        fields = set().union(*map(fields_of, re.findall(r"read_options\(([A-Z]\w+)", text)))
        found |= {"--" + name.replace("_", "-") for name in fields} | {"--config"}
    return found


@cache
def option_classes() -> dict[str, ast.ClassDef]:
    """The classes of options by their names."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "mtsql").rglob("*.py"))
    defined = (node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: node for node in defined if node.name.endswith(("Config", "Options"))}


def fields_of(cls: str) -> set[str]:
    """The annotated fields of a class of options, with those that it inherits."""
    node = option_classes()[cls]
    own = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    return own.union(*(fields_of(base.id) for base in node.bases))


def commands(text: str) -> list[tuple[Path, str]]:
    """The project's commands on a page, in code spans and blocks: script and the rest of the line."""
    joined = re.sub(r" *\\\n *", " ", text)
    spans = re.findall(r"```\n(.*?)```|`([^`\n]+)`|((?:^    .*\n)+)", joined, re.DOTALL | re.MULTILINE)
    found = []
    for line in "\n".join(part for span in spans for part in span).splitlines():
        for module, script, rest in COMMAND.findall(line):
            path = ROOT / (module.replace(".", "/") if module else script)
            if module:
                path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
            found.append((path, rest))
    return found


def test_the_reading_path_has_at_most_fourteen_stops_and_each_is_there():
    text = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    stops = STOP.findall(text)
    assert [int(number) for number, _, _ in stops] == list(range(1, len(stops) + 1))
    assert 10 <= len(stops) <= 14
    missing = [(file, name) for _, file, name in stops if name not in names(ROOT / file)]
    assert missing == []


def test_the_life_of_one_token_is_told_in_order():
    text = (ROOT / "docs" / "reading.md").read_text(encoding="utf-8")
    told = [name for _, _, name in STOP.findall(text)]
    life = ["_sample", "Segment.sampled", "group_advantages", "token_batch", "token_logprobs", "grpo_loss"]
    places = [next(i for i, name in enumerate(told) if name.endswith(step)) for step in life]
    assert places == sorted(places)


def test_every_part_of_the_paper_is_where_the_readme_says():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = text.split("## Where each part of the paper is")[1].split("\n## ")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and ".py" in row]
    assert len(rows) >= 10
    for row in rows:
        places = PLACE.findall(row)
        assert places, row
        for file, called in places:
            wanted = re.findall(r"`([\w.]+)`", called)
            assert wanted, f"{file} without a name: {row}"
            assert set(wanted) <= names(ROOT / file), row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_functions_named_on_a_page_exist(page: Path):
    text = page.read_text(encoding="utf-8")
    shown = re.sub(r"```python\n.*?```", "", text, flags=re.DOTALL)
    for path in re.findall(r"`((?:mtsql|configs|bench|docs|tests)/[\w./]+\.\w+)`", shown):
        assert (ROOT / path).is_file(), path
    for file, called in PLACE.findall(shown):
        if "/" in file or (ROOT / file).is_file():
            assert set(re.findall(r"`([\w.]+)`", called)) <= names(ROOT / file), (file, called)
    for file, name in re.findall(r"`tests/(\w+\.py)`: `(test_\w+)`", shown):
        assert name in names(ROOT / "tests" / file), name
    known = set().union(*(names(file) for file in (ROOT / "tests").glob("test_*.py")))
    known |= {"test_themes", "test_database"}  # a split, a folder of Spider
    assert set(re.findall(r"`(test_\w+)`", shown)) <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_short_file_names_on_a_page_are_those_of_one_file(page: Path):
    """`loss.py`, `test_learn.py`: without a folder where the page has made clear which."""
    known = {path.name for folder in ("mtsql", "tests", "bench") for path in (ROOT / folder).rglob("*.py")}
    known |= {path.name for path in ROOT.glob("*.py")}
    short = set(re.findall(r"`(\w+\.py)`", page.read_text(encoding="utf-8")))
    assert short <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_on_a_page_exist(page: Path):
    for script, rest in commands(page.read_text(encoding="utf-8")):
        assert script.is_file(), script
        known = options(script)
        for flag in FLAG.findall(rest.partition(" -- ")[0].partition("#")[0]):
            assert flag in known or flag.replace("--no-", "--", 1) in known, (script.name, flag)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_named_on_a_page_are_those_of_some_script(page: Path):
    scripts = [*ROOT.glob("*.py"), *(ROOT / "mtsql").rglob("*.py"), *(ROOT / "bench").glob("*.py")]
    known = set().union(*map(options, scripts)) | OTHERS_FLAGS
    named = re.findall(r"`(--[a-z][a-z0-9-]*)", page.read_text(encoding="utf-8"))
    assert set(named) <= known


@pytest.mark.parametrize("page", PAGES + NOTES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_modules_named_in_the_notes_exist(name: str):
    """Only in those written by hand: a page that a program made keeps the names of its day."""
    text = (ROOT / "docs" / "results" / name).read_text(encoding="utf-8")
    for module in set(re.findall(r"-m\s(mtsql(?:\.\w+)+)", text)):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module


def test_the_readme_is_short():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    told = re.sub(r"```\n.*?```", "", text, flags=re.DOTALL)  # commands, and what they print
    assert len(told.splitlines()) <= 190


def test_the_package_needs_what_requirements_pins():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[=>]=", line)[0]: line for line in project["dependencies"]}
    pinned = dict(line.split("==") for line in (ROOT / "requirements.txt").read_text().split())
    imported = {"torch", "transformers", "peft", "sqlglot", "numpy", "tqdm", "matplotlib", "safetensors"}
    assert imported <= set(needed) <= set(pinned)
    assert needed["torch"] == f"torch=={pinned['torch']}"
    for name, line in needed.items():
        least = [int(part) for part in re.split(r"[=>]=", line)[1].split(".")]
        assert least <= [int(part) for part in pinned[name].split(".")], line
