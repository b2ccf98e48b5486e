"""Training that is cheap and exact: what normkit.lab.train offers, as a little arithmetic.

A run's model options say how it behaves: seconds a step, and what goes wrong in which epoch.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from normkit.errors import OptionError
from normkit.lab.experiment import Experiment, Model, Run, Setting, Train, Variant
from normkit.lab.results import DONE, Epoch, Result
from normkit.lab.train.training import Progress

STEPS = 4  # an epoch
TROUBLE = ("dies_in", "dies_once_in", "fails_in", "fails_once_in", "refuses_in", "full_once_in")


class Sets:
    shape = (1, 8, 8)


def load(setting: Setting, device: str) -> Sets:
    return Sets()


def experiment(
    variants: int = 3, seeds: int = 2, epochs: int = 3, seconds: float = 0.0, **trouble: int
) -> Experiment:
    """Variants v0, v1, …; what is given as trouble happens in v1, in the epoch that it says."""
    made = tuple(
        Variant(
            f"v{i}",
            Setting(
                model=Model(
                    options={
                        "factor": 3.5 + i / 10,
                        "seconds": seconds,
                        **(trouble if i == 1 else {}),
                    }
                ),
                train=Train(epochs=epochs),
            ),
        )
        for i in range(variants)
    )
    return Experiment("pretended", "Pretended", made, tuple(range(1, seeds + 1)), "v0")


def train(
    run: Run,
    *,
    device: str = "cpu",
    sets: Any = None,
    checkpoint: Path | None = None,
    tell: Callable[[Any], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
) -> Result | None:
    options, epochs = run.setting.model.options, run.setting.train.epochs
    state: dict[str, Any] = {"done": 0, "x": run.seed / 100 + 0.1, "epochs": []}
    if checkpoint is not None and checkpoint.exists():
        state = json.loads(checkpoint.read_text())
    for done in range(state["done"] + 1, epochs * STEPS + 1):
        epoch = (done - 1) // STEPS + 1
        _trouble(options, epoch, checkpoint)
        if stop():
            return None
        time.sleep(options["seconds"])
        _journal(run.id)
        x = state["x"]
        state |= {"done": done, "x": options["factor"] * x * (1 - x)}  # chaotic: no step is lost
        record = None
        if done % STEPS == 0:
            record = Epoch(epoch, test_accuracy=state["x"], seconds=0.001 * epoch)
            state["epochs"].append(asdict(record))
        if checkpoint is not None:
            _save(checkpoint, json.dumps(state))
        tell(Progress(run.id, done / STEPS, epochs, record=record))
    records = tuple(Epoch(**each) for each in state["epochs"])
    return Result(run.id, DONE, (epochs,), records, seconds=1.0, parameters=1)


def side_by_side(setting: Setting, shape: tuple[int, int, int], device: str) -> int:
    return 3


def train_together(
    runs: Sequence[Run],
    *,
    checkpoints: Sequence[Path],
    done: Callable[[Result], None],
    **given: Any,
) -> list[Result | None]:
    """One after the other, which nobody can tell from side by side."""
    results = []
    for run, path in zip(runs, checkpoints, strict=True):
        results.append(train(run, checkpoint=path, **given))
        if results[-1] is not None:
            done(results[-1])
    return results


def expected(run: Run) -> float:
    """The last accuracy, without any sweep."""
    result = train(_quick(run))
    assert result is not None
    score = result.score("accuracy")
    assert score is not None
    return score


def _quick(run: Run) -> Run:
    options = {"factor": run.setting.model.options["factor"], "seconds": 0.0}
    return Run(Setting(model=Model(options=options), train=run.setting.train), run.seed)


def _journal(run: str) -> None:
    """Who worked on what, line after line, where a test wants to know."""
    if path := os.environ.get("PRETEND_JOURNAL"):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{os.getpid()} {run}\n".encode())
        os.close(file)


def _save(checkpoint: Path, text: str) -> None:
    half = checkpoint.with_name(f".{os.getpid()}.{checkpoint.name}")
    half.write_text(text)
    os.replace(half, checkpoint)


def _trouble(options: Any, epoch: int, checkpoint: Path | None) -> None:
    due = {name for name in TROUBLE if options.get(name) == epoch}
    if due and checkpoint is not None and any(name.endswith("once_in") for name in due):
        once = checkpoint.parent.with_name(f"{checkpoint.stem}.once")
        due = set() if once.exists() else due
        once.touch()
    if due & {"dies_in", "dies_once_in"}:
        os.kill(os.getpid(), signal.SIGKILL)
    if due & {"fails_in", "fails_once_in"}:
        print(f"about to fail in epoch {epoch}", flush=True)
        raise RuntimeError("the sum\nis odd")
    if due & {"refuses_in"}:
        raise OptionError("lr got −1, expected more.")
    if due & {"full_once_in"}:
        raise OSError(errno.ENOSPC, "No space left on device")
