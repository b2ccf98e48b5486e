"""How kernels see a tensor: its form, tiles, and the order in which memory is gone through."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

TILE = 2048  # elements of a map's program: two 16-byte loads of bfloat16 a thread
COLUMNS = 256  # cells of a tile, side by side in memory
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
    def flat(self) -> tuple[int, int, int, int] | None:
        """M, CELLS, FLAT and WIDE of the kernels for short rows (flat.py); None where they do not
        serve."""
        if not self.rows or self.shared >= 4 or self.positions > TILE // 8:
            return None
        cells = power_of_two(TILE // self.positions + 1) // 2
        if self.cells % cells:
            return None
        wide = power_of_two(self.positions)
        return self.positions, cells, power_of_two(cells * self.positions), wide

    @property
    def cell_tiles(self) -> int:
        return -(-self.cells // self.tile_cells)


def reduction_of(form: Form, span: int) -> tuple[int, ...]:
    """What a reduction is compiled for: V, ROWS, POSITIONS, CELLS, UNROLL, EVEN."""
    positions = form.tile_positions
    if positions > 1 and positions * form.tile_cells == TILE:
        positions //= 2  # a thread has one load of each tile
    unroll = min(UNROLL, power_of_two(span // positions))
    step = positions * unroll
    even = form.cells % form.tile_cells == 0 and form.positions % step == 0 and span % step == 0
    return form.shared, form.rows, positions, form.tile_cells, unroll, even


class Sweep(NamedTuple):
    """How a reduction goes through a tensor, and after it a map, which has a program for each tile
    and goes backwards."""

    splits: int  # parts of a cell
    depth: int  # tiles that each program of the reduction goes through
    programs: int  # of the reduction
    wave: bool  # whether all of them have a place at once

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
    splits, span = splits_of(form, multiprocessors)
    programs = form.cell_tiles * splits * form.blocks
    wave = programs <= multiprocessors * PLACES
    return Sweep(splits, span // form.tile_positions, programs, wave)


@lru_cache(maxsize=1024)
def splits_of(form: Form, multiprocessors: int) -> tuple[int, int]:
    """Into how many parts each cell is cut for a reduction, and how long they are."""
    if form.flat:
        return 1, form.positions
    wanted = multiprocessors * PLACES
    unit = form.tile_positions * UNROLL // 2  # what a program reads at once
    units = -(-form.positions // unit)
    splits = max(1, min(units, wanted // max(1, form.cell_tiles * form.blocks)))
    if splits == 1:
        return 1, -(-form.positions // form.tile_positions) * form.tile_positions
    span = -(-units // splits) * unit
    return -(-form.positions // span), span


def power_of_two(value: int) -> int:
    """The least power of two that is not below a value."""
    return 1 << max(0, value - 1).bit_length()


@lru_cache(maxsize=16)
def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
