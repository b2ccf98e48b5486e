"""Training a run from beginning to end."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from normkit.errors import NonFiniteWarning
from normkit.lab.data import load
from normkit.lab.experiment import Run
from normkit.lab.results import Result
from normkit.lab.train.checkpointing import EVERY, Keeper
from normkit.lab.train.choosing import repeatable
from normkit.lab.train.progress import Progress
from normkit.lab.train.training import Training

Tell = Callable[[Progress], None]
Stop = Callable[[], bool]
OFTEN = 0.1  # seconds between two reports in the middle of an epoch


def nobody(progress: Progress) -> None:
    """Listens to no progress."""


def never() -> bool:
    """Does not stop."""
    return False


def train(
    run: Run,
    *,
    device: torch.device | str = "cpu",
    sets: Any = None,
    checkpoint: Path | None = None,
    tell: Tell = nobody,
    stop: Stop = never,
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
    with surroundings():
        training = Training(run, sets or load(run.setting.data, device), device=device)
        keeper = Keeper(checkpoint, save_every)
        keeper.resume(training)
        report = Reporter(training, tell)
        while training.step():
            report()
            if stop():
                keeper.save(training)
                return None
            if keeper.due():
                keeper.save(training)
        return training.result()


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
def surroundings() -> Iterator[None]:
    """What holds for the whole process while runs are trained."""
    gc.collect()  # models and recorded steps of earlier runs refer to themselves, and hold memory
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with repeatable(), warnings.catch_warnings():
        # a divergence is recorded, and a layer's count of such batches ends up in the result's note
        warnings.simplefilter("ignore", NonFiniteWarning)
        yield
