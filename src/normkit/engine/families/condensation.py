"""The condensation score on Triton: weights from the moments, one read of the samples, the update.

With w_n = 1/‖x_n‖, and ‖x_n‖² from the parts of the moments,

    S = (‖Σ w_n x_n‖² − n) / (n(n − 1))

A sample is D values side by side in memory, whatever its format. D comes as D/V and V, like the
positions of triton/passes.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from normkit.core.fusion import Condensation
from normkit.core.layout import Layout
from normkit.engine.replay.record import active
from normkit.engine.triton import forms, passes
from normkit.engine.triton.launch import Launch
from normkit.engine.triton.passes import Parts

WIDTH = 1024  # values of a sample a program reads at once: 16 bytes of bfloat16 a thread
SAMPLES = 8


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
        if active.recording is not None:
            active.recording.obstacle = "torch changes the score"
        score.mul_(decay).add_((1 - decay) * factor)
        return
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
    _, channels, positions, splits, _ = size
    width = min(passes.power_of_two(channels), 1024)
    depth = min(passes.power_of_two(splits), 4096 // width)
    weights = Launch(weights_kernel, (samples,), size, (depth, width))
    values = channels * positions
    width = min(passes.power_of_two(values), WIDTH)
    programs = min(-(-values // width), multiprocessors * forms.PROGRAMS)
    shared = math.gcd(values, 16)
    tile = shared, min(passes.power_of_two(samples), SAMPLES), width, 256
    numbers = samples, values // shared, decay, factor
    return weights, Launch(score_kernel, (programs,), numbers, tile), programs


# ---------------------------------------------------------------- kernels


@triton.jit
def weights_kernel(
    parts, out, rows, C, positions, splits, span, DEPTH: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """1/‖x_n‖ of sample n = program id, 0 for a sample of zeros; parts (2, splits, N, C)."""
    sample = tl.program_id(0)
    squares = parts + tl.cast(splits, tl.int64) * rows * C
    total = tl.zeros((DEPTH, WIDTH), tl.float32)
    for begin in range(0, splits, DEPTH):
        split = begin + tl.arange(0, DEPTH)
        count = tl.minimum(positions - split * span, span).to(tl.float32)[:, None]
        row = (split * rows + sample).to(tl.int64)[:, None] * C
        for start in range(0, C, WIDTH):
            channel = start + tl.arange(0, WIDTH)
            mask = (split < splits)[:, None] & (channel < C)[None, :]
            mean = tl.load(parts + row + channel[None, :], mask=mask, other=0.0)
            square = tl.load(squares + row + channel[None, :], mask=mask, other=0.0)
            total += square + count * mean * mean
    norm = tl.sum(tl.sum(total, 0), 0)
    tl.store(out + sample, tl.where(norm > 0, 1.0 / tl.sqrt(norm), 0.0))


@triton.jit
def score_kernel(
    x, weights, score, arrivals, samples, turns, decay, factor,
    V: tl.constexpr, SAMPLES: tl.constexpr, WIDTH: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """score ← decay · score + (1 − decay) · factor · S, if that is finite.

    Every program sums over the samples at its own places and writes the sum of the squares behind
    the weights; the last to arrive adds them up, always in the same order.
    """
    D = tl.cast(turns, tl.int64) * V
    program, programs = tl.program_id(0), tl.num_programs(0)
    squares = weights + samples
    lane = tl.arange(0, WIDTH)
    found = tl.zeros((WIDTH,), tl.float32)
    for block in range(program, tl.cdiv(D, WIDTH), programs):
        place = tl.cast(block, tl.int64) * WIDTH + lane
        total = tl.zeros((WIDTH,), tl.float32)
        for start in range(0, samples, SAMPLES):
            sample = start + tl.arange(0, SAMPLES)
            mask = (sample < samples)[:, None] & (place < D)[None, :]
            at = sample.to(tl.int64)[:, None] * D + place[None, :]
            value = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weights + sample, mask=sample < samples, other=0.0)
            total += tl.sum(value * weight[:, None], 0)
        found += total * total
    tl.store(squares + program, tl.sum(found, 0))
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel") == programs - 1:
        tl.store(arrivals, 0)  # ready for the next launch
        total = tl.zeros((MANY,), tl.float32)
        for start in range(0, programs, MANY):
            entry = start + tl.arange(0, MANY)
            total += tl.load(squares + entry, mask=entry < programs, other=0.0)
        n = tl.cast(samples, tl.float32)
        new = (tl.sum(total, 0) - n) / (n * (n - 1.0)) * factor
        old = tl.load(score)
        new = decay * old + (1.0 - decay) * new
        # a NaN here would compare as "not condensed" for ever
        tl.store(score, tl.where(new - new == 0, new, old))
