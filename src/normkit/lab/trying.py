"""Trying a model before it is trained: on a few random images, and on as few as an epoch ends with.

Images are as the published sets have them; only those of somebody's own folder are read.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from normkit.errors import NormkitError, OptionError
from normkit.lab import data
from normkit.lab.data.making import SIDE
from normkit.lab.data.sources import PUBLISHED
from normkit.lab.data.synthetic import sizes
from normkit.lab.experiment import Data, Setting, Train
from normkit.lab.last_batches import Last, last_of
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
    samples = max(linked, min(together(setting.train), few(shape)))
    for training in (True, False):
        _run(model.train(training), samples, classes, shape)
    _try_last(model, last_of(setting), samples, linked, classes, shape)


def _try_last(
    model: nn.Module, last: Last, samples: int, linked: int, classes: int, shape: Shape
) -> None:
    """The end of an epoch may have fewer samples than a layer needs: say so at its beginning."""
    fewer = {last.batch % linked} if last.batch % linked else set()
    if last.together == 1 < samples:
        fewer.add(1)
    for size in fewer:
        try:
            _run(model.train(), size, classes, shape)
        except NormkitError as error:
            raise OptionError(f"{last}: {error} Try train.drop_last = true.") from error


def _run(model: nn.Module, samples: int, classes: int, shape: Shape) -> None:
    images = torch.randn(samples, *shape, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # random images of no meaning
            out = model(images)
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


def few(shape: Shape) -> int:
    """With how many images a model is tried."""
    return FEW if max(shape[1:]) <= LARGE else 2


def together(train: Train) -> int:
    """How many samples share statistics."""
    return train.worker_batch or train.batch or FEW
