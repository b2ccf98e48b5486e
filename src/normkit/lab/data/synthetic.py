"""A set made from nothing: a pattern for each class, under noise.

"synthetic:3x32x32x10x2000" has images of 3×32×32, 10 classes and 2,000 training samples; the test
set is a fifth as large. It is the same on every machine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from normkit.errors import OptionError
from normkit.lab.data.records import Raw, Split
from normkit.lab.data.seeding import generator

USUAL = "1x8x8x4x400"


def sizes(name: str) -> tuple[int, ...]:
    """C, H, W, classes and samples of "synthetic:CxHxWxCLASSESxSAMPLES"."""
    said = name.partition(":")[2] or USUAL
    words = said.split("x")
    if len(words) != 5 or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise OptionError(
            f"{name!r} is no synthetic set. Expected synthetic:CxHxWxCLASSESxSAMPLES, such as "
            f"synthetic:{USUAL}."
        )
    *shape, classes, samples = map(int, words)
    if samples < 5 * classes:  # the test set, a fifth of it, is to have every class too
        raise OptionError(
            f"{name!r} has {samples} samples of {classes} classes. Expected five of each or more."
        )
    return (*shape, classes, samples)


def make(name: str) -> Raw:
    """
    >>> make("synthetic:3x4x4x2x50").train.images.shape
    torch.Size([50, 3, 4, 4])
    """
    channels, height, width, classes, samples = sizes(name)
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
