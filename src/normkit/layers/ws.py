"""ws: weight standardization."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.messages import title
from normkit.engine.dispatch import Path, decide_weight
from normkit.engine.special import standardized_filters, wanted_type
from normkit.errors import OptionError, ShapeError
from normkit.layers.weight import WeightNormalizer, centred, constant, energy, fan_in, length


class Preset(NamedTuple):
    """One of the forms in use; they differ in the variance and in the place and size of eps."""

    unbiased: bool
    eps_outside: bool
    eps: float


VARIANTS = {
    "paper": Preset(unbiased=False, eps_outside=False, eps=1e-5),
    "ws": Preset(unbiased=True, eps_outside=True, eps=1e-5),
    "bcn": Preset(unbiased=True, eps_outside=False, eps=1e-5),
    "timm": Preset(unbiased=False, eps_outside=False, eps=1e-6),
}


class WS(WeightNormalizer):
    """Weight standardization: each filter gets mean 0 and variance 1.

    Formula:
        Ŵ = (W − mean) / √(var + eps)
        variant   paper: var over I,   ws: / (std + eps) with std over I − 1,
                  bcn: var over I − 1, timm: as paper with eps 1e-6 (the others 1e-5)
        center=False   W / √(var + eps), or with rms=True  W / √(mean W² + eps)
        scale=False    W − mean

    Statistics: one mean and variance per output channel, over its I = in/groups · kernel weights,
    the same in training and eval mode; gradients flow through both. ``unbiased``, ``eps_outside``
    and ``eps`` override the variant. A filter of one weight (depthwise 1×1) has no variance and is
    left as it is, unless skip_fan_in_one=False: then it becomes 0, as the formula says.

    Shapes: a weight (O, I, *kernel), as of Conv1d to Conv3d and Linear, to the same. Not for
    transposed convolutions, which have the output channels on the second axis.

    Use when: a norm follows the convolution, above all with few images a worker (with gn or bcn).
    Avoid when: nothing normalizes the output, which is about √I times larger than usual and can
    overflow float16 (bfloat16 cannot); never for the classifier.

    Paper: Qiao et al. 2019, "Micro-Batch Training with Batch-Channel Normalization and Weight
    Standardization" (ws-bcn), eq. 5 and 7, which leaves eps open. ``center`` and ``scale`` alone
    are the rows of its Table 4; eq. 12 divides by the std of the centred weight, and so do we.
    We never compute mean W² − mean², and a constant filter has a finite gradient in all variants.

    >>> import torch, normkit as nk
    >>> conv = nk.WS.attach(torch.nn.Conv2d(3, 8, 3))
    >>> conv.weight.var(dim=(1, 2, 3), correction=0).mean().round(decimals=2).item()
    1.0
    >>> type(nk.WS.fold(conv)).__name__
    'Conv2d'
    """

    computed_together = True
    card = Card(
        name="ws",
        title="Weight Standardization",
        paper="Qiao et al. 2019 (ws-bcn)",
        kind="weight",
        family=False,
        same_in_eval=True,
    )
    standardizes = True

    def __init__(
        self,
        channels: int,
        *,
        variant: str = "paper",
        eps: float | None = None,
        unbiased: bool | None = None,
        eps_outside: bool | None = None,
        center: bool = True,
        scale: bool = True,
        rms: bool = False,
        skip_fan_in_one: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        self.variant = self._choice("variant", variant, tuple(VARIANTS))
        preset = VARIANTS[self.variant]
        self.eps = self._number("eps", preset.eps if eps is None else eps, 0)
        self.unbiased = preset.unbiased if unbiased is None else unbiased
        self.eps_outside = preset.eps_outside if eps_outside is None else eps_outside
        if not (center or scale):
            raise OptionError("WS with center=False and scale=False would do nothing.")
        if rms and (center or not scale):
            raise OptionError(
                "WS expects rms=True only with center=False and scale=True: "
                "of a centred weight the root mean square is the standard deviation."
            )
        self.center, self.scale, self.rms = center, scale, rms
        self.skip_fan_in_one = skip_fan_in_one
        # what Together has computed: (weight, its version, with gradients?, result)
        self.ready: tuple[Tensor, int, bool, Tensor] | None = None

    def forward(self, weight: Tensor) -> Tensor:
        if self.ready is not None:
            of, version, grad, value = self.ready
            current = of is weight and version == weight._version
            if current and grad == torch.is_grad_enabled() and value.dtype == wanted_type(weight):
                return value
        if self._has_kernel(weight):
            self.check(weight)
            count = fan_in(weight) - self.unbiased
            done = standardized_filters(weight, count, self.eps, self.eps_outside)
            if done is not None:
                return done
        return super().forward(weight)

    def _has_kernel(self, weight: Tensor) -> bool:
        return self.center and self.scale and not self._skips(weight)

    def path(self, weight: Tensor, *, compiled: bool | None = None) -> Path:
        if not self._has_kernel(weight):
            return super().path(weight, compiled=compiled)
        return decide_weight(weight, compiled=compiled)

    def normalize(self, weight: Tensor) -> Tensor:
        if self._skips(weight):
            return weight
        middle = centred(weight)
        top = middle if self.center else weight
        return top / self._deviation(weight if self.rms else middle) if self.scale else top

    def _deviation(self, values: Tensor) -> Tensor:
        """What to divide by, (O, 1, …)."""
        # the mean was estimated from the same weights; the root mean square needs none
        count = fan_in(values) - (self.unbiased and not self.rms)
        if self.eps_outside:
            return length(values) / math.sqrt(count) + self.eps
        return (energy(values) / count + self.eps).sqrt()

    def check(self, weight: Tensor) -> None:
        super().check(weight)
        divides = self.scale and self.unbiased and not self.rms
        if fan_in(weight) == 1 and divides and not self._skips(weight):
            raise ShapeError(
                f"{title(self)} has no unbiased variance of one weight per output channel. "
                "Try skip_fan_in_one=True or unbiased=False."
            )

    def undefined(self, weight: Tensor) -> Tensor | None:
        if self.eps > 0 or not self.scale or self._skips(weight):
            return None
        return weight.flatten(1).eq(0).all(1) if self.rms else constant(weight)

    def defaults(self) -> dict[str, Any]:
        return {**super().defaults(), **VARIANTS[self.variant]._asdict()}

    def _skips(self, weight: Tensor) -> bool:
        return self.skip_fan_in_one and fan_in(weight) == 1
