"""Sets of several domains with the same classes: PACS and Office-31, as they are published."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from normkit.errors import OptionError, nearest
from normkit.lab.data.files import find
from normkit.lab.data.loaders import FileLoader, Loader, Sets
from normkit.lab.data.loading import SIDE, check_kind
from normkit.lab.data.records import DomainListing, Files
from normkit.lab.data.sampling import split
from normkit.lab.data.sources import PUBLISHED
from normkit.lab.data.transforms import IMAGENET, Augmentation, coefficients
from normkit.lab.experiment.records import Data


@dataclass(frozen=True, eq=False)
class DomainSets(Sets):
    """Labelled images of one domain to train on, and another one, without labels, to adapt to."""

    target: Loader | None = None


def domain_listing(spec: Data, source: str, target: str) -> DomainListing:
    """The files of a set, and whether it has both domains."""
    check_kind(spec, "domains")
    content = find(PUBLISHED[spec.name], spec.path).read()
    assert isinstance(content, DomainListing)
    for key, domain in (("source", source), ("target", target)):
        if domain not in content.domains:
            hint = nearest(domain, content.domains)
            raise OptionError(f"{spec.name} has no domain {domain!r} ({key}). {hint}")
    return content


def load_domains(spec: Data, source: str, target: str, device: torch.device | str) -> DomainSets:
    """From one domain to another. The test are all images of the target, as papers have it."""
    listing = domain_listing(spec, source, target)
    scale, shift = coefficients(spec.normalize, IMAGENET, 255)
    side, augmentation = spec.size or SIDE, Augmentation.of(spec)

    def loader(files: Files) -> FileLoader:
        return FileLoader(files, side, scale, shift, augmentation, device)

    given = listing.domains[source]
    train, aside = split(given.labels, spec.validation, spec.subset, spec.split_seed, spec.name)
    other = loader(listing.domains[target])
    return DomainSets(
        name=spec.name,
        train=loader(given.take(train)),
        validation=None if aside is None else loader(given.take(aside)),
        test=other,
        classes=listing.classes,
        shape=(3, side, side),
        target=other,
    )
