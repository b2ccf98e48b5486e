"""Which domain the layers of a model are in: said by ``use_domain``, until its block ends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

from normkit.errors import NothingToDo, OptionError
from normkit.layers.domains import Domain, DomainIndex, OfDomains


def layers_with_domains(model: nn.Module) -> list[OfDomains]:
    """The layers of a model that keep statistics of several domains."""
    return [m for m in model.modules() if isinstance(m, OfDomains) and m.domains is not None]


@contextmanager
def unseen_domains(model: nn.Module) -> Iterator[None]:
    """Inside, domains that no batch has entered are no error: they are about to get statistics."""
    layers = layers_with_domains(model)
    for layer in layers:
        layer._seen = frozenset(range(layer.domains or 0))
    try:
        yield
    finally:
        for layer in layers:
            layer._seen = frozenset()


def use_domain(model: nn.Module, domain: int | Sequence[int] | Tensor) -> ChosenDomain:
    """Say which domain the next forwards of a model are in, or which one each sample is of.

    For layers with ``domains=K``, which keep K sets of running statistics: ``nk.BN(64, domains=2)``
    or ``nk.convert(model, "bn", domains=2)``. Training pools the samples of a domain, alone, and
    counts them for its statistics; eval mode uses those. Until it is called a layer is in domain 0.
    Takes effect at once; as a context manager it ends with the block. With an index for each
    sample the batch must keep its samples on the way to the norms.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(nk.BN(2, domains=2))
    >>> with nk.use_domain(model, [0, 0, 0, 1, 1, 1]):
    ...     y = model(torch.cat([torch.randn(3, 2, 8, 8), 5 + torch.randn(3, 2, 8, 8)]))
    >>> bool(y[:3].mean().abs() < 1e-3), bool(y[3:].mean().abs() < 1e-3)
    (True, True)
    >>> with nk.use_domain(model.eval(), 1):
    ...     y = model(torch.zeros(1, 2, 8, 8))
    """
    layers = layers_with_domains(model)
    if not layers:
        raise NothingToDo(
            f"{type(model).__name__} has no layer with domains. Try "
            'nk.convert(model, "bn", domains=2) first.'
        )
    if isinstance(domain, bool | float):
        raise OptionError(f"use_domain expects a whole number, got {domain!r}.")
    single = isinstance(domain, int) or (isinstance(domain, Tensor) and domain.dim() == 0)
    chosen: Domain = int(domain) if single else DomainIndex(domain)  # type: ignore[arg-type]
    for layer in layers:
        layer.check_domain(chosen)
    end = ChosenDomain(model)
    for layer in layers:
        layer.domain = chosen
    return end


class ChosenDomain:
    """Gives the domains from before back when a block ends."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.before = {
            path: (layer, layer.domain)
            for path, layer in model.named_modules()
            if isinstance(layer, OfDomains) and layer.domains is not None
        }

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        for layer, domain in self.before.values():
            layer.domain = domain
        known = {id(layer) for layer, _ in self.before.values()}
        some = next(iter(self.before.values()))
        for path, module in self.model.named_modules():  # a conversion inside has brought others
            if isinstance(module, OfDomains) and id(module) not in known:
                module.follow_domain(self.before.get(path, some)[1])
