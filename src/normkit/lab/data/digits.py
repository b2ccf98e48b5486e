"""scikit-learn's digits: 1,797 images of 8×8 with 17 shades, which come with scikit-learn.

The test part of the Optical Recognition of Handwritten Digits data set by E. Alpaydin and
C. Kaynak (UCI Machine Learning Repository, 1998, doi 10.24432/C50P49). No split was published: 360
samples, the same share of every class, are the test set, and they are always the same ones.
"""

from __future__ import annotations

from typing import Any

import torch

from normkit.lab.data.records import Raw, Split
from normkit.lab.data.splitting import stratified
from normkit.models import require

TEST = 360
SAMPLES = (1_797 - TEST, TEST)  # to train and to test on
WHITE = 16


def source() -> Any:
    """scikit-learn's data sets, or an error that says how to get them."""
    return require("sklearn.datasets", "lab", "The data set digits")


def make() -> Raw:
    found = source().load_digits()
    images = torch.as_tensor(found.images).to(torch.uint8).unsqueeze(1)
    labels = torch.as_tensor(found.target).long()
    test, train = stratified(labels, TEST, "digits")
    return Raw(Split(images[train], labels[train], WHITE), Split(images[test], labels[test], WHITE))
