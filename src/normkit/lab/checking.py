"""What a file alone does not show: data sets that are missing, and models that cannot be made.

    check(experiment)        # an error before anything trains, or nothing

``reading`` has checked the names and values; here the data sets are looked for, and each model is
built, converted and run once on a few random images.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import Tensor

from normkit.errors import NormkitError, OptionError
from normkit.lab import data
from normkit.lab.data.making import SIDE
from normkit.lab.data.sources import PUBLISHED
from normkit.lab.data.synthetic import sizes
from normkit.lab.experiment import Data, Experiment, Run, Setting, Train, Variant
from normkit.lab.problems import BadExperiment
from normkit.lab.variants import followers, make
from normkit.layers.dn import DN

Shape = tuple[int, int, int]  # channels, height, width
SHAPES: dict[str, Shape] = {
    "digits": (1, 8, 8),
    "mnist": (1, 28, 28),
    "fashion-mnist": (1, 28, 28),
    "usps": (1, 16, 16),
    "cifar10": (3, 32, 32),
    "cifar100": (3, 32, 32),
}
FEW = 4  # images that a model is tried with; workers with more are not worth the time
LARGE = 64  # side of images of which two have to be enough


def check(experiment: Experiment) -> None:
    """Look for the data sets, then try the models."""
    check_data(experiment)
    check_models(experiment)


def check_data(experiment: Experiment) -> None:
    """An error that names every data set that is unknown, missing or damaged."""
    found: dict[str, str] = {}
    for variant in _distinct(experiment, "data"):
        try:
            data.locate(variant.setting.data)
        except NormkitError as error:
            found.setdefault(str(error), _name(variant))
    _complain(experiment, found, "has no data")


def check_models(experiment: Experiment) -> None:
    """An error that names every variant whose model cannot be built, converted or run.

    Images are as the published sets have them; only those of somebody's own folder are read.
    """
    found: dict[str, str] = {}
    for variant in _distinct(experiment, "model"):
        try:
            try_model(variant.setting)
        except NormkitError as error:
            found.setdefault(str(error), _name(variant))
    _complain(experiment, found, "cannot be trained")


def try_model(setting: Setting) -> None:
    """Build the model of a setting, and run it once in training mode and once in eval mode."""
    classes, shape = expected(setting.data)
    try:
        model = make(setting, classes, shape, seed=1)
    except NormkitError:
        raise
    except Exception as error:  # whatever a constructor does with options that do not fit
        raise OptionError(f"the model: {type(error).__name__}: {error}") from error
    for layer in followers(model):
        layer.set_update_rate(setting.train.lr)
    linked = max((m.batch for m in model.modules() if isinstance(m, DN)), default=1)
    few = FEW if max(shape[1:]) <= LARGE else 2
    samples = max(linked, min(_together(setting.train), few))
    images = torch.randn(samples, *shape, generator=torch.Generator().manual_seed(0))
    for training in (True, False):
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # random images of no meaning
                out = model.train(training)(images)
        except NormkitError:
            raise
        except Exception as error:
            raise OptionError(
                f"the model does not take {samples} images of {'×'.join(map(str, shape))}: "
                f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            ) from error
        if not isinstance(out, Tensor) or out.shape != (samples, classes):
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise OptionError(
                f"the model gives {got} for {samples} images of {classes} classes, expected a "
                f"tensor ({samples}, {classes})."
            )


def expected(spec: Data) -> tuple[int, Shape]:
    """The number of classes and the shape of the images of a data set, without reading it.

    >>> expected(Data("cifar100")), expected(Data("imagenet", size=160))
    ((100, (3, 32, 32)), (1000, (3, 160, 160)))
    """
    data.check(spec)
    if spec.name.partition(":")[0] == "synthetic":
        channels, height, width, classes, _ = sizes(spec.name)
        shape = (channels, height, width)
    elif spec.name == "folder":
        sets = data.load(spec)
        classes, shape = sets.classes, sets.shape
    else:
        source = PUBLISHED.get(spec.name)
        classes = source.classes if source and source.classes else 10
        shape = SHAPES.get(spec.name, (3, SIDE, SIDE))
    return classes, (shape[0], spec.size or shape[1], spec.size or shape[2])


def _together(train: Train) -> int:
    """How many samples share statistics."""
    return train.worker_batch or train.batch or FEW


def _distinct(experiment: Experiment, what: str) -> Iterable[Variant]:
    """One variant for each data set, or for each model on a data set."""
    found: dict[str, Variant] = {}
    for variant in experiment.variants:
        setting = variant.setting
        spec = Data(name=setting.data.name, path=setting.data.path, size=setting.data.size)
        same = Setting(data=spec)
        if what == "model":
            counts = any(step.name in ("bgn", "dn") for step in setting.steps)
            together = _together(setting.train)
            train = Train(batch=together if counts else min(together, FEW))
            same = Setting(spec, setting.model, setting.steps, train)
        found.setdefault(f"{Run(same, 0).id} {spec.path}", variant)
    return found.values()


def _name(variant: Variant) -> str:
    where = ", ".join(f"{axis} = {value!r}" for axis, value in variant.cell)
    return f"{variant.name!r}" + (f" at {where}" if where else "")


def _complain(experiment: Experiment, found: dict[str, str], what: str) -> None:
    if not found:
        return
    said = [f"{name} {what}: {error}" for error, name in found.items()]
    if len(said) == 1:
        raise BadExperiment(f"{experiment.name}: variant {said[0]}")
    listed = "".join(f"\n  {each}" for each in said)
    raise BadExperiment(f"{experiment.name} has {len(said)} problems:{listed}")
