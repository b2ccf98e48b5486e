"""Norms whose batch statistics several micro-batches share: where their calls are caught.

Every normalizer of normkit turns the moments of each sample and channel into its tables in one
method. Caught there, it can be given the moments of all micro-batches at once, and of the tables
each micro-batch takes its own rows: whatever the layer does with a batch, it does with the full
one. A batch norm of torch.nn or timm is computed by a normkit bn with the same parameters and
buffers in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from normkit.calibration.accumulation.twins import follow, twin_of
from normkit.core.layout import Batch, Channels, Layout
from normkit.core.moments import Moments
from normkit.core.running import is_recomputation
from normkit.errors import OptionError
from normkit.inspection import Site
from normkit.layers.batch import BatchNormalizer
from normkit.layers.bgn import BGN
from normkit.layers.bn import BN
from normkit.layers.norm_act import NormAct
from normkit.layers.ubn import UBN

_here = threading.local()

Compute = Callable[[Moments], Any]


class Party(Protocol):
    """Whoever a micro-batch shares its statistics through, right now."""

    def exchange(self, norm: Shared, own: Moments, compute: Compute) -> Any:
        """The micro-batch's rows of what the norm computes from the moments of all."""

    def observe(self, norm: Shared, x: Tensor, own: Moments) -> None:
        """ubn looks at samples themselves, for its score."""


def party() -> Party | None:
    """The one that the code at hand belongs to; None outside of a step."""
    return getattr(_here, "party", None)


@contextmanager
def belonging_to(one: Party | None) -> Iterator[None]:
    before = party()
    _here.party = one
    try:
        yield
    finally:
        _here.party = before


class Shared:
    """A norm whose calls are caught while a step runs, and left alone otherwise."""

    def __init__(self, path: str, module: nn.Module, site: Site) -> None:
        self.path, self.module = path, module
        self.in_backward = False
        self.layer: BatchNormalizer = (
            module if isinstance(module, BatchNormalizer) else twin_of(module)
        )
        inside = module is site.module  # a NormAct calls its own activation
        self.after = [part for part in (site.drop, site.act) if part is not None and inside]

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Methods of the instance in front of those of its class, for the time of the block."""
        layer = self.layer
        name = _turning_point(layer)
        own = {name: getattr(layer, name), "cells": layer.cells, "fusion": layer.fusion}

        def turned(moments: Moments | None, *rest: Any) -> Any:
            one = self.party()
            if one is None or moments is None:
                return own[name](moments, *rest)
            return one.exchange(self, moments, lambda all_of: own[name](all_of, *rest))

        def cells(x: Tensor) -> Layout:
            found: Layout = own["cells"](x)
            # rows of samples join; one row for a whole micro-batch would lose its size
            return Channels.of(x) if self.party() and isinstance(found, Batch) else found

        def fusion(x: Tensor) -> Any:
            return None if self.party() else own["fusion"](x)

        with ExitStack() as stack:
            put: list[tuple[nn.Module, str, Callable[..., Any]]] = [
                (layer, name, turned),
                (layer, "cells", cells),
                (layer, "fusion", fusion),
            ]
            if isinstance(layer, UBN):
                put.append((layer, "observe", self._observing(layer.observe)))
            if layer is not self.module:
                put.append((self.module, "forward", self._in_place_of(self.module.forward)))
            for owner, method, function in put:
                stack.callback(_taken_back(owner, method))
                vars(owner)[method] = function
            yield

    def party(self) -> Party | None:
        """Whom to share with; None if the layer uses running statistics, or outside of a step."""
        if not self.layer.uses_batch():
            return None
        found = party()
        if found is None and self.in_backward and is_recomputation():
            raise OptionError(
                f"{self.path} runs a second time in the backward: the model checkpoints its "
                "activations itself. Turn that off; accumulate(recompute=True) does it exactly."
            )
        return found

    def _observing(self, own: Callable[..., None]) -> Callable[..., None]:
        def observe(x: Tensor, moments: Moments) -> None:
            one = self.party()
            if one is None:
                own(x, moments)
            else:
                one.observe(self, x, moments)

        return observe

    def _in_place_of(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a batch norm that is not ours."""

        def forward(x: Tensor) -> Tensor:
            assert isinstance(self.layer, BN)
            follow(self.layer, self.module)
            if self.party() is None:
                return own(x)
            y: Tensor = self.layer(x)
            for part in self.after:
                y = part(y)
            return y

        return forward


def _turning_point(layer: BatchNormalizer) -> str:
    """The method through which all moments go."""
    if isinstance(layer, BGN):
        return "map_of"
    return "gated" if isinstance(layer, UBN) else "coefficients"


def _taken_back(owner: nn.Module, name: str) -> Callable[[], None]:
    """What puts an attribute of the instance back as it is now."""
    had, value = name in vars(owner), vars(owner).get(name)

    def back() -> None:
        if had:
            vars(owner)[name] = value
        else:
            vars(owner).pop(name, None)

    return back


def catchable(site: Site) -> bool:
    """Whether the norm at a site can be shared by micro-batches."""
    norm = site.module.norm if isinstance(site.module, NormAct) else site.module
    if isinstance(norm, BatchNormalizer):
        return True
    plain = site.kind in ("bn", "sync_bn") and not site.own_forward
    return plain and hasattr(norm, "num_features")
