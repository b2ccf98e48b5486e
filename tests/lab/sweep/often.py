"""normkit.lab.train with a checkpoint several times a second, for sweeps that are killed."""

from __future__ import annotations

from functools import partial

from normkit.lab import train as training
from normkit.lab.train import side_by_side as side_by_side

EVERY = 0.2  # seconds

train = partial(training.train, save_every=EVERY)
train_together = partial(training.train_together, save_every=EVERY)
