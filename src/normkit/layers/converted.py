"""How a layer takes over what a batch norm has learned, and what conversions ask of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.trained import DECAYED, NOT_DECAYED, SCALES, ParameterRole, TrainedBN
from normkit.layers.measured import Measured, Refusal


class Converted(Measured):
    """The way from a batch norm and back to one, with what holds for most layers.

    A layer overrides what is different for it.
    """

    card: ClassVar[Card]
    channels: int
    affine: bool
    beyond_batch_norm: ClassVar[tuple[str, ...]] = ()  # parts that no batch norm has
    # parameters that only undo, at first, what the layer does beyond a batch norm: after one
    # without scale and shift they are not trained
    compensates: tuple[str, ...] = ()

    # ---------------------------------------------------------------- from and to a batch norm

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        """Options with which the layer comes closest to a batch norm, beside those asked for."""
        return {"eps": bn.eps, "affine": bn.affine}

    @classmethod
    def missing_choice(cls, asked: Mapping[str, Any]) -> str:
        """What should have been asked for in a conversion, for the layer to be more than a batch
        norm, as a sentence; empty if nothing."""
        return ""

    def affine_from(self, bn: TrainedBN) -> tuple[Tensor, Tensor]:
        """Scale and shift of a batch norm, in the form of this layer's weight and bias."""
        return bn.weight, bn.bias

    def start_from(self, bn: TrainedBN) -> dict[str, str]:
        """Take over what a trained batch norm has learned.

        Returns which tensors now hold something of it, and what: plans say just that.
        """
        taken = {}
        if self.weight is not None and self.bias is not None:
            for name, value in zip(("weight", "bias"), self.affine_from(bn), strict=True):
                getattr(self, name).copy_(value)
                taken[name] = name
        return taken

    # ---------------------------------------------------------------- what conversions ask

    @property
    def channels_sharing_a_scale(self) -> int:
        """How many neighbouring channels have one scale and shift after the statistics."""
        return 1

    def with_output_map(self, scale: Tensor, shift: Tensor) -> dict[str, Tensor] | Refusal:
        """The values of its tensors with which it would give scale · y + shift instead of y.

        ``scale`` and ``shift`` are one number a channel, the same in channels that share theirs;
        nothing is changed. A refusal, if no values of its tensors do that for every input.
        """
        weight, bias = self.weight, self.bias
        if weight is None or bias is None:
            return Refusal("it has no scale and shift of its own: try affine=True")
        columns = scale.reshape(-1, *(1,) * (weight.dim() - 1))
        wide = scale.dtype
        return {
            "weight": weight.detach().to(wide) * columns,
            "bias": torch.addcmul(shift, bias.detach().to(wide), scale),
        }

    def parameter_role(self, name: str) -> ParameterRole:
        """What part a parameter of this layer plays for an optimizer and for a conversion."""
        if name != "weight":
            return ParameterRole(NOT_DECAYED, name == "bias")
        assert self.weight is not None
        kernel = self.weight.dim() > 1  # to be trained as that of a convolution
        return ParameterRole(DECAYED) if kernel else ParameterRole(SCALES, True)

    def not_in_onnx(self, any_size: bool) -> str:
        """Why an ONNX file cannot compute what the layer does in eval mode, for every image size
        if ``any_size``, and what to try; empty if it can."""
        return ""
