"""Loaders for training, validation and test, from a set as it was published."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.lab.data.augmentation import Augmentation
from normkit.lab.data.images import FileLoader
from normkit.lab.data.normalization import IMAGENET, coefficients
from normkit.lab.data.records import Files, Listing, Raw, Sets, Split
from normkit.lab.data.splitting import split
from normkit.lab.data.tensors import TensorLoader
from normkit.lab.experiment import Data

SIDE = 224  # of images from files, where no size is asked for


def from_tensors(spec: Data, raw: Raw, device: torch.device | str) -> Sets:
    source = raw.test if spec.train == "test" else raw.train
    source, test = _resized(source, spec.size), _resized(raw.test, spec.size)
    classes = int(max(raw.train.labels.max(), raw.test.labels.max())) + 1
    scale, shift = coefficients(spec.normalize, source.moments, source.white)

    def loader(part: Split, which: Tensor | None, does: Augmentation) -> TensorLoader:
        images, labels = part.images, part.labels
        if which is not None and which.numel() < len(labels):
            images, labels = images[which], labels[which]
        return TensorLoader(images, labels, scale, shift, does, device)

    train, aside = split(source.labels, spec.validation, spec.subset, spec.split_seed, spec.name)
    channels, height, width = source.images.shape[1:]
    return Sets(
        name=spec.name,
        train=loader(source, train, Augmentation.of(spec)),
        validation=None if aside is None else loader(source, aside, Augmentation()),
        test=loader(test, None, Augmentation()),
        classes=classes,
        shape=(channels, height, width),
    )


def _resized(part: Split, size: int | None) -> Split:
    if size is None or part.images.shape[2:] == (size, size):
        return part
    pieces = []
    for images in part.images.split(1024):
        values = images.float() * (255 / part.white)
        values = F.interpolate(values, (size, size), mode="bilinear", antialias=True)
        pieces.append(values.round_().clamp_(0, 255).to(torch.uint8))
    return Split(torch.cat(pieces), part.labels)


def from_files(spec: Data, read: Listing, device: torch.device | str, workers: int | None) -> Sets:
    source = read.test if spec.train == "test" else read.train
    # of ImageNet, for others too: one's own would cost a pass over all files
    scale, shift = coefficients(spec.normalize, IMAGENET, 255)
    does, side = Augmentation.of(spec), spec.size or SIDE

    def loader(part: Files, which: Tensor | None) -> FileLoader:
        if which is not None:
            part = Files([part.paths[i] for i in which.tolist()], part.labels[which])
        return FileLoader(part, side, scale, shift, does, device, workers)

    train, aside = split(source.labels, spec.validation, spec.subset, spec.split_seed, spec.name)
    return Sets(
        name=spec.name,
        train=loader(source, train),
        validation=None if aside is None else loader(source, aside),
        test=loader(read.test, None),
        classes=read.classes,
        shape=(3, side, side),
    )
