"""Which code computes a layer: decided here, once, before anything is built.

    torch        passes in torch, coefficients as torch operations: any device
    triton       passes in Triton, coefficients as torch operations
    fused        passes and coefficients in Triton: a few launches each way
    cpp          on a CPU: passes as loops in C++, coefficients as torch operations
    loops        on a CPU: passes and coefficients as loops in C++
    expression   one differentiable expression, for transforms, tracers and compilers to look into
    moments      in a compiled graph: moments by an operator with kernels, the rest expressions
    split        coefficients by an operator, the map an expression: fused with its neighbours
    whole        one operator, residual and activation included

A layer asks ``decide`` with what it is about to compute and hands the answer, a ``Path``, to the
functions of the engine; ``nk.why`` asks the same and prints the answer. A compiler fuses
expressions with what stands around them, but its reductions over maps are slower than ours:
``COMPILED`` says which way a family goes. Measured on an H200 (bf16, channels_last, a step at
128×256×56×56, in units of the memory floor): bn 1.09 split, 1.10 whole, 1.49 as an expression; gn
1.11, 1.09, 1.90; bcn 1.13, 1.11, 1.64; nn.BatchNorm2d compiled 1.27.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from normkit.core.fusion import (
    Depthwise,
    Description,
    Fixed,
    Pixel,
    Squash,
    Traced,
    graph_family,
    has_gaps,
    is_half,
)
from normkit.core.layout import Batch, Channels, Layout, is_channels_last
from normkit.engine import remaking
from normkit.engine.cpu import passes as cpp_passes
from normkit.engine.replay import build
from normkit.engine.torch import passes as torch_passes
from normkit.errors import OptionError, nearest

# for each family in a compiled graph: alone, and with a residual or an activation
COMPILED = {
    "pool-sample": ("split", "whole"),
    "pool-batch": ("split", "whole"),
    "gate": ("split", "whole"),
    "channel": ("split", "whole"),
    "mix": ("split", "whole"),
    "moments": ("moments", "moments"),  # of layers that are in no family
}
OPERATORS = ("split", "whole")
KERNELS = ("fused", *OPERATORS)  # paths on which a kernel makes the coefficients
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CELLS = 65_535  # of a grid
LONGEST = 8192  # weights of a filter: they stay in registers

# looked up once: every forward asks
_transforms, _tracing = torch._C._are_functorch_transforms_active, torch._C._get_tracing_state
_modes = torch._C._len_torch_dispatch_stack
_installed = importlib.util.find_spec("triton") is not None

NAMES = ("auto", "torch", "triton")
FORCED = "use_backend('torch') is in force"
_forced = "auto"


class NotServed(OptionError):
    """Triton was asked for, and cannot serve a tensor."""

    def __init__(self, obstacle: str) -> None:
        super().__init__(f"Triton was asked for, but {obstacle}. Try use_backend('auto').")
        self.obstacle = obstacle


class Path(NamedTuple):
    """Which code computes, and what keeps a faster one from it; nothing if that is empty."""

    name: str
    reason: str = ""
    part: bool = False  # of a norm alone, where the convolution after it is torch's
    # whether residual and activation are better done by torch's own operations where there will be
    # a backward: on a CPU they are vectorized, and the mask of a ReLU is not recomputed. A step of
    # ResNet-18 takes 1.1 times as long with them in the same pass, of a narrow one 1.4 times; with
    # them apart, and over the output of the norm, as long as without fusing
    apart: bool = False
    traced: bool = False  # fused by the layer's own coefficients, compiled: see engine.tracing

    @property
    def passes(self) -> Any:
        """The passes over activations that this path takes in eager mode."""
        if self.name in ("triton", "fused"):
            return _triton()[0]
        return cpp_passes if self.name in ("cpp", "loops") else torch_passes


def decide(
    x: Tensor,
    layout: Layout,
    description: Description | None = None,
    *,
    fixed: bool = False,
    followed: bool = False,
    compiled: bool | None = None,
) -> Path:
    """The path of a layer for a dense input: Triton where it can, unless a backend is forced.

    ``description`` says what the coefficients are, if a kernel can make them; ``fixed`` that they
    need no moments; ``followed`` that a residual or an activation is given; ``compiled`` asks for
    what a compiled graph would get.
    """
    if torch.compiler.is_compiling() if compiled is None else compiled:
        return _in_graph(x, layout, _for_operators(description), fixed, followed)
    if looked_into():
        return Path("expression", "a transform or a tracer looks into the arithmetic")
    if _forced == "torch":
        return Path("torch", FORCED)
    if _forced == "auto" and not x.is_cuda:
        return _without_gpu(x, layout, description, fixed, followed)
    if isinstance(description, Depthwise) and isinstance(description.norm, Fixed):
        # no kernel does the convolution after such a map
        return decide(x, layout, description.norm, fixed=True)._replace(part=True)
    # a program of pixels takes several, where the grids of the passes might not hold so many
    own = Channels.of(x) if isinstance(description, Pixel) else layout
    obstacle = _obstacle(x, own)
    if obstacle:
        if _forced == "triton":
            raise NotServed(obstacle)
        if own is not layout and not _obstacle(x, layout):
            return Path("triton", obstacle)
        return Path("torch", obstacle)
    if description is None:
        return Path("triton", "" if fixed else "no kernel makes its coefficients")
    if isinstance(description, Depthwise):
        obstacle = _not_convolved(x, description)
        if obstacle:
            return Path(decide(x, layout, description.norm).name, obstacle, part=True)
    if unreadable := _unreadable(description):
        return Path("triton", unreadable)
    if isinstance(description, Fixed | Squash):
        obstacle = _not_pointwise(own, description)
        return Path("triton", obstacle) if obstacle else Path("fused")
    return Path("fused", traced=isinstance(description, Traced))


def decide_weight(
    weight: Tensor, longest: int | None = LONGEST, *, compiled: bool | None = None
) -> Path:
    """The path of weight standardization, for filters of up to so many weights."""
    if compiled or looked_into():
        return Path("expression", "someone looks into the arithmetic")
    if _forced == "torch":
        return Path("torch", FORCED)
    size = weight.shape[1:].numel()
    if longest is not None and size > longest:
        return Path("torch", f"a filter has more than {longest} weights")
    obstacle = _no_triton(weight)
    if not obstacle and (weight.dim() < 2 or size < 2 or weight.shape[0] == 0):
        obstacle = "a filter has a single weight"
    if not obstacle and not (weight.is_contiguous() or is_channels_last(weight)):
        obstacle = "the weight has gaps in memory"
    return Path("torch", obstacle) if obstacle else Path("fused")


def looked_into() -> bool:
    """Whether someone looks into the arithmetic: compilers, transforms, tracers, dual numbers."""
    return (
        torch.compiler.is_compiling()
        or _transforms()
        or _tracing() is not None
        or forward_ad._current_level >= 0
    )


def looked_into_backward(grad: Tensor) -> bool:
    """The same in a backward: someone differentiates it once more, or has many gradients at once
    (``is_grads_batched``, ``jacobian(vectorize=True)``: tensors of torch's first vmap)."""
    return (
        torch.is_grad_enabled()
        or looked_into()
        or torch._C._functorch.is_legacy_batchedtensor(grad)
    )


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


def forced() -> str:
    """The backend in force, or "auto"."""
    return _forced


class _Forced:
    """Gives the choice back when a block ends."""

    def __init__(self, before: str) -> None:
        self.before = before

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        global _forced
        _forced = self.before


def _for_operators(description: Description | None) -> Description | None:
    """Without maps that need no moments: of these a compiler makes one kernel."""
    norm = description.norm if isinstance(description, Depthwise) else description
    return None if isinstance(norm, Fixed | Squash) else description


# ---------------------------------------------------------------- CPUs, and other devices


def _without_gpu(
    x: Tensor, layout: Layout, description: Description | None, fixed: bool, followed: bool
) -> Path:
    obstacle = f"the tensor is on {x.device.type}"
    if not x.is_cpu:
        return Path("torch", obstacle)
    apart = followed and not remaking.active()  # what is made in parts is kept
    if _modes():
        return Path("torch", "a mode of torch looks at its operations", apart=apart)
    if build.extension_on_cpu() is None:
        return Path("torch", f"{obstacle}, and {build.reason_on_cpu()}", apart=apart)
    obstacle = cpp_passes.serves(x, layout)
    if obstacle:
        return Path("torch", obstacle, apart=apart)
    reason, part = "", False
    if isinstance(description, Depthwise):
        reason = _not_in_loops(x, description)
        part, description = bool(reason), description.norm
    if description is None:
        return Path("cpp", "" if fixed else "no loop makes its coefficients", apart=apart)
    if not isinstance(description, Traced) and has_gaps(description):
        return Path("cpp", "its parameters or statistics have gaps in memory", part, apart)
    return Path("loops", reason, part, apart)


def _not_in_loops(x: Tensor, description: Depthwise) -> str:
    """What keeps loops from doing the convolution as well, if anything."""
    if has_gaps(description):
        return "its parameters or statistics have gaps in memory"
    return _not_convolved(x, description)


# ---------------------------------------------------------------- what keeps Triton from it


@lru_cache(maxsize=1)
def _triton() -> tuple[Any, str]:
    try:
        return importlib.import_module("normkit.engine.triton.passes"), ""
    except ImportError as error:
        return None, f"Triton cannot be imported ({error})"


def _no_triton(x: Tensor) -> str:
    """What keeps Triton from any tensor like this one, if anything."""
    # the interpreter is for tests: it serves a CPU tensor only when asked to
    interpreted = _forced == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (x.is_cuda or (interpreted and x.device.type == "cpu")):
        return f"the tensor is on {x.device.type}"
    if x.dtype not in DTYPES:
        return f"the kernels do not compute in {x.dtype}"
    return _triton()[1]


def _obstacle(x: Tensor, layout: Layout) -> str:
    """What keeps the passes on Triton from this tensor, if anything."""
    return _no_triton(x) or str(_triton()[0].serves(x, layout))


def _not_convolved(x: Tensor, description: Depthwise) -> str:
    """What keeps a kernel from doing the convolution as well, if anything."""
    if x.dim() != 4 or description.kernel.shape[2:] != (3, 3):
        return "its convolution is not one of 3 × 3 over two axes"
    return "" if x[0].numel() < 2**31 else "a sample has 2³¹ values or more"


def _unreadable(description: Description) -> str:
    """What keeps kernels from its parameters and statistics, if anything."""
    if has_gaps(description):
        return "its parameters or statistics have gaps in memory"
    return "it has a scale or a shift alone" if is_half(description) else ""


def _not_pointwise(layout: Layout, description: Fixed | Squash) -> str:
    """What keeps a kernel from a map of each value by itself, if anything."""
    if not (isinstance(layout, Batch) or (isinstance(layout, Channels) and layout.strips == 1)):
        return "its cells are not channels"
    channels = layout.columns
    sizes = [(description.weight, channels), (description.bias, channels)]
    if isinstance(description, Fixed):
        given = description.mean, description.var
        sizes += [(table, description.groups) for table in given]
        if given[0].requires_grad or given[1].requires_grad:
            return "its statistics are to get a gradient"
    else:
        sizes.append((description.alpha, 1))
    for table, size in sizes:
        if table is not None and (table.numel() != size or table.dtype not in DTYPES):
            return "its parameters or statistics have another size or type"
    return ""


# ---------------------------------------------------------------- graphs


def _in_graph(
    x: Tensor, layout: Layout, description: Description | None, fixed: bool, followed: bool
) -> Path:
    if isinstance(description, Pixel):
        return Path("expression", "a compiler makes one kernel of it")
    obstacle = _no_operators(x, layout)
    if obstacle:
        return Path("expression", obstacle)
    if fixed and description is None:
        return Path("expression")
    part = isinstance(description, Depthwise)
    if isinstance(description, Depthwise):
        description, followed = description.norm, False  # the convolution stands between
    family = None if description is None else graph_family(description)
    reason = ""
    if family is None:
        reason = "no operator makes its coefficients"
    elif description is not None and (reason := _unreadable(description)):
        family = None
    way = COMPILED[family or "moments"][int(followed)]
    if family is None and way != "expression":
        way = "moments"
    return Path(way, reason, part)


def _no_operators(x: Tensor, layout: Layout) -> str:
    """What keeps operators from a graph, if anything."""
    # the flag, and not is_exporting(): in torch 2.11 every graph takes that for True
    if torch.compiler._is_exporting_flag:
        return "exported programs hold no operators of ours"
    if _transforms():
        return "a transform looks into the arithmetic"
    if not isinstance(layout, Batch | Channels):
        return "no operator has such cells"
    if x.dtype not in DTYPES:
        return f"the kernels do not compute in {x.dtype}"
    if _forced == "torch":
        return FORCED
    interpreted = _forced == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if not (x.is_cuda or (interpreted and x.device.type == "cpu")):
        return f"the tensor is on {x.device.type}"
    if not _installed:
        return "Triton is not installed"
    # whether a grid holds all cells, in comparisons that a graph for any size can bear
    if layout.channels_last:
        fits = layout.extent[0] <= CELLS
    else:
        cells, positions = layout.extent
        fits = cells <= CELLS or (positions <= 256 and cells <= 8 * CELLS)
    return "" if fits else "more cells than a kernel's grid holds"
