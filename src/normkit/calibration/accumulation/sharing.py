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
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, nn

from normkit.calibration.accumulation.twins import follow, twin_of
from normkit.core.moments import Moments
from normkit.core.recomputation import is_recomputation
from normkit.core.statistics import LayerState, MapResult
from normkit.errors import OptionError
from normkit.inspection import Site
from normkit.layers.batch import BatchNormalizer
from normkit.layers.bn import BN
from normkit.layers.norm_act import NormAct

_here = threading.local()


class Party(Protocol):
    """Whoever a micro-batch shares its statistics through, right now."""

    def exchange(self, norm: Shared, x: Tensor, own: Moments, state: LayerState) -> MapResult:
        """The micro-batch's rows of what the norm computes from the moments of all."""


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
        """The norm exchanges its moments with those of other micro-batches, while in the block."""
        layer = self.layer

        def exchange(x: Tensor, moments: Moments, state: LayerState) -> MapResult:
            one = self.party()
            if one is None:
                return layer.compute(moments, layer.observe(x, moments, state))
            return one.exchange(self, x, moments, state)

        before, layer.exchange = layer.exchange, exchange
        try:
            if layer is self.module:
                yield
                return
            own = vars(self.module).get("forward")
            vars(self.module)["forward"] = self._in_place_of(self.module.forward)
            try:
                yield
            finally:
                vars(self.module).pop("forward")
                if own is not None:
                    vars(self.module)["forward"] = own
        finally:
            layer.exchange = before

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


def catchable(site: Site) -> bool:
    """Whether the norm at a site can be shared by micro-batches."""
    norm = site.module.norm if isinstance(site.module, NormAct) else site.module
    if isinstance(norm, BatchNormalizer):
        return True
    plain = site.kind in ("bn", "sync_bn") and not site.own_forward
    return plain and hasattr(norm, "num_features")
