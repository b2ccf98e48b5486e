"""From what an experiment says about its data to the sets it trains and tests on."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from normkit.errors import OptionError, UnknownName, nearest
from normkit.lab.data import builtin
from normkit.lab.data.files import find
from normkit.lab.data.loaders import FileLoader, Sets, TensorLoader
from normkit.lab.data.own import FORMATS, own_files, own_listing
from normkit.lab.data.records import Content, DigitDomains, Files, Listing, Raw, Split
from normkit.lab.data.sampling import counts, split
from normkit.lab.data.sources import PUBLISHED
from normkit.lab.data.transforms import IMAGENET, Augmentation, coefficients
from normkit.lab.experiment import Data
from normkit.lab.experiment.rules import section_faults

KIND_OF = {name: published.kind for name, published in PUBLISHED.items()}
KIND_OF |= {name: own.kind for name, own in FORMATS.items()}
KIND_OF |= {"digits": "labels", "synthetic": "labels"}
NAMES = sorted(KIND_OF)
SIDE = 224  # of images from files, where no size is asked for
# what belongs to an image of a set, and the task that is for
KINDS = {
    "boxes": ("objects in each image", "detection"),
    "labels": ("a label for each image", "classification"),
    "maps": ("a map of classes for each image", "segmentation"),
    "clips": ("frames of a clip", "video"),
    "domains": ("several domains", "adaptation"),
    "episodes": ("other classes in its test than to train on", "few-shot"),
}
SHAPES = {  # of the other published sets
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "usps": (1, 16, 16),
    "mnist-usps": (1, 28, 28),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
    "bccd": (3, 480, 640),
    "camvid": (3, 240, 320),
    "coco": (3, 480, 640),
    "moving-digits": (8, 24, 24),
    "nuclei": (3, 256, 256),
    "fc100": (3, 32, 32),
    "omniglot": (1, 105, 105),
    "omniglot-small": (1, 105, 105),
}


def names() -> list[str]:
    """The sets that can be asked for; synthetic takes its sizes with it.

    >>> "cifar10" in names(), "digits" in names()
    (True, True)
    """
    return list(NAMES)


def check(spec: Data) -> None:
    """Raises an error if ``spec`` asks for something that cannot be, before any file is opened."""
    if _is_synthetic(spec):
        builtin.synthetic_sizes(spec.name)
    elif spec.name not in NAMES:
        raise UnknownName(f"there is no data set {spec.name!r}. {nearest(spec.name, NAMES)}")
    for key, fault in section_faults("data", spec):
        raise OptionError(f"{key} {fault}")


def locate(spec: Data) -> Path | None:
    """Where a set's files are, verified; None for a set that needs none.

    >>> locate(Data("digits"))
    """
    check(spec)
    if spec.name == "digits":
        builtin.digits_source()
    if spec.name in FORMATS:
        own_files(spec)
        return Path(spec.path or ".").expanduser()
    source = PUBLISHED.get(spec.name)
    return find(source, spec.path).path if source else None


def check_kind(spec: Data, kind: str) -> None:
    """Refuse a set that is made for another task than one of this kind."""
    names = [name for name, each in KIND_OF.items() if each == kind]
    if spec.name not in NAMES and ":" not in spec.name:
        raise UnknownName(f"there is no data set {spec.name!r}. {nearest(spec.name, names)}")
    if (own := KIND_OF.get(spec.name, "labels")) != kind:
        has, task = KINDS[own]
        raise OptionError(
            f"data.name is {spec.name!r}, which has {has}. Try {', '.join(names)}, or "
            f'task = "{task}".'
        )


def content_of(spec: Data) -> Content:
    """What the files of a set have, published or somebody's own."""
    if spec.name in FORMATS:
        check(spec)
        return own_listing(spec)
    files = find(PUBLISHED[spec.name], spec.path)
    key = files, tuple(file.stat().st_mtime_ns for file in files.files)
    if key not in _cached:
        content = files.read()
        if not isinstance(content, Raw | DigitDomains):
            return content  # a list: cheap, and a folder can change without its date
        _cached.clear()
        _cached[key] = content
    return _cached[key]


# the last one: runs that follow each other mostly share their data
_cached: dict[object, Raw | DigitDomains] = {}


