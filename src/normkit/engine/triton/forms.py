"""How kernels see a tensor: its form, tiles, and the order in which memory is gone through.

Measured on an H200 (bfloat16, channels_last, 51 MB: eight passes take 97 µs): with two loads a
thread under way the moments took 25 µs and the sums of backward 40, twice and 1.6 times what their
bytes take, while the maps were at their bytes; with eight loads 21 and 35. Started ahead of the
kernel in front, six launches save 4 µs in all, and going backwards up to 4 (contiguous: 10). What
did not pay: hints for the cache (0 to +2 µs), copies through shared memory (0), tiles 256 cells
wide (+13), eight programs a multiprocessor with four loads a thread (+12), rows as runs at 14 × 14
(+50), and of several rows several tiles at once (+280).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

FLAT_WARPS = 8  # of the kernels for short rows: a thread has one vector
TILE = 2048  # elements of a map's program: two 16-byte loads of bfloat16 a thread
COLUMNS = 128  # cells of a tile, side by side in memory
WIDEST = 512  # those of a reduction of many short cells
UNROLL = 8  # loads that each thread of a reduction has under way
PLACES = 4  # programs of a reduction for each multiprocessor: so many have a place at once
PROGRAMS = 8  # of other kernels
GRID_LIMIT = 65_535  # of the second and third axis


class Form(NamedTuple):
    """How a kernel sees the tensor: B blocks of M positions × K cells, or R rows."""

    blocks: int
    positions: int
    cells: int
    rows: bool
    tile_positions: int
    tile_cells: int

    @property
    def tile(self) -> tuple[int, ...]:
        """What a kernel is compiled for: V, ROWS, POSITIONS, CELLS."""
        return self.shared, self.rows, self.tile_positions, self.tile_cells

    @property
    def shared(self) -> int:
        """The power of two, up to 16, that divides the positions."""
        return math.gcd(self.positions, 16)

    @property
    def turns(self) -> int:
        return self.positions // self.shared

    @property
    def flat(self) -> tuple[int, int, int, int, int] | None:
        """M, CELLS, VECTORS, SPAN and PIECES of the kernels for short rows (flat.py); None where
        they do not serve."""
        if not self.rows or self.shared >= 4 or self.positions > TILE // 8:
            return None
        cells = power_of_two(TILE // self.positions + 1) // 2
        if self.cells % cells:
            return None
        span = min(8, power_of_two(self.positions + 1) // 2)  # no longer than a row
        vectors = power_of_two(-(-cells * self.positions // span))
        # a row that starts with the last value of a vector has the most of them
        pieces = power_of_two((self.positions + span - 2) // span + 1)
        return self.positions, cells, vectors, span, pieces

    @property
    def cell_tiles(self) -> int:
        return -(-self.cells // self.tile_cells)


class Reduction(NamedTuple):
    """How a reduction goes through a tensor."""

    splits: int  # into how many parts each cell is cut
    span: int  # their positions; the last may have fewer
    cells: int  # of a program
    positions: int  # of a program's tile, of which it reads several at once
    unroll: int

    def tile(self, form: Form, bytes: int) -> tuple[int, ...]:
        """What a kernel is compiled for, of values of so many bytes: V, ROWS, POSITIONS, CELLS,
        UNROLL, EVEN, WHOLE."""
        unroll = max(1, self.unroll * 2 // bytes)
        step = self.positions * unroll
        whole = form.cells % self.cells == 0  # no tile has cells beside the tensor
        even = whole and form.positions % step == 0 and self.span % step == 0
        return form.shared, form.rows, self.positions, self.cells, unroll, even, whole

    def grid(self, form: Form) -> tuple[int, int, int]:
        return -(-form.cells // self.cells), self.splits, form.blocks


class Sweep(NamedTuple):
    """How a reduction goes through a tensor, and after it a map, which has a program for each tile
    and goes backwards."""

    splits: int  # parts of a cell
    depth: int  # tiles that each program of the reduction goes through
    programs: int  # times as many tiles
    wave: bool  # whether all programs of the reduction have a place at once

    @property
    def tiles(self) -> int:
        return self.depth * self.programs


@lru_cache(maxsize=1024)
def form_of(shape: tuple[int, ...]) -> Form:
    """The form of a layout's view: (B, M, K), or (R, M) for rows."""
    if len(shape) == 2:
        cells, positions = shape
        wide = min(power_of_two(positions), 2048)
        return Form(1, positions, cells, True, wide, max(1, min(TILE // wide, power_of_two(cells))))
    blocks, positions, cells = shape
    wide = min(power_of_two(cells), COLUMNS)
    high = max(1, min(TILE // wide, power_of_two(positions)))
    return Form(blocks, positions, cells, False, high, wide)


def sweep_of(form: Form, multiprocessors: int) -> Sweep:
    """Of a map, after ``reduction_of`` the same tensor."""
    reduction = reduction_of(form, multiprocessors)
    programs = form.cell_tiles * reduction.splits * form.blocks
    wave = math.prod(reduction.grid(form)) <= multiprocessors * PLACES
    return Sweep(reduction.splits, reduction.span // form.tile_positions, programs, wave)


@lru_cache(maxsize=1024)
def reduction_of(form: Form, multiprocessors: int) -> Reduction:
    """As many programs as have a place at once, if possible, each with many loads under way.

    Several rows are read one tile at a time: threads would have to exchange what they add up.
    """
    wanted = multiprocessors * PLACES
    cells, positions, most = form.tile_cells, form.tile_positions, UNROLL
    if form.rows and cells > 1:
        most = 1
    elif positions > 1 and positions * cells == TILE:
        positions //= 2  # a thread has one load of each tile
        many = form.blocks * form.cell_tiles > wanted and form.cells >= WIDEST
        if many and not form.rows and form.positions <= positions * UNROLL:
            cells, positions = WIDEST, positions * cells // WIDEST
    unit = max(positions * most, form.tile_positions)  # what a program reads at once
    units = -(-form.positions // unit)
    splits = max(1, min(units, wanted // max(1, form.blocks * -(-form.cells // cells))))
    if splits == 1:
        span = -(-form.positions // form.tile_positions) * form.tile_positions
    else:
        span = -(-units // splits) * unit
    unroll = min(most, power_of_two(-(-span // positions)))
    return Reduction(-(-form.positions // span), span, cells, positions, unroll)


def power_of_two(value: int) -> int:
    """The least power of two that is not below a value."""
    return 1 << max(0, value - 1).bit_length()


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
