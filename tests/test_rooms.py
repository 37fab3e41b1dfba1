"""The rooms of the code: who may import whom (pyproject.toml), and where commands stand."""

from __future__ import annotations

import ast

from conftest import ROOT
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

ROOMS_WITHOUT_COMMANDS = ("data", "sql", "agent", "recipes", "learn")


def test_data_flows_one_way(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    status = lint_imports(config_filename="pyproject.toml", no_cache=True)
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


def test_commands_stand_on_the_top_floor():
    """`python -m mtsql.report.viewer` and `.export` are the exceptions, since people look for them there."""
    for room in (*ROOMS_WITHOUT_COMMANDS, "report"):
        for path in (ROOT / "mtsql" / room).glob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            mains = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "main"]
            assert not mains or path.name in ("viewer.py", "export.py"), path
