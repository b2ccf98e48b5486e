"""normkit::remember: lets the statistics that an operator found enter the running ones."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from normkit.engine.launch import Launch
from normkit.engine.operators_ready import on_triton
from normkit.engine.operators_records import TAGS

torch.library.define(
    "normkit::remember",
    "(Tensor tables, Tensor(a!) mean, Tensor(b!) second, Tensor(c!) batches, Tensor(d!) nonfinite,"
    " Tensor(e!) arrivals, SymInt begin, SymInt values, int less, float weight) -> ()",
    tags=TAGS,
)


def _remember(
    tables: Tensor, mean: Tensor, second: Tensor, batches: Tensor, nonfinite: Tensor,
    arrivals: Tensor, begin: int, values: int, less: int, weight: float,
) -> None:  # fmt: skip
    """Whole, or not at all if one is not finite; which of both is counted.

    The second statistic is multiplied by values / (values − less).
    """
    on_triton("normkit::remember", tables)
    start = _launch((begin, mean.shape[0], weight, values / max(values - less, 1)))
    start(tables, mean, second, batches, nonfinite, arrivals)


@lru_cache(maxsize=4096)
def _launch(numbers: Any) -> Launch:
    from normkit.engine import triton_memory as kernels  # needs Triton, which is here

    return Launch(kernels.remember_kernel, (1,), numbers, (256,))


torch.library.impl("normkit::remember", ("cpu", "cuda"), _remember)
torch.library.register_fake("normkit::remember", lambda *given: None)
