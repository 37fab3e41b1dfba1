"""Configuration and input errors: one sentence, exit code 2."""

import json
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, refusal

from evaluate import Args as EvaluateArgs
from mtsql.config import from_toml, read_options, save_config, user_errors
from mtsql.data.datasets import load_dataset
from mtsql.errors import UserError
from mtsql.extras import curriculum
from mtsql.task import find_split
from mtsql.toy.imitation import ImitationConfig
from train_grpo import Args as GrpoArgs
from train_sft import Args as SftArgs

CONFIGS = sorted(ROOT.glob("configs/*.toml"))


def load(*argv):
    return read_options(SftArgs, "test", ["--data", "d", "--out", "o", "--model", "m", *argv])


def test_command_line_overrides_file_and_defaults(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('\ufeff[common]\nseed = 3\ntools = "none"\n[sft]\nepochs = 2\n[grpo]\nanything = 1\n')
    config = load("--config", str(path), "--seed", "4")
    assert (config.seed, config.tools, config.epochs, config.rows) == (4, "none", 2.0, 256)


WRONG = [
    ("", ["--rows", "0"], "--rows: should be at least 1, not 0"),
    ("", ["--epochs", "nan"], "--epochs: should be at least 0.01 and finite, not nan"),
    ("", ["--learning-rate=-1e-4"], "--learning-rate: should be at least 0 and finite, not -0.0001"),
    ("", ["--temperature=0"], "--temperature: should be at least 0.01 and finite, not 0.0"),
    ("[common]\nsql_timeout = inf", [], "c.toml: [common]: error: argument --sql-timeout: should be"),
    ("[common]\nsplit = 'dev'", [], "[common] has an unknown field 'split'"),
    ("", ["--recipe", "sql_trail"], "--tools both needs a memory, which only"),
    ("", ["--sead", "1"], "unrecognized arguments: --sead"),
    ("", ["--see", "1"], "unrecognized arguments: --see"),
    ("", ["--tools", "all"], "argument --tools: invalid choice: 'all'"),
    ("[sft]\nepoch = 1", [], "[sft] has an unknown field 'epoch'"),
    ("[stf]\nepochs = 1", [], "unknown table [stf]"),
    ("[sft]\nepochs = 'x'", [], "c.toml: [sft]: error: argument --epochs: invalid float value: 'x'"),
    ("[sft]\nepochs = true", [], "c.toml: [sft]: error: argument --epochs: expected one argument"),
    ("[common]\nerror_hints = 'yes'", [], "--no-error-hints: ignored explicit argument 'yes'"),
    ("[common]\ntools = ['both', 'none']", [], "[common]: error: unrecognized arguments: none"),
    ("[sft\n", [], "not valid TOML"),
    ("common = 3", [], "common should be one table, [common]"),
    ("[[common]]\nrows = 3", [], "common should be one table, [common]"),
    ("# caf\udce9", [], "c.toml is not valid TOML"),  # a byte that is not UTF-8
    ("", ["--config", "nowhere.toml"], "nowhere.toml: No such file"),
    ("", ["--config", "n" * 300], "File name too long"),
    ("", ["--config", "configs"], "configs: Is a directory"),
    ("", ["--out", ""], "give --out"),  # a variable of the shell that is not set
]


@pytest.mark.parametrize(("toml", "argv", "message"), WRONG)
def test_wrong_options_are_one_sentence_and_exit_code_2(tmp_path, capsys, toml, argv, message):
    path = tmp_path / "c.toml"
    path.write_bytes(toml.encode("utf-8", "surrogateescape"))
    assert message in refusal(capsys, load, "--config", str(path), *argv)


def test_what_has_no_default_is_asked_for(capsys):
    assert "give --data" in refusal(capsys, read_options, SftArgs, "test", ["--out", "o"])


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
        config = read_options(GrpoArgs, "", [*files, *"--data d --out o --model m --data e".split()])
        assert (config.recipe, config.clip_high, config.prompts_per_step) == ("sql_trail", 0.28, 24)
        assert config.data == ("d", "e")


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

    said = refusal(capsys, user_errors, mistake, UserError("HTTP 400, \033[2J"))
    assert said == "error: HTTP 400, \\x1b[2J\n"  # a server's words
    with pytest.raises(SystemExit) as stop:
        user_errors(mistake, KeyboardInterrupt())
    assert stop.value.code == 130 and capsys.readouterr().err == "interrupted\n"
    for error in (ValueError("a student's own"), FileNotFoundError("a defect")):
        with pytest.raises(type(error)):
            user_errors(mistake, error)


def test_a_closed_pipe_that_is_not_the_readers_is_a_defect():
    reads, writes = os.pipe()
    os.close(reads)
    with pytest.raises(BrokenPipeError):
        user_errors(os.write, writes, b"x")


def test_data_that_is_not_there_is_named(tiny, tmp_path):
    tables, databases = tiny.folder / "tables.json", tiny.folder / "database"
    with pytest.raises(UserError, match=r"absent\.json: No such file"):
        load_dataset([(tmp_path / "absent.json", tables, databases)])
    with pytest.raises(UserError, match="of a database named in"):
        load_dataset([(tmp_path / "absent.json", tables, tmp_path)])
    with pytest.raises(OSError, match="File name too long"):  # which a command says in a sentence
        find_split("x" * 300, "dev")
