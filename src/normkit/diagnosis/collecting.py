"""Measuring a trained model on data: one pass, and a table of what was found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from normkit.diagnosis.activations import AfterActivation
from normkit.diagnosis.batches import HINT, each_batch, output_of
from normkit.diagnosis.expecting import progressive
from normkit.diagnosis.measurements import MEASURES, Measurements
from normkit.diagnosis.summing import summed
from normkit.diagnosis.watching import Watch
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection import Site, select, survey, undisturbed
from normkit.inspection.batches import naming
from normkit.inspection.calling import Forward
from normkit.inspection.keeping import running_of
from normkit.inspection.quiet import refuse_lazy

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
        watches, sizes = watched(model, sites, batches, wanted, samples, max_batches, forward)
        return summed(watches, kept, sizes, wanted, start)


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
    found = survey(model)
    refuse_lazy(model)
    if not len(found):
        raise NothingToDo(
            f"{found.title} has no norms, or computes them without a module, where nobody can "
            "see them. Print survey(model) to see what is found."
        )
    return select(found, where)


def watched(
    model: nn.Module,
    sites: tuple[Site, ...],
    batches: Iterable[Any],
    wanted: frozenset[str],
    samples: int,
    most: int | None,
    forward: Forward | None = None,
) -> tuple[list[Watch], list[int]]:
    """Run the model on all batches; what the norms got, in the order of their first call."""
    order: dict[str, Watch] = {}
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
    order: dict[str, Watch],
    stack: ExitStack,
) -> None:
    activations = AfterActivation(model)
    for site in sites:
        act = site.act or activations.modules.get(site.followed_by or "", site.followed_by)
        watch = Watch(site, act, wanted, samples)

        def before(_: nn.Module, args: Any, kwargs: Any, watch: Watch = watch) -> None:
            order.setdefault(watch.site.path, watch)
            watch.before(args, kwargs)

        handles = [site.module.register_forward_pre_hook(before, with_kwargs=True)]
        if wanted & {"dead", "saturated"}:
            handles += activations.listen(site, watch.after)
        for handle in handles:
            stack.callback(handle.remove)
