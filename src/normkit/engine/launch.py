"""Launching a Triton kernel again without working out again what it was compiled for.

Triton looks at every argument on every call to find the right binary: more host time than a small
layer's kernels take. What it looks at is types, the alignment of pointers, and integers; here that
is a key, and a kernel seen before is started directly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_seen: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_direct = True  # until a version of Triton is met that does not allow it


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *args: Any, **options: Any) -> None:
    """kernel[grid](first, *args, **options); options are constants of compilation, num_warps."""
    index = first.get_device()
    if index < 0:  # Triton's interpreter
        kernel[grid](first, *args, **options)
        return
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            launch(kernel, grid, first, *args, **options)
        return
    # all that the binary depends on, or more; a float is passed and not compiled in
    key = (
        id(kernel),
        index,
        first.dtype,
        first.data_ptr() & 15,
        *options.values(),
        *[
            (arg.dtype, arg.data_ptr() & 15)
            if isinstance(arg, Tensor)
            else (None if isinstance(arg, float) else arg)
            for arg in args
        ],
    )
    found = _seen.get(key)
    if found is None:
        compiled = kernel[grid](first, *args, **options)
        constants = tuple(options[name] for name in kernel.arg_names[len(args) + 1 :])
        _seen[key] = compiled, constants
        return
    compiled, constants = found
    _start(compiled, index, (*grid, 1, 1), (first, *args, *constants))


def _start(compiled: Any, index: int, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """What a compiled kernel does when it is called, less the hooks for Triton's profilers."""
    global _direct
    if _direct:
        try:
            compiled.run(
                *grid[:3],
                torch._C._cuda_getCurrentRawStream(index),
                compiled.function,
                compiled.packed_metadata,
                None,
                None,
                None,
                *args,
            )
            return
        except (AttributeError, TypeError):  # another version of Triton takes other arguments
            _direct = False
    compiled[grid[:3]](*args)
