"""Runs, who has claimed them, and their results."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

from normkit.lab.experiment import Run
from normkit.lab.results import Epoch, Result
from normkit.lab.store.database import (
    StoreError,
    connect,
    connect_to_read,
    tables_of,
    transaction,
    translated_errors,
)
from normkit.lab.store.experiments import StoredExperiment
from normkit.lab.store.owner import Owner, describe_owner, is_alive

WAITING, CLAIMED, DONE, FAILED = "waiting", "claimed", "done", "failed"
RUN_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{20}(?![0-9a-f])")  # in the name of a file


@dataclass(frozen=True)
class RunState:
    """Where a run stands. A divergence is a result, and so it is "done"."""

    run: str  # id
    state: str  # WAITING, CLAIMED, DONE or FAILED
    owner: str | None = None  # the launcher that has claimed it
    reason: str = ""  # why it failed
    epoch: int = 0  # the last one recorded, of a run that is not done


class Reader:
    """An open store, without the means to change it; file and folder may be read-only."""

    def __init__(self, path: str | Path, *, create: bool = False) -> None:
        self.path = Path(path)
        self.folder = self.path.with_name(f"{self.path.name}.runs")
        if not create and not self.path.exists():
            raise StoreError(f"There is no store {self.path}. Try normkit lab run, or --store.")
        self._connection = self._connect()

    def _connect(self) -> sqlite3.Connection:
        return connect_to_read(self.path)

    def results(self, ids: Iterable[str] | None = None) -> dict[str, Result]:
        """Results by run id; of these runs, or of all."""
        return self._by_run("SELECT run, record FROM results", ids, Result.from_json)

    def epochs(self, run: str) -> list[Epoch]:
        """The epochs of an unfinished run so far."""
        rows = self._rows("SELECT record FROM epochs WHERE run = ? ORDER BY epoch", run)
        return [self._parsed(run, text, lambda each: Epoch(**json.loads(each))) for (text,) in rows]

    def status(self, ids: Iterable[str] | None = None) -> dict[str, RunState]:
        """Where every run stands. One whose launcher is gone waits."""
        last_epoch = "(SELECT COALESCE(MAX(epoch), 0) FROM epochs WHERE run = id)"
        rows = self._rows(f"SELECT id, state, owner, reason, {last_epoch} FROM runs")
        states = {row[0]: RunState(*row) for row in rows}
        alive = {each.owner: self.is_alive(each.owner) for each in states.values()}
        for run, each in states.items():
            if each.state == CLAIMED and not alive[each.owner]:
                states[run] = dataclasses.replace(each, state=WAITING, owner=None)
        return states if ids is None else {run: states[run] for run in ids if run in states}

    def log(self, run: str) -> str:
        """The traceback of a run that failed, and what its process printed; "" if there is none."""
        rows = self._later("logs", "SELECT log FROM logs WHERE run = ?", run)
        return rows[0][0] if rows else ""

    def contents(self, ids: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """By run id, what the id is a hash of: the setting without defaults, and the seed."""
        return self._by_run("SELECT id, content FROM runs", ids, json.loads)

    def experiments(self) -> list[StoredExperiment]:
        """What was asked for, the latest last."""
        rows = self._later("experiments", "SELECT record, saved FROM experiments ORDER BY saved")
        return [
            self._parsed("experiment", text, partial(StoredExperiment.from_json, saved=saved))
            for text, saved in rows
        ]

    def checkpoint(self, run: str) -> Path:
        """Where a run is kept while it is trained."""
        return self.folder / f"{run}.pt"

    def is_alive(self, owner: str | None) -> bool:
        """Whether a launcher, or one of its workers, is still there."""
        return owner is not None and is_alive(self.folder, owner)

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.close()
        with suppress(OSError):  # not empty: other launchers, or checkpoints, are there
            self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with translated_errors(self.path):
            return self._connection.execute(query, values).fetchall()

    def _later(self, table: str, query: str, *values: Any) -> list[Any]:
        """Of a table that a store of an earlier release may lack."""
        with translated_errors(self.path):
            there = table in tables_of(self._connection)
        return self._rows(query, *values) if there else []

    def _by_run(
        self, query: str, ids: Iterable[str] | None, reader: Callable[[str], Any]
    ) -> dict[str, Any]:
        rows = dict(self._rows(query))
        wanted = rows if ids is None else [run for run in ids if run in rows]
        return {run: self._parsed(run, rows[run], reader) for run in wanted}

    def _parsed(self, run: str, text: str, reader: Callable[[str], Any]) -> Any:
        try:
            return reader(text)
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(
                f"{self.path} holds something for run {run} that cannot be read: {error}. "
                "It may come from another program, or from another version of normkit."
            ) from error


class Store(Reader):
    """One SQLite file on a local disk; launchers write it, workers never do.

    >>> import tempfile
    >>> from normkit.lab.experiment import Run, Setting
    >>> with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "my.sqlite") as store:
    ...     store.add([Run(Setting(), seed=1)])
    ...     [each.state for each in store.status().values()]
    ['waiting']
    """

    def __init__(self, path: str | Path, *, create: bool = True) -> None:
        super().__init__(path, create=create)

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        return connect(self.path)

    def remember(self, experiment: StoredExperiment) -> None:
        """Keep what was asked for, once; asked again, it is the latest."""
        record = experiment.to_json()
        key = hashlib.sha256(record.encode()).hexdigest()[:20]
        form = "'%Y-%m-%d %H:%M:%f'"
        # two may be asked for in one millisecond
        after = f"(SELECT strftime({form}, max(saved), '+0.001 seconds') FROM experiments)"
        now = f"max(strftime({form}, 'now'), coalesce({after}, ''))"
        with self._transaction() as base:
            change = f"INSERT OR REPLACE INTO experiments VALUES (?, ?, {now})"
            base.execute(change, (key, record))

    def add(self, runs: Iterable[Run]) -> None:
        """Runs that are to be done. Those that it has stay as they are."""
        rows = [(run.id, json.dumps(run.content(), sort_keys=True)) for run in runs]
        with self._transaction() as base:
            base.executemany("INSERT OR IGNORE INTO runs (id, content) VALUES (?, ?)", rows)

    def claim(self, owner: Owner, ids: Sequence[str] | None = None) -> str | None:
        """The first of these runs that is free, now the owner's. None: there is none.

        A run is free if it waits, or if the launcher that claimed it is gone.
        """
        with self._transaction() as base:
            query = "SELECT id, owner FROM runs WHERE state = ? OR state = ? AND owner != ?"
            free = dict(base.execute(query, (WAITING, CLAIMED, owner.name)).fetchall())
            alive = {each: self.is_alive(each) for each in set(free.values())}
            for run in sorted(free) if ids is None else ids:
                if run in free and not alive[free[run]]:
                    change = "UPDATE runs SET state = ?, owner = ?, reason = '' WHERE id = ?"
                    base.execute(change, (CLAIMED, owner.name, run))
                    return run
        return None

    def release(self, owner: Owner, ids: Iterable[str] | None = None) -> None:
        """Let others have these runs of the owner; None: all of them."""
        change = "UPDATE runs SET state = ?, owner = NULL WHERE state = ? AND owner = ?"
        with self._transaction() as base:
            if ids is None:
                base.execute(change, (WAITING, CLAIMED, owner.name))
            for run in ids or ():
                base.execute(f"{change} AND id = ?", (WAITING, CLAIMED, owner.name, run))

    def finish(self, result: Result) -> None:
        """Keep a result. The first one of a run stays; what was kept for resuming goes."""
        with self._transaction() as base:
            if not base.execute("SELECT 1 FROM runs WHERE id = ?", (result.run,)).fetchone():
                raise StoreError(f"{self.path} has no run {result.run}. Try to add it first.")
            insert = "INSERT OR IGNORE INTO results (run, record) VALUES (?, ?)"
            base.execute(insert, (result.run, result.to_json()))
            change = "UPDATE runs SET state = ?, owner = NULL, reason = '' WHERE id = ?"
            base.execute(change, (DONE, result.run))
            for table in ("epochs", "logs"):
                base.execute(f"DELETE FROM {table} WHERE run = ?", (result.run,))
        self.tidy([result.run])

    def fail(self, run: str, reason: str, log: str = "") -> None:
        """A run that could not be trained. The next launcher tries it again, by ``retry``.

        Its log stays until the run is done.
        """
        with self._transaction() as base:
            change = "UPDATE runs SET state = ?, owner = NULL, reason = ? WHERE id = ?"
            changed = base.execute(f"{change} AND state != '{DONE}'", (FAILED, reason, run))
            if changed.rowcount:
                keep = "INSERT OR REPLACE INTO logs (run, log) VALUES (?, ?)"
                base.execute(keep, (run, log or reason))

    def retry(self, ids: Iterable[str]) -> None:
        """Let those of these runs that failed wait again."""
        change = "UPDATE runs SET state = ?, reason = '' WHERE id = ? AND state = ?"
        with self._transaction() as base:
            base.executemany(change, [(WAITING, run, FAILED) for run in ids])

    def forget(self, ids: Iterable[str]) -> None:
        """Let these runs wait as if they had never been trained."""
        ids = list(ids)
        owners = {each.owner for each in self.status(ids).values() if each.state == CLAIMED}
        if owners:
            names = " and ".join(describe_owner(owner) for owner in owners if owner)
            raise StoreError(f"{self.path} is in use by {names}. Try again when it has ended.")
        with self._transaction() as base:
            for run in ids:
                for table in ("results", "epochs", "logs"):
                    base.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
                change = "UPDATE runs SET state = ?, owner = NULL, reason = '' WHERE id = ?"
                base.execute(change, (WAITING, run))
        self.tidy(ids)

    def record_epochs(self, epochs: Iterable[tuple[str, Epoch]]) -> None:
        """Epochs of unfinished runs, for whoever looks."""
        rows = [(r, e.epoch, json.dumps(dataclasses.asdict(e))) for r, e in epochs]
        with self._transaction() as base:
            base.executemany("INSERT OR REPLACE INTO epochs VALUES (?, ?, ?)", rows)

    def tidy(self, runs: Collection[str], *, keep_checkpoints: bool = False) -> None:
        """Remove what runs left beside the store, half-written files included.

        Only for their owner, or when they are done: another's files may be in use.
        """
        for file in self.folder.iterdir() if runs and self.folder.exists() else ():
            match = RUN_ID.search(file.name)
            if match is None or match[0] not in runs:
                continue
            if not (keep_checkpoints and file == self.checkpoint(match[0])):
                with suppress(OSError):
                    file.unlink()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with translated_errors(self.path), transaction(self._connection):
            yield self._connection
