"""What is random about an epoch: drawn at once, as whole numbers, a row for each sample.

Every kind of decision has its own stream, so that turning one on leaves the others as they were.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from normkit.lab.data.seeding import generator
from normkit.lab.experiment import Data

# columns of a plan
INDEX = 0  # which sample
CORNER = 1  # where its crop begins, among all bytes of the padded set
MIRROR = 2  # 255: mirrored, 0: not; a mask for bytes
HOLE_ROW, HOLE_COLUMN = 3, 4  # the middle of the cutout
MAP = slice(5, 11)  # affine map of rotation and resized crop, in units of 1/FINE
COLUMNS = 11
FINE = 1 << 24  # as fine as float32 is at 1

AREA = (0.08, 1.0)  # of a resized crop, as a share of the image
RATIO = (3 / 4, 4 / 3)  # its width to its height
TRIES = 10  # to find a box that fits, before the whole image is taken


@dataclass(frozen=True)
class Augmentation:
    """Which random changes images go through; all of them off by default."""

    flip: bool = False
    crop: int = 0
    resized_crop: bool = False
    rotation: float = 0.0
    cutout: int = 0

    @classmethod
    def of(cls, spec: Data) -> Augmentation:
        return cls(spec.flip, spec.crop, spec.resized_crop, spec.rotation, spec.cutout)

    @property
    def turns(self) -> bool:
        """Pixels are interpolated, and flips come with the map that does it."""
        return bool(self.rotation or self.resized_crop)

    def plan(self, order: Tensor, shape: tuple[int, int, int], seed: int, epoch: int) -> Tensor:
        """(N, COLUMNS) int64: sample ``order[i]``, and what happens to it, in row i."""
        samples = order.numel()
        channels, height, width = shape
        plan = torch.zeros(COLUMNS, samples, dtype=torch.int64).t()  # columns are contiguous
        plan[:, INDEX] = order

        def whole(kind: str, count: int) -> Tensor:  # from 0 to count − 1
            return torch.randint(count, (samples,), generator=generator(kind, seed, epoch))

        if self.crop:
            tall, broad = height + 2 * self.crop, width + 2 * self.crop
            top, left = whole("top", 2 * self.crop + 1), whole("left", 2 * self.crop + 1)
            plan[:, CORNER] = (order * channels * tall + top) * broad + left
        if self.flip:
            plan[:, MIRROR] = whole("flip", 2) * 255
        if self.cutout:
            plan[:, HOLE_ROW] = whole("hole row", height)
            plan[:, HOLE_COLUMN] = whole("hole column", width)
        if self.turns:
            box = torch.tensor([[0, 0, height, width]])
            if self.resized_crop:
                box = boxes(samples, height, width, generator("box", seed, epoch))
            turned = torch.zeros(samples, dtype=torch.float64)
            if self.rotation:
                turned.uniform_(-1, 1, generator=generator("angle", seed, epoch))
            mirrored = plan[:, MIRROR] > 0
            map_ = maps(box, turned * math.radians(self.rotation), mirrored, height, width)
            plan[:, MAP] = (map_ * FINE).round().long()
        return plan


def maps(box: Tensor, angle: Tensor, mirrored: Tensor, height: int, width: int) -> Tensor:
    """(N, 6): from a place in the result to one in the image, both counted from −1 to 1.

    In the result's pixels it is turned back (a picture turns counter-clockwise), then mirrored,
    then moved into the box. So what surrounds the box is seen where a turn leaves its corners.
    """
    top, left, high, wide = box.double().unbind(1)
    along, down = wide / width * torch.where(mirrored, -1.0, 1.0), high / height
    cos, sin = angle.cos(), angle.sin()
    across = (along * cos, -along * sin * (height / width), (2 * left + wide) / width - 1)
    upright = (down * sin * (width / height), down * cos, (2 * top + high) / height - 1)
    return torch.stack(torch.broadcast_tensors(*across, *upright), 1)


def boxes(samples: int, height: int, width: int, random: torch.Generator) -> Tensor:
    """(N, 4) top, left, height and width of random boxes: the first of some tries that fits."""

    def uniform(low: float, high: float, count: int) -> Tensor:
        drawn = torch.rand(samples, count, generator=random, dtype=torch.float64)
        return drawn * (high - low) + low

    area = uniform(*AREA, TRIES) * height * width
    ratio = uniform(math.log(RATIO[0]), math.log(RATIO[1]), TRIES).exp()
    wide, high = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (wide > 0) & (wide <= width) & (high > 0) & (high <= height)
    first, found = fits.int().argmax(1, keepdim=True), fits.any(1)
    wide = torch.where(found, wide.gather(1, first).squeeze(1), width)
    high = torch.where(found, high.gather(1, first).squeeze(1), height)
    top, left = uniform(0, 1, 2).unbind(1)
    top, left = (top * (height - high + 1)).floor(), (left * (width - wide + 1)).floor()
    return torch.stack((top, left, high, wide), 1).long()
