"""Norms whose batch statistics several micro-batches share.

A normalizer of normkit is a pure function of the moments of each sample and channel and of its
state. Given the moments of all micro-batches at once it does with them what it does with a full
batch, and of the tables each micro-batch takes its own rows. A batch norm of torch.nn or timm is
computed by the layer of normkit with the same parameters and buffers in its place.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from normkit.core.moments import Moments
from normkit.core.recomputation import is_recomputation
from normkit.core.statistics import LayerState, MapResult
from normkit.errors import OptionError
from normkit.inspection import Site
from normkit.inspection.kinds import PLAIN_BATCH_NORMS, layer_of
from normkit.inspection.run import replaced_forward
from normkit.inspection.side_by_side import RunHandle
from normkit.layers.base import Normalizer

_here = threading.local()


class Exchange(Protocol):
    """Through which a micro-batch gets at the statistics of the full batch."""

    def exchange(self, norm: SharedNorm, x: Tensor, own: Moments, state: LayerState) -> MapResult:
        """The micro-batch's rows of what the norm computes from the moments of all."""


def current_exchange() -> Exchange | None:
    """That of the code at hand; None outside of a step."""
    return getattr(_here, "exchange", None)


@contextmanager
def exchanging_through(exchange: Exchange) -> Iterator[None]:
    before = current_exchange()
    _here.exchange = exchange
    try:
        yield
    finally:
        _here.exchange = before


def can_share(site: Site) -> bool:
    """Whether micro-batches can share the statistics of the norm at a site."""
    if isinstance(site.norm, Normalizer):
        return site.norm.shares_batch
    plain = site.kind in PLAIN_BATCH_NORMS and not site.own_forward
    return plain and hasattr(site.norm, "num_features")


class SharedNorm:
    """A norm that computes with the full batch while a step runs, and as ever otherwise."""

    def __init__(self, site: Site) -> None:
        self.path, self.module = site.path, site.norm
        self.in_backward = False
        own = isinstance(site.norm, Normalizer)
        self.layer: Any = site.norm if own else _layer_in_place_of(site)
        inside = site.norm is site.module  # a NormAct calls its own activation
        self.after = [part for part in (site.drop, site.act) if part is not None and inside]

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """The norm exchanges its moments with those of other micro-batches, while in the block."""
        layer = self.layer

        def exchange(x: Tensor, moments: Moments, state: LayerState) -> MapResult:
            through = self.current_exchange()
            if through is None:
                return layer.compute(moments, layer.observe(x, moments, state))
            return through.exchange(self, x, moments, state)

        before, layer.exchange = layer.exchange, exchange
        try:
            if layer is self.module:
                yield
            else:
                forward = partial(self._foreign_forward, self.module.forward)
                with replaced_forward(self.module, forward):
                    yield
        finally:
            layer.exchange = before

    def current_exchange(self) -> Exchange | None:
        """None if the layer uses running statistics, or outside of a step."""
        if not self.layer.uses_batch():
            return None
        through = current_exchange()
        if through is None and self.in_backward and is_recomputation():
            raise OptionError(
                f"{self.path} runs a second time in the backward: the model checkpoints its "
                "activations itself. Turn that off; accumulate(recompute=True) does it exactly."
            )
        return through

    def _foreign_forward(self, own: Callable[..., Any], x: Tensor) -> Tensor:
        _follow(self.layer, self.module)
        if self.current_exchange() is None:
            return own(x)
        y: Tensor = self.layer(x)
        for part in self.after:
            y = part(y)
        return y


def _layer_in_place_of(site: Site) -> Normalizer:
    """A layer that computes what another library's batch norm would, with its tensors."""
    norm: Any = site.norm
    layer = layer_of(site.kind)
    assert layer is not None
    options: dict[str, Any] = {
        "eps": norm.eps,
        "momentum": norm.momentum,
        "affine": norm.weight is not None,
        "track_running_stats": norm.running_mean is not None,
    }
    return _follow(layer(norm.num_features, **options), norm)


