"""One forward of a model, measured while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.layout import Batch, Channels, dense
from normkit.core.moments import Moments
from normkit.core.recomputation import is_recomputation
from normkit.diagnosis.measures import condensation
from normkit.diagnosis.observe.activations import AfterActivation
from normkit.diagnosis.observe.collect import SAMPLES
from normkit.diagnosis.observe.norm_record import NormRecord
from normkit.engine.normalize import moments
from normkit.engine.torch import passes as torch_passes
from normkit.inspection import Site
from normkit.inspection.run import input_tensor
from normkit.layers.base import Normalizer

Number = tuple[str, str, Tensor | float]  # path, measure, value


class StepRecord:
    """Hooks on every norm from the beginning of a forward to its end."""

    def __init__(
        self,
        model: nn.Module,
        sites: tuple[Site, ...],
        wanted: frozenset[str],
        start: Mapping[str, Tensor],
    ) -> None:
        self.wanted, self.start = wanted, start
        self.records: list[NormRecord] = []
        self.refused: dict[str, dict[str, str]] = {}  # reasons by path and measure
        self._first: NormRecord | None = None  # of the norm that ran first
        self._ends: list[Callable[[], None]] = []
        activations = AfterActivation(model) if wanted & {"dead", "saturated"} else None
        try:
            for site in sites:
                self._watch(site, activations)
        except BaseException:
            self.end()
            raise

    def numbers(self) -> Iterator[Number]:
        """What was measured; values may still be on a device."""
        frozen = []
        for record in self.records:
            measures = record.measures(record.kept, self.start)
            self.refused[record.site.path] = measures.refused
            for measure, value in measures.numbers.items():
                if measure in self.wanted:
                    yield record.site.path, measure, value
                    if measure == "frozen":
                        frozen.append(torch.as_tensor(value).reshape(()))
        if frozen:
            yield "", "frozen_share", torch.stack([f.to(frozen[0].device) for f in frozen]).mean()

    def end(self) -> None:
        """Take everything off the model."""
        for end in reversed(self._ends):
            end()
        self._ends = []

    def _watch(self, site: Site, activations: AfterActivation | None) -> None:
        act = None if activations is None else activations.of(site)
        # the condensation score is that of the first norm, by definition
        record = NormRecord(site, act, self.wanted - {"condensation"}, SAMPLES)
        self.records.append(record)
        heard: list[Moments] = []
        norm = record.norm
        if isinstance(norm, Normalizer):
            self._ends.append(listen(norm, heard.append))

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            heard.clear()
            x = None if is_recomputation() else input_tensor(args, kwargs)
            if x is None:
                return
            with torch.no_grad():
                if self._first is None and "condensation" in self.wanted:
                    record.condensation = condensation(x, SAMPLES)
                self._first = self._first or record
                if not isinstance(norm, Normalizer):  # it may write over its input
                    record.take(x, moments_for(x, site.channel_axis))

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x = None if is_recomputation() else input_tensor(args, kwargs)
            if x is None or not isinstance(norm, Normalizer):
                return
            with torch.no_grad():
                table = reusable(norm, x, heard)
                record.take(x, moments_for(x, each=True) if table is None else table)

        hooks = [
            site.module.register_forward_pre_hook(before, with_kwargs=True),
            site.module.register_forward_hook(after, with_kwargs=True),
        ]
        if activations is not None:
            hooks += activations.listen(site, record.after)
        self._ends += [hook.remove for hook in hooks]


def listen(layer: Normalizer, listener: Callable[[Moments], None]) -> Callable[[], None]:
    """Let a function hear the moments of every batch; calling what is returned ends it.

    They are tables (N, C) of each sample, or (1, C) of the batch where the layer needs no more. A
    call of which nothing is heard computed none, or none of whole channels.
    """
    layer.listeners = (*layer.listeners, listener)

    def end() -> None:
        layer.listeners = tuple(heard for heard in layer.listeners if heard is not listener)

    return end


def reusable(norm: Normalizer, x: Tensor, heard: list[Moments]) -> Moments | None:
    """The moments that a layer was heard to use, if they tell what is asked.

    They must be of whole channels, not of pixels or pieces; gates and centering need those of each
    sample.
    """
    cells = norm.cells(x)
    if not heard or not isinstance(cells, Batch | Channels) or cells.columns != x.shape[1]:
        return None
    rows, columns = heard[-1].mean.shape
    fits = columns == x.shape[1] and (rows == x.shape[0] or not norm.reads_each_sample)
    return heard[-1] if fits else None


def moments_for(x: Tensor, axis: int = 1, *, each: bool = False) -> Moments:
    """Mean and variance of each channel in the precision of layers, tables (1, C) or (N, C).

    Of each sample if that is asked for, or no slower.
    """
    x = dense(x if axis == 1 else x.movedim(axis, 1))
    if not each and torch_passes.has_native(x):  # one call, for any memory
        mean, var = torch_passes.moments_of_batch(x)
        return Moments(mean[None], var[None], x.numel() // x.shape[1])
    return moments(x, Batch.of if not each and Batch.fits(x) else Channels.of)
