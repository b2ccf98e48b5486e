"""Training several runs side by side in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from normkit.errors import OptionError
from normkit.lab.data import load
from normkit.lab.experiment import Run
from normkit.lab.results import Result
from normkit.lab.train.checkpointing import EVERY, Keeper
from normkit.lab.train.loop import Reporter, Stop, Tell, never, nobody, surroundings
from normkit.lab.train.training import Training


def kept(result: Result) -> None:
    """Waits for the others."""


def train_together(
    runs: Sequence[Run],
    *,
    device: torch.device | str = "cpu",
    sets: Any = None,
    checkpoints: Sequence[Path | None] = (),
    tell: Tell = nobody,
    done: Callable[[Result], None] = kept,
    stop: Stop = never,
    save_every: float = EVERY,
) -> list[Result | None]:
    """The results of several runs, each as if it had been trained alone; None where stopped.

    They take turns, step by step. On a GPU each has its own stream, so that kernels which are too
    small to fill it run at the same time. Runs on the same data share it; ``sets`` are for all.
    ``done`` hears of each result when it is there, and not only when the last run has ended.
    """
    if checkpoints and len(checkpoints) != len(runs):
        raise OptionError(f"{len(runs)} runs expect as many checkpoints, got {len(checkpoints)}.")
    results: list[Result | None] = [None] * len(runs)
    with surroundings():
        known = {run.setting.data: sets for run in runs}
        if sets is None:
            known = {data: load(data, device) for data in known}
        trainings = [
            Training(run, known[run.setting.data], device=device, beside=len(runs)) for run in runs
        ]
        keepers = [Keeper(path, save_every) for path in checkpoints or [None] * len(runs)]
        for keeper, training in zip(keepers, trainings, strict=True):
            keeper.resume(training)
        reports = [Reporter(training, tell) for training in trainings]
        going = set(range(len(runs)))
        while going:
            for i in sorted(going):
                if not trainings[i].step():
                    results[i] = found = trainings[i].result()
                    going.discard(i)
                    done(found)
                    continue
                reports[i]()
                if keepers[i].due():
                    keepers[i].save(trainings[i])
            if stop():
                for i in going:
                    keepers[i].save(trainings[i])
                break
    return results
