"""normkit::remember: lets the statistics that an operator found enter the running ones."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from normkit.engine.launch import Launch
from normkit.engine.operators_ready import on_triton

torch.library.define(
    "normkit::remember",
    "(Tensor tables, Tensor(a!) mean, Tensor(b!) second, Tensor(c!) batches, Tensor(d!) nonfinite,"
    " Tensor(e!) arrivals, Tensor? rate, SymInt begin, SymInt values, int less, bool conditional,"
    " float weight) -> ()",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides),
)


def _remember(
    tables: Tensor, mean: Tensor, second: Tensor, batches: Tensor, nonfinite: Tensor,
    arrivals: Tensor, rate: Tensor | None, begin: int, values: int, less: int, conditional: bool,
    weight: float,
) -> None:  # fmt: skip
    """Whole, or not at all if one is not finite; which of both is counted.

    The second statistic is multiplied by values / (values − less). The weight of the new value is
    a number or, if there is one, the rate.
    """
    on_triton("normkit::remember", tables)
    correction = values / max(values - less, 1)
    numbers = begin, tables.shape[0] - 1, mean.shape[0], weight, correction
    start = _launch(numbers, (rate is not None, conditional))
    start(tables, mean, second, batches, nonfinite, arrivals, rate)


@lru_cache(maxsize=4096)
def _launch(numbers: Any, flags: Any) -> Launch:
    from normkit.engine import triton_memory as kernels

    return Launch(kernels.remember_kernel, (1,), numbers, (*flags, 256))


torch.library.impl("normkit::remember", ("cpu", "cuda"), _remember)
torch.library.register_fake("normkit::remember", lambda *given: None)
