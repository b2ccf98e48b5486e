"""Which of its algorithms cuDNN may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def one_algorithm(wanted: bool = True) -> Iterator[None]:
    """cuDNN computes the same numbers every time; if that is not wanted, it takes what is fastest.

    By the setters behind ``torch.backends.cudnn``: those refuse to be set in programs that have
    called disable_global_flags, as test suites of torch do.
    """
    cudnn: Any = torch.backends.cudnn
    setters: Any = torch._C
    before = cudnn.benchmark, cudnn.deterministic
    setters._set_cudnn_benchmark(not wanted)
    setters._set_cudnn_deterministic(wanted)
    try:
        yield
    finally:
        setters._set_cudnn_benchmark(before[0])
        setters._set_cudnn_deterministic(before[1])
