"""Configuration and input errors: one sentence, exit code 2."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from evaluate import Args as EvaluateArgs
from mtsql.config import Common, from_toml, option, read_options, save_config, user_errors
from mtsql.data.datasets import load_dataset
from mtsql.errors import UserError
from mtsql.extras import curriculum
from mtsql.extras.chat import __main__ as chat
from mtsql.task import find_split
from mtsql.toy.imitation import ImitationConfig
from train_grpo import Args as GrpoArgs
from train_sft import Args as SftArgs

ROOT = Path(__file__).parents[1]
CONFIGS = sorted(ROOT.glob("configs/*.toml"))


@dataclass(frozen=True, kw_only=True)
class Small(Common):
    """A configuration for these tests."""

    SECTION: ClassVar = "sft"
    model: str = option("m", "a model")
    rate: float = option(0.5, "a number")


def load(*argv):
    return read_options(Small, "test", ["--data", "d", "--out", "o", *argv])


@pytest.mark.parametrize("given", ["--learning-rate=-1e-4", "--epochs=nan", "--temperature=0"])
def test_numbers_that_break_training_are_refused_at_once(given, capsys):
    with pytest.raises(SystemExit) as stopped:
        read_options(SftArgs, "", ["--data", "D", "--out", "O", "--model", "M", given])
    name, value = given.split("=")
    assert stopped.value.code == 2
    least = 0 if name == "--learning-rate" else 0.01
    assert f"{name}: should be at least {least} and finite, not {float(value)}" in capsys.readouterr().err


def test_command_line_overrides_file_and_defaults(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('\ufeff[common]\nseed = 3\ntools = "none"\n[sft]\nrate = 2\n[grpo]\nanything = 1\n')
    config = load("--config", str(path), "--seed", "4")
    assert (config.seed, config.tools, config.rate, config.rows) == (4, "none", 2.0, 256)


@pytest.mark.parametrize(
    ("toml", "argv", "message"),
    [
        ("", ["--rows", "0"], "--rows: should be at least 1, not 0"),
        ("", ["--sql-timeout", "nan"], "--sql-timeout: should be at least 0.01 and finite, not nan"),
        ("", ["--sql-timeout=-1"], "--sql-timeout: should be at least 0.01 and finite, not -1.0"),
        (
            "[common]\nsql_timeout = inf",
            [],
            "c.toml: [common]: error: argument --sql-timeout: should be at least 0.01 and finite",
        ),
        ("[sft]\nrows = 0", [], "[sft]: error: argument --rows: should be at least 1, not 0"),
        ("[common]\nsplit = 'dev'", [], "[common] has an unknown field 'split'"),
        ("", ["--recipe", "sql_trail"], "--tools both needs a memory, which only"),
        ("", ["--sead", "1"], "unrecognized arguments: --sead"),
        ("", ["--see", "1"], "unrecognized arguments: --see"),
        ("", ["--tools", "all"], "argument --tools: invalid choice: 'all'"),
        ("[sft]\nrat = 1", [], "[sft] has an unknown field 'rat'"),
        ("[stf]\nrate = 1", [], "unknown table [stf]"),
        ("[sft]\nrate = 'x'", [], "c.toml: [sft]: error: argument --rate: invalid float value: 'x'"),
        ("[sft]\nrate = true", [], "c.toml: [sft]: error: argument --rate: expected one argument"),
        (
            "[common]\nerror_hints = 'yes'",
            [],
            "--no-error-hints: ignored explicit argument 'yes'",
        ),
        ("[common]\ntools = ['both', 'none']", [], "[common]: error: unrecognized arguments: none"),
        ("[sft\n", [], "not valid TOML"),
    ],
)
def test_wrong_options_are_one_sentence_and_exit_code_2(tmp_path, capsys, toml, argv, message):
    path = tmp_path / "c.toml"
    path.write_text(toml)
    with pytest.raises(SystemExit) as stop:
        load("--config", str(path), *argv)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_options_and_file(tmp_path, capsys):
    with pytest.raises(SystemExit):
        read_options(Small, "test", ["--out", "o"])
    assert "give --data" in capsys.readouterr().err
    with pytest.raises(SystemExit):  # a variable of the shell that is not set
        read_options(Small, "test", ["--data", "d", "--out", ""])
    assert "give --out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        load("--config", "nowhere.toml")
    assert "nowhere.toml: No such file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        load("--config", str(tmp_path))
    assert f"{tmp_path}: Is a directory" in capsys.readouterr().err
    (tmp_path / "latin.toml").write_bytes(b"# caf\xe9\n")
    with pytest.raises(SystemExit):
        load("--config", str(tmp_path / "latin.toml"))
    assert "latin.toml is not valid TOML" in capsys.readouterr().err


def test_saved_config_says_what_ran(tmp_path):
    save_config(load("--seed", "7"), tmp_path)
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["config"]["seed"] == 7
    assert saved["versions"]["torch"].startswith("2.13")
    assert re.fullmatch("[0-9a-f]{40}", saved["commit"]) and type(saved["uncommitted_changes"]) is bool


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
@pytest.mark.parametrize("cls", [ImitationConfig, SftArgs, GrpoArgs, EvaluateArgs, curriculum.Args])
def test_shipped_configs_are_valid(path, cls):
    model = [] if cls is ImitationConfig else ["--model", "m"]
    config = read_options(cls, "test", ["--config", str(path), "--data", "d", "--out", "o", *model])
    given = {"data", "out", "model"}
    wanted = {k: v for k, v in from_toml(path, cls).items() if hasattr(config, k) and k not in given}
    assert wanted and {key: getattr(config, key) for key in wanted} == wanted


def test_of_several_files_the_later_overrides():
    paper, ours = "configs/sql_trail.toml", "configs/recipes.toml"
    for files in (["--config", paper, ours], ["--config", paper, "--config", ours]):
        config = read_options(
            GrpoArgs, "", [*files, "--data", "d", "--out", "o", "--model", "m", "--data", "e"]
        )
        assert (config.recipe, config.clip_high, config.prompts_per_step) == ("sql_trail", 0.28, 24)
        assert config.data == ("d", "e")


def test_what_common_sets_is_taken_by_the_commands_that_have_it(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("[common]\nrows = 7\nseed = 5\n")
    argv = ["--config", str(path), "--data", "d", "--out", "o"]
    assert read_options(SftArgs, "", [*argv, "--model", "m"]).rows == 7
    assert read_options(ImitationConfig, "", argv).seed == 5


def test_a_recipe_sets_the_temperature_of_training_alone():
    paper = ["--config", "configs/skyrl_sql.toml"]
    shared = [*paper, "--data", "d"]
    grpo = read_options(GrpoArgs, "", [*shared, "--out", "o", "--model", "m"])
    assert grpo.temperature == 0.6
    assert read_options(chat.Args, "", [*paper, "--database", "d"]).temperature == 0


def test_help_shows_the_settings_of_the_chosen_files(capsys):
    shown = {}
    for file in ("toy", "sql_trail"):
        with pytest.raises(SystemExit) as stop:
            read_options(GrpoArgs, "", ["--config", f"configs/{file}.toml", "--help"])
        assert stop.value.code == 0
        described = " ".join(capsys.readouterr().out.split()).rpartition("--clip-high X ")[2]
        shown[file] = described.partition(" --updates")[0].rpartition(" ")[2]
    assert shown == {"toy": "[0.2]", "sql_trail": "[0.28]"}


@pytest.mark.parametrize("script", ["train_sft.py", "train_grpo.py", "evaluate.py"])
def test_help_and_wrong_options_import_no_torch(script):
    for argument, code in (("--help", 0), ("--sead", 2)):
        command = [sys.executable, "-X", "importtime", script, argument]
        outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        assert outcome.returncode == code
        imported = {line.rpartition("|")[2].strip() for line in outcome.stderr.splitlines()}
        assert "mtsql.config" in imported and not imported & {"torch", "transformers", "peft"}


def test_only_our_own_errors_become_a_sentence(capsys):
    def mistake(error):
        raise error

    with pytest.raises(SystemExit) as stop:
        user_errors(mistake, UserError("give --data"))
    assert stop.value.code == 2 and capsys.readouterr().err == "error: give --data\n"
    with pytest.raises(SystemExit):
        user_errors(mistake, UserError("HTTP 400, \033[2J"))
    assert capsys.readouterr().err == "error: HTTP 400, \\x1b[2J\n"  # a server's words
    with pytest.raises(SystemExit) as stop:
        user_errors(mistake, KeyboardInterrupt())
    assert stop.value.code == 130 and capsys.readouterr().err == "interrupted\n"
    for error in (ValueError("a student's own"), FileNotFoundError("a defect")):
        with pytest.raises(type(error)):
            user_errors(mistake, error)


def test_a_reader_that_has_read_enough_is_no_error():
    program = (
        "import sys; from mtsql.config import user_errors\n"
        "def main():\n for _ in range(100_000): print('a line of a long list')\n"
        "user_errors(main)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"a line of a long list\n"
        process.stdout.close()
        assert process.stderr.read() == b"" and process.wait() == 1
    with pytest.raises(BrokenPipeError):  # a defect, of a pipe that is not the reader's
        user_errors(os.write, _closed_pipe(), b"x")


def _closed_pipe():
    reads, writes = os.pipe()
    os.close(reads)
    return writes


def test_data_errors_name_the_file_and_the_field(tiny, tmp_path):
    tables, databases = tiny.folder / "tables.json", tiny.folder / "database"
    bad = tmp_path / "bad.json"
    cases = {
        "[{": "not valid JSON",
        "{}": "should hold a list",
        '[{"database_id": "music"}]': "interaction",
        '[{"database_id": "music", "interaction": [{"utterance": "a"}]}]': "query",
        '[{"database_id": "gone", "interaction": [{"utterance": "a", "query": "b"}]}]': "'gone' is not in",
    }
    for content, message in cases.items():
        bad.write_text(content)
        with pytest.raises(UserError, match=message) as error:
            load_dataset(bad, tables, databases)
        assert "bad.json" in str(error.value)
    with pytest.raises(UserError, match=r"absent\.json: No such file"):
        load_dataset(tmp_path / "absent.json", tables, databases)
    with pytest.raises(UserError, match="of a database named in"):
        load_dataset(bad, tables, tmp_path)
    with pytest.raises(UserError, match="has no dev split"):
        find_split(str(tmp_path), "dev")
    bad.write_text(
        '[{"database_id": "gone", "interaction": [{"utterance": "a", "query": "select 1"}]},'
        '{"database_id": "music", "interaction": [{"utterance": "a", "query": "select 1"}]}]'
    )
    assert load_dataset(bad, tables, databases, allow_missing=True).missing.total() == 1


def test_official_folder_layouts_are_found(tmp_path):
    (tmp_path / "sql_state_tracking").mkdir()
    path = tmp_path / "sql_state_tracking" / "cosql_dev.json"
    path.write_text("[]")
    assert find_split(str(tmp_path), "dev") == path
    (tmp_path / "dev.json").write_text("[]")
    assert find_split(str(tmp_path), "dev") == tmp_path / "dev.json"
