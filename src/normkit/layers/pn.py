"""pn: positional normalization, statistics per sample and pixel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Pixel
from normkit.core.layout import Layout, Pixels, dense
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import LayerState
from normkit.engine.dispatch import decide
from normkit.engine.normalize import moments as moments_of
from normkit.engine.special import normalized_pixels
from normkit.errors import OptionError
from normkit.layers.base import Normalizer
from normkit.layers.measured import Refusal


class PN(Normalizer):
    """Positional normalization: each pixel standardized over its channels.

    Formula:
        y = weight · (x − mean) / √(var + eps) + bias

    Statistics: one mean and variance per sample and position, over the channels; the same in
    eval mode. No buffers.

    Shapes: (N, C, *spatial) with C > 1 to the same.

    Use when: structure at each position matters, as in generative models; it is what some
    detection code calls LN.
    Avoid when: channels are few.

    Paper: Li et al. 2019 (PONO), as compared in bgn: with an affine map and without the
    re-injection of the moments. ``with_moments`` gives those for the shortcut variant, and
    ``unbiased=True`` the variance of the authors' torch file (their TensorFlow file is biased).

    from_batch_norm carries weight and bias; statistics then come from each pixel.

    >>> import torch, normkit as nk
    >>> y = nk.PN(8)(torch.randn(2, 8, 5, 5))
    >>> abs(y[0, :, 0, 0].mean().item()) < 1e-5
    True
    """

    card = Card(
        name="pn",
        title="Positional Normalization",
        paper="Li et al. 2019 (PONO)",
        family=False,
        same_in_eval=True,
        aliases=("ln2d", "layernorm2d", "channellayernorm"),
    )

    def __init__(self, channels: int, *, unbiased: bool = False, **options: Any) -> None:
        super().__init__(channels, **options)
        if channels == 1:
            raise OptionError("PN expects more than one channel: one value has no variance.")
        self.unbiased = unbiased

    def cells(self, x: Tensor) -> Layout:
        return Pixels.of(x)

    def coefficients(self, moments: Moments | None) -> Coefficients:
        """The map of each pixel, tables (N, L); the affine map of the channels follows it."""
        assert moments is not None
        return self._corrected(moments).standardizing(self.eps)

    def _corrected(self, moments: Moments) -> Moments:
        return Moments(moments.mean, moments.unbiased(int(self.unbiased)), moments.count)

    def normalize(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        state = self.state()
        x = dense(x)
        description = self.description(x, state)
        path = decide(x, self.cells(x), description)
        y = None
        if description is not None:
            record = self.recorded(path, x, state, description, activation)
            y = normalized_pixels(path, x, description, residual, activation, record)
        if y is None and path.name == "loops":
            y = self.in_loops(path, x, state, description, residual, activation)
        if y is not None:
            return y
        if self.weight is None and self.bias is None:
            return self.run(path, x, state, None, residual, activation)[0]
        return self.finish(self.run(path, x, state, None)[0], residual, activation)

    def normalize_masked(
        self, x: Tensor, valid: Tensor, residual: Tensor | None, activation: str
    ) -> Tensor:
        return self.normalize(x, residual, activation)  # no pixel looks at another one

    def fusion(self, x: Tensor, state: LayerState) -> Any:
        return Pixel(self.eps, int(self.unbiased), self.weight, self.bias)

    def with_moments(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(y, mean, std), the moments shaped (N, 1, *spatial), for a moment shortcut."""
        y = self(x)
        found = self._corrected(moments_of(x, Pixels))
        shape = (x.shape[0], 1, *x.shape[2:])
        return y, found.mean.reshape(shape), torch.sqrt(found.var + self.eps).reshape(shape)

    # ---------------------------------------------------------------- for diagnosis

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        return moments, 1

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return Refusal("every position is divided by a deviation of its own")

    def group_size(self, shape: torch.Size) -> int:
        return shape[1]

    def standardized(self, x: Tensor, table: Moments, *, batch: bool) -> Tensor | Refusal:
        x = x.float()
        found = self._corrected(moments_of(x, Pixels))
        map = found.standardizing(self.eps)
        return map.each(lambda t: t.reshape(len(x), 1, *x.shape[2:])).of(x)
