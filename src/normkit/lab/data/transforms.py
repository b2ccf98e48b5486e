"""What is done to images: normalization, augmentation, mixup.

What is random about an epoch is drawn at once, as whole numbers, a row for each sample. Every kind
of decision has its own stream, so that turning one on leaves the others as they were. Augmentation
of a batch is tensor operations of fixed shapes alone: nothing waits for the host or asks for a
number, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.lab.data.records import ChannelMoments
from normkit.lab.data.sampling import generator, seeded, stream
from normkit.lab.experiment import Data

# of ImageNet's training set, as everybody uses them
IMAGENET: ChannelMoments = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))

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


def coefficients(kind: str, moments: ChannelMoments, white: int) -> tuple[Tensor, Tensor]:
    """scale and shift, each (1, C, 1, 1), for bytes of which ``white`` means 1.0.

    >>> scale, shift = coefficients("halves", ((0.3,), (0.2,)), 255)
    >>> (torch.tensor([0, 255]) * scale + shift).flatten()
    tensor([-1.,  1.])
    """
    mean, std = (torch.tensor(each, dtype=torch.float64) for each in moments)
    if kind == "dataset":
        std = torch.where(std > 0, std, 1.0)  # a channel that is constant becomes zero
    elif kind == "halves":
        mean, std = torch.full_like(mean, 0.5), torch.full_like(std, 0.5)
    elif kind == "fixed":  # the middle of a byte's range, and the largest distance from it
        mean, std = torch.full_like(mean, 128 / 255), torch.full_like(std, 128 / 255)
    elif kind == "lite":  # what EfficientNet-Lite was trained with
        mean, std = torch.full_like(mean, 127 / 255), torch.full_like(std, 128 / 255)
    else:
        mean, std = torch.zeros_like(mean), torch.ones_like(std)
    scale, shift = 1 / (white * std), -mean / std
    return scale.float().view(1, -1, 1, 1), shift.float().view(1, -1, 1, 1)


def normalize(images: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """Bytes to numbers: value = byte·scale + shift, for each channel."""
    # in place after one conversion: a single new tensor, and faster than mixed types on a CPU
    return images.float().mul_(scale).add_(shift)


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
    first, any_fits = fits.int().argmax(1, keepdim=True), fits.any(1)
    wide = torch.where(any_fits, wide.gather(1, first).squeeze(1), width)
    high = torch.where(any_fits, high.gather(1, first).squeeze(1), height)
    top, left = uniform(0, 1, 2).unbind(1)
    top, left = (top * (height - high + 1)).floor(), (left * (width - wide + 1)).floor()
    return torch.stack((top, left, high, wide), 1).long()


class Windows:
    """Cuts a window out of each of some images of a padded set.

    The rows of all windows are rows of one overlapping view of the set's bytes: every place where
    a row could begin, and the bytes that follow it. So a crop of a whole batch is one selection of
    rows, which the CPU copies piece by piece; an index for every pixel costs five times as much.
    """

    def __init__(self, padded: Tensor, padding: int) -> None:
        _, channels, tall, broad = padded.shape
        self.shape = (channels, tall - 2 * padding, broad - 2 * padding)
        _, height, width = self.shape
        self.rows = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
        first = torch.arange(channels, device=padded.device) * tall * broad
        self.within = (first[:, None] + torch.arange(height, device=padded.device) * broad).view(-1)

    def cut(self, plan: Tensor) -> Tensor:
        places = (plan[:, CORNER].unsqueeze(1) + self.within).view(-1)
        return self.rows.index_select(0, places).view(-1, *self.shape)


def mirror(images: Tensor, plan: Tensor) -> Tensor:
    """Mirrored left to right where the plan says so."""
    mask = plan[:, MIRROR].to(torch.uint8).view(-1, 1, 1, 1)
    # a choice by bits: torch.where on bytes takes ten times as long on a CPU
    return images.flip(3).bitwise_xor_(images).bitwise_and_(mask).bitwise_xor_(images)


def turn(images: Tensor, plan: Tensor, smooth: bool) -> Tensor:
    """Each image as the plan's map sees it, black beyond its borders: bytes to float32 bytes.

    ``smooth`` interpolates between pixels; else the nearest is taken, as is usual for rotation.
    """
    maps = plan[:, MAP].to(torch.float32, memory_format=torch.contiguous_format).mul_(1 / FINE)
    grid = F.affine_grid(maps.view(-1, 2, 3), list(images.shape), align_corners=False)
    mode = "bilinear" if smooth else "nearest"
    return F.grid_sample(images.float(), grid, mode, "zeros", align_corners=False)


class Holes:
    """Squares of zeros, clipped at the borders."""

    def __init__(self, side: int, height: int, width: int, device: torch.device) -> None:
        self.rows, self.columns = (
            self._bands(side, length).to(device) for length in (height, width)
        )

    @staticmethod
    def _bands(side: int, length: int) -> Tensor:
        """(length, length) of 0 and 1: the band of ``side`` places around each place."""
        places = torch.arange(length)
        offset = places[None, :] - (places[:, None] - side // 2)
        return ((offset >= 0) & (offset < side)).float()

    def cut(self, images: Tensor, plan: Tensor) -> Tensor:
        rows = self.rows.index_select(0, plan[:, HOLE_ROW])
        columns = self.columns.index_select(0, plan[:, HOLE_COLUMN])
        hole = (rows.unsqueeze(2) * columns.unsqueeze(1)).unsqueeze(1)  # (B, 1, H, W)
        return images.addcmul_(images, hole, value=-1)


def soften(labels: Tensor, classes: int, smoothing: float = 0.0) -> Tensor:
    """(B,) int64 to (B, classes) float32: 1 − smoothing for the label, the rest for all alike.

    >>> soften(torch.tensor([1]), 4, 0.2)
    tensor([[0.0500, 0.8500, 0.0500, 0.0500]])
    """
    floor = smoothing / classes
    soft = torch.full((labels.shape[0], classes), floor, device=labels.device)
    return soft.scatter_(1, labels.unsqueeze(1), 1 - smoothing + floor)


def mixing_weights(
    alpha: float, samples: int, *, seed: int, epoch: int, device: torch.device | str = "cpu"
) -> Tensor:
    """An epoch's weights of mixup, one a sample, from the beta distribution of (alpha, alpha)."""
    with seeded(stream("mixup", seed, epoch)):
        shape = torch.tensor(alpha, dtype=torch.float64)
        weights = torch.distributions.Beta(shape, shape).sample((samples,)).float()
    return weights.to(device)


def mix(images: Tensor, soft: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Each sample blended with the one before it in the batch, images and soft labels alike.

    The order of a batch is random already, so its neighbour is as good as any other partner.

    >>> images = torch.tensor([0.0, 4.0]).view(2, 1, 1, 1)
    >>> images, soft = mix(images, torch.eye(2), torch.tensor([1, 0.75]))
    >>> images.flatten(), soft[1]
    (tensor([0., 3.]), tensor([0.2500, 0.7500]))
    """
    images = torch.lerp(images.roll(1, 0), images, weights.view(-1, 1, 1, 1))
    return images, torch.lerp(soft.roll(1, 0), soft, weights.view(-1, 1))
