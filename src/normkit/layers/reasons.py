"""Which backend a layer runs on."""

from __future__ import annotations

from torch import Tensor, nn

from normkit.core.layout import Channels, dense
from normkit.engine.dispatch import reason
from normkit.engine.special import MOST
from normkit.errors import OptionError
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct
from normkit.layers.weight import WeightNormalizer, fan_in
from normkit.layers.ws import WS


def why(layer: nn.Module, x: Tensor) -> str:
    """Says which backend would run for an input, and what keeps the other from it.

    For ws, wn and cwn x is a weight.

    >>> import torch, normkit as nk
    >>> nk.why(nk.BN(8), torch.randn(2, 8, 4, 4))
    'bn runs on torch, because the tensor is on cpu.'
    """
    if isinstance(layer, NormAct):
        layer = layer.norm
    if isinstance(layer, WeightNormalizer):
        layer.check(x)
        return f"{layer.card.name} runs on {_of_weight(layer, x)}"
    if not isinstance(layer, Normalizer):
        raise OptionError(
            f"why expects a layer of normkit, got {type(layer).__name__}. "
            "Try why(model.layer1[0].bn1, x): a layer, not a model, and what it gets."
        )
    layer.check(x)
    x = dense(x)
    return f"{layer.card.name} runs on {reason(x, *layer.layouts(x))}"


def _of_weight(layer: WeightNormalizer, weight: Tensor) -> str:
    if not (isinstance(layer, WS) and layer.center and layer.scale and fan_in(weight) > 1):
        return "torch, because there is no kernel for it."
    if fan_in(weight) > MOST:
        return f"torch, because a filter has more than {MOST} weights."
    return reason(weight, Channels.of(dense(weight)))