def load(
    spec: Data,
    device: torch.device | str = "cpu",
    workers: int | None = None,
    kind: str = "labels",
) -> Sets:
    """The sets that ``spec`` asks for, on the device.

    ``workers`` are processes that decode image files; None chooses by the number of CPUs. ``kind``
    is "episodes" for sets whose test has other classes.

    >>> sets = load(Data("digits", validation=0.1))
    >>> len(sets.train), len(sets.validation), len(sets.test), sets.classes, sets.shape
    (1293, 144, 360, 10, (1, 8, 8))
    """
    check(spec)
    check_kind(spec, kind)
    if spec.name == "digits":
        content: Content = builtin.digits()
    elif _is_synthetic(spec):
        content = builtin.synthetic(spec.name)
    else:
        content = content_of(spec)
    if isinstance(content, Raw):
        return _from_tensors(spec, content, device)
    assert isinstance(content, Listing)  # sets of other kinds have loaders of their own
    return _from_files(spec, content, device, workers)


def training_samples(spec: Data) -> int:
    """How many samples a run trains on, beside the validation set, told without reading them.

    Only somebody's own images are listed for it.

    >>> training_samples(Data("digits", validation=0.1)), training_samples(Data("cifar10"))
    (1293, 50000)
    """
    check(spec)
    if spec.name == "digits":
        samples = builtin.DIGITS_SAMPLES
    elif _is_synthetic(spec):
        total = builtin.synthetic_sizes(spec.name)[-1]
        samples = (total, total // 5)
    elif spec.name in FORMATS:
        own = own_listing(spec)
        samples = len(own.train), len(own.test)
    else:
        published = PUBLISHED[spec.name].samples
        assert published is not None  # of every published set
        samples = published
    total = samples[("train", "test").index(spec.train)]
    return counts(total, spec)[0]


def classes_and_shape(spec: Data) -> tuple[int, tuple[int, int, int]]:
    """The number of classes and the shape of the images of a data set, without reading it.

    Images are as the published sets have them; only somebody's own are listed.

    >>> classes_and_shape(Data("cifar100")), classes_and_shape(Data("imagenet", size=160))
    ((100, (3, 32, 32)), (1000, (3, 160, 160)))
    """
    check(spec)
    if _is_synthetic(spec):
        channels, height, width, classes, _ = builtin.synthetic_sizes(spec.name)
    elif spec.name in FORMATS:
        classes, (channels, height, width) = own_listing(spec).classes, (3, SIDE, SIDE)
    else:
        source = PUBLISHED.get(spec.name)
        classes = source.classes if source and source.classes else 10
        channels, height, width = SHAPES.get(spec.name, (3, SIDE, SIDE))
    return classes, (channels, spec.size or height, spec.size or width)


def _is_synthetic(spec: Data) -> bool:
    return spec.name.partition(":")[0] == "synthetic"


def _from_tensors(spec: Data, raw: Raw, device: torch.device | str) -> Sets:
    source = raw.test if spec.train == "test" else raw.train
    source, test = resized(source, spec.size), resized(raw.test, spec.size)
    scale, shift = coefficients(spec.normalize, source.moments, source.white)

    def loader(part: Split, indices: Tensor | None, augmentation: Augmentation) -> TensorLoader:
        images, labels = part.images, part.labels
        if indices is not None and indices.numel() < len(labels):
            images, labels = images[indices], labels[indices]
        return TensorLoader(images, labels, scale, shift, augmentation, device, source.white)

    train, validation = split(source.labels, spec)
    channels, height, width = source.images.shape[1:]
    return Sets(
        name=spec.name,
        train=loader(source, train, Augmentation.of(spec)),
        validation=None if validation is None else loader(source, validation, Augmentation()),
        test=loader(test, None, Augmentation()),
        classes=int(max(raw.train.labels.max(), raw.test.labels.max())) + 1,
        shape=(channels, height, width),
    )


def resized(part: Split, size: int | None) -> Split:
    """The images at another size, if one is asked for."""
    if size is None or part.images.shape[2:] == (size, size):
        return part
    pieces = []
    for images in part.images.split(1024):
        values = images.float() * (255 / part.white)
        values = F.interpolate(values, (size, size), mode="bilinear", antialias=True)
        pieces.append(values.round_().clamp_(0, 255).to(torch.uint8))
    return Split(torch.cat(pieces), part.labels)


def _from_files(
    spec: Data, listing: Listing, device: torch.device | str, workers: int | None
) -> Sets:
    source = listing.test if spec.train == "test" else listing.train
    # of ImageNet, for others too: one's own would cost a pass over all files
    scale, shift = coefficients(spec.normalize, IMAGENET, 255)
    augmentation, side = Augmentation.of(spec), spec.size or SIDE

    def loader(part: Files, indices: Tensor | None) -> FileLoader:
        if indices is not None:
            part = part.take(indices)
        return FileLoader(part, side, scale, shift, augmentation, device, workers)

    train, validation = split(source.labels, spec)
    return Sets(
        name=spec.name,
        train=loader(source, train),
        validation=None if validation is None else loader(source, validation),
        test=loader(listing.test, None),
        classes=listing.classes,
        shape=(3, side, side),
    )
