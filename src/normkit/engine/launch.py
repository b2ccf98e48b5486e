"""Launching a Triton kernel again without working out again what it was compiled for.

Triton looks at every argument on every call to find the right binary: more host time than a small
layer's kernels take. What it looks at is types, the alignment of pointers, and numbers; here that
is a key, and a kernel seen before is started directly, with addresses instead of tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_seen: dict[tuple[Any, ...], Any] = {}
_direct = True  # until a version of Triton is met that does not allow it


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[Any, ...],
    constants: tuple[int, ...],
    warps: int = 4,
) -> None:
    """kernel[grid](*tensors, *numbers, *constants), in the order of the kernel's arguments.

    Constants are compiled in. The first tensor stands in for those that are None: a kernel does
    not touch what its constants say it has not got.
    """
    first = tensors[0]
    assert first is not None
    index = first.get_device()
    if index >= 0:
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                launch(kernel, grid, tensors, numbers, constants, warps)
            return
        addresses = [(first if t is None else t).data_ptr() for t in tensors]
        aligned = True
        for address in addresses:
            if address & 15:
                aligned = False
        if aligned and _direct:
            types = tuple([None if t is None else t.dtype for t in tensors])
            key = (id(kernel), index, warps, constants, numbers, types)
            compiled = _seen.get(key)
            if compiled is None:
                _seen[key] = _compile(kernel, grid, tensors, numbers, constants, warps)
            else:
                _start(compiled, index, grid, (*addresses, *numbers, *constants))
            return
    _compile(kernel, grid, tensors, numbers, constants, warps)


def _compile(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: tuple[Tensor | None, ...],
    numbers: tuple[Any, ...],
    constants: tuple[int, ...],
    warps: int,
) -> Any:
    """Triton's own way, which compiles what it has not seen, and launches."""
    given = [tensors[0] if t is None else t for t in tensors]
    names = kernel.arg_names[len(given) + len(numbers) :]
    named = dict(zip(names, constants, strict=True))
    return kernel[grid](*given, *numbers, **named, num_warps=warps)


def _start(compiled: Any, index: int, grid: tuple[int, ...], args: tuple[Any, ...]) -> None:
    """What a compiled kernel does when it is called, less the hooks for Triton's profilers."""
    global _direct
    x, y, z = (*grid, 1, 1)[:3]
    stream = torch._C._cuda_getCurrentRawStream(index)
    try:
        compiled.run(
            x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *args
        )
    except (AttributeError, TypeError):  # another version of Triton takes other arguments
        _direct = False
        compiled[x, y, z](*args)
