"""A data set of the author's own as loaders: any torch Dataset, or an iterable of batches.

    def make(size=8):                      # in mydata.py;  data = "mydata.py:make"
        return {"train": MyDataset(size), "test": MyDataset(size, train=False), "classes": 4}

What is random about a sample, such as torchvision's v2 transforms, is drawn from the seed, the
epoch and the sample's position alone; so runs are paired, and a run can be interrupted anywhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate

from normkit.errors import NormkitError, OptionError, ShapeError
from normkit.inspection.batches import samples_in, tensors_in
from normkit.lab.data.loaders import Cuts, Loader, Sets
from normkit.lab.data.sampling import counts, generator, stream
from normkit.lab.experiment import Data
from normkit.lab.own_code import error_place, find, source_place

PARTS = ("train", "validation", "test")
KEYS = (*PARTS, "classes", "shape", "varying", "collate")
VISION = "torchvision.transforms.v2"
LEFT_OUT = -100  # a label that torch's losses leave out
MOST_BATCHES = 1_000_000  # of an iterable that does not say how many it has


def own_sets(spec: Data, folder: str, device: torch.device | str) -> Sets:
    """The sets that the author's function makes."""
    make = find(spec.name, folder)
    where = f"{spec.name}{source_place(make)}"
    with explained(f"{where} failed"):
        given = make(**spec.options) if callable(make) else make
    if isinstance(given, Sets):
        return given
    if isinstance(given, tuple | list) and len(given) == 2:
        given = dict(zip(("train", "test"), given, strict=True))
    if not isinstance(given, Mapping) or not {"train", "test"} <= given.keys() <= set(KEYS):
        got = f"the keys {', '.join(map(str, given))}" if isinstance(given, Mapping) else given
        raise OptionError(
            f"{where} gave {str(got)[:80]}, expected (train, test), or a mapping with train and "
            f"test, and where wanted {', '.join(KEYS[1:2] + KEYS[3:])}."
        )
    parts = {name: given[name] for name in PARTS if given.get(name) is not None}
    if spec.validation or spec.subset is not None:
        parts = _divided(parts, spec, where, given.get("shape"))
    transform = transform_of(spec.augment, folder)
    loaders = {
        name: loader_of(
            part,
            f"{where}, {name}",
            torch.device(device),
            transform if name == "train" else None,
            collate=given.get("collate"),
            varying=bool(given.get("varying")),
            shape=given.get("shape"),
        )
        for name, part in parts.items()
    }
    first = next(iter(loaders["train"].batches(1)), None)
    shape = given.get("shape") or _first_shape(first)[1:]
    classes = given.get("classes")
    return Sets(
        name=spec.name,
        train=loaders["train"],
        validation=loaders.get("validation"),
        test=loaders["test"],
        classes=_classes_of(parts["train"], parts["test"]) if classes is None else int(classes),
        shape=tuple(shape),
    )


def loader_of(
    source: Any,
    where: str,
    device: torch.device,
    transform: Callable[..., Any] | None = None,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    varying: bool = False,
    shape: Sequence[int] | None = None,
) -> Loader:
    """A loader of a data set with positions, or of an iterable of batches."""
    listed = is_list_of_batches(source, shape)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not listed:
        return DatasetLoader(source, where, device, transform, collate, varying)
    if transform is not None:
        raise OptionError(
            f"data.augment needs samples, and {where} gives batches. Try a torch Dataset, or let "
            "it do the augmentation itself."
        )
    if not isinstance(source, Iterable):
        raise OptionError(
            f"{where} is a {type(source).__name__}, expected a torch Dataset or an iterable of "
            "batches."
        )
    return BatchesLoader(source, where, device, varying)


def check_labels(batch: Any, classes: int, place: Callable[[int], str]) -> None:
    """Refuse a label that is no class, where a batch is a pair with labels as whole numbers."""
    if not classes or not isinstance(batch, tuple | list) or len(batch) != 2:
        return
    labels = batch[1]
    if not isinstance(labels, Tensor) or labels.dim() != 1 or labels.dtype != torch.int64:
        return
    if labels.device.type != "cpu":  # nobody waits for a GPU here
        return
    wrong = ((labels < 0) | (labels >= classes)) & (labels != LEFT_OUT)
    if wrong.any():
        first = int(wrong.nonzero()[0])
        raise OptionError(
            f"{place(first)} has the label {int(labels[first])}, expected 0 to {classes - 1}. Try "
            'another number of "classes" beside train and test, or other labels.'
        )


