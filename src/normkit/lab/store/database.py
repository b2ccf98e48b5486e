"""The SQLite file behind a store: its tables, its version, and its errors in plain words."""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normkit.errors import NormkitError

VERSION = 1
LOCK_TIMEOUT = 30.0  # seconds to wait for another process to end its transaction

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE runs (
  id TEXT PRIMARY KEY,
  content TEXT NOT NULL,                  -- JSON, of which the id is a hash
  state TEXT NOT NULL DEFAULT 'waiting',  -- waiting, claimed, done, failed
  owner TEXT,                             -- the launcher that has claimed it
  reason TEXT NOT NULL DEFAULT ''         -- why it failed
) WITHOUT ROWID;
CREATE TABLE epochs (                     -- of runs that are being trained
  run TEXT NOT NULL REFERENCES runs (id),
  epoch INTEGER NOT NULL,
  record TEXT NOT NULL,                   -- JSON
  PRIMARY KEY (run, epoch)
) WITHOUT ROWID;
CREATE TABLE results (
  run TEXT PRIMARY KEY REFERENCES runs (id),
  record TEXT NOT NULL,                   -- JSON
  finished TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
) WITHOUT ROWID;
"""
# tables that came later: a store may lack them, and who does not know them ignores them
LATER = """
CREATE TABLE IF NOT EXISTS logs (         -- of runs that failed, the last time they did
  run TEXT PRIMARY KEY REFERENCES runs (id),
  log TEXT NOT NULL,                      -- the traceback, and what its process printed
  written TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS experiments (  -- what was asked for, as often as it was something else
  id TEXT PRIMARY KEY,                    -- a hash of the record
  record TEXT NOT NULL,                   -- JSON
  saved TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP
) WITHOUT ROWID;
"""


class StoreError(NormkitError):
    """A store that cannot be read or written."""


class DiskFull(StoreError):
    """There is no room left for results or checkpoints."""


def connect(path: Path) -> sqlite3.Connection:
    """Open a store to write it, or make it where there is none."""
    with translated_errors(path):
        # transactions are begun and ended by name: see transaction()
        connection = sqlite3.connect(path, timeout=LOCK_TIMEOUT, isolation_level=None)
        try:
            _prepare(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def connect_to_read(path: Path) -> sqlite3.Connection:
    """Open a store that is there, without a change to it; its folder may be read-only.

    A database with a write-ahead log is read with the help of a small file beside it. Where that
    file can neither be found nor made, nobody writes the store from this machine, and it is read
    as it lies there: by itself, or, where a log holds results that are not in it yet, as a copy.
    """
    with translated_errors(path):
        for how in ("mode=rw", "mode=ro"):  # the first may make that file, and takes it away again
            try:
                return _open_to_read(path, how)
            except sqlite3.OperationalError as error:
                name = getattr(error, "sqlite_errorname", "")
                if not name.startswith(("SQLITE_CANTOPEN", "SQLITE_READONLY")):
                    raise
        log = path.with_name(f"{path.name}-wal")
        if not log.exists() or not log.stat().st_size:
            return _open_to_read(path, "immutable=1")
        with tempfile.TemporaryDirectory(prefix="normkit-") as folder:
            for file in (path, log):
                shutil.copyfile(file, Path(folder) / file.name)
            copied = _open_to_read(Path(folder) / path.name, "mode=rw", shown=path)
            try:
                connection = sqlite3.connect(":memory:", isolation_level=None)
                copied.backup(connection)
            finally:
                copied.close()
            return connection


def _open_to_read(path: Path, how: str, shown: Path | None = None) -> sqlite3.Connection:
    address = f"{path.resolve().as_uri()}?{how}"
    connection = sqlite3.connect(address, timeout=LOCK_TIMEOUT, isolation_level=None, uri=True)
    try:
        _check_damage(connection, shown or path)
        _check_version(connection, shown or path)
    except BaseException:
        connection.close()
        raise
    return connection


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    connection.execute("PRAGMA synchronous = FULL")  # what is committed survives a power cut
    connection.execute("PRAGMA foreign_keys = ON")
    _check_damage(connection, path)
    if not tables_of(connection):
        _use_write_ahead_log(connection)
        with transaction(connection):
            if not tables_of(connection):  # another launcher may have been first
                for statement in TABLES.split(";")[:-1]:
                    connection.execute(statement)
                connection.execute("INSERT INTO meta VALUES ('version', ?)", (str(VERSION),))
    _check_version(connection, path)
    if not {"logs", "experiments"} <= tables_of(connection):
        with transaction(connection):
            for statement in LATER.split(";")[:-1]:
                connection.execute(statement)


def _check_damage(connection: sqlite3.Connection, path: Path) -> None:
    damage = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise StoreError(_damaged(path, damage))


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    if "meta" not in tables_of(connection):
        raise StoreError(f"{path} is a database, but not a store of normkit. Try another --store.")
    row = connection.execute("SELECT value FROM meta WHERE key = 'version'").fetchone()
    version = int(row[0]) if row else 0
    if version > VERSION:
        raise StoreError(
            f"{path} was written by a newer normkit: it is a store of version {version}, and this "
            f"normkit reads versions up to {VERSION}. Try: pip install --upgrade normkit"
        )


def tables_of(connection: sqlite3.Connection) -> set[str]:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {name for (name,) in rows}


def _use_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Readers and the writer do not wait for each other; kept in the file from then on."""
    end = time.monotonic() + LOCK_TIMEOUT
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            # two at once: for this statement SQLite does not wait by itself
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > end:
                raise
            time.sleep(0.05)


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, and one process at a time."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


@contextmanager
def translated_errors(path: Path) -> Iterator[None]:
    """SQLite's errors as ours: what is wrong with which file, and what to try."""
    try:
        yield
    except sqlite3.Error as error:
        kind = getattr(error, "sqlite_errorname", "")
        message = str(error).rstrip(".")
        if kind.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            raise DiskFull(
                f"{path} could not be written: {message}. Nothing that it holds is lost. "
                "Try to make room on that disk, then the same command again."
            ) from error
        if kind.startswith(("SQLITE_NOTADB", "SQLITE_CORRUPT")):
            raise StoreError(_damaged(path, message)) from error
        if kind.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise StoreError(
                f"{path} has been locked by another program for {LOCK_TIMEOUT:.0f} s. "
                "Try again when it has ended."
            ) from error
        if kind.startswith("SQLITE_READONLY"):
            raise StoreError(
                f"{path} cannot be written: {message}. lab status, report, log and export only "
                "read it; to train, try a copy of it and --store."
            ) from error
        raise StoreError(f"{path} could not be used as a store: {message}.") from error


def _damaged(path: Path, message: str) -> str:
    return (
        f"{path} is damaged, or not a store of normkit: {' '.join(message.split())}. Try an older "
        f"copy of it, or move it away: runs are then trained again, from the checkpoints in "
        f"{path}.runs as far as there are any."
    )
