"""Random streams that depend on what they are for alone, and splits with a share of every class."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from normkit.errors import OptionError
from normkit.lab.experiment.records import Data


def stream(*parts: object) -> int:
    """A seed of 63 bits from any number of parts.

    >>> stream("order", 1, 0) == stream("flip", 1, 0)
    False
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """A generator on the CPU: the same numbers whichever device will use them."""
    return torch.Generator().manual_seed(stream(*parts))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers on the CPU start from a seed, and go on afterwards as if not."""
    with torch.random.fork_rng(devices=[]):
        # not torch.manual_seed, which would also reset the generators of the GPUs
        torch.default_generator.manual_seed(seed)
        yield


def stratified(labels: Tensor, count: int, *seed: object) -> tuple[Tensor, Tensor]:
    """Positions of ``count`` samples and of the others, both in ascending order.

    Every class gives its share of ``count``, rounded down; what is left over goes to the largest
    remainders, and where those are equal, the seed decides.

    >>> chosen, others = stratified(torch.tensor([0] * 6 + [1] * 4), 5, 0)
    >>> chosen.numel(), int((chosen < 6).sum()), others.numel()
    (5, 3, 5)
    """
    random = generator("split", *seed)
    sizes = torch.bincount(labels)
    exact = sizes.double() * count / labels.numel()
    shares = exact.floor().long()
    # rounded, so that two classes of one size have one remainder
    remainders = (exact - shares).mul(1e6).round()
    order = torch.randperm(sizes.numel(), generator=random)
    order = order[remainders[order].argsort(descending=True, stable=True)]
    shares[order[: count - int(shares.sum())]] += 1
    mixed = torch.randperm(labels.numel(), generator=random)
    mixed = mixed[labels[mixed].argsort(stable=True)]  # class after class, random within a class
    rank = torch.arange(labels.numel()) - (sizes.cumsum(0) - sizes)[labels[mixed]]
    chosen = rank < shares[labels[mixed]]
    return mixed[chosen].sort().values, mixed[~chosen].sort().values


def counts(total: int, spec: Data) -> tuple[int, int]:
    """How many samples to train on, and to validate on; an error where that cannot be.

    >>> counts(1000, Data("digits", validation=0.1, subset=256))
    (256, 100)
    """
    validation, subset = spec.validation, spec.subset
    aside = round(total * validation)
    if validation and not 0 < aside < total:
        raise OptionError(
            f"validation={validation} of {total} samples of {spec.name} is {aside}: "
            "expected some to train on and some to validate on. Try a larger share."
        )
    left = total - aside
    if subset is not None and not 0 < subset <= left:
        raise OptionError(
            f"subset={subset}, but {spec.name} has {left} samples to train on"
            f"{' beside the validation set' if validation else ''}."
        )
    return (left if subset is None else subset), aside


def split(labels: Tensor, spec: Data) -> tuple[Tensor, Tensor | None]:
    """Positions to train on, and to validate on (None where nothing is set aside)."""
    left, aside = counts(labels.numel(), spec)
    train, validated = torch.arange(labels.numel()), None
    if aside:
        validated, train = stratified(labels, aside, "validation", spec.split_seed)
    if spec.subset is not None:
        chosen, _ = stratified(labels[train], left, "subset", spec.split_seed)
        train = train[chosen]
    return train, validated
