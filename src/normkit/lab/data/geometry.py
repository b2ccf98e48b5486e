"""Augmentation of a batch, from the rows of a plan: tensor operations of fixed shapes alone.

Nothing here waits for the host or asks for a number, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.lab.data.augmentation import CORNER, FINE, HOLE_COLUMN, HOLE_ROW, MAP, MIRROR


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
