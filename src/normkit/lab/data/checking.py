"""What an experiment may say about its data."""

from __future__ import annotations

from normkit.errors import OptionError, UnknownName, nearest
from normkit.lab.data import synthetic
from normkit.lab.data.normalization import KINDS
from normkit.lab.data.sources import FOLDER, PUBLISHED
from normkit.lab.experiment import Data

NAMES = sorted([*PUBLISHED, "digits", "synthetic"])


def check(spec: Data) -> None:
    """Raises an error if ``spec`` asks for something that cannot be, before any file is opened."""
    if spec.name.partition(":")[0] == "synthetic":
        synthetic.sizes(spec.name)
    elif spec.name not in NAMES:
        raise UnknownName(f"there is no data set {spec.name!r}. {nearest(spec.name, NAMES)}")
    if spec.name == "folder" and spec.path is None:
        raise OptionError(f"data.name is 'folder', but data.path is missing. {FOLDER.get}")
    for key, value, known in (
        ("train", spec.train, ("train", "test")),
        ("normalize", spec.normalize, KINDS),
    ):
        if value not in known:
            raise OptionError(f"data.{key} is {value!r}. {nearest(value, known)}")
    for key, fine, expected in (
        ("validation", 0 <= spec.validation < 1, "a share from 0 to below 1"),
        ("subset", spec.subset is None or spec.subset > 0, "a number of samples, at least 1"),
        ("size", spec.size is None or spec.size > 0, "pixels, at least 1"),
        ("crop", spec.crop >= 0, "pixels, at least 0"),
        ("rotation", 0 <= spec.rotation <= 180, "degrees from 0 to 180"),
        ("cutout", spec.cutout >= 0, "pixels, at least 0"),
        ("mixup", spec.mixup >= 0, "at least 0"),
    ):
        if not fine:
            raise OptionError(f"data.{key} is {getattr(spec, key)}, expected {expected}.")
    if spec.crop and spec.resized_crop:
        raise OptionError(
            f"data.crop is {spec.crop} and data.resized_crop is true: expected one kind of crop."
        )
