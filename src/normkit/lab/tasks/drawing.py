"""Pictures that a run leaves for the report: pixels from normalized images, colours for classes,
small PNG files as text."""

from __future__ import annotations

import base64
import colorsys
import struct
import zlib
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from normkit.errors import ShapeError

LARGEST_SIDE = 240  # of one image: a page holds many
SMALLEST_SIDE = 48  # smaller ones are drawn in blocks
GAP = 2  # pixels between two images


def pixels(images: Tensor, loader: Any) -> Tensor:
    """Values from 0 to 1 of normalized images (N, C, H, W) of a loader."""
    white = getattr(loader, "white", 255)
    scale, shift = (getattr(loader, name).to(images) for name in ("scale", "shift"))
    return ((images - shift) / (scale * white)).clamp(0, 1)


def colours(count: int) -> list[tuple[float, float, float]]:
    """One for each class: red, green and blue from 0 to 1."""
    return [colorsys.hsv_to_rgb(i / count, 0.55 + 0.45 * (i % 2), 0.95) for i in range(count)]


def coloured(classes: Tensor, count: int) -> Tensor:
    """(3, H, W) of a map (H, W): a colour for each class; what is below 0 is black."""
    table = torch.tensor([(0.0, 0.0, 0.0), *colours(count)], device=classes.device)
    return table[classes.clamp(min=-1).long() + 1].permute(2, 0, 1)


def beside(*images: Tensor) -> Tensor:
    """Images (C, H, W) of one size in a row, neither too large for a page nor too small.

    >>> tuple(beside(torch.zeros(1, 8, 8), torch.zeros(1, 8, 8)).shape)
    (3, 48, 98)
    """
    row: list[Tensor] = []
    for image in images:
        image = image.float().expand(3, -1, -1)
        larger = max(image.shape[1:]) / LARGEST_SIDE
        if larger > 1:
            size = [max(1, round(side / larger)) for side in image.shape[1:]]
            image = F.interpolate(image[None], size, mode="area")[0]
        elif (times := -(-SMALLEST_SIDE // max(image.shape[1:]))) > 1:
            image = image.repeat_interleave(times, 1).repeat_interleave(times, 2)
        row += [image, image.new_ones(3, image.shape[1], GAP)]
    return torch.cat(row[:-1], dim=2)


def encoded(image: Tensor) -> str:
    """An image (3, H, W) or (1, H, W) of values from 0 to 1 as a PNG in base 64."""
    if image.dim() != 3 or image.shape[0] not in (1, 3):
        raise ShapeError(
            f"A picture is a tensor {tuple(image.shape)}, expected (3, H, W) or (1, H, W)."
        )
    pixels = image.detach().float().clamp(0, 1).mul(255).round().byte().cpu()
    rows = pixels.expand(3, -1, -1).permute(1, 2, 0)  # (H, W, 3)
    height, width, _ = rows.shape
    lines = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
