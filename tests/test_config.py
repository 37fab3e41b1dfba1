"""Configuration and input errors: one sentence, exit code 2."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from mtsql.config import Common, load_config, option, save_config
from mtsql.data.datasets import load_dataset
from mtsql.errors import UserError
from mtsql.run import find_split

CONFIGS = sorted(Path(__file__).parents[1].glob("configs/*.toml"))


@dataclass(frozen=True, kw_only=True)
class Small(Common):
    """A configuration for these tests."""

    rate: float = option(0.5, "a number")


def load(*argv):
    return load_config(Small, "sft", "test", ["--data", "d", "--out", "o", *argv])


def test_command_line_overrides_file_and_defaults(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text('[common]\nseed = 3\ntools = "none"\n[sft]\nrate = 2\n[grpo]\nanything = 1\n')
    config = load("--config", str(path), "--seed", "4")
    assert (config.seed, config.tools, config.rate, config.rows) == (4, "none", 2.0, 256)


@pytest.mark.parametrize(
    ("toml", "argv", "message"),
    [
        ("", ["--sead", "1"], "unrecognized arguments: --sead"),
        ("", ["--see", "1"], "unrecognized arguments: --see"),
        ("", ["--tools", "all"], "--tools all is unknown; choose from both"),
        ("[sft]\nrat = 1", [], "[sft] has an unknown field 'rat'"),
        ("[stf]\nrate = 1", [], "unknown table [stf]"),
        ("[sft]\nrate = 'x'", [], "rate should be float, not 'x'"),
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


def test_missing_options_and_file(capsys):
    with pytest.raises(SystemExit):
        load_config(Small, "sft", "test", ["--out", "o"])
    assert "give --data" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        load("--config", "nowhere.toml")
    assert "nowhere.toml does not exist" in capsys.readouterr().err


def test_saved_config_says_what_ran(tmp_path):
    save_config(load("--seed", "7"), tmp_path)
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["config"]["seed"] == 7
    assert saved["versions"]["torch"].startswith("2.13")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
@pytest.mark.parametrize("section", ["imitation", "sft", "grpo", "evaluate"])
def test_shipped_configs_are_valid(path, section):
    import evaluate
    import train_grpo
    import train_sft
    from mtsql.toy.imitation import ImitationConfig

    cls = {
        "imitation": ImitationConfig,
        "sft": train_sft.SftConfig,
        "grpo": train_grpo.GrpoConfig,
        "evaluate": evaluate.EvaluateConfig,
    }[section]
    model = [] if section == "imitation" else ["--model", "m"]
    config = load_config(cls, section, "test", ["--config", str(path), "--data", "d", "--out", "o", *model])
    assert config.max_interactions == 4


def test_data_errors_name_the_file_and_the_field(tiny, tmp_path):
    tables, databases = tiny.folder / "tables.json", tiny.folder / "database"
    bad = tmp_path / "bad.json"
    cases = {
        "[{": "not valid JSON",
        "{}": "should hold a list",
        '[{"database_id": "music"}]': "interaction",
        '[{"database_id": "music", "interaction": [{"utterance": "a"}]}]': "query",
        '[{"database_id": "gone", "interaction": []}]': "'gone' is not in",
    }
    for content, message in cases.items():
        bad.write_text(content)
        with pytest.raises(UserError, match=message) as error:
            load_dataset(bad, tables, databases)
        assert "bad.json" in str(error.value)
    with pytest.raises(UserError, match=r"absent\.json does not exist"):
        load_dataset(tmp_path / "absent.json", tables, databases)
    with pytest.raises(UserError, match="holds none of the databases"):
        load_dataset(bad, tables, tmp_path)
    with pytest.raises(UserError, match="has no dev split"):
        find_split(str(tmp_path), "dev")
    bad.write_text(
        '[{"database_id": "gone", "interaction": []},'
        '{"database_id": "music", "interaction": [{"utterance": "a", "query": "select 1"}]}]'
    )
    assert load_dataset(bad, tables, databases, allow_missing=True).skipped == 1


def test_official_folder_layouts_are_found(tmp_path):
    (tmp_path / "sql_state_tracking").mkdir()
    path = tmp_path / "sql_state_tracking" / "cosql_dev.json"
    path.write_text("[]")
    assert find_split(str(tmp_path), "dev") == path
    (tmp_path / "dev.json").write_text("[]")
    assert find_split(str(tmp_path), "dev") == tmp_path / "dev.json"
