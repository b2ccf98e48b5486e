"""Which models there are, found out by building them without values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest

from torch import nn

from normkit import models
from normkit.zoo.building import without_values

LOOKED_AT = 6  # models of each family among which a sample is chosen


@dataclass(frozen=True)
class Member:
    """A model of the zoo, and how large it is."""

    reference: str
    """As in ``normkit survey``."""
    family: str
    """What it is built like: the file of timm or the kind of torchvision that defines it."""
    batch_norms: int
    parameters: int


def timm_references() -> list[str]:
    """Every model that this timm has."""
    return [f"timm:{name}" for name in models.names("timm")]


def few_of_each_family(references: Iterable[str]) -> list[str]:
    """Of some models of timm, a few of each family, evenly over their names.

    To build all models takes longer than to run a sample of them.
    """
    timm, wanted = models.require("timm", "models", "The zoo"), set(references)
    found = []
    for family in timm.list_modules():
        names = [f"timm:{name}" for name in timm.list_models(module=family)]
        names = [name for name in names if name in wanted]
        few = min(LOOKED_AT, len(names))
        found += [names[i * len(names) // few] for i in range(few)]
    return found


def torchvision_references() -> list[str]:
    """Every model of torchvision for classification, segmentation and detection."""
    library = models.require("torchvision.models", "models", "The zoo")
    parts = (library, library.segmentation, library.detection)
    return [f"torchvision:{name}" for part in parts for name in library.list_models(part)]


def describe(reference: str) -> Member:
    """Build a model on the meta device, and count."""
    with without_values():
        model = models.build(reference)
    found = sum(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())
    size = sum(p.numel() for p in model.parameters())
    return Member(reference, type(model).__module__, found, size)


def choose(members: Iterable[Member], count: int) -> list[Member]:
    """The smallest model of each family, then the second smallest of each, and so on.

    Families come in the order of their smallest model, so that the choice is the cheapest one
    with so many families in it; it depends on nothing but the members.
    """
    by_family: dict[str, list[Member]] = {}
    for member in sorted(members, key=lambda m: (m.parameters, m.reference)):
        by_family.setdefault(member.family, []).append(member)
    turns = zip_longest(*by_family.values())
    return [member for turn in turns for member in turn if member is not None][:count]
