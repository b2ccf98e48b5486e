"""scikit-learn's digits, as the models of the diseases are trained on them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SEED = 0  # of the order in which they are cut


class Digits(NamedTuple):
    """scikit-learn's 8×8 digits, cut once into what is trained on and what is not."""

    train: tuple[Tensor, Tensor]  # (N, 1, 8, 8), (N,)
    test: tuple[Tensor, Tensor]


def load_digits() -> Digits:
    """1,437 images to train on and 360 to test on, in a fixed random order."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels, dtype=torch.long)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED))
    kept, held_out = order[:-360], order[-360:]
    return Digits((x[kept], y[kept]), (x[held_out], y[held_out]))
