"""Who has claimed a run, and whether they are still there.

A launcher holds a lock on a file of its own, and its worker processes inherit it. The kernel
gives a lock back when the last process that holds it is gone, however it went. So a lock that can
be had means that neither the launcher nor any of its workers is left, and their runs are free.
No clock is asked, and a process that sleeps, or a number that a new process got, deceives nobody.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from normkit.lab.store.database import StoreError


class Owner:
    """A launcher: a name that is used once, and a lock for as long as it or a worker lives."""

    def __init__(self, folder: Path) -> None:
        host = re.sub(r"[^\w.-]", "_", socket.gethostname())[:60]
        self.name = f"{host}-{os.getpid()}-{secrets.token_hex(4)}"
        self.folder = folder
        waiting = folder / f".{self.name}"
        self.lock = _create(waiting)
        if not _try_lock(self.lock, waiting):
            raise StoreError(f"{waiting} is locked by another program.")
        # under this name it has always been locked: see is_alive
        os.rename(waiting, _lock_file(folder, self.name))

    def close(self) -> None:
        """Let go, when the workers have ended."""
        os.close(self.lock)
        is_alive(self.folder, self.name)  # takes the file away


def is_alive(folder: Path, name: str) -> bool:
    """Whether a launcher or one of its workers is left. The file of a dead one is removed."""
    try:
        file = _open_lock(_lock_file(folder, name))
    except FileNotFoundError:
        return False
    try:
        if not _try_lock(file, _lock_file(folder, name)):
            return True
        # two may find it dead, and a folder may be read-only
        with suppress(OSError):
            os.unlink(_lock_file(folder, name))
        return False
    finally:
        os.close(file)


def remove_dead_owners(folder: Path) -> None:
    """Remove what launchers that are gone have left."""
    for file in folder.glob("*.lock"):
        is_alive(folder, file.stem)


def describe_owner(name: str) -> str:
    """An owner in words: process 4711 on somewhere."""
    host, process, _ = name.rsplit("-", 2)
    return f"process {process} on {host}"


def _create(path: Path) -> int:
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):  # one that ends removes the folder if it is empty
            return os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o644)


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        return os.open(path, os.O_RDONLY)  # of a read-only store: a local disk locks these too


def _lock_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.lock"


def _try_lock(file: int, path: Path) -> bool:
    try:
        import fcntl
    except ImportError as error:
        raise StoreError("The lab runs on Linux and macOS. On Windows, try WSL.") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise StoreError(
            f"{path} could not be locked: {error.strerror}. Try a --store on a local disk."
        ) from error
    return True
