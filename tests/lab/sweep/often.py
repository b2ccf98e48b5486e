"""normkit.lab.train with checkpoints at random intervals, for sweeps that are killed.

Of each run, the place that it has reached is written to a file in the folder KILLING_PLACES: who
kills it then knows how far past its checkpoint it was.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from normkit.lab import train as training
from normkit.lab.train import side_by_side as side_by_side
from normkit.lab.train.training import Progress

EVERY = (0.1, 1.0, 4.0)  # seconds


def train(*given: Any, tell: Callable[[Progress], None], **options: Any) -> Any:
    every = random.SystemRandom().choice(EVERY)
    return training.train(*given, tell=_noted(tell), save_every=every, **options)


def train_together(*given: Any, tell: Callable[[Progress], None], **options: Any) -> Any:
    every = random.SystemRandom().choice(EVERY)
    return training.train_together(*given, tell=_noted(tell), save_every=every, **options)


def _noted(tell: Callable[[Progress], None]) -> Callable[[Progress], None]:
    folder = Path(os.environ["KILLING_PLACES"])

    def note(progress: Progress) -> None:
        (folder / progress.run).write_text(f"{os.getpid()} {progress.epochs}")
        tell(progress)

    return note
