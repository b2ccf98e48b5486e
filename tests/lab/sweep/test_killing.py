"""kill -9 at random moments: every run once, and with the numbers of an undisturbed sweep.

NORMKIT_KILLS=100 (or more) makes it long; killing.py beside it does the same to the real command.
"""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

from lab.sweep import pretend
from lab.sweep.nursery import Nursery
from normkit.lab.store import Store

KILLS = int(os.environ.get("NORMKIT_KILLS", "12"))


def test_random_kills(nursery: Nursery, path: Path, journal: Path) -> None:
    wanted = {"variants": 4, "seeds": 3, "epochs": 4, "seconds": 0.005}
    kills, launches = {"launcher": 0, "worker": 0, "both": 0}, 0
    while True:
        launcher = nursery.launch(path, **wanted)
        launches += 1
        while sum(kills.values()) < KILLS and alive(launcher):
            time.sleep(random.uniform(0.0, 0.25))
            kind = random.choice(list(kills))
            victims = workers(path, launcher) if kind != "launcher" else []
            victims = victims if kind == "both" else victims[:1]
            if not alive(launcher) or (kind == "worker" and not victims):
                continue
            kills[kind] += 1
            for victim in victims + [launcher] * (kind != "worker"):
                kill(victim)
        status = nursery.wait(launcher)
        assert status in (0, 1, -signal.SIGKILL), path.with_suffix(".log").read_text()
        assert launches < 3 * KILLS + 10, "the sweep does not come to an end"
        if status == 0 and sum(kills.values()) < KILLS:
            wanted["seeds"] += 2  # done before all kills, on a fast machine: it gets more to do
        elif status == 0:
            break
    print(f"{kills}, {launches} launches, {wanted['seeds']} seeds")
    check(path, journal, **wanted)


def check(path: Path, journal: Path, **wanted: float) -> None:
    runs = pretend.experiment(**wanted).runs()  # type: ignore[arg-type]
    with Store(path) as store:
        results = store.results()
        states = {each.state for each in store.status().values()}
        left = list(store.folder.iterdir()) if store.folder.exists() else []
    assert len(results) == len(runs)
    for run in runs:
        assert results[run.id].score("accuracy") == pretend.expected(run)
        assert [each.epoch for each in results[run.id].epochs] == [1, 2, 3, 4]
    assert states == {"done"}
    assert left == []
    assert no_two_at_once(journal, {run.id for run in runs})


def no_two_at_once(journal: Path, runs: set[str]) -> bool:
    """Whether a process that has taken a run over is never followed by the one before it."""
    past: dict[str, list[str]] = {}
    for line in journal.read_text().splitlines():
        process, run = line.split()
        steps = past.setdefault(run, [])
        if process not in steps:
            steps.append(process)
        elif steps[-1] != process:
            return False
    return runs <= past.keys()


def workers(path: Path, launcher: int) -> list[int]:
    """Those of this launcher that are there, in random order."""
    found = [int(file.stem.split(".")[1]) for file in path.parent.glob(f"{launcher}.*.worker")]
    there = [number for number in found if alive(number)]
    return random.sample(there, len(there))


def alive(process: int) -> bool:
    """Whether it is there and has not ended; one that nobody has waited for yet is in state Z."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill(number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)
