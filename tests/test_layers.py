"""The layers of the code: who may import whom (pyproject.toml), and where commands stand."""

import ast

from conftest import ROOT
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

PACKAGES = ("data", "sql", "agent", "recipes", "learn", "report")


def test_data_flows_one_way(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    status = lint_imports(config_filename="pyproject.toml", no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_the_core_holds_no_commands():
    for package in PACKAGES:
        for path in (ROOT / "mtsql" / package).glob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert not [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"], path