class DatasetLoader(Loader):
    """Batches of a data set that has its samples by position."""

    label_classes = 0  # where labels are classes: how many there are

    def __init__(
        self,
        source: Any,
        where: str,
        device: torch.device,
        transform: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        varying: bool = False,
    ) -> None:
        self.source, self.where, self.device = source, where, device
        self.transform, self.collate = transform, collate or default_collate
        self.varying = varying
        self.first: tuple[int, tuple[int, ...]] | None = None  # a sample, and its shape
        if not len(source):
            raise OptionError(f"{where} has no samples.")

    def __len__(self) -> int:
        return len(self.source)

    def chosen(
        self, order: Tensor, cuts: Cuts, *, seed: int = 0, epoch: int = 0, augment: bool = False
    ) -> Iterator[Any]:
        base = stream("sample", seed if augment else 0, epoch if augment else 0) >> 1
        for first, last in cuts:
            chosen = order[first:last].tolist()
            samples = []
            with drawing_apart():
                for place, index in enumerate(chosen, first):
                    torch.default_generator.manual_seed(base + place)
                    random.seed(base + place)
                    with explained(f"{self.where}: sample {index} failed"):
                        sample = self.source[index]
                        if augment and self.transform is not None:
                            whole = isinstance(sample, tuple | list)
                            sample = self.transform(*sample) if whole else self.transform(sample)
                    samples.append(sample)
            yield self._together(samples, chosen)

    def _together(self, samples: list[Any], indices: Sequence[int]) -> Any:
        for sample, index in zip(samples, indices, strict=True):
            shape = _first_shape(sample)
            number, usual = self.first = self.first or (index, shape)
            if shape != usual and not self.varying:
                raise ShapeError(
                    f"{self.where}: sample {index} has inputs {shape}, and sample {number} has "
                    f'{usual}. Try to make them of one size, or say "varying": True and give a '
                    '"collate" beside train and test.'
                )
        with explained(f"{self.where}: samples {indices[0]} … {indices[-1]} make no batch"):
            batch = self.collate(samples)
        check_labels(batch, self.label_classes, lambda place: self._sample(indices[place]))
        return batch

    def _sample(self, index: int) -> str:
        """A sample as the author counts them, and where its data set is written."""
        source: Any = self.source
        while isinstance(source, Subset):
            index, source = source.indices[index], source.dataset
        kind = type(source)
        return f"{self.where}: sample {index} of {kind.__name__}{source_place(kind)}"


class BatchesLoader(Loader):
    """An iterable that gives whole batches, such as a DataLoader: their size is its own."""

    label_classes = 0  # where labels are classes: how many there are

    def __init__(
        self, source: Iterable[Any], where: str, device: torch.device, varying: bool = False
    ) -> None:
        if iter(source) is source:
            raise OptionError(
                f"{where} is an iterator, which ends with the first epoch. Try an object with "
                "__iter__, such as a DataLoader or a list of batches."
            )
        self.source, self.where, self.device, self.varying = source, where, device, varying
        first = next(self._numbered(0, 0), None)
        if first is None:
            raise OptionError(f"{where} has no batches.")
        self.batch_size = samples_in(first)
        self.shape = _first_shape(first)
        try:
            self.count = len(source)  # type: ignore[arg-type]
        except TypeError:
            self.count = sum(1 for _ in islice(self._numbered(0, 0), MOST_BATCHES))
            if self.count == MOST_BATCHES:
                raise OptionError(
                    f"{where} gives more than {MOST_BATCHES:,} batches. Try a __len__ that says "
                    "how many an epoch has."
                ) from None

    def __len__(self) -> int:
        return self.count * self.batch_size

    def batches(
        self,
        batch: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shuffle: bool = False,
        drop_last: bool = False,
        augment: bool = False,
        start: int = 0,
    ) -> Iterator[Any]:
        """As the source gives them, whatever size is asked for."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)
        for number, given in enumerate(islice(self._numbered(seed, epoch), self.count)):
            shape = _first_shape(given)
            if not self.varying and shape[1:] != self.shape[1:]:
                raise ShapeError(
                    f"{self.where}: batch {number + 1} has inputs {shape}, and the first one "
                    f'{self.shape}. Try one size, or say "varying": True beside train and test.'
                )
            if number >= start:
                where = f"{self.where}: batch {number + 1}"
                check_labels(given, self.label_classes, f"{where}, sample {{}}".format)
                yield given

    def _numbered(self, seed: int, epoch: int) -> Iterator[Any]:
        """What the source gives, drawn from the seed and the epoch."""
        state = torch.Generator().manual_seed(stream("batches", seed, epoch)).get_state()
        with drawing_apart(), explained(f"{self.where} failed"):
            random.seed(stream("batches", seed, epoch))
            torch.default_generator.set_state(state)
            source = iter(self.source)
            state = torch.default_generator.get_state()
        while True:
            with drawing_apart(), explained(f"{self.where} failed"):
                torch.default_generator.set_state(state)
                given = next(source, None)
                state = torch.default_generator.get_state()
            if given is None:
                return
            yield given


def transform_of(steps: Sequence[Mapping[str, Any]], folder: str = "") -> Callable[..., Any] | None:
    """The augmentation of data.augment, one transform after the other; None without any."""
    if not steps:
        return None
    made = []
    for step in steps:
        options = dict(step)
        name = str(options.pop("use", ""))
        reference = name if ":" in name else f"{VISION}:{name}"
        kind = find(reference, folder)
        with explained(f"data.augment: {name} could not be made"):
            made.append(kind(**options) if isinstance(kind, type) else _with_options(kind, options))

    def augmented(*sample: Any) -> Any:
        for each in made:
            sample = each(*sample)
            sample = sample if isinstance(sample, tuple) else (sample,)
        return sample if len(sample) > 1 else sample[0]

    return augmented


def _with_options(function: Callable[..., Any], options: dict[str, Any]) -> Callable[..., Any]:
    """A function of the image alone; what else a sample has stays as it is."""
    return lambda image, *others: (function(image, **options), *others)


@contextmanager
def drawing_apart() -> Iterator[None]:
    """Random numbers that are drawn inside are nobody else's."""
    before, plain = torch.default_generator.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(before)
        random.setstate(plain)


