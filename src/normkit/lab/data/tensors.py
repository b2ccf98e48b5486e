"""Small sets: bytes on the training device, augmented there a batch at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.lab.data.records import Loader
from normkit.lab.data.transforms import INDEX, Augmentation, Holes, Windows, mirror, normalize, turn

NONE = Augmentation()


class TensorLoader(Loader):
    """Batches from tensors. Made by ``load``; images are bytes (N, C, H, W).

    >>> from normkit.lab.data import load
    >>> from normkit.lab.experiment import Data
    >>> train = load(Data("digits", crop=1)).train
    >>> plan = train.plan(seed=1, epoch=0)
    >>> images, labels = train.gather(plan[:64])
    >>> tuple(images.shape), images.dtype, labels.dtype
    ((64, 1, 8, 8), torch.float32, torch.int64)
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        scale: Tensor,
        shift: Tensor,
        augmentation: Augmentation = NONE,
        device: torch.device | str = "cpu",
    ) -> None:
        self.device = torch.device(device)
        self.augmentation = augmentation
        self.shape: tuple[int, int, int] = (images.shape[1], images.shape[2], images.shape[3])
        images = images.to(self.device)
        padding = augmentation.crop
        if padding:  # black, before normalization, as a crop of the picture itself would see it
            images = F.pad(images, (padding,) * 4)
        self.images, self.labels = images, labels.to(self.device)
        self.scale, self.shift = scale.to(self.device), shift.to(self.device)
        _, height, width = self.shape
        self._inner = images[:, :, padding : padding + height, padding : padding + width]
        self._windows = Windows(images, padding) if padding else None
        side = augmentation.cutout
        self._holes = Holes(side, height, width, self.device) if side else None

    def __len__(self) -> int:
        return self.labels.shape[0]

    def plan(self, seed: int, epoch: int, *, shuffle: bool = True) -> Tensor:
        """(N, COLUMNS) int64 on the device: all that is random about an epoch.

        Any run of its rows is a batch for ``gather``. Without augmentation it is the order alone.
        """
        return self._planned(self.order(seed, epoch, shuffle=shuffle), seed, epoch)

    def gather(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Images, normalized, and labels: of rows of a plan, or plain ones of (B,) of an order."""
        if which.dim() == 1:
            images = self._inner.index_select(0, which)
            return normalize(images, self.scale, self.shift), self.labels.index_select(0, which)
        augmentation = self.augmentation
        index = which[:, INDEX]
        windows = self._windows
        images = windows.cut(which) if windows else self.images.index_select(0, index)
        if augmentation.turns:
            images = turn(images, which, smooth=augmentation.resized_crop)
        elif augmentation.flip:
            images = mirror(images, which)
        images = normalize(images, self.scale, self.shift)
        if self._holes:  # after normalization: zero is the mean
            images = self._holes.cut(images, which)
        return images, self.labels.index_select(0, index)

    def _load(
        self, order: Tensor, cuts: list[tuple[int, int]], seed: int, epoch: int, augment: bool
    ) -> Iterator[tuple[Tensor, Tensor]]:
        rows = self._planned(order, seed, epoch) if augment else self._moved(order)
        for first, last in cuts:
            yield self.gather(rows[first:last])

    def _planned(self, order: Tensor, seed: int, epoch: int) -> Tensor:
        if self.augmentation == NONE:
            return self._moved(order)
        return self._moved(self.augmentation.plan(order, self.shape, seed, epoch))

    def _moved(self, drawn: Tensor) -> Tensor:
        if self.device.type == "cuda":  # from pinned memory the host need not wait for the copy
            return drawn.pin_memory().to(self.device, non_blocking=True)
        return drawn.to(self.device)
