"""Launching a Triton kernel again without working out again what it was compiled for.

Triton looks at every argument on every call to find the right binary: more host time than a small
layer's kernels take. A ``Launch`` is everything that stays the same from call to call: the kernel,
its grid, the numbers and the constants. What is left are addresses and the types behind them.

Kernels that end with a constant OVERLAP are started, on GPUs that can, while the kernel in front of
them still runs (CUDA's programmatic dependent launch), so that nothing waits for their first
programs to be placed. Such a kernel calls ``stages.wait`` in every program, before it touches what
others have written, and is in front of the next one in turn. It may read before that only what
the reduction of the same step has read: see ``passes.apply_map``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from normkit.engine.replay.record import Unrecordable, active


@lru_cache(maxsize=16)
def overlaps(index: int) -> bool:
    """Whether a device starts kernels ahead: NVIDIA's from Hopper on."""
    if index < 0 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(index) >= (9, 0)


class Launch:
    """kernel[grid](*tensors, *numbers, *constants), in the order of the kernel's arguments.

    Constants are compiled in. Tensors may be None where the constants tell the kernel not to touch
    them. Make one for each shape and keep it: see ``functools.lru_cache`` where they are made.
    With ``alone`` it never overlaps with the kernel in front. ``registers`` is how many a thread
    may have, so that more programs have a place.
    """

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[Any, ...],
        constants: tuple[int, ...],
        warps: int = 4,
        *,
        alone: bool = False,
        registers: int | None = None,
    ) -> None:
        self.kernel, self.grid, self.warps = kernel, grid, warps
        self.options = {"num_warps": warps}
        if registers is not None:
            self.options["maxnreg"] = registers
        self.numbers, self.constants, self.alone = numbers, constants, alone
        self.known: dict[tuple[Any, ...], Callable[..., None]] = {}
        self.compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        first = tensors[0]
        assert first is not None
        if type(first) is not Tensor and isinstance(first, FakeTensor):
            return  # nothing to compute, and a kernel would write to address 0
        if active.recording is not None:
            active.recording.launched(self, tensors)
        index = first.get_device()
        if index < 0:  # Triton's interpreter
            self.compile(tensors)
            return
        if index != torch._C._cuda_getDevice():
            with torch.cuda.device(index):
                self(*tensors)
            return
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        bits = 0
        for address in addresses:
            bits |= address
        if bits & 15:  # not aligned: another binary
            self.compile(tensors)
            return
        types = (index, *[None if t is None else t.dtype for t in tensors])
        start = self.known.get(types)
        if start is None:
            self.compiled[types] = self.compile(tensors)
            self.known[types] = self.starter(self.compiled[types])
            return
        start(torch._C._cuda_getCurrentRawStream(index), addresses)

    def compile(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """Triton's own way, which compiles what it has not seen, and launches."""
        first = tensors[0]
        assert first is not None
        given = [first if t is None else t for t in tensors]
        index = first.get_device()
        names = self.kernel.arg_names[len(given) + len(self.numbers) :]
        named = dict(zip(names, self.all_constants(index), strict=True))
        if named.get("OVERLAP"):
            named["launch_pdl"] = True
        return self.kernel[self.grid](*given, *self.numbers, **named, **self.options)

    def all_constants(self, index: int) -> tuple[Any, ...]:
        """Those given, and OVERLAP for kernels that have it."""
        if self.kernel.arg_names[-1] != "OVERLAP":
            return self.constants
        return *self.constants, overlaps(index) and not self.alone

    def starter(self, compiled: Any) -> Callable[[int, list[int]], None]:
        """What a compiled kernel does when it is called, less the hooks for Triton's profilers."""
        x, y, z = (*self.grid, 1, 1)[:3]
        rest = (*self.numbers, *self.all_constants(-1))
        run, function = compiled.run, compiled.function
        hooks = (compiled.packed_metadata, None, None, None)
        scratch = getattr(run, "global_scratch_size", 1) + getattr(run, "profile_scratch_size", 1)
        if not scratch and not hasattr(run, "arg_annotations"):  # Triton 3.6
            flags = (run.launch_cooperative_grid, run.launch_pdl, None, None)
            launch = run.launch

            def start(stream: int, addresses: list[int]) -> None:
                launch(x, y, z, stream, function, *flags, *hooks, *addresses, *rest)
        else:

            def start(stream: int, addresses: list[int]) -> None:
                run(x, y, z, stream, function, *hooks, *addresses, *rest)

        return start

    def started(self, tensors: Sequence[Tensor | None]) -> dict[str, Any]:
        """What C++ needs to start it again: the function, its grid and its numbers."""
        first = tensors[0]
        assert first is not None
        index = first.get_device()
        grid = [*self.grid, 1, 1][:3]
        plain = {"grid": grid, "threads": 0, "shared": 0, "numbers": [], "call": self}
        plain["overlap"] = False
        if index < 0:  # the interpreter: it is called
            return {**plain, "function": 0}
        compiled = self.compiled.get((index, *[None if t is None else t.dtype for t in tensors]))
        if compiled is None:
            raise Unrecordable("a tensor is not aligned")
        run, metadata = compiled.run, compiled.metadata
        scratch = getattr(run, "global_scratch_size", 0) or getattr(run, "profile_scratch_size", 0)
        special = scratch or getattr(run, "launch_cooperative_grid", False)
        if special or max(getattr(metadata, "cluster_dims", (1,))) > 1:
            raise Unrecordable("a kernel is started in a special way")
        given = self.kernel.params[len(tensors) :]
        numbers = [
            ("f" if type(n) is float else "i" if -(2**31) <= n < 2**31 else "l", n)
            for n, parameter in zip(self.numbers, given, strict=False)
            # Triton compiles ones in
            if type(n) is float or n != 1 or parameter.do_not_specialize
        ]
        return {
            **plain,
            "function": compiled.function,
            "threads": 32 * metadata.num_warps,
            "shared": metadata.shared,
            "numbers": numbers,
            "overlap": bool(getattr(run, "launch_pdl", False)),
        }
