"""input_norm: batch normalization of the network's input, and what it is compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Fusion
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import LayerState, MapResult
from normkit.core.trained import ParameterRole, TrainedBN
from normkit.errors import OptionError
from normkit.layers.bn import BN
from normkit.layers.measured import Refusal

HALF_RANGE = 128 / 255  # (x − 128) / 128 for pixels that have been divided by 255
TINY = 1e-12  # torch refuses an eps of zero


class InputNorm(BN):
    """A batch norm before the first convolution, scaled like the activations inside the network.

    Formula:
        bn        y = weight · (x − mean) / √(var + eps) + bias, weight starts at
                  sigma_act · scale_init, bias stays at its start, 0
        fixed     y = (x − 128/255) / (128/255)
        dataset   y = (x − mean) / std with given means and deviations per channel
        none      y = x

    Statistics: as bn, over the images of a batch; eval mode uses running ones.

    Shapes: (N, C, *spatial) to the same. Images come scaled to 0 … 1, not standardized.

    Use when: bn layers start with ``scale_init`` below one; give the same value here.
    Avoid when: the data are standardized already, or single images of odd exposure matter.

    Paper: Davis & Frank, "Revisiting Batch Normalization", section 3.4. sigma_act is the
    standard deviation of a rectified unit normal, 0.58 in the paper (0.5838 exactly); measure
    it for other activations. The bias exists, so that checkpoints of bn load, but is not trained.

    >>> import torch, normkit as nk
    >>> layer = nk.InputNorm(3, scale_init=0.5)
    >>> y = layer(torch.rand(16, 3, 8, 8))
    >>> round(y.std(correction=0).item(), 2)
    0.29
    """

    card = Card(
        name="input_norm",
        title="BN-based input normalization",
        paper="Davis & Frank 2021 (revisiting-bn)",
        pools_samples=True,
        exact_from_bn=True,
        normalizes_input=True,
    )
    shared_buffers = BN.shared_buffers | {"given_mean", "given_std"}
    given_mean: Tensor | None
    given_std: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        sigma_act: float = 0.58,
        mode: str = "bn",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **options: Any,
    ) -> None:
        if mode != "bn":  # nothing to learn, nothing to track
            if extra := options.keys() - {"device", "dtype"}:
                raise OptionError(f"InputNorm(mode={mode!r}) has no {', '.join(sorted(extra))}.")
            options = {**options, "affine": False, "track_running_stats": False}
        super().__init__(channels, **options)
        self.mode = self._choice("mode", mode, ("bn", "fixed", "dataset", "none"))
        self.sigma_act = sigma_act
        if self.weight is not None and self.bias is not None:
            with torch.no_grad():
                self.weight.mul_(sigma_act)
            self.bias.requires_grad_(False)
        if (mode == "dataset") != (mean is not None and std is not None):
            raise OptionError('InputNorm expects mean and std with mode="dataset", and only there.')
        if mode == "fixed":
            mean = std = [HALF_RANGE] * channels
        elif mode == "none":
            mean, std = [0.0] * channels, [1.0] * channels
        self.register_buffer("given_mean", self._given("mean", mean))
        self.register_buffer("given_std", self._given("std", std))
        for name in [name for name, buffer in self._buffers.items() if buffer is None]:
            self._buffers[name] = self._buffers.pop(name)  # last: torch.export miscounts after them

    def _given(self, option: str, values: Sequence[float] | None) -> Tensor | None:
        if values is None:
            return None
        if len(values) != self.channels or (option == "std" and min(values) <= 0):
            raise OptionError(
                f"InputNorm expects {option} to be {self.channels} numbers"
                f"{' above zero' if option == 'std' else ''}, got {values!r}."
            )
        like = self._statistic(0.0)
        return torch.tensor([float(v) for v in values], dtype=like.dtype, device=like.device)

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        return super().options_from(bn, asked) if asked.get("mode", "bn") == "bn" else {}

    def as_batch_norm(self, like: Tensor | None = None) -> TrainedBN:
        bn = super().as_batch_norm(like)
        if self.given_mean is None or self.given_std is None:
            return bn
        return bn.having(mean=self.given_mean, var=self.given_std.square(), eps=TINY)

    def parameter_role(self, name: str) -> ParameterRole:
        role = super().parameter_role(name)
        return role._replace(of_batch_norm=False) if name == "bias" else role  # it is not trained

    def can_synchronise(self) -> bool:
        return self.mode == "bn"

    def uses_moments(self) -> bool:
        return self.mode == "bn" and super().uses_moments()

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        return super().fusion(x, state) if self.mode == "bn" else None

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        if self.given_mean is None or self.given_std is None:
            return super().coefficients(moments, state)
        given = Moments(self.given_mean.clone()[None], self.given_std.square()[None], 1)
        return MapResult(given.standardizing(0))

    # ---------------------------------------------------------------- for diagnosis

    def pools_samples(self) -> bool:
        return self.mode == "bn"

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        if self.mode == "bn":
            return super().standardizing(table, batch=batch)
        return self.coefficients(None, self.state()).map

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return moments.var[0] if self.given_std is None else self.given_std.square()
