"""What a run measures, as plain data: every writer reads these."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

LIMIT = 1.5  # times nn.BatchNorm2d: what a layer of the family may cost
RESTLESS = 1.5  # a busy machine: one and the same layer takes that much longer now and then

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}

NORMKIT = "normkit"
BASELINE = "nn.BatchNorm2d"
PLAIN = "straightforward"
PLAIN_COMPILED = "straightforward, compiled"
NORMKIT_COMPILED = "normkit, compiled"


@dataclass(frozen=True)
class Setting:
    """One input to measure with."""

    shape: tuple[int, ...]
    format: str
    dtype: torch.dtype
    device: torch.device

    @property
    def input_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        return f"{sizes} · {self.format} · {str(self.dtype).removeprefix('torch.')}"


@lru_cache(maxsize=1)
def tensors(setting: Setting) -> tuple[Tensor, Tensor]:
    """An input and the gradient of its output, the same in every run.

    The mean of one makes samples similar, as activations are: ubn then keeps to its batch
    statistics, which cost more than the running ones it would settle on with unlike samples.
    """
    drawn = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(setting.shape, generator=drawn) + mean for mean in (1.0, 0.0))
    x, dy = (
        t.to(setting.device, setting.dtype).to(memory_format=FORMATS[setting.format])
        for t in (x, dy)
    )
    return x.requires_grad_(), dy


@dataclass
class Cell:
    """What one contestant cost. None: not measured on this device."""

    seconds: float
    saved_per_input_byte: float
    replay_seconds: float | None = None
    peak_bytes: int | None = None
    kernels: int | None = None


@dataclass
class Row:
    """A layer and its competitors, measured in turns."""

    layer: str
    family: bool
    cells: dict[str, Cell] = field(default_factory=dict)
    note: str = ""

    @property
    def ratio(self) -> float | None:
        """The layer's time over that of nn.BatchNorm2d."""
        if NORMKIT not in self.cells:
            return None
        return self.cells[NORMKIT].seconds / self.cells[BASELINE].seconds


@dataclass
class Table:
    """All layers at one setting. ``floor`` is the time of eight passes over memory, on a GPU."""

    setting: Setting
    rows: list[Row] = field(default_factory=list)
    floor: float | None = None

    @property
    def unrest(self) -> float:
        """How much longer nn.BatchNorm2d took beside one layer than beside another."""
        times = [row.cells[BASELINE].seconds for row in self.rows if row.cells]
        return max(times) / min(times) if times else 1.0

    @property
    def contestants(self) -> list[str]:
        """The columns, in the order in which they first appear."""
        return list(dict.fromkeys(name for row in self.rows for name in row.cells))


@dataclass(frozen=True)
class Speed:
    """How fast a whole network trains with one normalizer. None: it did not fit in memory."""

    network: str
    images_per_second: float | None
    peak_bytes: int | None


@dataclass
class Run:
    """Everything that is printed and written."""

    environment: dict[str, str | int | float]
    tables: list[Table] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """How many family layers stay within the limit in every setting, and which do not."""
        worst: dict[str, float] = {}
        for table in self.tables:
            for row in table.rows:
                if row.family and row.ratio is not None:
                    worst[row.layer] = max(worst.get(row.layer, 0.0), row.ratio)
        above = sorted((n for n, r in worst.items() if r > LIMIT), key=lambda n: -worst[n])
        said = (
            f"{len(worst) - len(above)} of {len(worst)} family layers are within {LIMIT}x of "
            f"{BASELINE} in every setting."
        )
        if above:
            said += " Above: " + ", ".join(f"{name} {worst[name]:.2f}x" for name in above) + "."
        return said
