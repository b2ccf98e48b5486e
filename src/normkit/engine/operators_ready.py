"""Whether an operator can run where it was called: it needs Triton."""

from __future__ import annotations

import importlib
import os
from typing import Any

from torch import Tensor

from normkit.errors import OptionError


def on_triton(operator: str, x: Tensor) -> tuple[Any, Any]:
    """The passes and the families of fused coefficients, on Triton."""
    if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise OptionError(
            f"{operator} expects a tensor on cuda, got one on {x.device.type}: its kernels need a "
            "GPU or, for tests, Triton's interpreter. Try use_backend('torch') before compiling."
        )
    try:
        passes = importlib.import_module("normkit.engine.triton_backend")
        return passes, importlib.import_module("normkit.engine.fused").FAMILIES
    except ImportError as error:
        raise OptionError(
            f"{operator} needs Triton, which cannot be imported ({error}). "
            "Try use_backend('torch') before compiling."
        ) from error
