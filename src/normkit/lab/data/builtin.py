"""Sets that need no files: the digits of scikit-learn, and patterns under noise."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from normkit.core.optional_dependencies import require
from normkit.errors import OptionError
from normkit.lab.data.records import Raw, Split
from normkit.lab.data.sampling import generator, stratified

DIGITS_TEST = 360
DIGITS_SAMPLES = (1_797 - DIGITS_TEST, DIGITS_TEST)  # to train and to test on
DIGITS_WHITE = 16
SYNTHETIC = "1x8x8x4x400"  # where no sizes are given


def digits_source() -> Any:
    """scikit-learn's data sets, or an error that says how to get them."""
    return require("sklearn.datasets", "lab", "The data set digits")


def digits() -> Raw:
    """scikit-learn's digits: 1,797 images of 8×8 with 17 shades.

    The test part of the Optical Recognition of Handwritten Digits data set by E. Alpaydin and
    C. Kaynak (UCI Machine Learning Repository, 1998, doi 10.24432/C50P49). No split was published:
    360 samples, the same share of every class, are the test set, and always the same ones.
    """
    table = digits_source().load_digits()
    images = torch.as_tensor(table.images).to(torch.uint8).unsqueeze(1)
    labels = torch.as_tensor(table.target).long()
    test, train = stratified(labels, DIGITS_TEST, "digits")
    return Raw(*(Split(images[part], labels[part], DIGITS_WHITE) for part in (train, test)))


def synthetic_sizes(name: str) -> tuple[int, ...]:
    """C, H, W, classes and samples of "synthetic:CxHxWxCLASSESxSAMPLES"."""
    words = (name.partition(":")[2] or SYNTHETIC).split("x")
    if len(words) != 5 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise OptionError(
            f"{name!r} is not a synthetic set. Expected synthetic:CxHxWxCLASSESxSAMPLES, such as "
            f"synthetic:{SYNTHETIC}."
        )
    *shape, classes, samples = map(int, words)
    if samples < 5 * classes:  # the test set, a fifth of it, is to have every class too
        raise OptionError(
            f"{name!r} has {samples} samples of {classes} classes. Expected five of each or more."
        )
    return (*shape, classes, samples)


def synthetic(name: str) -> Raw:
    """A pattern for each class, under noise; the same on every machine.

    "synthetic:3x32x32x10x2000" has images of 3×32×32, 10 classes and 2,000 training samples; the
    test set is a fifth as large.

    >>> synthetic("synthetic:3x4x4x2x50").train.images.shape
    torch.Size([50, 3, 4, 4])
    """
    channels, height, width, classes, samples = synthetic_sizes(name)
    random = generator("synthetic", name)
    coarse = torch.rand(classes, channels, 4, 4, generator=random)
    patterns = F.interpolate(coarse, (height, width), mode="bilinear").mul(128).to(torch.uint8)

    def split(count: int) -> Split:
        labels = torch.randint(classes, (count,), generator=random)
        labels[:classes] = torch.arange(classes)  # every class at least once
        shape = (count, channels, height, width)
        noise = torch.randint(128, shape, generator=random, dtype=torch.uint8)
        return Split(noise.add_(patterns[labels]), labels)

    return Raw(split(samples), split(samples // 5))
