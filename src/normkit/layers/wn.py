"""wn: weight normalization."""

from __future__ import annotations

from torch import Tensor

from normkit.core.card import Card
from normkit.layers.weight import WeightNormalizer, length, widened


class WN(WeightNormalizer):
    """Weight normalization: length and direction of each filter are learned apart.

    Formula:
        W = g · v / ‖v‖

    Statistics: one norm per output channel, over its weights, the same in training and eval mode.
    g starts at ‖v‖, so that attaching changes the weight by rounding only, and setting
    ``module.weight`` sets both.

    Shapes: a weight (O, I, *kernel), as of Conv1d to Conv3d and Linear, to the same; g is
    (O, 1, …). Not for transposed convolutions.

    Use when: it is to be compared with ws or cwn, or for its plain start on a trained network.
    Avoid when: a norm follows and accuracy counts; in ws-bcn it does worse than no wn at all.

    Paper: Salimans & Kingma 2016. The same function and state_dict as
    torch.nn.utils.parametrizations.weight_norm; but a filter of zeros, for which the formula is
    0 / 0, is an error when attaching, where torch goes on with NaN.

    >>> import torch, normkit as nk
    >>> conv = nk.WN.attach(torch.nn.Conv2d(3, 8, 3))
    >>> conv.parametrizations.weight.original0.shape
    torch.Size([8, 1, 1, 1])
    """

    card = Card(
        name="wn",
        title="Weight Normalization",
        paper="Salimans & Kingma 2016",
        kind="weight",
        family=False,
        same_in_eval=True,
    )

    def forward(self, g: Tensor, v: Tensor) -> Tensor:  # type: ignore[override]
        self.check(v)
        wide = widened(v)
        return (widened(g) * wide / length(wide)).to(v.dtype)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """g and v: the norms of the filters, and the filters."""
        v = super().right_inverse(weight)
        return length(widened(v)).to(v.dtype), v

    def undefined(self, weight: Tensor) -> Tensor | None:
        return length(weight).flatten().eq(0)
