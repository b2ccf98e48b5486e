"""Augmentation of a batch against the same done to one image at a time."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.v2 import functional as vision

from normkit.lab.data import load
from normkit.lab.data.sampling import generator
from normkit.lab.data.transforms import (
    COLUMNS,
    CORNER,
    FINE,
    HOLE_COLUMN,
    HOLE_ROW,
    MAP,
    MIRROR,
    Augmentation,
    boxes,
    maps,
    turn,
)
from normkit.lab.experiment import Data

NAME = "synthetic:3x12x10x4x300"
N, C, H, W = 300, 3, 12, 10
BYTES = load(Data(NAME, normalize="none")).train.images


def augmented(**said: object) -> tuple[Tensor, Tensor]:
    """All images in their own order, as bytes again, and the plan."""
    train = load(Data(NAME, normalize="none", **said)).train
    plan = train.plan(7, 0, shuffle=False)
    images, _ = train.gather(plan)
    return (images * 255).round().to(torch.uint8), plan


def test_flip() -> None:
    images, plan = augmented(flip=True)
    for image, original, mirrored in zip(images, BYTES, plan[:, MIRROR] > 0, strict=True):
        assert torch.equal(image, original.flip(2) if mirrored else original)
    # a fair coin 300 times: 150 ± five standard deviations of 8.7
    assert 106 < int((plan[:, MIRROR] > 0).sum()) < 194


def test_crop() -> None:
    images, plan = augmented(crop=2)
    places = set()
    for number, (image, original) in enumerate(zip(images, BYTES, strict=True)):
        corner = int(plan[number, CORNER]) - number * C * (H + 4) * (W + 4)
        top, left = divmod(corner, W + 4)
        places.add((top, left))
        padded = F.pad(original, (2, 2, 2, 2))
        assert torch.equal(image, padded[:, top : top + H, left : left + W])
    assert places == {(top, left) for top in range(5) for left in range(5)}


def test_crop_then_flip() -> None:
    both, plan = augmented(crop=2, flip=True)
    cropped, alone = augmented(crop=2)
    assert torch.equal(plan[:, CORNER], alone[:, CORNER])  # one decision leaves the other alone
    mirrored = (plan[:, MIRROR] > 0).view(-1, 1, 1, 1)
    assert torch.equal(both, torch.where(mirrored, cropped.flip(3), cropped))


def test_cutout() -> None:
    train = load(Data(NAME, cutout=5)).train
    plan = train.plan(7, 0, shuffle=False)
    images, _ = train.gather(plan)
    plain, _ = train.gather(torch.arange(N))
    for image, original, row in zip(images, plain, plan, strict=True):
        top, left = int(row[HOLE_ROW]) - 2, int(row[HOLE_COLUMN]) - 2
        expected = original.clone()
        expected[:, max(top, 0) : top + 5, max(left, 0) : left + 5] = 0
        assert torch.equal(image, expected)
    assert set(plan[:, HOLE_ROW].tolist()) == set(range(H))
    assert set(plan[:, HOLE_COLUMN].tolist()) == set(range(W))


def rows_for(map_: Tensor) -> Tensor:
    plan = torch.zeros(len(map_), COLUMNS, dtype=torch.int64)
    plan[:, MAP] = (map_ * FINE).round().long()
    return plan


def turned(images: Tensor, degrees: float, *, mirrored: bool = False) -> Tensor:
    count, _, height, width = images.shape
    angle = torch.full((count,), math.radians(degrees), dtype=torch.float64)
    mirror = torch.full((count,), mirrored)
    map_ = maps(torch.tensor([[0, 0, height, width]]), angle, mirror, height, width)
    return turn(images, rows_for(map_), smooth=False)


@pytest.mark.parametrize("degrees", [0.0, 15.0, -15.0, 7.3, 45.0, 179.0])
def test_rotation_is_that_of_torchvision(degrees: float) -> None:
    assert torch.equal(turned(BYTES, degrees), vision.rotate(BYTES, degrees).float())


def test_a_quarter_turn() -> None:
    square = BYTES[..., :10, :]
    assert torch.equal(turned(square, 90.0), square.rot90(1, (2, 3)).float())


def test_flip_then_rotation() -> None:
    expected = vision.rotate(BYTES.flip(3), 15.0).float()
    assert torch.equal(turned(BYTES, 15.0, mirrored=True), expected)


def test_angles_stay_within_the_limit() -> None:
    plan = Augmentation(rotation=30.0).plan(torch.arange(5000), (1, 8, 8), 1, 0)
    cos, minus_sin = (plan[:, MAP][:, i].double() / FINE for i in (0, 1))
    degrees = torch.rad2deg(torch.atan2(-minus_sin, cos))
    assert degrees.abs().max() <= 30.001
    # uniform from −30 to 30: its outer tenths are there, its mean is within five of its 0.245
    assert degrees.min() < -29
    assert degrees.max() > 29
    assert abs(float(degrees.mean())) < 1.23


def test_resized_crop_of_one_box() -> None:
    """A box of half the size, stretched by two, against torch's own interpolation."""
    box = torch.tensor([[4, 2, 6, 5]])
    map_ = maps(box, torch.zeros(1, dtype=torch.float64), torch.tensor([False]), H, W)
    image = BYTES[:1]
    seen = turn(image, rows_for(map_), smooth=True)
    part = image[:, :, 4:10, 2:7].float()
    expected = F.interpolate(part, (H, W), mode="bilinear", align_corners=False)
    # at its borders the box still sees the pixels beside it, interpolation does not; values up to
    # 255 in float32, with places that are exact to 2⁻²⁴ of the size
    error = (seen - expected)[:, :, 1:-1, 1:-1].abs().max()
    assert error < 255 * 2**-20


def test_boxes() -> None:
    found = boxes(20_000, 32, 24, generator("test"))
    top, left, high, wide = found.unbind(1)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + high <= 32).all()
    assert (left + wide <= 24).all()
    assert high.min() > 0
    # rounded sides: the share may leave its bounds by half a pixel on each side
    share = high * wide / (32 * 24)
    assert ((high + 0.5) * (wide + 0.5) >= 0.08 * 32 * 24).all()
    assert share.max() <= 1
    ratio = wide / high
    assert ((wide + 0.5) / (high - 0.5) >= 3 / 4).all()
    assert ratio.float().median() < 1.1


def test_all_together_have_the_right_form() -> None:
    train = load(Data(NAME, flip=True, resized_crop=True, rotation=10.0, cutout=3)).train
    images, labels = train.gather(train.plan(1, 0)[:7])
    assert images.shape == (7, C, H, W)
    assert images.dtype == torch.float32
    assert images.isfinite().all()
    assert labels.shape == (7,)
