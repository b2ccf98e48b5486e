"""What weight standardization does to the gradients of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit.diagnosis.measures import ws_gradient_decomposition
from normkit.lab.train.objective import loss_of
from normkit.layers.ws import WS

PARTS = ("a", "b", "c")


def ws_gradients(model: nn.Module, images: Tensor, labels: Tensor) -> dict[str, list[float]]:
    """The parts of each standardized weight's gradient, summed over its filters.

    The model is run in the mode it is in; gradients of its parameters are left alone.
    """
    uses: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def look(module: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
        uses[module] = given[0].detach(), out

    layers = [module for module in model.modules() if isinstance(module, WS)]
    hooks = [layer.register_forward_hook(look) for layer in layers]
    try:
        loss = loss_of(model(images), labels)
    finally:
        for hook in hooks:
            hook.remove()
    if not uses:
        return {}
    grads = torch.autograd.grad(loss, [out for _, out in uses.values()])
    parts = [
        ws_gradient_decomposition(weight, grad)
        for (weight, _), grad in zip(uses.values(), grads, strict=True)
    ]
    return {
        f"ws_gradients_{name}": [float(getattr(found, name).sum()) for found in parts]
        for name in PARTS
    }
