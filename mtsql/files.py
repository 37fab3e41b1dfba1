"""Files and folders that are written whole or not at all, and the reader of JSON and JSONL."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from mtsql.errors import UserError

FULL_DISK = 2**24  # bytes; with less free a library may have failed to write its next piece
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Also read-only, another's; a name too long, links in a circle: no defect of the code
OF_THE_DISK = NO_ROOM | {errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP}


@contextmanager
def writing_errors(path: Path) -> Iterator[None]:
    """While the block writes `path`, what stands in its way becomes a UserError that names it."""
    try:
        yield
    except IsADirectoryError:
        raise UserError(f"{path} is a folder; name a file") from None
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"{path} cannot be written, since a file stands where it needs a folder; name another place"
        ) from None
    except PermissionError:
        raise UserError(f"{path} cannot be written without permission; name a place that is yours") from None
    except (OSError, RuntimeError) as error:  # RuntimeError is Path.resolve's in a circle of links
        if isinstance(error, OSError) and error.errno not in OF_THE_DISK:
            raise
        why = getattr(error, "strerror", "a circle of links")
        raise UserError(f"{str(path)[:300]} cannot be written ({why}); name another place") from None


@contextmanager
def reading_errors(path: Path) -> Iterator[None]:
    """While the block opens `path` and reads it, what stands in its way becomes a UserError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except IsADirectoryError:
        raise UserError(f"{path} is a folder, not a file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None


def shipped(path: str | Path) -> Path:
    """A file or folder that comes with the project: from here, or else where `pip install` has put it."""
    installed = Path(sysconfig.get_path("data"), "share", "mtsql", path)
    return installed if not Path(path).exists() and installed.exists() else Path(path)


def load_json(path: Path) -> Any:
    """What a JSON file holds; a byte order mark before it is skipped.

    Raises UserError, which names the file, if it cannot be read, is no JSON or holds what is no character.
    """
    with reading_errors(path):
        content = path.read_bytes()
    try:
        return _parsed(content)
    except UnicodeEncodeError as error:
        lone = error.object[error.start : error.end]
        raise UserError(f"{path} holds {lone!a}, half of a character, which is no text") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error})") from None


def load_json_lines(path: Path, errors: str = "replace") -> Iterator[tuple[int, Any]]:
    """Each line of a JSONL file with its number, from 1; None for what is no JSON.

    Lines end at line feeds alone, and blank ones are skipped. Half of a character, as a model may write it,
    becomes "?" or, with `errors` "strict", is no JSON. A last line that was cut off, as a killed process
    leaves it, is left out, which is said. Raises UserError if the file cannot be read.
    """
    with reading_errors(path), path.open("rb") as file:
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
    """Raises ValueError; NaN and infinity, which are no JSON, are None, and so are huge numbers of a log."""

    def finite(number: str) -> float | None:
        return float(number) if math.isfinite(float(number)) else None

    def bounded(number: str) -> int | None:
        return int(number) if len(number) < 300 or errors == "strict" else None

    found = json.loads(content, parse_constant=lambda _: None, parse_float=finite, parse_int=bounded)
    if b"\\ud" in content.lower():  # perhaps half of a pair
        found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors=errors))
    return found


def hold_folder(folder: Path) -> FileLock:
    """Keep other processes from writing a folder as long as this one holds what is returned.

    The lock is a file beside it, so that wrong input leaves no folder. Raises UserError if another process
    holds it, and if no folder can be there.
    """
    with writing_errors(folder):
        folder = folder.resolve()  # "." has no name
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_file():
            raise NotADirectoryError
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
    straight.
    Raises UserError if `path` is a folder, stands below a file or may not be written.
    """
    data = content.encode() if isinstance(content, str) else content
    with writing_errors(path):
        if path.is_dir():  # "." has no sibling
            raise IsADirectoryError
        path = path.resolve() if path.is_symlink() and path.exists() else path
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
    with writing_errors(path), temporary_sibling(path) as temporary:
        with temporary.open("wb") as file:
            file.write(data)
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


def refuse_filled(folder: Path, known: Collection[str] = ()) -> None:
    """Raise UserError for a folder that a command must not replace: one that holds more than `known` files.

    Neither may it replace a file, or the folder that it runs in.
    """
    with writing_errors(folder):
        held = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        if held - set(known) or folder.is_file() or folder.resolve() == Path.cwd():
            raise UserError(f"{folder} exists already; remove it or name another folder")


@contextmanager
def folder_atomically(folder: Path) -> Iterator[Path]:
    """A temporary folder to fill, which replaces `folder` when the block ends without an error.

    An error, or Ctrl-C, leaves the old folder as it was. What it holds is on the disk before it has its name.
    The exchange is two renames: a process killed between them leaves the old folder beside it, which
    `recover_folder` brings back; a reader who does so between them is no obstacle. Raises UserError
    if the disk is full, and if `folder` stands below a file or may not be written.
    """
    with writing_errors(folder):
        recover_folder(folder)
    with temporary_sibling(folder) as temporary:
        with writing_errors(folder):
            if folder.is_file():
                raise NotADirectoryError
            temporary.mkdir(parents=True)
        try:
            yield temporary
            for path in (*temporary.rglob("*"), temporary):
                sync(path)
        except Exception as error:  # each library has its own for this
            in_rust = re.search(r"\(os error (\d+)\)", str(error))
            number = int(in_rust[1]) if in_rust else getattr(error, "errno", None)
            if number not in NO_ROOM and shutil.disk_usage(temporary).free > FULL_DISK:
                raise
            what = "make room, and a training goes on with --resume"
            raise UserError(f"the disk is full: {folder} could not be written; {what}") from error
        retired = _retired(folder)
        while temporary.exists():
            shutil.rmtree(retired, ignore_errors=True)
            if folder.exists():
                folder.rename(retired)
            try:
                temporary.rename(folder)
            except OSError:
                if not folder.exists():  # else a reader has just brought it back
                    raise
        sync(folder.parent)
        shutil.rmtree(retired, ignore_errors=True)


def recover_folder(folder: Path) -> None:
    """Bring back the old folder if a process was killed while `folder_atomically` replaced it."""
    if not folder.exists() and _retired(folder).is_dir():
        with suppress(OSError):  # another was faster
            _retired(folder).rename(folder)


def _retired(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


@contextmanager
def temporary_sibling(path: Path) -> Iterator[Path]:
    """A name beside `path`; what is still there at the end is removed, and what killed processes left there.

    Raises UserError if its folder cannot be made.
    """
    with writing_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{escape(path.name)}.*.tmp"):
            if not _lives(left.name.split(".")[-2]):
                _remove(left)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
    finally:
        _remove(temporary)


def _lives(process: str) -> bool:
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, ValueError, OverflowError):  # somebody else's process, or no name of ours
        return True
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
