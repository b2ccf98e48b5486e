"""The images of a fit: read, checked, cut into runs, and a part of them held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from normkit.errors import NothingToDo, OptionError
from normkit.inspection.batches import (
    BatchReader,
    LoaderBatch,
    ModelCall,
    images_in,
    read_batch,
    tensors_in,
)

UNTOUCHED = "Nothing was changed."
ENOUGH = "64 to 256 unlabelled images like those the network was trained on are enough"


@dataclass(frozen=True, eq=False)
class Fit:
    """Images to fit a conversion on, and how: what ``fit=`` takes where images alone will not do.

    ``images`` is a tensor (N, ...), a loader or other iterable of batches, which may hold labels
    as well (they are not used), a list of images for a model that takes lists, or a mapping of
    keyword arguments. At most ``max_images`` are read: all their maps at one layer, of the old
    and of the new network, are in memory at a time, so this bounds it.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    >>> images = torch.randn(16, 3, 9, 9)
    >>> nk.plan_conversion(model, "gn", groups=1, fit=nk.Fit(images, held_out=0.25)).fit.images
    16
    """

    images: Any
    max_images: int = 256
    batch: int = 32
    """How many images one forward takes."""
    held_out: float = 0.2
    """The share of the images that measures the fit and chooses; the equations are of the rest."""
    rounds: int = 3
    """How often the fit is refined for what comes after the activation; 0 fits before it."""
    shrink: float = 0.0
    """1 are least squares, which make a channel smaller by its correlation with the old one; 0 lets
    it keep its variance, which is better for the network as a whole where the fit is poor."""
    distill: int = 0
    """Steps of training after the fit, on the same images, to match the old network's outputs."""
    parameters: Literal["norms", "all"] | None = None
    """What changes: "norms", scales and shifts of the new norms; or "all": weights of convolutions
    and linear layers are fitted as well, by regression, and distilling trains every parameter.
    None is "norms" for a fit alone, and "all" if distilling follows."""
    augment: bool = True
    """Whether images may be flipped and cropped at random while distilling, which is done if the
    fit is nearly as good for such views as for the images."""
    standardize: str | None = None
    """Weight standardization on top: "ws" (or "wn", "cwn") for the convolutions before these norms,
    which are then fitted to what the old norms gave with the weights as they were."""
    forward: Callable[[nn.Module, Any], Any] | None = None
    """How the model is called with a batch, (model, batch) → output, where a batch is neither
    inputs nor (inputs, labels): with several inputs in a list, or keywords of its own."""
    progress: Callable[[int, float], None] | None = None
    """Called with a step and the error of the outputs on the images that are held out."""

    checkpoint: str | PathLike[str] | None = None
    """A file that holds the state of distilling; if it exists, distilling goes on from there."""

    def __post_init__(self) -> None:
        for name, least in (("max_images", 2), ("batch", 1), ("rounds", 0), ("distill", 0)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise OptionError(f"Fit expects {name} to be at least {least}, got {value!r}.")
        if self.parameters not in ("norms", "all", None):
            raise OptionError(f'Fit expects parameters "norms" or "all", got {self.parameters!r}.')
        for name in ("forward", "progress"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise OptionError(f"Fit expects {name} to be a function, got {value!r}.")
        if not 0 <= self.shrink <= 1:
            raise OptionError(f"Fit expects shrink between 0 and 1, got {self.shrink!r}.")
        if not 0 < self.held_out < 1:
            raise OptionError(
                f"Fit expects held_out to be a share between 0 and 1, got {self.held_out!r}."
            )

    @property
    def everything(self) -> bool:
        """Whether more than the norms is fitted and trained."""
        return self.parameters == "all" or (self.parameters is None and self.distill > 0)


@dataclass(frozen=True, eq=False)
class ImageRun:
    """What one forward of each network gets."""

    batch: LoaderBatch
    number: int
    held_out: Tensor
    """Which of its samples are held out: booleans."""

    def part(self, table: Tensor, held_out: bool) -> Tensor:
        """The rows of the samples that are fitted, or held out.

        What has no row for each sample, as the boxes of a detector, all counts for the fit.
        """
        if table.dim() == 0 or table.shape[0] != len(self.held_out):
            return table[:0] if held_out and table.dim() else table
        mask = self.held_out.to(table.device)
        return table[mask if held_out else ~mask]

    def first(self, count: int) -> Any:
        """What the model gets of the first samples; None where the inputs cannot be cut."""
        inputs, images = self.batch.inputs, self.batch.images
        if images is not None and isinstance(inputs, ModelCall):
            return ModelCall(inputs.forward, list(images[:count]), min(count, len(images)))
        return rows_of(inputs, lambda t: t[:count], len(self.held_out))

    def inputs(self, held_out: bool) -> Any:
        """What the model gets of the samples that are fitted, or held out; None if the inputs
        have no row for each sample, as a list of images of several sizes."""
        return rows_of(self.batch.inputs, lambda t: self.part(t, held_out), len(self.held_out))


def image_runs(model: nn.Module, fit: Fit) -> list[ImageRun]:
    """The images in runs of ``fit.batch``, or an error that says what is wrong with them."""
    batches = list(_joined(list(_read(model, fit)), fit, model))
    sizes = [batch.size for batch in batches]
    count = sum(sizes)
    if count < 2:
        raise OptionError(
            f"A fit needs at least 2 images, got {count}: one part is held out to measure it; "
            f"{ENOUGH}. {UNTOUCHED}"
        )
    for number, batch in enumerate(batches, 1):
        _check(batch, number)
    _refuse_constant(batches)
    every = min(max(2, round(1 / fit.held_out)), count)  # at least one
    held_out = torch.arange(count) % every == every - 1
    return [
        ImageRun(batch, number, part)
        for number, (batch, part) in enumerate(zip(batches, held_out.split(sizes), strict=True), 1)
    ]


def _read(model: nn.Module, fit: Fit) -> Iterator[LoaderBatch]:
    """The batches as they are given, not more than wanted."""
    images = fit.images
    if isinstance(images, Tensor):
        if images.dim() == 0 or len(images) == 0:
            raise NothingToDo(f"fit= has no images, got shape {tuple(images.shape)}; {ENOUGH}.")
        batches: Iterable[Any] = images[: fit.max_images].split(fit.batch)
    elif isinstance(images, Mapping) or (
        fit.forward is None and images_in(model, images) is not None
    ):
        batches = [images]
    elif (
        isinstance(images, str) or hasattr(images, "__array__") or not isinstance(images, Iterable)
    ):
        raise OptionError(
            f"fit= expects images: a tensor (N, ...), a loader, or a list of batches, got "
            f"{type(images).__name__}.{_instead_of(images)} {UNTOUCHED}"
        )
    else:
        batches = images
    left = fit.max_images
    for batch in BatchReader(model, batches, fit.forward, max_samples=fit.max_images):
        yield batch if batch.size <= left else _first(batch, left, model)
        left -= batch.size


def _instead_of(images: Any) -> str:
    """What to try in place of something that is nearly right."""
    if hasattr(images, "__array__"):
        return " Try torch.as_tensor(images)."
    if hasattr(images, "__getitem__") and hasattr(images, "__len__"):  # a dataset
        return " Try torch.utils.data.DataLoader(dataset, batch_size=32)."
    return " Folders are read by normkit convert --fit." if isinstance(images, str) else ""


def single_images(fit: Fit) -> str:
    """What to say of a model that fails, if what came were images and no batches of them."""
    images = fit.images
    if not isinstance(images, tuple | list) or not images or fit.forward is not None:
        return ""
    if not all(isinstance(x, Tensor) and x.dim() == 3 for x in images):
        return ""
    return (
        f"fit= got a list of tensors such as {tuple(images[0].shape)}, each taken for a batch. If "
        f"these are single images, try torch.stack(images). {UNTOUCHED}"
    )


def _first(batch: LoaderBatch, count: int, model: nn.Module) -> LoaderBatch:
    """The first samples of a batch, if it is of a kind that can be cut."""
    if batch.images is not None:
        return read_batch([list(batch.images[:count])], model)
    return _cut(batch, 0, count) or batch


def _cut(batch: LoaderBatch, start: int, end: int) -> LoaderBatch | None:
    """Some samples of a batch of tensors; None if it has another form."""
    inputs = rows_of(batch.inputs, lambda t: t[start:end], batch.size)
    return None if inputs is None else LoaderBatch(inputs)


def rows_of(inputs: Any, take: Callable[[Tensor], Tensor], count: int) -> Any:
    """Inputs of ``count`` samples with ``take`` for each tensor; None if one of them has not a row
    for each sample."""
    if isinstance(inputs, ModelCall):
        if inputs.samples is not None:
            return None
        batch = rows_of(inputs.batch, take, count)
        return None if batch is None else ModelCall(inputs.forward, batch)
    if any(t.shape[:1] != (count,) for t in tensors_in(inputs)):
        return None
    return tree_map_only(Tensor, take, inputs)


def _joined(batches: list[LoaderBatch], fit: Fit, model: nn.Module) -> Iterator[LoaderBatch]:
    """Small batches of one shape become larger ones, large ones smaller: a forward each."""
    waiting: list[Tensor] = []
    images: list[Tensor] = []
    for batch in batches:
        x = batch.inputs
        if batch.images is not None:
            images += batch.images
        elif not isinstance(x, Tensor):
            starts = range(0, batch.size, fit.batch)
            parts = [_cut(batch, start, start + fit.batch) for start in starts]
            yield from [part for part in parts if part is not None] or [batch]
        else:
            if waiting and waiting[0].shape[1:] != x.shape[1:]:
                yield from map(LoaderBatch, torch.cat(waiting).split(fit.batch))
                waiting = []
            waiting.append(x)
    if waiting:
        joined = waiting[0] if len(waiting) == 1 else torch.cat(waiting)
        yield from map(LoaderBatch, joined.split(fit.batch))
    for start in range(0, len(images), fit.batch):
        yield read_batch([images[start : start + fit.batch]], model)


def _check(batch: LoaderBatch, number: int) -> None:
    for x in tensors_in(batch.inputs):
        shape = tuple(x.shape)
        if x.dim() < 2 and not x.is_floating_point() and not isinstance(batch.inputs, ModelCall):
            raise OptionError(
                f"fit= expects images, batch {number} is {x.dtype} of shape {shape}, which looks "
                f"like labels. Give the images, or pairs (images, labels). {UNTOUCHED}"
            )
        if x.is_floating_point() and not bool(torch.isfinite(x).all()):
            raise OptionError(
                f"fit= expects finite numbers, batch {number} {shape} has NaN or infinity. "
                f"{UNTOUCHED}"
            )


def _refuse_constant(batches: list[LoaderBatch]) -> None:
    """All images alike, or each of one value: then every channel is constant."""
    first: Tensor | None = None
    for batch in batches:
        for x in tensors_in(batch.inputs):
            if x.dim() < 2 and not x.is_floating_point():  # labels, for a forward of one's own
                continue
            if not x.is_floating_point() or x.dim() < 2:
                return
            rows = [x] if batch.images is not None else list(x)
            for row in rows:
                first = row if first is None else first
                if row.shape != first.shape:
                    return
                different = row.dim() > 0 and not bool((row == first).all())
                flat = row.dim() >= 2 and bool((row == row.flatten()[0]).all())
                if different and not flat:
                    return
    if first is not None:
        raise OptionError(
            f"fit= got images that are all constant or all the same; {ENOUGH}. {UNTOUCHED}"
        )
