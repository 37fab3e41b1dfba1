"""Files and folders that are written whole or not at all, and the reader of JSON and JSONL."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from mtsql.errors import UserError

FULL_DISK = 2**24  # bytes; with less free a library may have failed to write its next piece
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """While the block reads or writes `path`, what stands in its way becomes a UserError that names it."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename or path}: {error.strerror}") from None


def shipped(path: str | Path) -> Path:
    """A file or folder that comes with the project: from here, or else where `pip install` has put it."""
    installed = Path(sysconfig.get_path("data"), "share", "mtsql", path)
    return installed if not os.path.exists(path) and os.path.exists(installed) else Path(path)


def load_json(path: Path) -> Any:
    """What a JSON file holds; a byte order mark before it is skipped.

    Raises UserError, which names the file, if it cannot be read, is no JSON or holds what is no character.
    """
    with file_errors(path):
        content = path.read_bytes()
    try:
        return _parsed(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error})") from None


def load_json_lines(path: Path, errors: str = "replace") -> Iterator[tuple[int, Any]]:
    """Each line of a JSONL file with its number, from 1; None for what is no JSON.

    Lines end at line feeds alone, and blank ones are skipped. Half of a character, as a model may write it,
    becomes "?" or, with `errors` "strict", is no JSON. A last line that was cut off, as a killed process
    leaves it, is left out, which is said. Raises UserError if the file cannot be read.
    """
    with file_errors(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            record = None
            if not line.strip():
                continue
            try:
                record = _parsed(line, errors)
            except (ValueError, RecursionError):
                if not line.endswith(b"\n"):
                    print(f"{path}: the last line is cut off, and left out", file=sys.stderr)
                    return
            yield number, record


def _parsed(content: bytes, errors: str = "strict") -> Any:
    """Raises ValueError; NaN and infinity, which are no JSON, are None."""
    found = json.loads(content, parse_constant=lambda _: None)
    if b"\\ud" in content.lower() or b"\xed" in content:  # perhaps half of a pair, written out or as it is
        found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors=errors))
    return found


def json_lines(records: Iterable[Any]) -> str:
    """The text of a JSONL file."""
    return "".join(json.dumps(record) + "\n" for record in records)


def hold_folder(folder: Path) -> FileLock:
    """Keep other processes from writing a folder as long as this one holds what is returned.

    The lock is a file beside it, so that wrong input leaves no folder. Raises UserError if another process
    holds it, and if no folder can be there.
    """
    folder = Path(os.path.realpath(folder))  # "." has no name
    with file_errors(folder):
        _refuse_file(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = folder.with_name(f".{folder.name}.lock")
        lock = FileLock(beside, is_singleton=True)  # one object a file, which may be taken again
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"another run writes to {folder}; wait for it, or take another --out") from None
    return lock


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name and rename it; an error leaves the old file as it was.

    What a symbolic link leads to is written, and into what is no ordinary file (/dev/stdout) it is written
    straight. Raises UserError if `path` is a folder, stands below a file or may not be written.
    """
    data = content.encode() if isinstance(content, str) else content
    with file_errors(path):
        if path.exists() and not path.is_file():
            path.write_bytes(data)  # which a folder refuses
            return
        path = Path(os.path.realpath(path))
        with temporary_sibling(path) as temporary:
            temporary.write_bytes(data)
            sync(temporary)
            temporary.replace(path)
            sync(path.parent)


def sync(path: Path) -> None:
    """Return when what a file or folder holds is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refuse_file(folder: Path) -> None:
    if folder.is_file():
        raise UserError(f"{folder} is a file; name a folder")


def refuse_filled(folder: Path) -> None:
    """Raise UserError for what a command must not replace: a folder with files, a file, or where it runs."""
    with file_errors(folder):
        filled = folder.exists() and any(folder.iterdir())
    if filled or os.path.realpath(folder) == os.getcwd():
        raise UserError(f"{folder} exists already; remove it or name another folder")


@contextmanager
def folder_atomically(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which replaces `folder` when the block ends without an error.

    An error, or Ctrl-C, leaves the old folder as it was. What it holds is on the disk before it has its name.
    The exchange is two renames: a process killed between them leaves the old folder beside it, which
    the next one that writes the folder brings back. Raises UserError if the disk is full, and if `folder`
    stands below a file or may not be written.
    """
    folder = Path(os.path.realpath(folder))  # what a link leads to
    with temporary_sibling(folder) as temporary:
        with file_errors(folder):
            recover_folder(folder)
            _refuse_file(folder)
            temporary.mkdir()
        try:
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
        except Exception as error:  # each library has its own for this
            says_so = any(os.strerror(number) in str(error) for number in NO_ROOM)
            if not says_so and shutil.disk_usage(temporary).free > FULL_DISK:
                raise
            what = "make room, and a training goes on with --resume"
            raise UserError(f"the disk is full: {folder} could not be written; {what}") from error
        retired = _retired(folder)
        shutil.rmtree(retired, ignore_errors=True)
        if folder.exists():
            folder.rename(retired)
        temporary.rename(folder)
        sync(folder.parent)
        shutil.rmtree(retired, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Bring back the old folder if a process was killed while `folder_atomically` replaced it."""
    if not folder.exists() and _retired(folder).is_dir():
        _retired(folder).rename(folder)


def _retired(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


@contextmanager
def temporary_sibling(path: Path) -> Iterator[Path]:
    """A name beside `path`; what is still there at the end is removed, and what killed processes left there.

    Raises UserError if its folder cannot be made.
    """
    with file_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{escape(path.name)}.[0-9]*.tmp"):
        process = left.name.split(".")[-2]
        gone = process.isdecimal() and not psutil.pid_exists(int(process))
        if gone or process == str(os.getpid()):  # in a container ids come again
            _remove(left)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # it was a folder, or is not there
        path.unlink()
