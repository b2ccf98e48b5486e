"""cwn: centred weight normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.card import Card
from normkit.core.messages import title
from normkit.errors import ShapeError
from normkit.layers.weight import WeightNormalizer, centred, constant, fan_in, length


class CWN(WeightNormalizer):
    """Centred weight normalization: filters of mean 0 and a learned length.

    Formula:
        W = gain · (v − mean) / (‖v − mean‖ + eps)

    Statistics: one mean and norm per output channel, over its weights, the same in training and
    eval mode; gradients flow through both. gain starts at ``scale``, √2 (the usual gain for
    ReLU), and stays there with learn_scale=False.

    Shapes: a weight (O, I, *kernel), as of Conv1d to Conv3d and Linear, to the same; gain is (O,).
    I = 1 is an error, for centring would leave nothing. Not for transposed convolutions.

    Use when: the length of the filters is to be learned, unlike in ws.
    Avoid when: a norm follows that cancels the length; ws does better there in ws-bcn.

    Paper: Huang et al. 2017; eq. 9 of ws-bcn. With gain √I and eps 0 it is ws. The author's code
    fixes the scale at 1.414 unless asked; we learn it, as eq. 9 has it. Give gain no weight decay.

    >>> import torch, normkit as nk
    >>> conv = nk.CWN.attach(torch.nn.Conv2d(3, 8, 3))
    >>> lengths = conv.weight.flatten(1).norm(dim=1)
    >>> bool((lengths - 2**0.5).abs().max() < 1e-3)
    True
    """

    card = Card(
        name="cwn",
        title="Centred Weight Normalization",
        paper="Huang et al. 2017",
        kind="weight",
        family=False,
        same_in_eval=True,
    )
    gain: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        learn_scale: bool = True,
        scale: float = 2**0.5,
        eps: float = 1e-5,
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        self.learn_scale, self.scale = learn_scale, self._number("scale", scale)
        self.eps = self._number("eps", eps, 0)
        gain = nn.Parameter(torch.full((channels,), scale, **self._factory))
        self.register_parameter("gain", gain if learn_scale else None)

    def normalize(self, weight: Tensor) -> Tensor:
        middle = centred(weight)
        unit = middle / (length(middle) + self.eps)
        if self.gain is None:
            return unit * self.scale
        return unit * self.gain.to(unit.dtype).view(-1, *[1] * (unit.dim() - 1))

    def check(self, weight: Tensor) -> None:
        super().check(weight)
        if fan_in(weight) == 1:
            raise ShapeError(
                f"{title(self)} expects more than one weight per output channel, got "
                f"{tuple(weight.shape)}: centring would leave nothing. Try wn."
            )

    def undefined(self, weight: Tensor) -> Tensor | None:
        return constant(weight) if self.eps == 0 else None
