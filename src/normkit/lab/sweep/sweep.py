"""run(): from an experiment and a store to results."""

from __future__ import annotations

from contextlib import suppress

from normkit.errors import UnknownName, nearest
from normkit.lab.experiment import Experiment
from normkit.lab.results import Result
from normkit.lab.store import DONE, DiskFull, Owner, Store, StoreError
from normkit.lab.store.owner import bury
from normkit.lab.sweep.engine import Engine
from normkit.lab.sweep.interrupts import Interrupts
from normkit.lab.sweep.launcher import Launcher
from normkit.lab.sweep.local import Local, Start, spawn
from normkit.lab.sweep.places import places
from normkit.lab.sweep.serving import TRAINER, no_room
from normkit.lab.sweep.watcher import Plan, Watcher, entries

ENGINES = ("local", "ray")


def run(
    experiment: Experiment,
    store: Store,
    *,
    workers: int | None = None,
    device: str | None = None,
    engine: str = "local",
    progress: Watcher | None = None,
    trainer: str = TRAINER,
    start: Start = spawn,
) -> list[Result]:
    """Train the runs that the store lacks; the results of all that are done, in order.

    Runs that could not be trained are missing in the list, and ``store.status()`` says why. The
    same call again goes on where this one ended, however it ended, and tries them again.
    ``trainer`` names a module with the functions of normkit.lab.train, and ``start`` is how a
    worker process is started; both are there for tests.
    """
    if engine not in ENGINES:
        raise UnknownName(f"engine got {engine!r}. {nearest(engine, ENGINES)}")
    chosen = places(workers, device) if engine == "local" else []
    watcher = progress or Watcher()
    runs = {run.id: run for run in experiment.runs()}
    store.add(runs.values())
    store.retry(runs)
    done = frozenset(run for run, each in store.status(runs).items() if each.state == DONE)
    store.tidy(done)  # where a launcher was killed right after it had written a result
    if len(done) < len(runs):
        bury(store.folder)
        owner = Owner(store.folder)
        try:
            missing = len(runs) - len(done)
            if engine == "local":
                made: Engine = Local(chosen[:missing], owner.lock, trainer, start)
            else:
                made = _ray(workers, device, missing, trainer)
            watcher.begin(Plan(entries(experiment), done, made.size(), experiment.metric))
            _sweep(Launcher(runs, store, owner, made, watcher))
        except OSError as error:
            if no_room(error):
                raise DiskFull(
                    f"There is no room on a disk: {error}. Nothing is lost. Try to make room, "
                    "then the same command again."
                ) from error
            raise
        finally:
            owner.close()
            watcher.end()
    return list(store.results(runs).values())


def _sweep(launcher: Launcher) -> None:
    try:
        with Interrupts() as interrupts:
            launcher.sweep(interrupts)
    finally:
        launcher.engine.close()
        with suppress(StoreError):  # if it cannot be written: the lock goes anyway
            launcher.store.release(launcher.owner)


def _ray(workers: int | None, device: str | None, most: int, trainer: str) -> Engine:
    from normkit.lab.sweep.ray_engine import Ray  # the optional package is asked for inside

    return Ray(workers, device, most, trainer)
