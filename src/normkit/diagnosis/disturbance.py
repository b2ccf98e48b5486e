"""How much a model minds wrong running statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.diagnosis.observe.collect import norms_of
from normkit.diagnosis.observe.passes import Loss, losses_of
from normkit.errors import NothingToDo, OptionError
from normkit.inspection import undisturbed
from normkit.inspection.batches import BatchReader, Forward
from normkit.inspection.statistics import pooled_statistics_of

PER = ("channel", "layer")
DELTAS = (0.1, 0.2, 0.3, 0.4, 0.5)
BATCHES = 16


@contextmanager
def disturbed(
    model: nn.Module, delta: float, *, where: Any = None, per: str = "channel", seed: int = 0
) -> Iterator[tuple[str, ...]]:
    """Running statistics are wrong inside, and what they were afterwards, even after an error.

        mean ← (1 + a)·mean    var ← (1 + b)·var    a, b uniform in (−delta, delta)

    a and b are drawn for each channel, or for each layer with ``per="layer"``; a variance does not
    fall below 0. Gives the paths of the layers. What the layers learn inside is forgotten.

    Paper: Huang et al. 2022 (estimation shift), eq. 5, which disturbs the first norm of each of
    the first six blocks: ``where=first_of_blocks(6)``.
    """
    if not delta >= 0:
        raise OptionError(f"disturbed expects delta ≥ 0, got {delta!r}.")
    if per not in PER:
        raise OptionError(f"disturbed expects per='channel' or 'layer', got {per!r}.")
    sites = norms_of(model, where)
    every = {site.path: pooled_statistics_of(site.norm) for site in sites}
    kept = {path: statistics for path, statistics in every.items() if statistics is not None}
    if not kept:
        raise NothingToDo("None of these norms has running statistics to disturb.")
    buffers = {b for one in kept.values() for b in one.norm.buffers(recurse=False)}
    before = [(buffer, buffer.detach().clone()) for buffer in buffers]
    drawn = torch.Generator().manual_seed(seed)
    try:
        for statistics in kept.values():
            statistics.put(_wrong(statistics.read(), delta, per == "channel", drawn))
        yield tuple(kept)
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)


def first_of_blocks(blocks: int) -> Any:
    """A ``where`` for the first norm of each of the first blocks."""

    def chosen(site: Any) -> bool:
        inside = site.block_index is not None and site.block_index < blocks
        return inside and site.position == 1 and not site.shortcut

    return chosen


def _wrong(kept: Moments, delta: float, each: bool, drawn: torch.Generator) -> Moments:
    def factor(like: Tensor) -> Tensor:
        shape = like.shape if each else (1, 1)
        noise = torch.rand(shape, generator=drawn, dtype=torch.float64) * 2 - 1
        return (1 + delta * noise).to(like)

    mean = kept.mean * factor(kept.mean)
    return Moments(mean, (kept.var * factor(kept.var)).clamp(min=0), kept.count)


@dataclass(frozen=True)
class Disturbance:
    """The loss by magnitude of the disturbance: mean over the seeds, and each of them."""

    layers: tuple[str, ...]
    undisturbed: float
    losses: dict[float, tuple[float, ...]]

    @property
    def means(self) -> dict[float, float]:
        return {delta: sum(losses) / len(losses) for delta, losses in self.losses.items()}

    def __str__(self) -> str:
        lines = [f"{len(self.layers)} layers disturbed", f"    0  loss {self.undisturbed:.4g}"]
        lines += [f"{delta:>5g}  loss {mean:.4g}" for delta, mean in self.means.items()]
        return "\n".join(lines)


def disturbance_test(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | None = None,
    *,
    deltas: Sequence[float] = DELTAS,
    seeds: int = 5,
    where: Any = None,
    per: str = "channel",
    max_batches: int | None = BATCHES,
    forward: Forward | None = None,
) -> Disturbance:
    """The loss in eval mode with disturbed statistics, mean over ``seeds`` draws. Changes nothing.

    ``loss(output, target)``, which may as well be an error rate, and ``forward`` are as in
    ``attribute_gap``.
    """
    if seeds < 1:
        raise OptionError(f"disturbance_test expects seeds ≥ 1, got {seeds!r}.")
    with undisturbed(model), disturbed(model, 0.0, where=where, per=per) as layers:
        pass  # refuses what cannot be done
    kept = list(BatchReader(model, batches, forward, max_batches=max_batches))
    plain = losses_of(model, kept, (), loss).mean
    losses: dict[float, tuple[float, ...]] = {}
    for delta in deltas:
        drawn = []
        for seed in range(seeds):
            with undisturbed(model), disturbed(model, delta, where=where, per=per, seed=seed):
                drawn.append(losses_of(model, kept, (), loss).mean)
        losses[float(delta)] = tuple(drawn)
    return Disturbance(layers, plain, losses)
