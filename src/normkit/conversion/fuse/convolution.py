"""Convolutions of a folded model that do the sum and the activation that follow them.

A folded norm is the bias of its convolution. torch has cuDNN compute the convolution and then adds
the bias in a pass of its own, slower than the norm was; a sum and an activation take one more each.
On a GPU, where nothing gets a gradient, all of it is here one call of cuDNN, or the convolution and
one pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.layout import shared_by_samples
from normkit.core.moments import Coefficients, Moments
from normkit.engine.activations import activated
from normkit.engine.dispatch import looked_into
from normkit.engine.normalize import normalize

NARROW = (torch.float16, torch.bfloat16)


class FoldedConv2d(nn.Conv2d):
    """activation(conv(x) + residual); with x alone, what an nn.Conv2d gives.

    ``activation`` is one of engine/activations.py; ``own`` is that of a call without one.
    """

    own = "none"

    @staticmethod
    def serves(conv: nn.Module) -> bool:
        """Whether a convolution can become one: torch's own, padded with zeros, with a bias."""
        return type(conv) is nn.Conv2d and conv.padding_mode == "zeros" and conv.bias is not None

    def forward(
        self, input: Tensor, residual: Tensor | None = None, activation: str | None = None
    ) -> Tensor:
        activation = self.own if activation is None else activation
        if self._in_eager_mode(input, residual):
            dtype = input.dtype
            if torch.is_autocast_enabled("cuda"):
                dtype = torch.get_autocast_dtype("cuda")
            if activation == "relu" and self._in_one_call(input, residual, dtype):
                return self._one_call(input.to(dtype), residual, dtype)
            y = self._conv_forward(input, self.weight, None)
            if residual is None or (residual.shape == y.shape and residual.dtype == y.dtype):
                return normalize(
                    y,
                    self._shift,
                    cells=shared_by_samples,
                    use_moments=False,
                    residual=residual,
                    activation=activation,
                )
            assert self.bias is not None
            y = y + self.bias.to(y.dtype)[:, None, None]
        else:
            y = self._conv_forward(input, self.weight, self.bias)
        return activated(y if residual is None else y + residual, activation)

    def _in_eager_mode(self, input: Tensor, residual: Tensor | None) -> bool:
        """Whether this is inference on a GPU that nobody traces, transforms or compiles."""
        if not (type(input) is Tensor and input.is_cuda and input.dim() == 4 and input.numel()):
            return False
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or looked_into():
            return False
        tensors = input, self.weight, self.bias, residual
        return not (
            torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
        )

    def _in_one_call(self, input: Tensor, residual: Tensor | None, dtype: torch.dtype) -> bool:
        """Whether cuDNN does it well: types and a format for which it has been measured."""
        if not (dtype in NARROW and self.groups == 1 and torch.backends.cudnn.enabled):
            return False
        if not input.is_contiguous(memory_format=torch.channels_last):
            return False
        if isinstance(self.padding, str):
            return False
        if residual is None:
            return True
        numbers = zip(
            *(input.shape[2:], self.padding, self.dilation, self.kernel_size, self.stride),
            strict=True,
        )
        sizes = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in numbers)
        return residual.dtype == dtype and residual.shape == (
            *(input.shape[0], self.out_channels),
            *sizes,
        )

    def _one_call(self, input: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        weight, bias = self._narrow(dtype)
        sizes = self.stride, self.padding, self.dilation, self.groups
        if residual is None:
            return torch.cudnn_convolution_relu(input, weight, bias, *sizes)  # type: ignore
        return torch.cudnn_convolution_add_relu(input, weight, residual, 1.0, bias, *sizes)  # type: ignore

    def _narrow(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Weight and bias in the type of autocast, kept until they change: autocast would make
        them anew in every forward."""
        weight, bias = self.weight, self.bias
        assert bias is not None
        if weight.dtype == dtype:
            return weight, bias.to(dtype)
        if weight.is_inference() or bias.is_inference():  # of these torch counts no changes
            return weight.to(dtype), bias.to(dtype)
        key = dtype, weight.data_ptr(), weight._version, bias.data_ptr(), bias._version
        known = self.__dict__.get("_cast")
        if known is None or known[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                known = key, (weight.to(dtype), bias.to(dtype))
            self.__dict__["_cast"] = known
        return known[1]

    def _shift(self, _: Moments | None) -> Coefficients:
        assert self.bias is not None
        shift = self.bias.detach().float()[None]
        return Coefficients(torch.ones_like(shift), shift)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.pop("_cast", None)  # moved to another device or type
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_cast"}

    def extra_repr(self) -> str:
        return super().extra_repr() + (f", {self.own}" if self.own != "none" else "")
