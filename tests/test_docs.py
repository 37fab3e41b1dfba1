"""The pages name files, functions, commands and options that exist."""

import re
import tomllib
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from conftest import ROOT

from mtsql.__main__ import COMMANDS

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
PLACE = re.compile(r"`([\w/]+\.py)`((?:: `[\w.]+`(?:, `[\w.]+`)*)?)")
COMMAND = re.compile(r"python (?:-m (mtsql[\w.]*)|([\w/]+\.py))((?: (?!&|#|\|).*)?)")
BLOCK = re.compile(r"```(?:\w*)\n(.*?)```", re.DOTALL)
FLAG = re.compile(r"(?<=\s)--[a-z][a-z0-9-]*")
OTHERS_FLAGS = {"--nproc-per-node", "--python", "--torch-backend"}  # torchrun's and uv's
LINK = re.compile(r"\]\((?!http)([^)#]+)[^)]*\)")
on_each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def module_file(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def defines(file: str, name: str) -> bool:
    """Whether a file has a function, class or constant, or a class in it a method or field: Class.name."""
    text = text_of(ROOT / file)
    cls, _, member = name.rpartition(".")
    if cls:
        body = re.search(rf"^class {cls}\b.*?(?=^[^\s)]|\Z)", text, re.MULTILINE | re.DOTALL)
        text = body[0] if body else ""
    indent = "    " if cls else ""
    return bool(re.search(rf"^{indent}(?:def |class )?{member}\s*[(:=]", text, re.MULTILINE))


@cache
def options(script: Path) -> set[str]:
    """Flags of a script: what argparse is told, and the fields of the classes that `read_options` gets."""
    text = text_of(script)
    if script.name == "evaluate.py":  # whose second form is there
        text += text_of(ROOT / "mtsql/extras/prediction_files.py")
    if script.name in ("explain.py", "ablate.py"):  # which hand on what they do not know
        others = (options(ROOT / f"{name}.py") for name in ("train_grpo", "train_sft", "evaluate"))
        return set().union(*others) | argparse_flags(text)
    found = argparse_flags(text) | {"--help"}
    for cls in re.findall(r"read_options\(([A-Z]\w+)", text):
        found |= {"--config"} | {"--" + name.replace("_", "-") for name in fields_of(cls, script)}
    return found


def argparse_flags(text: str) -> set[str]:
    """What stands as an option in quotes."""
    return set(re.findall(r'"(--[a-z][a-z0-9-]*)"', text))


def fields_of(cls: str, script: Path) -> list[str]:
    """The options of a class that `script` has; its own module needs no library of the bridges."""
    own = "mtsql.extras.bridges.task" if cls == "BridgeConfig" else ""
    module = own or ".".join(script.relative_to(ROOT).with_suffix("").parts)
    return [field.name for field in fields(getattr(import_module(module), cls))]


def commands(text: str) -> list[tuple[Path, str]]:
    """The project's commands on a page, in code spans and blocks: script and the rest of the line."""
    joined = re.sub(r" *\\\n *", " ", text)
    shown = BLOCK.findall(joined) + re.findall(r"`([^`\n]+)`", joined)
    found = (match for line in "\n".join(shown).splitlines() for match in COMMAND.findall(line))
    return [command_file(module, script, rest) for module, script, rest in found]


def command_file(module: str, script: str, rest: str) -> tuple[Path, str]:
    """The file of a command and its options; `mtsql X` is the module that its table says."""
    if module == "mtsql" and rest.strip():
        name, _, rest = rest.strip().partition(" ")
        module, script = COMMANDS[name][0].removesuffix(".__main__"), ""
    return (module_file(module) if module else ROOT / script), rest


@on_each_page
def test_files_and_functions_named_on_a_page_exist(page: Path):
    text = text_of(page)
    shown = re.sub(r"```python\n.*?```", "", text, flags=re.DOTALL)
    for path in re.findall(r"`((?:mtsql|configs|bench|docs|tests)/[\w./]+\.\w+)`", shown):
        assert (ROOT / path).is_file(), path
    for file, called in PLACE.findall(shown):
        if "/" in file or (ROOT / file).is_file():
            assert all(defines(file, name) for name in re.findall(r"`([\w.]+)`", called)), (file, called)
    files = (ROOT / "tests").glob("test_*.py")
    tests = set(re.findall(r"^def (test_\w+)", "".join(map(text_of, files)), re.MULTILINE))
    tests |= {"test_themes", "test_database"}  # a split, a folder of Spider
    assert set(re.findall(r"`(test_\w+)`", shown)) <= tests
    folders = (ROOT / "mtsql", ROOT / "tests", ROOT / "bench", ROOT / "configs")
    known = {path.name for folder in folders for path in folder.rglob("*.*")}
    known |= {path.name for path in ROOT.glob("*.py")}
    assert set(re.findall(r"`([\w.]+\.(?:py|toml))`", text)) <= known  # `loss.py`: without a folder


@on_each_page
def test_commands_and_options_on_a_page_exist(page: Path):
    for script, rest in commands(text_of(page)):
        assert script.is_file(), script
        known = options(script)
        for flag in FLAG.findall(rest.partition(" -- ")[0].partition("#")[0]):
            assert flag in known or flag.replace("--no-", "--", 1) in known, (script.name, flag)
    scripts = [*ROOT.glob("*.py"), *(ROOT / "mtsql").rglob("*.py"), *(ROOT / "bench").glob("*.py")]
    known = set().union(*map(options, scripts)) | OTHERS_FLAGS
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    assert set(re.findall(r"`(--[a-z][a-z0-9-]*)", text_of(page))) <= known


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("docs/*/*.md"), *ROOT.glob("models/*/README.md")])
def test_links_lead_to_files(page: Path):
    for target in LINK.findall(text_of(page)):
        assert (page.parent / target).exists(), target


def test_the_pages_are_few_and_short_and_begin_with_a_command():
    assert len(DOCS) <= 11
    assert sum(len(text_of(page).split()) for page in DOCS) <= 14_000
    for page in DOCS:
        if page.name != "how_to.md":  # whose blocks are Python
            assert "\n```\n" in "\n".join(text_of(page).splitlines()[:8]), page.name
    linked = {target for page in PAGES for target in LINK.findall(text_of(page))}
    assert {page.name for page in DOCS} <= {Path(target).name for target in linked}


def test_the_package_needs_what_requirements_pins():
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    needed = {re.split(r"[=>]=", line)[0]: line for line in project["dependencies"]}
    pinned = dict(line.split("==") for line in text_of(ROOT / "requirements.txt").split())
    imported = {"torch", "transformers", "peft", "sqlglot", "numpy", "tqdm", "matplotlib", "safetensors"}
    assert imported <= set(needed) <= set(pinned)
    assert needed["torch"] == f"torch=={pinned['torch']}"
    for name, line in needed.items():
        least = [int(part) for part in re.split(r"[=>]=", line)[1].split(".")]
        assert least <= [int(part) for part in pinned[name].split(".")], line


def test_the_readme_shows_the_step_as_it_stands():
    text, script = text_of(ROOT / "README.md"), (ROOT / "train_grpo.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 150 and max(map(len, lines)) <= 120
    stands = "".join(script.split())
    shown = "".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)).splitlines()
    assert len(shown) > 10 and all("".join(line.split()) in stands for line in shown)
