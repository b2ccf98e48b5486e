"""Runs, who has claimed them, and their results."""

from __future__ import annotations

import dataclasses
import json
import re
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from normkit.lab.experiment import Run
from normkit.lab.results import Epoch, Result
from normkit.lab.store.database import StoreError, plainly, writing
from normkit.lab.store.owner import Owner, spoken
from normkit.lab.store.reading import Reader
from normkit.lab.store.records import CLAIMED, DONE, FAILED, WAITING

RUN = re.compile(r"(?<![0-9a-f])[0-9a-f]{20}(?![0-9a-f])")  # a run's id, in the name of a file


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

    def add(self, runs: Iterable[Run]) -> None:
        """Runs that are to be done. Those that are known stay as they are."""
        rows = [(run.id, json.dumps(run.content(), sort_keys=True)) for run in runs]
        with self._writing() as base:
            base.executemany("INSERT OR IGNORE INTO runs (id, content) VALUES (?, ?)", rows)

    def claim(self, owner: Owner, ids: Sequence[str] | None = None) -> str | None:
        """The first of these runs that is free, now the owner's. None: there is none.

        A run is free if it waits, or if the launcher that claimed it is gone.
        """
        with self._writing() as base:
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
        with self._writing() as base:
            if ids is None:
                base.execute(change, (WAITING, CLAIMED, owner.name))
            for run in ids or ():
                base.execute(f"{change} AND id = ?", (WAITING, CLAIMED, owner.name, run))

    def finish(self, result: Result) -> None:
        """Keep a result. The first one of a run stays; what was kept for resuming goes."""
        with self._writing() as base:
            known = base.execute("SELECT 1 FROM runs WHERE id = ?", (result.run,)).fetchone()
            if not known:
                raise StoreError(f"{self.path} has no run {result.run}. Try to add it first.")
            insert = "INSERT OR IGNORE INTO results (run, record) VALUES (?, ?)"
            base.execute(insert, (result.run, result.to_json()))
            change = "UPDATE runs SET state = ?, owner = NULL, reason = '' WHERE id = ?"
            base.execute(change, (DONE, result.run))
            base.execute("DELETE FROM epochs WHERE run = ?", (result.run,))
        self.tidy([result.run])

    def fail(self, run: str, reason: str) -> None:
        """A run that could not be trained. The next launcher tries it again, by ``retry``."""
        with self._writing() as base:
            change = "UPDATE runs SET state = ?, owner = NULL, reason = ? WHERE id = ?"
            base.execute(f"{change} AND state != '{DONE}'", (FAILED, reason, run))

    def retry(self, ids: Iterable[str]) -> None:
        """Let those of these runs that failed wait again."""
        change = "UPDATE runs SET state = ?, reason = '' WHERE id = ? AND state = ?"
        with self._writing() as base:
            base.executemany(change, [(WAITING, run, FAILED) for run in ids])

    def forget(self, ids: Iterable[str]) -> None:
        """Let these runs wait as if they had never been trained."""
        ids = list(ids)
        owners = {each.owner for each in self.status(ids).values() if each.state == CLAIMED}
        if owners:
            names = " and ".join(spoken(owner) for owner in owners if owner)
            raise StoreError(f"{self.path} is in use by {names}. Try again when it has ended.")
        with self._writing() as base:
            for run in ids:
                base.execute("DELETE FROM results WHERE run = ?", (run,))
                base.execute("DELETE FROM epochs WHERE run = ?", (run,))
                change = "UPDATE runs SET state = ?, owner = NULL, reason = '' WHERE id = ?"
                base.execute(change, (WAITING, run))
        self.tidy(ids)

    def live(self, epochs: Iterable[tuple[str, Epoch]]) -> None:
        """What unfinished runs have told, for whoever looks."""
        rows = [(r, e.epoch, json.dumps(dataclasses.asdict(e))) for r, e in epochs]
        with self._writing() as base:
            base.executemany("INSERT OR REPLACE INTO epochs VALUES (?, ?, ?)", rows)

    def tidy(self, runs: Collection[str], *, keep_checkpoints: bool = False) -> None:
        """Remove what runs left beside the store, half-written files included.

        Only for their owner, or when they are done: another's files may be in use.
        """
        for file in self.folder.iterdir() if runs and self.folder.exists() else ():
            found = RUN.search(file.name)
            if found is None or found[0] not in runs:
                continue
            if not (keep_checkpoints and file == self.checkpoint(found[0])):
                with suppress(OSError):
                    file.unlink()

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        with plainly(self.path), writing(self._connection):
            yield self._connection
