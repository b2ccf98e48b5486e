"""From an image file to bytes of one size, augmented on the way: the work of worker processes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normkit.lab.data.augmentation import Augmentation, boxes
from normkit.lab.data.errors import CorruptData
from normkit.models import require

SHORTER_SIDE = 8 / 7  # before the middle is cut out: 256 pixels for 224


@dataclass(frozen=True)
class Decoder:
    """Reads an image and brings it to size × size."""

    size: int
    augmentation: Augmentation
    fill: tuple[int, ...]  # bytes of a cutout: what becomes zero

    def __call__(self, path: str, seed: int | None) -> Tensor:
        """(3, size, size) uint8; without a seed, as evaluation sees it."""
        functional, _ = libraries()
        image = decoded(path)
        if seed is None:
            return self._middle(image, functional)
        return self._augmented(image, functional, random.Random(seed))

    def _middle(self, image: Tensor, functional: Any) -> Tensor:
        image = functional.resize(image, self._larger(), antialias=True)
        return functional.center_crop(image, [self.size, self.size])

    def _larger(self) -> list[int]:
        """The size that is cropped: a square with a margin to move in, or by the shorter side."""
        if self.augmentation.crop:
            return [self.size + 2 * self.augmentation.crop] * 2
        return [round(self.size * SHORTER_SIDE)]

    def _augmented(self, image: Tensor, functional: Any, draw: random.Random) -> Tensor:
        does, size = self.augmentation, [self.size, self.size]
        if does.resized_crop:
            drawn = torch.Generator().manual_seed(draw.getrandbits(63))
            box = boxes(1, image.shape[1], image.shape[2], drawn)[0].tolist()
            image = functional.resized_crop(image, *box, size, antialias=True)
        elif does.crop:
            image = functional.resize(image, self._larger(), antialias=True)
            top, left = draw.randint(0, 2 * does.crop), draw.randint(0, 2 * does.crop)
            image = functional.crop(image, top, left, *size)
        else:
            image = self._middle(image, functional)
        if does.flip and draw.random() < 0.5:
            image = functional.horizontal_flip(image)
        if does.rotation:
            image = functional.rotate(image, draw.uniform(-does.rotation, does.rotation))
        if does.cutout:
            top, left = (draw.randrange(self.size) - does.cutout // 2 for _ in range(2))
            hole = image[:, max(top, 0) : top + does.cutout, max(left, 0) : left + does.cutout]
            hole.copy_(torch.tensor(self.fill, dtype=torch.uint8).view(3, 1, 1))
        return image


def libraries() -> tuple[Any, Any]:
    """torchvision's functions and Pillow."""
    vision = "torchvision.transforms.v2.functional"
    return require(vision, "models", "image files"), require("PIL.Image", "models", "image files")


def decoded(path: str) -> Tensor:
    """(3, H, W) uint8 of any image file."""
    _, pillow = libraries()
    try:
        with pillow.open(path) as file:
            image = file.convert("RGB")
    except (OSError, SyntaxError, ValueError) as error:  # whatever a damaged file leads to
        reason = str(error).rstrip(".")
        raise CorruptData(f"{path} cannot be read as an image: {reason}.") from error
    rows = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return rows.view(image.height, image.width, 3).permute(2, 0, 1).contiguous()
