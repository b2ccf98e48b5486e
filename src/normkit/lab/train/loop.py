"""Training runs from beginning to end: one, or several side by side in one process."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from normkit.core.precision import deterministic_cudnn
from normkit.errors import NonFiniteWarning, OptionError
from normkit.lab.experiment import Run
from normkit.lab.results import Result
from normkit.lab.tasks import load_sets, sets_key
from normkit.lab.train.checkpoint import EVERY, Checkpointer
from normkit.lab.train.processes import train_in_processes
from normkit.lab.train.training import Progress, Training

Tell = Callable[[Progress], None]
Stop = Callable[[], bool]
OFTEN = 0.1  # seconds between two reports in the middle of an epoch


def train(
    run: Run,
    *,
    device: torch.device | str = "cpu",
    sets: Any = None,
    checkpoint: Path | None = None,
    tell: Tell = lambda progress: None,
    stop: Stop = lambda: False,
    save_every: float = EVERY,
) -> Result | None:
    """Train a run, from its checkpoint if there is one; None if it was stopped before its end.

    ``tell`` hears of progress, ``stop`` is asked after every step. A run that diverges has a result
    like any other. Whether and where it was interrupted makes no difference to a result.

    >>> from normkit.lab.experiment import Data, Setting, Train
    >>> setting = Setting(Data("synthetic:1x8x8x3x64"), train=Train(epochs=2, batch=32, lr=0.05))
    >>> result = train(Run(setting, seed=1))
    >>> result.status, len(result.epochs), result.selected
    ('done', 2, (2,))
    """
    if run.setting.train.gpus > 1:
        return train_in_processes(
            run,
            device=device,
            sets=sets,
            checkpoint=checkpoint,
            report=lambda training: Reporter(training, tell),
            stop=stop,
            save_every=save_every,
        )
    [result] = train_together(
        [run],
        device=device,
        sets=sets,
        checkpoints=[checkpoint],
        tell=tell,
        stop=stop,
        save_every=save_every,
    )
    return result


def train_together(
    runs: Sequence[Run],
    *,
    device: torch.device | str = "cpu",
    sets: Any = None,
    checkpoints: Sequence[Path | None] = (),
    tell: Tell = lambda progress: None,
    done: Callable[[Result], None] = lambda result: None,
    stop: Stop = lambda: False,
    save_every: float = EVERY,
) -> list[Result | None]:
    """The results of several runs, each as if it had been trained alone; None where stopped.

    They take turns, step by step. On a GPU each has its own stream, so that kernels which are too
    small to fill it run at the same time. Runs on the same data share it; ``sets`` are for all.
    ``done`` hears of each result when it is there, and not only when the last run has ended.
    """
    if checkpoints and len(checkpoints) != len(runs):
        raise OptionError(f"{len(runs)} runs expect as many checkpoints, got {len(checkpoints)}.")
    if any(run.setting.train.gpus > 1 for run in runs):
        raise OptionError("A run with train.gpus above 1 has no other at its side. Try train().")
    results: list[Result | None] = [None] * len(runs)
    with process_settings():
        settings = {sets_key(run.setting): run.setting for run in runs}
        loaded = {
            key: load_sets(setting, device) if sets is None else sets
            for key, setting in settings.items()
        }
        trainings = [
            Training(run, loaded[sets_key(run.setting)], device=device, beside=len(runs))
            for run in runs
        ]
        checkpointers = [
            Checkpointer(path, save_every) for path in checkpoints or [None] * len(runs)
        ]
        for checkpointer, training in zip(checkpointers, trainings, strict=True):
            checkpointer.resume(training)
        reports = [Reporter(training, tell) for training in trainings]
        going = set(range(len(runs)))
        while going:
            for i in sorted(going):
                if not trainings[i].step():
                    results[i] = result = trainings[i].result()
                    going.discard(i)
                    done(result)
                    continue
                reports[i]()
                if checkpointers[i].due():
                    checkpointers[i].save(trainings[i])
            if going and stop():
                for i in going:
                    checkpointers[i].save(trainings[i])
                break
    return results


class Reporter:
    """Tells of the progress of a training: every record, and its place now and then."""

    def __init__(self, training: Training, tell: Tell) -> None:
        self.training, self.tell = training, tell
        self.told = len(training.records)
        self.last = 0.0

    def __call__(self) -> None:
        records = self.training.records
        for record in records[self.told :]:
            self.tell(self.training.progress(record))
        now = time.monotonic()
        if len(records) > self.told:
            self.told, self.last = len(records), now
        elif now - self.last >= OFTEN:
            self.last = now
            self.tell(self.training.progress())


@contextmanager
def process_settings() -> Iterator[None]:
    """What holds for the whole process while runs are trained."""
    gc.collect()  # models and recorded steps of earlier runs refer to themselves, and hold memory
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    # cuDNN as revisiting BN has it: otherwise a resumed run would differ from an undisturbed one
    with deterministic_cudnn(), warnings.catch_warnings():
        # a divergence is recorded, and a layer's count of such batches ends up in the result's note
        warnings.simplefilter("ignore", NonFiniteWarning)
        yield
