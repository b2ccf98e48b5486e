"""Statistics of several domains, calibrated one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from normkit.calibration.calibrate import calibrate
from normkit.calibration.result import Calibration
from normkit.errors import NothingToDo, OptionError, ShapeError
from normkit.layers.domain_in_use import layers_with_domains

DomainOf = Callable[[Any], Sequence[int] | Tensor]


class DomainCalibrations(dict[int, Calibration]):
    """The Calibration of each domain. ``print`` it for their tables."""

    def __str__(self) -> str:
        return "\n\n".join(f"domain {domain}: {done}" for domain, done in self.items())

    def __repr__(self) -> str:
        return f"<DomainCalibrations of the domains {', '.join(map(str, self))}>"


def calibrate_domains(
    model: nn.Module,
    batches: Any,
    *,
    domain_of: DomainOf | None = None,
    **options: Any,
) -> DomainCalibrations:
    """``calibrate`` for each domain of a model with statistics of several.

    ``batches`` is a loader for each domain: a mapping from domains, or a sequence in their order.
    Or it is one loader, and ``domain_of(batch)`` tells the domain of each sample of a batch: then
    each domain gets its samples of every batch. ``options`` are those of ``calibrate``. Every
    domain must have data; if anything fails, no statistics have changed. Returns the Calibration of
    each domain, a dictionary to print; each can be taken back by itself.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(nk.BN(1, domains=2))
    >>> batch = torch.tensor([[1.0], [10.0], [3.0], [20.0]]), torch.tensor([0, 1, 0, 1])
    >>> done = nk.calibrate_domains(model, [batch], domain_of=lambda batch: batch[1])
    >>> model[0].running_mean.flatten().tolist()
    [2.0, 15.0]
    """
    layers = layers_with_domains(model)
    if not layers:
        raise NothingToDo(
            f"{type(model).__name__} has no layer with domains. Try nk.calibrate(model, loader)."
        )
    domains = max(layer.domains or 0 for layer in layers)
    given = _given(batches, domain_of, domains)
    done = DomainCalibrations()
    try:
        for domain, own in given.items():
            done[domain] = calibrate(model, own, domain=domain, **options)
    except BaseException:
        for calibration in done.values():
            calibration.undo()
        raise
    return done


def _given(batches: Any, domain_of: DomainOf | None, domains: int) -> dict[int, Any]:
    """The batches of each domain."""
    if domain_of is not None:
        kept = list(batches) if isinstance(batches, Iterator) else batches
        return {
            domain: DomainBatches(kept, domain_of, domain, domains) for domain in range(domains)
        }
    if isinstance(batches, Tensor) or not isinstance(batches, Mapping | Sequence):
        raise OptionError(
            "calibrate_domains expects a loader for each domain, as a mapping or a sequence, or "
            f"domain_of= with one loader, got {type(batches).__name__}."
        )
    given = dict(batches) if isinstance(batches, Mapping) else dict(enumerate(batches))
    if sorted(given) != list(range(domains)):
        raise OptionError(
            f"calibrate_domains expects batches of the domains 0 to {domains - 1}, "
            f"got {sorted(given)}. For one of them try nk.calibrate(model, loader, domain=0)."
        )
    return given


class DomainBatches:
    """Of each batch of a loader, the samples of one domain."""

    def __init__(
        self, batches: Iterable[Any], domain_of: DomainOf, domain: int, domains: int
    ) -> None:
        self.batches, self.domain_of = batches, domain_of
        self.domain, self.domains = domain, domains

    def __iter__(self) -> Iterator[Any]:
        some = False
        for number, batch in enumerate(self.batches, 1):
            rows = self._rows(batch, number)
            if len(rows):
                some = True
                yield _taken(batch, rows)
        if not some:
            raise NothingToDo(f"No batch has a sample of domain {self.domain}.")

    def _rows(self, batch: Any, number: int) -> Tensor:
        index = torch.as_tensor(self.domain_of(batch)).cpu()
        samples = _samples(batch)
        if index.shape != (samples,):
            raise ShapeError(
                f"Batch {number} has {samples} samples, but domain_of gives domains of shape "
                f"{tuple(index.shape)}."
            )
        wrong = index[(index < 0) | (index >= self.domains)]
        if len(wrong):
            raise OptionError(
                f"Batch {number} has a sample of domain {wrong[0].item()}, "
                f"the model has the domains 0 to {self.domains - 1}."
            )
        return (index == self.domain).nonzero()[:, 0]


def _samples(batch: Any) -> int:
    """As many as the first tensor has."""
    first = next((t for t in tree_leaves(batch) if isinstance(t, Tensor) and t.dim()), None)
    return 0 if first is None else len(first)


def _taken(batch: Any, rows: Tensor) -> Any:
    """The samples of a batch: of every tensor that has as many entries as there are samples."""
    samples = _samples(batch)

    def taken(value: Any) -> Any:
        own = isinstance(value, Tensor) and value.dim() and len(value) == samples
        return value[rows.to(value.device)] if own else value

    return tree_map(taken, batch)
