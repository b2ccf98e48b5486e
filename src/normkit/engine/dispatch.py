"""Which backend runs, and why: the one place that chooses."""

from __future__ import annotations

import importlib
import os
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normkit.core.layout import Layout
from normkit.engine.torch import passes as torch_passes
from normkit.errors import OptionError, nearest

# looked up once: every forward asks, more than once
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state

NAMES = ("auto", "torch", "triton")
_forced = "auto"


def choose(x: Tensor, layout: Layout) -> ModuleType:
    """The backend for a tensor: Triton where it can, unless one is forced."""
    if _forced == "torch" or (_forced == "auto" and not x.is_cuda):
        return torch_passes  # no reasons needed
    triton, obstacle = _triton_for(x, layout)
    if not obstacle and triton is not None:
        return triton
    if _forced == "triton":
        raise OptionError(f"Triton was asked for, but {obstacle}. Try use_backend('auto').")
    return torch_passes


def reason(x: Tensor, *layouts: Layout) -> str:
    """Which backend runs for a tensor, and why not the other, in one sentence.

    Of several layouts the first that Triton serves is taken; forced, it has to serve the first.
    """
    obstacles = [_triton_for(x, layout)[1] for layout in layouts]
    obstacle = obstacles[0] if _forced == "triton" or "" not in obstacles else ""
    if _forced == "torch":
        return "torch, because use_backend('torch') is in force" + (
            f"; Triton could not: {obstacle}." if obstacle else "; Triton could."
        )
    if obstacle and _forced == "triton":
        return f"no backend: Triton is asked for, but {obstacle}."
    if obstacle:
        return f"torch, because {obstacle}."
    return "triton" + (" (forced)." if _forced == "triton" else ".")


def use_backend(name: str) -> _Forced:
    """Force a backend, "torch" or "triton", or let the engine choose again: "auto".

    Takes effect at once, for all layers; as a context manager it ends with the block. A backend
    that cannot serve a tensor is then an error instead of a silent change.
    """
    global _forced
    if name not in NAMES:
        raise OptionError(f"Unknown backend {name!r}. {nearest(name, NAMES)}")
    before, _forced = _forced, name
    return _Forced(before)


class _Forced:
    """Gives the choice back when a block ends."""

    def __init__(self, before: str) -> None:
        self.before = before

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        global _forced
        _forced = self.before


@lru_cache(maxsize=1)
def _triton() -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module("normkit.engine.triton.passes"), ""
    except ImportError as error:
        return None, f"Triton cannot be imported ({error})"


def _triton_for(x: Tensor, layout: Layout) -> tuple[ModuleType | None, str]:
    """The Triton backend, and what keeps it from serving this tensor, if anything."""
    # the interpreter is for tests: it serves a CPU tensor only when asked to
    interpreted = _forced == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (x.is_cuda or (interpreted and x.device.type == "cpu")):
        return None, f"the tensor is on {x.device.type}"
    module, obstacle = _triton()
    if module is None:
        return None, obstacle
    return module, str(module.serves(x, layout))


def expression_wanted() -> bool:
    """Whether someone looks into the arithmetic: compilers, transforms, tracers, dual numbers."""
    return (
        torch.compiler.is_compiling()
        or _transforms()
        or _tracing() is not None
        or forward_ad._current_level >= 0
    )


def expression_wanted_of(grad: Tensor) -> bool:
    """The same in a backward: someone differentiates it once more, or has many gradients at once
    (``is_grads_batched``, ``jacobian(vectorize=True)``: tensors of torch's first vmap)."""
    return (
        torch.is_grad_enabled()
        or expression_wanted()
        or torch._C._functorch.is_legacy_batchedtensor(grad)
    )
