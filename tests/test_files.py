"""Files and folders are written whole or not at all, and what stands in their way is one sentence."""

from __future__ import annotations

import errno
import multiprocessing
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mtsql import files
from mtsql.errors import UserError
from mtsql.files import folder_atomically, hold_folder, recover_folder, refuse_filled, write_atomically
from mtsql.model_folder import check_exists


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
    with pytest.raises(error):
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
    folder = tmp_path / "run"
    for name in ("one", "two"):
        with folder_atomically(folder) as temporary:
            (temporary / name).write_text(name)
    assert [p.name for p in folder.iterdir()] == ["two"]
    folder.rename(tmp_path / ".run.old")  # as if killed between the two renames
    recover_folder(folder)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


def test_a_reader_between_a_writers_renames_loses_nothing(tmp_path, monkeypatch):
    folder, rename, readers = tmp_path / "run", Path.rename, []

    def renamed(path: Path, target: Path) -> None:
        rename(path, target)
        if path == folder and not readers:
            readers.append(check_exists(folder))  # as a command that reads it does

    for name in ("old", "new"):
        with folder_atomically(folder) as temporary:
            (temporary / name).touch()
            monkeypatch.setattr(Path, "rename", renamed)
    assert [p.name for p in folder.iterdir()] == ["new"] and list(tmp_path.iterdir()) == [folder] and readers


def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path):
    dead = multiprocessing.get_context("fork").Process(target=int)
    dead.start()
    dead.join()
    for name in ("file", "folder"):
        (tmp_path / f".{name}.{dead.pid}.tmp").mkdir()
        (tmp_path / f".{name}.{os.getppid()}.tmp").touch()  # of a process that lives
    write_atomically(tmp_path / "file", "")
    with folder_atomically(tmp_path / "folder"):
        pass
    left = {f".{name}.{os.getppid()}.tmp" for name in ("file", "folder")}
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder", *left}


def test_what_stands_in_the_way_of_a_file_or_folder_is_one_sentence(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("kept")
    for write in (hold_folder, write_file, enter_folder):
        with pytest.raises(UserError, match="file/out cannot be written, since a file stands"):
            write(file / "out")
    for write in (hold_folder, enter_folder):
        with pytest.raises(UserError, match="file cannot be written, since a file stands"):
            write(file)
    for folder in (tmp_path, Path(".")):
        with pytest.raises(UserError, match="is a folder; name a file"):
            write_file(folder)
    assert file.read_text() == "kept" and list(tmp_path.iterdir()) == [file]
    (tmp_path / "circle").symlink_to("circle")
    for path in (tmp_path / ("n" * 300), tmp_path / "circle" / "out"):  # names that no disk takes
        for write in (hold_folder, write_file, enter_folder, refuse_filled):
            with pytest.raises(UserError, match="cannot be written"):
                write(path)
        with pytest.raises(UserError):
            check_exists(path)

    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", forbidden)  # who runs the tests may be allowed everything
    for write in (hold_folder, write_file, enter_folder):
        with pytest.raises(UserError, match="out cannot be written without permission"):
            write(tmp_path / "out")
