"""kill -9 of a sweep that really trains, in processes as users have them, a hundred times.

    python tests/lab/sweep/killing.py --kills 100

It takes a quarter of an hour and is no part of the test suite; test_killing.py is. One sweep goes
undisturbed. Of another the launcher, a worker, or both are killed at random moments, and it is
launched again until it is done. Then the two stores have to agree in every number but times, bit by
bit. Checkpoints are written every 0.1, 1 or 4 seconds, by chance; it counts how many runs were past
their checkpoint when they were killed, and how many steps had to be done again for that.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from normkit.lab import data
from normkit.lab.experiment.reading import parse
from normkit.lab.results import Result
from normkit.lab.store import FAILED, Store
from normkit.lab.sweep import ProgressLines, run
from normkit.lab.train.batches import EpochPlan
from normkit.lab.train.checkpoint import StaleCheckpoint, checkpoint_place

KINDS = ("launcher", "worker", "both")
EXPERIMENT = """
baseline = "bn"
seeds = {seeds}
[data]
name = "digits"
flip = true
[train]
epochs = 12
batch = 64
lr = 0.1
[watch]
measures = ["condensation"]
[[variants]]
name = "bn"
[[variants]]
name = "bcn"
norm = "bcn"
[[variants]]
name = "ubn"
norm = "ubn"
[[variants]]
name = "gn + ws"
norm = "gn"
options = {{ groups = 4 }}
weights = "ws"
"""


def launch(store: Path, seeds: int) -> int:
    experiment = parse(EXPERIMENT.format(seeds=seeds))
    with Store(store) as opened:
        run(experiment, opened, workers=2, device="cpu", progress=ProgressLines(), trainer="often")
        return int(any(each.state == FAILED for each in opened.status().values()))


def start(store: Path, seeds: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, "--launch", str(store), "--seeds", str(seeds)]
    places = store.with_suffix(".places")
    places.mkdir(exist_ok=True)
    with store.with_suffix(".log").open("ab") as log:
        environment = {**os.environ, "KILLING_PLACES": str(places)}
        return subprocess.Popen(command, stderr=log, env=environment)


def steps_an_epoch() -> int:
    setting = parse(EXPERIMENT.format(seeds=1)).variants[0].setting
    return EpochPlan.of(setting.train, len(data.load(setting.data, "cpu").train)).steps


def wait_for_training(store: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Until a worker of this launcher has told of a run."""
    while launcher.poll() is None:
        mine = set(workers(launcher.pid))
        places = [file.read_text() for file in store.with_suffix(".places").iterdir()]
        if any(int(each.partition(" ")[0] or 0) in mine for each in places):
            return
        time.sleep(0.05)


def past_checkpoints(store: Path, dead: set[int], steps: int) -> list[int]:
    """For each run that these processes had: how many steps it was past its checkpoint."""
    past = []
    for file in store.with_suffix(".places").iterdir():
        process, _, epochs = file.read_text().partition(" ")
        if not epochs or int(process) not in dead:
            continue
        file.unlink()
        reached = round(float(epochs) * steps)
        try:
            done, at = checkpoint_place(store.with_name(f"{store.name}.runs") / f"{file.name}.pt")
        except StaleCheckpoint:  # none yet, or the run is done
            continue
        past.append(reached - done * steps - at)
    return past


def disturb(store: Path, seeds: int, kills: int) -> Counter[str]:
    """Until it is done, with so many kills on the way."""
    done: Counter[str] = Counter()
    steps = steps_an_epoch()
    while True:
        launcher = start(store, seeds)
        done["launches"] += 1
        while sum(done[kind] for kind in KINDS) < kills and launcher.poll() is None:
            # some while processes start, most while runs are trained
            if random.random() < 0.7:
                wait_for_training(store, launcher)
            time.sleep(random.uniform(0, 3))
            kind = random.choice(KINDS)
            victims = [] if kind == "launcher" else workers(launcher.pid)
            victims = victims if kind == "both" else victims[:1]
            if launcher.poll() is not None or (kind == "worker" and not victims):
                continue
            done[kind] += 1
            # without their launcher, workers end by themselves
            dying = set(victims if kind == "worker" else workers(launcher.pid))
            for victim in victims + [launcher.pid] * (kind != "worker"):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
            time.sleep(0.2)
            past = [each for each in past_checkpoints(store, dying, steps) if each > 0]
            done["runs past their checkpoint"] += len(past)
            done["steps done again"] += sum(past)
            print(f"\r{dict(done)}", end="", flush=True)
        status = launcher.wait()
        if status == 0:
            print()
            return done
        assert status in (1, -signal.SIGKILL), f"exit status {status}: see {store.parent}"


def workers(launcher: int) -> list[int]:
    """The processes of a launcher, in random order."""
    with suppress(OSError):
        listed = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
        found = [int(number) for number in listed.split()]
        return random.sample(found, len(found))
    return []


def numbers(result: Result) -> dict[str, Any]:
    """Everything but times, the command, and what is installed: that may change in the meantime."""
    said = dataclasses.asdict(result)
    for key in ("seconds", "images_per_second", "provenance", "environment"):
        del said[key]
    for epoch in said["epochs"]:
        del epoch["seconds"]
    return said


def check(folder: Path, seeds: int) -> int:
    """Whether two stores hold the same runs with the same numbers; how many."""
    with Store(folder / "calm.sqlite") as calm, Store(folder / "killed.sqlite") as killed:
        expected, found = calm.results(), killed.results()
    assert len(expected) == 4 * seeds
    assert found.keys() == expected.keys()
    wrong = [each for each in expected if numbers(found[each]) != numbers(expected[each])]
    assert not wrong, f"{wrong} differ"
    left = sorted(file.name for file in folder.iterdir() if file.suffix != ".places")
    assert left == ["calm.log", "calm.sqlite", "killed.log", "killed.sqlite"], left
    return len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--launch", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        sys.exit(launch(options.launch, options.seeds))
    folder = Path(tempfile.mkdtemp())
    print(f"in {folder}")
    began = time.monotonic()
    assert start(folder / "calm.sqlite", options.seeds).wait() == 0
    print(f"undisturbed: {time.monotonic() - began:.0f} s")
    done = disturb(folder / "killed.sqlite", options.seeds, options.kills)
    found = check(folder, options.seeds)
    seconds = time.monotonic() - began
    assert done["runs past their checkpoint"] > 0
    print(f"{found} runs, each once, all numbers equal. {dict(done)}, {seconds:.0f} s.")


if __name__ == "__main__":
    main()
