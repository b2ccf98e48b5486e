"""Measuring the norms of a model on batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.diagnosis.observe.measurements import MEASURES, Measurements, Record
from normkit.diagnosis.observe.norm_record import AfterActivation, NormRecord
from normkit.diagnosis.observe.passes import HINT, each_batch, output_of
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection import Site, select, survey, undisturbed
from normkit.inspection.batches import naming
from normkit.inspection.calling import Forward
from normkit.inspection.keepers import Keeper, table_of
from normkit.inspection.keeping import reader_of, running_of
from normkit.inspection.quiet import refuse_lazy
from normkit.inspection.tally import Pooling

Progress = Callable[[int, int], None]  # what is done, of how much
MODES = ("eval", "progressive")
SAMPLES = 32  # that the condensation score looks at, as in the figures of ubn


def collect(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    measures: Iterable[str] | None = None,
    mode: str = "eval",
    where: Any = None,
    max_batches: int | None = None,
    samples: int = SAMPLES,
    start: Mapping[str, Tensor] | None = None,
    forward: Forward | None = None,
    progress: Progress | None = None,
) -> Measurements:
    """What the norms of a model are given and give, measured in eval mode. Changes nothing.

    ``batches`` are tensors, pairs (inputs, target) or mappings of keyword arguments, or anything
    with ``forward(model, batch)``; ``measures`` some of ``MEASURES``, all by default; ``where``
    chooses norms as ``select`` does. ``start``, a state_dict of the untrained model, is what drift
    is measured from. ``mode="progressive"`` gives every norm the exact statistics of its own input
    before those above it are measured: the ESM of a layer is then its own, without what comes from
    below. That takes a pass for each norm with running statistics, so an iterator is not enough.
    """
    wanted = wanted_measures(measures)
    if mode not in MODES:
        raise OptionError(f"Unknown mode {mode!r}. {nearest(mode, MODES)}")
    if mode == "progressive" and iter(batches) is batches:
        raise OptionError(
            'mode="progressive" goes through the batches several times, got an iterator. '
            "Try list(batches), or the DataLoader itself."
        )
    sites = norms_of(model, where)
    kept = {site.path: running_of(site.norm) for site in sites}
    with undisturbed(model):
        if mode == "progressive":
            progressive(model, sites, batches, max_batches, forward, progress)
        result = Measurements([], ())
        norms, sizes = recorded(model, sites, batches, wanted, samples, max_batches, forward)
        for norm in norms:
            _add(result, norm, kept[norm.site.path], wanted, start)
        return replace(result, batch_sizes=tuple(sizes))


def _add(
    result: Measurements,
    norm: NormRecord,
    running: Moments | None,
    wanted: frozenset[str],
    start: Mapping[str, Tensor] | None,
) -> None:
    """Put what was recorded about a norm into the table."""
    path, inputs, expected = norm.site.path, norm.channels.total, norm.expected.total
    if inputs is None:
        return
    measures = norm.measures(running, start)
    result.calls[path], result.inputs[path] = norm.calls, _cpu(inputs)
    if running is not None and expected is not None:
        result.running[path], result.expected[path] = _cpu(running), _cpu(expected)
    if norm.matrix is not None:
        result.matrices[path] = norm.matrix
    result.channels[path] = {name: value.cpu() for name, value in measures.channels.items()}
    numbers = measures.numbers.items()
    result.records.extend(Record(path, name, float(v)) for name, v in numbers if name in wanted)
    result.refused[path] = {name: why for name, why in measures.refused.items() if name in wanted}


def _cpu(moments: Moments) -> Moments:
    count = moments.count.cpu() if isinstance(moments.count, Tensor) else moments.count
    return Moments(moments.mean.cpu(), moments.var.cpu(), count)


def wanted_measures(measures: Iterable[str] | None) -> frozenset[str]:
    """The names asked for; an unknown one is an error."""
    if measures is None:
        return frozenset(MEASURES)
    names = [measures] if isinstance(measures, str) else list(measures)
    for name in names:
        if name not in MEASURES:
            raise OptionError(f"Unknown measure {name!r}. {nearest(str(name), MEASURES)}")
    return frozenset(names)


def norms_of(model: nn.Module, where: Any = None) -> tuple[Site, ...]:
    """The norms of a model that can be run, and those chosen; none at all is an error."""
    surveyed = survey(model)
    refuse_lazy(model)
    if not len(surveyed):
        raise NothingToDo(
            f"{surveyed.title} has no norms, or computes them without a module, where nobody can "
            "see them. Print survey(model) to see what is found."
        )
    return select(surveyed, where)


def recorded(
    model: nn.Module,
    sites: tuple[Site, ...],
    batches: Iterable[Any],
    wanted: frozenset[str],
    samples: int,
    most: int | None,
    forward: Forward | None = None,
) -> tuple[list[NormRecord], list[int]]:
    """Run the model on all batches; what the norms got, in the order of their first call."""
    order: dict[str, NormRecord] = {}
    sizes: list[int] = []
    with ExitStack() as stack:  # hooks go, whatever happens
        for number, batch in enumerate(each_batch(batches, model, most, forward), 1):
            if number == 1:
                # which activation follows which norm is seen, not guessed
                with naming(batch.inputs, number, HINT):
                    seen = survey(model, batch.inputs)
                chosen = [seen[site.path] for site in sites]
                _hook(model, chosen, wanted, samples, order, stack)
            output_of(model, batch, number)
            sizes.append(batch.size)
    return list(order.values()), sizes


def _hook(
    model: nn.Module,
    sites: list[Site],
    wanted: frozenset[str],
    samples: int,
    order: dict[str, NormRecord],
    stack: ExitStack,
) -> None:
    activations = AfterActivation(model)
    for site in sites:
        act = site.act or activations.modules.get(site.followed_by or "", site.followed_by)
        watch = NormRecord(site, act, wanted, samples)

        def before(_: nn.Module, args: Any, kwargs: Any, watch: NormRecord = watch) -> None:
            order.setdefault(watch.site.path, watch)
            watch.before(args, kwargs)

        handles = [site.module.register_forward_pre_hook(before, with_kwargs=True)]
        if wanted & {"dead", "saturated"}:
            handles += activations.listen(site, watch.after)
        for handle in handles:
            stack.callback(handle.remove)


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
