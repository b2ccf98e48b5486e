"""The feature condensation score: how alike the samples of a batch are."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normkit.core.fusion import Condensation
from normkit.core.layout import Channels, Layout
from normkit.core.moments import Moments
from normkit.engine.launch import Launch
from normkit.engine.normalize import dense

if TYPE_CHECKING:  # needs Triton
    from normkit.engine.triton_backend import Parts

WIDTH = 1024  # values of a sample a program reads at once: 16 bytes of bfloat16 a thread
SAMPLES = 8


def condensation_score(x: Tensor, moments: Moments) -> Tensor:
    """Mean cosine between the samples of x over all ordered pairs; 1 for a single sample.

    With unit vectors u_n the pairs need not be formed: (‖Σ u_n‖² − n) / (n(n − 1)). The norms
    come from the moments, so this is one more read of x: O(nD). A zero sample has cosine 0 with
    every other. No gradient, no host synchronisation.
    """
    n = x.shape[0]
    if n == 1:
        return torch.ones((), device=x.device, dtype=moments.mean.dtype)
    with torch.no_grad():
        squares = (moments.var + moments.mean.square()).sum(1) * moments.count  # ‖x_n‖²
        weight = torch.where(squares > 0, squares.rsqrt(), 0)
        total = weighted_sum(x, weight)
        return (total.square().sum() - n) / (n * (n - 1))


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Σ_n weight[n] · x_n as one flat vector in the order of memory."""
    x = dense(x)
    flat = Channels(x).view(x).reshape(x.shape[0], -1)
    return torch.mv(flat.to(weight.dtype).mT, weight)


@torch.no_grad()
def update_score(
    x: Tensor, parts: Parts, layout: Layout, score: Tensor, condensation: Condensation
) -> None:
    """score ← decay · score + (1 − decay) · factor · S of the first samples, on Triton.

    Two launches: the weights, from parts of moments that are there anyway, and one read of those
    samples. Nothing is changed by samples that are not finite.
    """
    samples, decay, factor, arrivals = condensation
    if samples == 1:  # as alike as can be
        score.mul_(decay).add_((1 - decay) * factor)
        return
    from normkit.engine import triton_backend as passes  # needs Triton, which is here

    size = x.shape[0], x.shape[1], x[0, 0].numel(), parts.splits, parts.span
    weights, scored, programs = _launches(
        size, samples, decay, factor, passes._multiprocessors(x.device)
    )
    table = passes.table(x, samples + programs)
    weights(parts.tables, table)
    scored(layout.aligned(x), table, score, arrivals)


@lru_cache(maxsize=1024)
def _launches(
    size: tuple[int, int, int, int, int],
    samples: int,
    decay: float,
    factor: float,
    multiprocessors: int,
) -> tuple[Launch, Launch, int]:
    """The weights, the score, and how many programs the latter has."""
    from normkit.engine import triton_backend as passes
    from normkit.engine import triton_condensation as kernels

    _, channels, positions, _, _ = size
    width = min(passes.power_of_two(channels), 1024)
    weights = Launch(kernels.weights_kernel, (samples,), size, (width,))
    values = channels * positions
    width = min(passes.power_of_two(values), WIDTH)
    programs = min(-(-values // width), multiprocessors * passes.PROGRAMS)
    shared = math.gcd(values, 16)
    tile = shared, min(passes.power_of_two(samples), SAMPLES), width, 256
    numbers = samples, values // shared, decay, factor
    return weights, Launch(kernels.score_kernel, (programs,), numbers, tile), programs