def _follow(layer: Any, norm: Any) -> Normalizer:
    """Share the parameters, buffers, mode and options that the other norm has now.

    Asked for before each call, since moving a model to another device gives it new buffers.
    """
    layer.training, layer.momentum, layer.eps = norm.training, norm.momentum, norm.eps
    layer._parameters["weight"], layer._parameters["bias"] = norm.weight, norm.bias
    if norm.running_mean is not None:
        layer._buffers.update(
            {name: b for name, b in norm._buffers.items() if name in layer._buffers}
        )
    anchor = norm.weight if norm.weight is not None else norm.running_mean
    if anchor is not None:
        for name, buffer in layer._buffers.items():
            if buffer is not None and buffer.device != anchor.device:  # those it has alone
                layer._buffers[name] = buffer.to(anchor.device)
    return layer


# -------------------------------------------------------------------- the forward of a step

Log = Callable[[SharedNorm, Moments, list[int], LayerState], None]


class FullBatch:
    """What one micro-batch shares with the others in the forward.

    The run that arrives last joins the moments of all and lets the norm compute its tables from
    them, once: running statistics are updated once a step. Autograd sees one graph over all
    micro-batches, so that its backward adds up what each of them sends into the statistics.
    """

    def __init__(self, run: RunHandle) -> None:
        self.run = run
        self.times: Counter[str] = Counter()
        self.log: Log | None = None  # what a block keeps of it

    def exchange(self, norm: SharedNorm, x: Tensor, own: Moments, state: LayerState) -> MapResult:
        layer = norm.layer

        def combine(parts: list[Any]) -> list[MapResult]:
            table = joined([moments for _, moments in parts])
            sizes = [moments.mean.shape[0] for _, moments in parts]
            first = FirstSamples(torch.cat([samples for samples, _ in parts]), sum(sizes))
            seen: LayerState = layer.observe(first, table, state)
            if self.log is not None:
                self.log(norm, table, sizes, seen)
            result = layer.compute(table, seen)
            layer.write(result.update)
            result = result._replace(update=None)
            return [rows(result, *bound, sum(sizes)) for bound in bounds_of(sizes)]

        samples = x.detach()[: layer.observed_samples()]
        result: MapResult = self.run.meet(self.key("norm", norm.path), (samples, own), combine)
        return result

    def key(self, what: str, path: str) -> tuple[str, str, int]:
        """The name of a meeting: the same for all micro-batches, and of this one only."""
        self.times[f"{what} {path}"] += 1
        return what, path, self.times[f"{what} {path}"]


class FirstSamples:
    """The first samples of a batch, which says how many it has in all."""

    def __init__(self, first: Tensor, size: int) -> None:
        self.first, self.shape, self.device = first, (size, *first.shape[1:]), first.device

    def __getitem__(self, part: Any) -> Tensor:
        return self.first[part]


def joined(parts: Sequence[Moments]) -> Moments:
    """The table of all micro-batches, one after the other."""
    first = parts[0]
    counts = [p.count for p in parts if isinstance(p.count, Tensor) and p.count.dim() == 2]
    if len(counts) == len(parts):  # of masks: each sample has its own
        count = torch.cat(counts)
        return Moments(torch.cat([p.mean for p in parts]), torch.cat([p.var for p in parts]), count)
    for part in parts:
        same = part.mean.shape[1:] == first.mean.shape[1:]
        if not (same and torch.equal(torch.as_tensor(part.count), torch.as_tensor(first.count))):
            raise OptionError(
                "The micro-batches have feature maps of different sizes: no full batch could hold "
                "them. Give micro-batches of one size."
            )
    mean, var = torch.cat([p.mean for p in parts]), torch.cat([p.var for p in parts])
    return Moments(mean, var, first.count)


def bounds_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each part begins and ends when they stand one after the other."""
    ends = list(accumulate(sizes))
    return list(zip([0, *ends], ends, strict=False))


def rows(tables: Any, start: int, stop: int, total: int) -> Any:
    """The rows of one micro-batch, of tables that have a row a sample; others are for all."""
    if isinstance(tables, Tensor):
        each = tables.dim() > 1 and tables.shape[0] == total > 1
        return tables[start:stop] if each else tables
    if isinstance(tables, tuple):
        cut = [rows(part, start, stop, total) for part in tables]
        return type(tables)(*cut) if hasattr(tables, "_fields") else tuple(cut)
    return tables
