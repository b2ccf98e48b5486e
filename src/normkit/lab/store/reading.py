"""What can be read in a store: results, where each run stands, what unfinished ones told."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from normkit.lab.results import Epoch, Result
from normkit.lab.store import owner as owners
from normkit.lab.store.database import StoreError, connect, plainly
from normkit.lab.store.records import CLAIMED, WAITING, State


class Reader:
    """An open store, without the means to change it."""

    def __init__(self, path: str | Path, *, create: bool = False) -> None:
        self.path = Path(path)
        self.folder = self.path.with_name(f"{self.path.name}.runs")
        if not create and not self.path.exists():
            raise StoreError(f"There is no store {self.path}. Try normkit lab run, or --store.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._connection = connect(self.path)

    def results(self, ids: Iterable[str] | None = None) -> dict[str, Result]:
        """Results by run id; of these runs, or of all."""
        rows = dict(self._rows("SELECT run, record FROM results"))
        wanted = rows if ids is None else [run for run in ids if run in rows]
        return {run: self._parsed(run, rows[run], Result.from_json) for run in wanted}

    def epochs(self, run: str) -> list[Epoch]:
        """What an unfinished run has told so far."""
        rows = self._rows("SELECT record FROM epochs WHERE run = ? ORDER BY epoch", run)
        return [self._parsed(run, text, lambda said: Epoch(**json.loads(said))) for (text,) in rows]

    def status(self, ids: Iterable[str] | None = None) -> dict[str, State]:
        """Where every run stands. One whose launcher is gone waits."""
        told = "(SELECT COALESCE(MAX(epoch), 0) FROM epochs WHERE run = id)"
        rows = self._rows(f"SELECT id, state, owner, reason, {told} FROM runs")
        found = {row[0]: State(*row) for row in rows}
        alive = {each.owner: self.is_alive(each.owner) for each in found.values()}
        for run, each in found.items():
            if each.state == CLAIMED and not alive[each.owner]:
                found[run] = dataclasses.replace(each, state=WAITING, owner=None)
        return found if ids is None else {run: found[run] for run in ids if run in found}

    def checkpoint(self, run: str) -> Path:
        """Where a run is kept while it is trained."""
        return self.folder / f"{run}.pt"

    def is_alive(self, owner: str | None) -> bool:
        """Whether a launcher, or one of its workers, is still there."""
        return owner is not None and owners.is_alive(self.folder, owner)

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._connection.close()
        with suppress(OSError):  # not empty: other launchers, or checkpoints, are there
            self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _rows(self, query: str, *values: Any) -> list[Any]:
        with plainly(self.path):
            return self._connection.execute(query, values).fetchall()

    def _parsed(self, run: str, text: str, reader: Callable[[str], Any]) -> Any:
        try:
            return reader(text)
        except (ValueError, TypeError, KeyError) as error:
            raise StoreError(
                f"{self.path} holds something for run {run} that cannot be read: {error}. "
                "It may come from another program, or from another version of normkit."
            ) from error
