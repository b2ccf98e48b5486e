"""Sets of several domains with the same classes: PACS, Office-31, and MNIST beside USPS."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from normkit.errors import OptionError
from normkit.lab.data.loaders import FileLoader, Loader, Sets, TensorLoader
from normkit.lab.data.loading import SIDE, check_kind, classes_and_shape, content_of, resized
from normkit.lab.data.records import DigitDomains, DomainListing, Files, Split
from normkit.lab.data.sampling import split
from normkit.lab.data.sources import PUBLISHED
from normkit.lab.data.transforms import IMAGENET, Augmentation, coefficients
from normkit.lab.experiment.records import Data


@dataclass(frozen=True, eq=False)
class DomainSets(Sets):
    """Labelled images of one domain to train on, and another one, without labels, to adapt to."""

    target: Loader | None = None


def check_domains(spec: Data, source: str, target: str) -> DomainListing | DigitDomains:
    """What a set has, if it has both domains."""
    check_kind(spec, "domains")
    content = content_of(spec)
    assert isinstance(content, DomainListing | DigitDomains)
    for key, domain in (("source", source), ("target", target)):
        if domain not in content.domains:
            known = ", ".join(content.domains)
            raise OptionError(f"{spec.name} has no domain {domain!r} ({key}). Known: {known}.")
    return content


def source_samples(spec: Data, source: str, target: str) -> int:
    """How many labelled images there are; of domains that are published sets, without reading."""
    published = PUBLISHED.get(source) if spec.name == "mnist-usps" else None
    if published is not None and published.samples is not None and target in PUBLISHED:
        return published.samples[0]
    content = check_domains(spec, source, target)
    assert isinstance(content, DomainListing)  # else a domain is unknown, which is an error
    return len(content.domains[source])


def load_domains(spec: Data, source: str, target: str, device: torch.device | str) -> DomainSets:
    """From one domain to another. Where a set has no test, the test are all images of the target,
    as papers have it."""
    content = check_domains(spec, source, target)
    if isinstance(content, DigitDomains):
        return _load_digits(spec, content, source, target, device)
    scale, shift = coefficients(spec.normalize, IMAGENET, 255)
    side, augmentation = spec.size or SIDE, Augmentation.of(spec)

    def loader(files: Files) -> FileLoader:
        return FileLoader(files, side, scale, shift, augmentation, device)

    given = content.domains[source]
    train, aside = split(given.labels, spec)
    other = loader(content.domains[target])
    return DomainSets(
        name=spec.name,
        train=loader(given.take(train)),
        validation=None if aside is None else loader(given.take(aside)),
        test=other,
        classes=content.classes,
        shape=(3, side, side),
        target=other,
    )


def _load_digits(
    spec: Data, content: DigitDomains, source: str, target: str, device: torch.device | str
) -> DomainSets:
    """To adapt to are the training images of the target, its test is the published one."""
    _, shape = classes_and_shape(spec)
    size = shape[1]
    given, other = (content.domains[name] for name in (source, target))
    labelled = resized(given.train, size)
    # the source's own, for both: the target's are not known before
    scale, shift = coefficients(spec.normalize, labelled.moments, labelled.white)

    def loader(part: Split, rows: torch.Tensor | None, augmented: bool) -> TensorLoader:
        images, labels = part.images, part.labels
        if rows is not None:
            images, labels = images[rows], labels[rows]
        how = Augmentation.of(spec) if augmented else Augmentation()
        return TensorLoader(images, labels, scale, shift, how, device, part.white)

    train, aside = split(labelled.labels, spec)
    return DomainSets(
        name=spec.name,
        train=loader(labelled, train, True),
        validation=None if aside is None else loader(labelled, aside, False),
        test=loader(resized(other.test, size), None, False),
        classes=content.classes,
        shape=(1, size, size),
        target=loader(resized(other.train, size), None, True),
    )
