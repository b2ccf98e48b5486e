"""kill -9 of a sweep that really trains, in processes as users have them, a hundred times.

    python tests/lab/sweep/killing.py --kills 100

It takes a quarter of an hour and is no part of the test suite; test_killing.py is. One sweep goes
undisturbed. Of another the launcher, a worker, or both are killed at random moments, and it is
launched again until it is done. Then the two stores have to agree in every number but times.
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

from normkit.lab.experiment.reading import parse
from normkit.lab.results import Result
from normkit.lab.store import FAILED, Store
from normkit.lab.sweep import ProgressLines, run

KINDS = ("launcher", "worker", "both")
EXPERIMENT = """
baseline = "bn"
seeds = {seeds}
[data]
name = "digits"
flip = true
[train]
epochs = 6
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
    with store.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stderr=log)


def disturb(store: Path, seeds: int, kills: int) -> Counter[str]:
    """Until it is done, with so many kills on the way."""
    done: Counter[str] = Counter()
    while True:
        launcher = start(store, seeds)
        done["launches"] += 1
        while sum(done[kind] for kind in KINDS) < kills and launcher.poll() is None:
            # many at the beginning, where processes start; some late
            time.sleep(random.choice([random.uniform(0, 3), random.uniform(0, 20)]))
            kind = random.choice(KINDS)
            victims = [] if kind == "launcher" else workers(launcher.pid)
            victims = victims if kind == "both" else victims[:1]
            if launcher.poll() is not None or (kind == "worker" and not victims):
                continue
            done[kind] += 1
            for victim in victims + [launcher.pid] * (kind != "worker"):
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
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
    """Everything but times."""
    said = dataclasses.asdict(result)
    for key in ("seconds", "images_per_second"):
        del said[key]
    for epoch in said["epochs"]:
        del epoch["seconds"]
    return said


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
    with Store(folder / "calm.sqlite") as calm, Store(folder / "killed.sqlite") as killed:
        expected, found = calm.results(), killed.results()
    assert len(expected) == 4 * options.seeds
    assert found.keys() == expected.keys()
    wrong = [each for each in expected if numbers(found[each]) != numbers(expected[each])]
    assert not wrong, f"{wrong} differ"
    left = sorted(file.name for file in folder.iterdir())
    assert left == ["calm.log", "calm.sqlite", "killed.log", "killed.sqlite"], left
    seconds = time.monotonic() - began
    print(f"{len(found)} runs, each once, all numbers equal. {dict(done)}, {seconds:.0f} s.")


if __name__ == "__main__":
    main()
