"""The launches of positional normalization: how pixels are cut into tiles."""

from __future__ import annotations

import math
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from normkit.core.layout import Pixels
from normkit.engine import triton_backend as passes
from normkit.engine import triton_pixel_turns, triton_pixels
from normkit.engine.fused_pixel import Pixel
from normkit.engine.launch import Launch

TILE = 2048  # values: backward keeps several tensors of them in registers
SIDE_BY_SIDE = 16  # pixels of a tile at least where they are neighbours: a sector of memory
MOST = 1024  # channels of a tile where they are not neighbours,
MOST_LAST = 8192  # and where they are
TILES = 16  # that one program of the backward goes through at most

Sizes = tuple[int, int, int, bool]


def write_map(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    pixel: Pixel,
) -> None:
    eps, correction, act, layout = pixel
    start = _map(_sizes(layout), eps, correction, (weight is not None, act, residual is not None))
    rest = None if residual is None else layout.aligned(residual)
    start(layout.aligned(x), weight, bias, rest, y)


def write_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    keep: Tensor | None,
    dx: Tensor,
    pixel: Pixel,
) -> tuple[Tensor | None, Tensor | None]:
    """Writes dx, and the residual's gradient to ``keep``; gives those of weight and bias."""
    eps, correction, act, layout = pixel
    start, reduce, programs = _gradient(
        _sizes(layout),
        eps,
        correction,
        (weight is not None, act, residual is not None, keep is not None),
        passes._multiprocessors(x.device),
    )
    channels = x.shape[1]
    parts = None if weight is None else passes.table(x, 2 * programs * channels)
    rest = None if residual is None else layout.aligned(residual)
    start(layout.aligned(grad), layout.aligned(x), weight, bias, rest, keep, dx, parts)
    if weight is None or parts is None:
        return None, None
    found = passes.table(x, 2 * channels)
    reduce(parts, found)
    dweight, dbias = found.view(2, channels).to(weight.dtype).unbind()
    return dweight, dbias


def _sizes(layout: Pixels) -> Sizes:
    """Blocks, channels, pixels of a block, and whether channels are neighbours in memory."""
    n, c = layout.shape[:2]
    if layout.channels_last or layout.positions == 1:
        return 1, c, n * layout.positions, True
    return n, c, layout.positions, False


class _Form(NamedTuple):
    kernels: ModuleType
    tiles: int  # of a block
    channels: int  # of a tile
    pixels: int
    warps: int


def _form(channels: int, pixels: int, last: bool) -> _Form:
    """All channels in one tile if they fit, else in turns."""
    wide = passes.power_of_two(channels)
    least, size, most = (1, TILE, MOST_LAST) if last else (SIDE_BY_SIDE, 2 * TILE, MOST)
    fits = wide <= most
    if not fits:
        wide = size // least
    high = min(passes.power_of_two(pixels), max(least, size // wide))
    warps = min(16, max(4, wide * high // 512))
    kernels = triton_pixels if fits else triton_pixel_turns
    return _Form(kernels, -(-pixels // high), wide, high, warps)


@lru_cache(maxsize=1024)
def _map(sizes: Sizes, eps: float, correction: int, flags: tuple[bool, str, bool]) -> Launch:
    blocks, channels, pixels, last = sizes
    affine, act, residual = flags
    form = _form(channels, pixels, last)
    divisors, numbers = _numbers(channels, pixels, eps, correction)
    constants = affine, passes.ACTIVATION[act], residual, last, *divisors, *form[2:4]
    kernel, grid = form.kernels.pixel_map_kernel, (blocks * form.tiles,)
    return Launch(kernel, grid, (form.tiles, *numbers), constants, form.warps)


@lru_cache(maxsize=1024)
def _gradient(
    sizes: Sizes,
    eps: float,
    correction: int,
    flags: tuple[bool, str, bool, bool],
    multiprocessors: int,
) -> tuple[Launch, Launch, int]:
    """The gradient, the sum of its parts, and how many parts there are."""
    blocks, channels, pixels, last = sizes
    affine, act, residual, keep = flags
    form = _form(channels, pixels, last)
    tiles = blocks * form.tiles
    span = max(1, min(TILES, tiles // (multiprocessors * passes.PROGRAMS)))
    programs = -(-tiles // span)
    divisors, numbers = _numbers(channels, pixels, eps, correction)
    constants = affine, passes.ACTIVATION[act], residual, keep, last, *divisors, *form[2:4]
    numbers = form.tiles, tiles, span, *numbers
    kernel = form.kernels.pixel_gradient_kernel
    start = Launch(kernel, (programs,), numbers, constants, form.warps)
    width, depth = 8, min(passes.power_of_two(programs), 256)
    reduce = Launch(
        triton_pixels.parameter_gradient_kernel,
        (-(-channels // width), 2),
        (programs, channels),
        (depth, width),
    )
    return start, reduce, programs


def _numbers(
    channels: int, pixels: int, eps: float, correction: int
) -> tuple[tuple[int, int], tuple[Any, ...]]:
    """V and W; c_turns, l_turns, divisor and eps."""
    shared = math.gcd(channels, 16), math.gcd(pixels, 16)
    turns = channels // shared[0], pixels // shared[1]
    return shared, (*turns, float(channels - correction), eps)
