"""Exact statistics from the input upwards: each norm sees what it would with all below exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from torch import Tensor, nn

from normkit.diagnosis.batches import each_batch, output_of
from normkit.inspection import Site
from normkit.inspection.calling import Forward
from normkit.inspection.keepers import Keeper, table_of
from normkit.inspection.keeping import reader_of
from normkit.inspection.tally import Pooling


class _Enough(BaseException):
    """Leaves a forward pass of which nothing more is needed; no error of the model."""


def progressive(
    model: nn.Module,
    sites: Iterable[Site],
    batches: Iterable[Any],
    most: int | None = None,
    forward: Forward | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write into each norm the statistics of all its inputs, in the order in which norms run.

    To be used where buffers are restored afterwards. A pass over the batches for each norm, which
    ends at that norm.
    """
    readers = {site: reader_of(site.norm) for site in sites}
    kept = {site: reader for site, reader in readers.items() if reader is not None}
    calls = _calls(model, list(kept), batches, forward)
    ordered = sorted((s for s in kept if s.path in calls), key=lambda s: list(calls).index(s.path))
    for done, site in enumerate(ordered):
        if progress is not None:
            progress(done, len(ordered))
        pooling = _inputs(model, site, kept[site], calls[site.path], batches, most, forward)
        assert pooling.total is not None
        kept[site].put(pooling.total)
    if progress is not None:
        progress(len(ordered), len(ordered))


def _calls(
    model: nn.Module, sites: list[Site], batches: Iterable[Any], forward: Forward | None
) -> dict[str, int]:
    """How often each norm is called for the first batch, in the order of the first calls."""
    calls: dict[str, int] = {}

    def count(path: str) -> None:
        calls[path] = calls.get(path, 0) + 1

    handles = [
        site.module.register_forward_pre_hook(lambda *_, path=site.path: count(path))
        for site in sites
    ]
    try:
        for number, batch in enumerate(each_batch(batches, model, 1, forward), 1):
            output_of(model, batch, number)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _inputs(
    model: nn.Module,
    site: Site,
    reader: Keeper,
    calls: int,
    batches: Iterable[Any],
    most: int | None,
    forward: Forward | None,
) -> Pooling:
    """Statistics of everything one norm gets."""
    pooling, left = Pooling(), 0

    def take(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal left
        x = next(t for t in (*args, *kwargs.values()) if isinstance(t, Tensor))
        pooling.add(reader.pooled(table_of(x, site.channel_axis), x.detach()))
        left -= 1
        if left == 0:
            raise _Enough

    handle = site.module.register_forward_pre_hook(take, with_kwargs=True)
    try:
        for number, batch in enumerate(each_batch(batches, model, most, forward), 1):
            left = calls
            with suppress(_Enough):
                output_of(model, batch, number)
    finally:
        handle.remove()
    return pooling
