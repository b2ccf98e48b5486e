"""Files that are complete or not there: written under another name, then renamed.

What a link points to gets the new content, and the link stays. A device or pipe gets the bytes of
the complete file: to rename onto it would put a file in its place.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from normkit.errors import NormkitError

Save = Callable[[Path], object]


def atomic_write(path: str | os.PathLike[str], save: Save) -> Path:
    """Let ``save`` write a file; its folder is made if there is none."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_all({target: save})
    return target


def atomic_write_all(files: Mapping[Path, Save]) -> None:
    """Write several files, each with its function: they appear when all are complete."""
    streams = [path for path in files if is_stream(path)]
    names = {path: _elsewhere(path) if path in streams else _beside(path) for path in files}
    try:
        for path, save in files.items():
            _save(save, names[path], path)
        for path in streams:  # first: they may fail, and what they got cannot be taken back
            _save(partial(_copy_into, names[path]), path, path)
        mask = os.umask(0)
        os.umask(mask)
        for path, name in names.items():
            if path not in streams:
                name.chmod(0o666 & ~mask)  # some writers leave files only for their owner
                os.replace(name, os.path.realpath(path))
    finally:
        for name in names.values():
            name.unlink(missing_ok=True)


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """UTF-8 with plain line ends on every system: a page's scripts are known by their hashes."""
    return atomic_write(path, lambda name: name.write_text(text, encoding="utf-8", newline="\n"))


def check_writable(path: Path) -> None:
    """An error that names a file which could not be written; nothing of it stays."""
    if not is_stream(path):
        _save(Path.touch, name := _beside(path), path)
        name.unlink()
    elif not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def is_stream(path: Path) -> bool:
    """Whether there is a device, pipe or socket, perhaps behind links: nothing to be replaced."""
    try:
        mode = path.stat().st_mode
    except OSError:  # nothing is there, or it cannot be looked at: the writer will say
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _copy_into(source: Path, stream: Path) -> None:
    with source.open("rb") as content, stream.open("wb") as target:
        shutil.copyfileobj(content, target)


def _save(save: Save, name: Path, path: Path) -> None:
    """Call ``save``; its error names the file that was asked for, not the one it got."""
    try:
        save(name)
    except NormkitError:
        raise
    except OSError as error:
        if error.filename not in (str(name), None) or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    except Exception as error:  # full disks and closed folders have many names in torch's writers
        cause = error.__cause__ or error.__context__
        if isinstance(cause, OSError) and cause.errno is not None:  # what torch met and renamed
            raise OSError(cause.errno, cause.strerror, str(path)) from error
        first = str(error).strip().partition("\n")[0].rstrip(".")
        raise OSError(f"{path} could not be written: {type(error).__name__}: {first}.") from error


def _beside(path: Path) -> Path:
    """In the same folder, for a file cannot be renamed from one file system to another; and a name
    of its own, for processes of two machines that share a folder may have one number."""
    real = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for links in a circle
    return real.with_name(f".{os.getpid()}-{secrets.token_hex(4)}.{real.name}")


def _elsewhere(path: Path) -> Path:
    """For what is copied into a stream: beside a device no file can be made."""
    return Path(tempfile.gettempdir()) / _beside(path).name
