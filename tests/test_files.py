"""Files and folders are written whole or not at all; those of others are read as editors leave them."""

import errno
import json
import multiprocessing
import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import GOLD, QUESTION, Tiny
from safetensors.torch import save_file

from mtsql import files
from mtsql.data.datasets import load_dataset
from mtsql.errors import UserError
from mtsql.extras.prediction_files import read_items, read_pairs
from mtsql.files import folder_atomically, hold_folder, load_json, load_json_lines, write_atomically
from mtsql.model_folder import check_exists
from mtsql.report.metrics import MetricsLog
from mtsql.report.records import read_records


def forbidden(*_: object, **__: object) -> None:
    """What the system says to others than root, who may be who runs the tests."""
    raise PermissionError(errno.EACCES, "Permission denied")


def write_file(path: Path) -> None:
    write_atomically(path, "")


def enter_folder(path: Path) -> None:
    with folder_atomically(path):
        raise AssertionError("it cannot be there")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failed_writes_leave_the_old_content(tmp_path, monkeypatch, error):
    def fail(*_: object) -> None:
        raise error

    file, folder = tmp_path / "file", tmp_path / "folder"
    write_atomically(file, "old")
    with folder_atomically(folder) as temporary:
        (temporary / "whole").touch()
    with pytest.raises(error), folder_atomically(folder) as temporary:
        (temporary / "half").touch()
        fail()
    monkeypatch.setattr(files.os, "fsync", fail)
    with pytest.raises((error, UserError)):
        write_atomically(file, b"new")
    assert file.read_text() == "old" and [p.name for p in folder.iterdir()] == ["whole"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def test_links_and_devices_are_written_to_and_not_replaced(tmp_path):
    (tmp_path / "real").write_text("old")
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to("real")
    write_atomically(link, "new")
    assert link.is_symlink() and (tmp_path / "real").read_text() == "new"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        write_atomically(pipe, "through")
        assert read.result() == "through" and pipe.is_fifo()


def test_folders_are_replaced_whole_and_recovered(tmp_path):
    (tmp_path / "disk").mkdir()
    folder, link = tmp_path / "disk" / "run", tmp_path / "run"
    link.symlink_to(folder)
    (tmp_path / "disk" / ".run.1x.tmp").touch()  # nobody's
    for name in ("one", "two"):
        with folder_atomically(link) as temporary:
            (temporary / name).write_text(name)
    assert [p.name for p in link.iterdir()] == ["two"] and link.is_symlink()
    folder.rename(folder.with_name(".run.old"))  # as if killed between the two renames
    files.recover_folder(folder)
    assert {p.name for p in folder.parent.iterdir()} == {"run", ".run.1x.tmp"}


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path):
    dead = multiprocessing.get_context("fork").Process(target=int)
    dead.start()
    dead.join()
    for name in ("file", "folder"):
        (tmp_path / f".{name}.{dead.pid}.tmp").mkdir()
        (tmp_path / f".{name}.{os.getppid()}.tmp").touch()  # of a process that lives
        (tmp_path / f".{name}.{os.getpid()}.tmp").mkdir()  # of one with our number, in an earlier container
    write_atomically(tmp_path / "file", "")
    with folder_atomically(tmp_path / "folder"):
        pass
    left = {f".{name}.{os.getppid()}.tmp" for name in ("file", "folder")}
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder", *left}


def test_what_stands_in_the_way_of_a_file_or_folder_is_one_sentence(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("kept")
    for write in (hold_folder, write_file, enter_folder):
        with pytest.raises(UserError, match="file: File exists"):
            write(file / "out")
    for write in (hold_folder, enter_folder):
        with pytest.raises(UserError, match="file is a file; name a folder"):
            write(file)
    for folder in (tmp_path, Path(".")):
        with pytest.raises(UserError, match=": Is a directory"):
            write_file(folder)
    assert file.read_text() == "kept" and list(tmp_path.iterdir()) == [file]
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path / ("n" * 300), tmp_path / "circle" / "out"):  # names that no disk takes
        for use in (hold_folder, write_file, enter_folder, check_exists):
            with pytest.raises(UserError):
                use(path)
    monkeypatch.setattr(Path, "mkdir", forbidden)
    for write in (hold_folder, write_file, enter_folder):
        with pytest.raises(UserError, match="out: Permission denied"):
            write(tmp_path / "out")


def test_a_file_that_does_not_fit_is_named_and_the_old_one_stays(tmp_path):
    small, log = tmp_path / "small", MetricsLog(tmp_path / "metrics.csv")
    write_atomically(small, "old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(UserError, match=r"small: File too large"):
            write_atomically(small, "new" * 10)
        with pytest.raises(UserError, match=r"metrics.csv: File too large"):
            log.append({"step": 1, "loss": 0.123456789})
        full = pytest.raises(UserError, match=r"the disk is full: .*policy could not be written")
        with full, folder_atomically(tmp_path / "policy") as temporary:
            save_file({"weight": torch.zeros(9)}, temporary / "model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert small.read_text() == "old" and len(list(tmp_path.iterdir())) == 2


# Files of others

ITEM = {"db_id": "music", "question": QUESTION, "query": GOLD}


def test_a_jsonl_file_may_have_a_mark_blank_lines_and_a_cut_last_one(tmp_path, capsys):
    records = [{"n": n, "text": "some\u2028\x85\u2029"} for n in range(2)]  # no ends of lines in JSON
    one, two = (json.dumps(record, ensure_ascii=False) for record in records)
    path = tmp_path / "some.jsonl"
    path.write_text(f"{one}\n{two}", "utf-8")
    assert list(load_json_lines(path)) == [(1, records[0]), (2, records[1])]
    assert capsys.readouterr().err == ""
    path.write_text(f"\ufeff{one}\r\n\n \t\n{two}\n{one[:-9]}", "utf-8")
    assert [record for _, record in load_json_lines(path)] == records
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
        assert load_dataset([(data, marked, databases)]).dialogues[0].turns[0].question == "größe 😀"
    data.write_text(json.dumps([ITEM | {"question": "\ud83d\ude00"}]))  # both halves
    assert load_dataset([(data, tables, databases)]).dialogues[0].turns[0].question == "\U0001f600"
    half = json.dumps([ITEM | {"question": "\ud800"}]).encode()
    for content in (half, half.replace(b"\\ud800", b"\xed\xa0\x80")):  # written out, and as it is
        data.write_bytes(content)
        with pytest.raises(UserError, match=r"dev.json is not valid JSON .*'\\ud800'"):
            load_dataset([(data, tables, databases)])


def test_what_may_not_be_read_is_one_sentence(tmp_path, monkeypatch):
    path = tmp_path / "some"
    path.touch()
    monkeypatch.setattr(Path, "open", forbidden)
    for read in (load_json, read_items, read_records, lambda path: read_pairs(path, path)):
        with pytest.raises(UserError, match="some: Permission denied"):
            list(read(path))