@contextmanager
def explained(what: str) -> Iterator[None]:
    """An error of the author's code becomes one that says where it was."""
    try:
        yield
    except (NormkitError, torch.OutOfMemoryError):
        raise
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise OptionError(f"{what}: {text.rstrip('.')}{error_place(error)}.") from error


# ------------------------------------------------------------------ what a data set is like


def is_list_of_batches(source: Any, shape: Sequence[int] | None = None) -> bool:
    """Whether a plain list holds batches, not samples.

    Their inputs have an axis more than ``shape``; without one, several images have a label each.

    >>> is_list_of_batches([(torch.zeros(32, 1, 8, 8), torch.zeros(32))], (1, 8, 8))
    True
    """
    if not isinstance(source, list | tuple) or not source:
        return False
    first, *others = [*tensors_in(source[0])] or [torch.empty(())]
    if shape is not None:
        return first.dim() == len(shape) + 1
    return first.dim() == 4 and bool(others) and others[0].shape == first.shape[:1]


def _divided(
    parts: dict[str, Any], spec: Data, where: str, shape: Sequence[int] | None
) -> dict[str, Any]:
    """With a validation set from the training set, and as many training samples as asked for."""
    source = parts["train"]
    batches = not hasattr(source, "__getitem__") or is_list_of_batches(source, shape)
    if batches or (spec.validation and "validation" in parts):
        wrong = "validation and subset need a torch Dataset with positions, and no validation set"
        raise OptionError(f"{where}: data.{wrong} of its own.")
    left, aside = counts(len(source), spec)
    order = torch.randperm(len(source), generator=generator("own split", spec.split_seed)).tolist()
    parts = {**parts, "train": Subset(source, sorted(order[aside : aside + left]))}
    if aside:
        parts["validation"] = Subset(source, sorted(order[:aside]))
    return parts


def _first_shape(batch: Any) -> tuple[int, ...]:
    first = next(tensors_in(batch), None)
    return () if first is None else tuple(first.shape)


def _classes_of(*sources: Any) -> int:
    """Classes of labels that can be had without reading the samples; 0: not known."""
    found = 0
    for source in sources:
        while isinstance(source, Subset | DataLoader):
            source = source.dataset
        names = getattr(source, "classes", None)
        labels = getattr(source, "targets", None)
        if isinstance(source, TensorDataset) and len(source.tensors) > 1:
            labels = source.tensors[1]
        if isinstance(names, Sequence):
            found = max(found, len(names))
        elif labels is not None:
            labels = torch.as_tensor(labels)
            if not labels.is_floating_point() and labels.dim() == 1 and labels.numel():
                found = max(found, int(labels.max()) + 1)
    return found
