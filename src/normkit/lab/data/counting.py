"""How many samples a run trains on, told without reading them."""

from __future__ import annotations

from dataclasses import replace

from normkit.lab.data import digits, synthetic
from normkit.lab.data.checking import check
from normkit.lab.data.loading import load
from normkit.lab.data.sources import PUBLISHED
from normkit.lab.data.splitting import counts
from normkit.lab.experiment import Data


def training_samples(spec: Data) -> int:
    """Beside the validation set; the files of somebody's own folder are listed for it.

    >>> training_samples(Data("digits", validation=0.1)), training_samples(Data("cifar10"))
    (1293, 50000)
    """
    check(spec)
    return counts(_published(spec), spec.validation, spec.subset, spec.name)[0]


def _published(spec: Data) -> int:
    part = ("train", "test").index(spec.train)
    if spec.name == "digits":
        return digits.SAMPLES[part]
    if spec.name.partition(":")[0] == "synthetic":
        samples = synthetic.sizes(spec.name)[-1]
        return (samples, samples // 5)[part]
    known = PUBLISHED[spec.name].samples
    if known is None:
        return len(load(replace(spec, validation=0.0, subset=None)).train)
    return known[part]
