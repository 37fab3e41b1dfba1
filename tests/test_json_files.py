"""Files of others: JSON and JSONL as editors and killed processes leave them, files that may not be read."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from conftest import GOLD, QUESTION, ROOT, Tiny

from mtsql.data.datasets import load_dataset
from mtsql.errors import UserError
from mtsql.extras.export import read_conversations
from mtsql.extras.prediction_files import read_items, read_pairs
from mtsql.extras.teacher import read_teacher
from mtsql.files import load_json, load_json_lines
from mtsql.learn.curriculum import read_counts
from mtsql.report.records import read_records

SEPARATED = f"{QUESTION}\u2028\x85\u2029"  # at which str.splitlines breaks a line, and JSON does not
ITEM = {"db_id": "music", "question": QUESTION, "query": GOLD}
SEGMENT = {"role": "model", "text": SEPARATED, "ids": [1], "loss_mask_sum": 1}
MESSAGES = [{"role": "user", "content": SEPARATED}, {"role": "assistant", "content": "an answer"}]
READERS: list[tuple[Callable, dict]] = [
    (read_counts, {"example_id": SEPARATED, "right": 1, "sampled": 2, "db_id": "music"}),
    (read_items, {"dialogue_id": SEPARATED, "turn_index": 0, "gold": GOLD}),
    (read_records, {"example_id": "0/0", "status": "answered", "segments": [SEGMENT], "reward": None}),
    (read_conversations, {"messages": MESSAGES}),
    (read_teacher, {"messages": MESSAGES}),
]


@pytest.mark.parametrize(("reader", "record"), READERS, ids=[reader.__name__ for reader, _ in READERS])
def test_a_jsonl_file_may_have_a_mark_blank_lines_and_a_cut_last_one(reader, record, tmp_path, capsys):
    line = json.dumps(record, ensure_ascii=False)
    other = json.dumps(record | {"example_id": "1/0"}, ensure_ascii=False)  # no question is counted twice
    path = tmp_path / "some.jsonl"
    path.write_text(line + "\n" + other, "utf-8")
    plain = list(reader(path))
    assert len(plain) == 2 and capsys.readouterr().err == ""
    path.write_text(f"\ufeff{line}\r\n\n \t\n{other}\n{line[:-9]}", "utf-8")
    assert list(reader(path)) == plain
    assert capsys.readouterr().err == f"{path}: the last line is cut off, and left out\n"


def test_json_lines_are_numbered_and_what_is_none_is_not_hidden(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_bytes(b'1\n\nno\n"\\ud800x"\n' + b"[" * 100_000 + b"\n\xff\nNaN\n")
    assert list(load_json_lines(path)) == [(1, 1), (3, None), (4, "?x"), (5, None), (6, None), (7, None)]
    assert dict(load_json_lines(path, errors="strict"))[4] is None


def test_a_file_of_questions_may_have_a_mark_and_has_only_characters(tiny: Tiny, tmp_path):
    tables, databases = tiny.folder / "tables.json", tiny.folder / "database"
    marked = tmp_path / "tables.json"
    marked.write_bytes(b"\xef\xbb\xbf" + tables.read_bytes())
    data = tmp_path / "dev.json"
    for encoding in ("utf-8-sig", "utf-16"):
        data.write_text(json.dumps([ITEM | {"question": "größe 😀"}], ensure_ascii=False), encoding)
        assert load_dataset(data, marked, databases).dialogues[0].turns[0].question == "größe 😀"
    data.write_text(json.dumps([ITEM | {"question": "\ud83d\ude00"}]))  # both halves
    assert load_dataset(data, tables, databases).dialogues[0].turns[0].question == "\U0001f600"
    data.write_text(json.dumps([ITEM | {"question": "\ud800"}]))
    with pytest.raises(UserError, match=r"dev.json holds '\\ud800', half of a character"):
        load_dataset(data, tables, databases)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Without the rights of root, whom no permission stops."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_may_not_be_read_is_one_sentence(tiny: Tiny):
    folder = Path("/tmp") / f"mtsql_unreadable_{os.getpid()}"  # the test's own folder is closed to nobody
    try:
        shutil.copytree(tiny.folder, folder)
        for opened in (folder, *folder.glob("**/")):
            opened.chmod(0o755)
        (folder / "dev.json").write_text(json.dumps([ITEM]))
        closed = [folder / "dev.json", folder / "tables.json", folder / "database" / "music" / "music.sqlite"]
        # Processes that read databases were started with root's rights, and keep them.
        for path in closed if os.geteuid() else closed[:2]:
            os.chmod(path, 0)
            with as_nobody(), pytest.raises(UserError, match=f"{path.name} .*(cannot be read|usable)"):
                load_dataset(folder / "dev.json", folder / "tables.json", folder / "database")
            os.chmod(path, 0o644)
        os.chmod(closed[0], 0)
        for read in (load_json, read_items, read_pairs):
            with as_nobody(), pytest.raises(UserError):
                read(*[closed[0]] * (2 if read is read_pairs else 1))
    finally:
        shutil.rmtree(folder)


def test_hidden_files_beside_a_database_are_none_of_its_suite(tiny: Tiny, tmp_path):
    """macOS writes ._name beside each file on a disk of another system."""
    shutil.copytree(tiny.folder / "database", tmp_path / "database")
    music = tmp_path / "database" / "music"
    (music / "._music.sqlite").write_bytes(b"\0\5\x16\7 no database")
    (music / "database_description").mkdir()
    (music / "database_description" / "._singer.csv").write_bytes(b"\0\5\x16\7\n")
    (tmp_path / "gold.txt").write_text(f"{GOLD}\tmusic\n")
    options = "--gold gold.txt --pred gold.txt --etype exec --databases database"
    command = [sys.executable, ROOT / "evaluate.py", *options.split()]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0 and "1.000" in run.stdout and "gold failed" not in run.stdout, run.stderr


def test_what_a_terminal_cannot_show_is_shown_as_a_number(tmp_path):
    path = tmp_path / "trajectories.jsonl"
    record = READERS[2][1] | {"segments": [SEGMENT | {"text": "größe 😀"}]}
    path.write_text(json.dumps(record) + "\n")
    command = [sys.executable, "-m", "mtsql.extras.viewer", str(path)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=120)
    assert run.returncode == 0 and r"gr\xf6\xdfe \U0001f600" in run.stdout, run.stderr
