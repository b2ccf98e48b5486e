"""bnet: batch normalization with a depthwise convolution as its affine map."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.card import Card
from normkit.core.fusion import Depthwise, Fusion, Pool
from normkit.core.layout import dense
from normkit.core.masks import blank
from normkit.core.messages import title
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState, MapResult
from normkit.core.trained import FixedMap, TrainedBN
from normkit.engine.activations import BY_RESULT
from normkit.engine.cpu.passes import ACTIVATIONS as IN_LOOPS
from normkit.engine.dispatch import Path, decide
from normkit.engine.epilogue import check as check_epilogue
from normkit.engine.epilogue import epilogue, followed_by
from normkit.engine.special import normalized_depthwise
from normkit.engine.torch.operations import depthwise
from normkit.errors import OptionError, ShapeError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.bn import running_map

KERNEL_STARTS = ("torch", "dirac", "fan_out", "zero")


class BNET(BatchNormalizer):
    """Batch normalization whose scale and shift see the neighbourhood of a pixel.

    Formula:
        x̂ = (x − mean) / √(var + eps)
        y = depthwise convolution of x̂ with weight (C, 1, k, k), zero padding, plus bias

    Statistics: as bn.

    Shapes: (N, C, *spatial) with ``dims`` spatial axes to the same; (N, C) is a map of 1×1.
    Near the border the kernel sees zeros, so there the map is not affine per channel.

    Use when: a little spatial context in the recovery step is worth 9C parameters: alone it gained
    nearly as much as all of ubn in five epochs of CIFAR-10 (docs/evidence.md, g).
    Avoid when: maps are tiny (only the centre tap acts on 1×1), or memory is short and torch
    convolves (``nk.why``): the normalized tensor is stored as well.

    Paper: Xu et al. 2020 (BNET), the affine part of Unified BN. ``kernel_size=1`` is bn. The
    released code leaves the start of the kernel ambiguous: ``init`` is "torch" (the default of
    nn.Conv2d), "dirac" (equals bn), "fan_out" (what generic loops over convolutions do) or
    "zero" (a residual branch that starts at zero).

    >>> import torch, normkit as nk
    >>> x = torch.randn(4, 8, 5, 5)
    >>> torch.allclose(nk.BNET(8, init="dirac")(x), nk.BN(8)(x), atol=1e-6)
    True
    """

    card = Card(
        name="bnet",
        title="Batch Normalization with Enhanced Linear Transformation",
        paper="Xu et al. 2020",
        family=False,
        pools_samples=True,
        exact_from_bn=True,
    )
    shares_map = True

    def __init__(
        self,
        channels: int,
        *,
        kernel_size: int = 3,
        init: str = "torch",
        dims: int = 2,
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        self.kernel_size, self.dims = odd(self._positive("kernel_size", kernel_size), self), dims
        self.init = self._choice("init", init, KERNEL_STARTS)
        self._choice("dims", dims, (1, 2, 3))
        if self.affine:
            kernel = self._new(0.0, channels, 1, *(kernel_size,) * dims)
            self.weight, self.bias = kernel, self._new(0.0)
            start_kernel(kernel, self.bias, init, self.scale_init)

    def check_size(self, x: Tensor) -> None:
        check_dims(x, self.dims, self)

    def maps_epilogue(self, activation: str) -> bool:
        return self.weight is None or activation in BY_RESULT

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        """Of the norm, which has no affine map of its own."""
        if not self.pools_all(x):
            return running_map(self, self.channels, None, None)
        memory = self.memory(x.numel() // self.channels, state)
        return Pool("batch", self.eps, self.channels, None, None, memory)

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        statistics, update = self.statistics(moments, state)
        return MapResult(statistics.standardizing(self.eps), update)

    def normalize(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        if self.weight is None:
            return super().normalize(x, residual, activation)
        check_epilogue(x, residual, activation)
        y, _, whole = with_convolution(self, x, residual, activation)
        if whole:
            return y
        return epilogue(depthwise(y, self.weight, self.bias), residual, activation)

    def normalize_masked(
        self, x: Tensor, valid: Tensor, residual: Tensor | None, activation: str
    ) -> Tensor:
        if self.weight is None:
            return super().normalize_masked(x, valid, residual, activation)
        # the kernel sees zeros beyond the valid part, as beyond the border
        y = blank(self.mapped_masked(x, valid)[0], valid)
        return epilogue(depthwise(y, self.weight, self.bias), residual, activation)

    def description(self, x: Tensor, state: LayerState) -> Any:
        norm = super().description(x, state)
        if norm is None or self.weight is None:
            return norm
        return Depthwise(norm, self.weight, self.bias)

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        # the kernel is the method, whether the batch norm had a scale or not
        return {**super().options_from(bn, asked), "affine": True, "init": "dirac"}

    def affine_from(self, bn: TrainedBN) -> tuple[Tensor, Tensor]:
        assert self.weight is not None
        return around_centre(bn.weight, self.weight), bn.bias

    def as_batch_norm(self, like: Tensor | None = None) -> TrainedBN:
        bn = super().as_batch_norm(like)
        if not bn.affine:
            return bn
        taps = ("kernel but for its centre",) if self.kernel_size > 1 else ()
        return bn.having(weight=centre(bn.weight)).losing(*taps)

    def fixed_map(self, axes: int | None = None) -> FixedMap | str:
        if reason := self.varies():
            return reason
        scale, shift = self._fixed_tables()
        if self.weight is None or self.bias is None:
            return FixedMap(scale, shift)
        if axes == 2 or self.kernel_size == 1:  # only the centre tap acts
            weight, bias = (t.detach().to(scale) for t in (centre(self.weight), self.bias))
            return FixedMap(weight * scale, weight * shift + bias)
        kind: Any = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[self.dims]
        many, size = self.channels, self.kernel_size
        like = {"device": self.weight.device, "dtype": self.weight.dtype}
        then = kind(many, many, size, padding=size // 2, groups=many, **like)
        for name, old in (("weight", self.weight), ("bias", self.bias)):
            setattr(then, name, nn.Parameter(old.detach(), old.requires_grad))
        return FixedMap(scale, shift, then.train(self.training))

    def affine_at_start(self) -> bool:
        if self.init == "torch":
            return is_drawn(self.weight, self.bias)
        return super().affine_at_start()


def with_convolution(
    layer: BatchNormalizer, x: Tensor, residual: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None, bool]:
    """Norm, convolution and what follows, where kernels or loops do it all; else the norm alone,
    with its gates. And whether it was all."""
    state = layer.state()
    x = dense(x)
    both = layer.description(x, state)
    path = decide(x, layer.cells(x), both, fixed=not layer.uses_moments())
    whole = None
    if path.name == "fused" and not path.part:
        whole = fused_convolution(layer, path, x, both, state, residual, activation)
    elif path.name == "loops" and not layer.with_loops(path, state, both).part:
        inside = activation in IN_LOOPS
        within = (residual, activation) if inside else (None, "none")
        whole = layer.in_loops(path, x, state, both, *within)
        if not inside and whole is not None:
            whole = followed_by(whole, residual, activation)
    if whole is not None:
        return whole, None, True
    path = path._replace(part=True)  # plans of norms alone are others
    return *layer.run(path, x, state, None if both is None else both.norm), False


def fused_convolution(
    layer: BatchNormalizer,
    path: Path,
    x: Tensor,
    both: Depthwise,
    state: LayerState,
    residual: Tensor | None,
    activation: str,
) -> Tensor:
    """Norm, convolution and what follows, by kernels that do it all where they can."""
    inside = layer.maps_epilogue(activation)
    within: tuple[Tensor | None, str] = (residual, activation) if inside else (None, "none")
    record = layer.recorded(path, x, state, both.norm, within[1])
    y, tables, begin = normalized_depthwise(
        x, both, *within, layer.cells, layer.repetition(state), record
    )
    layer.after_fusion(both.norm, state, tables, begin, x)
    return y if inside else followed_by(y, residual, activation)


def odd(kernel_size: int, owner: nn.Module) -> int:
    """A kernel size that has a centre."""
    if kernel_size % 2 == 0:
        raise OptionError(
            f"{type(owner).__name__} expects an odd kernel_size, got {kernel_size}. "
            f"Try {kernel_size + 1}."
        )
    return kernel_size


def check_dims(x: Tensor, dims: int, owner: nn.Module) -> None:
    """The kernel has as many axes as the maps, or the maps have none."""
    if x.dim() not in (2, 2 + dims):
        raise ShapeError(
            f"{title(owner)} has a kernel of {dims} spatial axes, got input {tuple(x.shape)}. "
            f"Try dims={x.dim() - 2}."
        )


def centre(kernel: Tensor) -> Tensor:
    """The centre taps (C,) of kernels (C, 1, *k), as a view."""
    for size in kernel.shape[2:]:
        kernel = kernel.select(2, size // 2)
    return kernel[:, 0]


def around_centre(taps: Tensor, like: Tensor) -> Tensor:
    """Kernels of the shape of ``like`` that are zero but for these centre taps (C,)."""
    kernel = torch.zeros_like(like)
    centre(kernel).copy_(taps)
    return kernel


def is_drawn(kernel: Tensor | None, bias: Tensor | None) -> bool:
    """Whether a kernel and its bias lie where nn.Conv2d draws them: training does not keep that."""
    bound = math.inf if kernel is None else 1 / math.sqrt(kernel[0].numel())
    return all(bool((t.abs() <= bound).all()) for t in (kernel, bias) if t is not None)


def start_kernel(kernel: Tensor, bias: Tensor, init: str, scale: float) -> None:
    """Fill a depthwise kernel and its bias with one of the four readings of the paper."""
    bound = 1 / math.sqrt(math.prod(kernel.shape[2:]))  # what nn.Conv2d does for fan-in k²
    with torch.no_grad():
        kernel.zero_()
        bias.zero_()
        if init == "dirac":
            centre(kernel).fill_(1.0)
        elif init == "torch":
            kernel.uniform_(-bound, bound)
        elif init == "fan_out":
            nn.init.kaiming_normal_(kernel, mode="fan_out", nonlinearity="relu")
        if init in ("torch", "fan_out"):
            bias.uniform_(-bound, bound)
        kernel.mul_(scale)
