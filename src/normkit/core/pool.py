"""What shares a mean and a variance, for maps that are nothing but a standardization."""

from __future__ import annotations

from typing import NamedTuple


class Pool(NamedTuple):
    """All samples and one channel ("batch"), or one sample and a group of channels ("sample").

    A layer that says it has such a pool promises: its map is (x − mean) / √(var + eps), then
    weight and bias per channel. A backend may then compute it in fewer steps.
    """

    kind: str
    eps: float
    groups: int = 0  # of channels, for "sample"
