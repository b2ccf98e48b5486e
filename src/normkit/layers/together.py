"""Weights of many convolutions, standardized together before a model's forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from normkit.engine.dispatch import looked_into
from normkit.engine.special import standardized_together, wanted_type
from normkit.layers.ws import WS


class Together:
    """Hooks on a model that have all its WS weights ready when the convolutions ask for them.

    Where it cannot, on another device, in a compiled model or when a part of the model is called
    alone, nothing is ready and every convolution computes its own weight: the same numbers.
    """

    def __init__(self, convolutions: Sequence[nn.Module]) -> None:
        self.convolutions = list(convolutions)

    def attach(self, model: nn.Module) -> tuple[RemovableHandle, RemovableHandle]:
        before = model.register_forward_pre_hook(self.prepare)
        after = model.register_forward_hook(_Forget(self), always_call=True)
        return before, after

    @staticmethod
    def detach(model: nn.Module) -> None:
        """Take these hooks off a model again."""
        for number, hook in list(model._forward_pre_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), Together):
                del model._forward_pre_hooks[number]
        for number, hook in list(model._forward_hooks.items()):
            if isinstance(hook, _Forget):
                del model._forward_hooks[number]
                model._forward_hooks_always_called.pop(number, None)

    def prepare(self, model: nn.Module, args: Any) -> None:
        if looked_into():
            return
        for (_, _, less, eps, outside), pairs in self._groups().items():
            done = standardized_together([w for w, _ in pairs], less, eps, outside)
            for (weight, ws), value in zip(pairs, done or (), strict=done is not None):
                ws.ready = weight, weight._version, torch.is_grad_enabled(), value

    def forget(self) -> None:
        for _, ws in self._pairs():
            ws.ready = None

    def _groups(self) -> dict[Any, list[tuple[Tensor, WS]]]:
        """Weights that one launch can do: of one type, device, variant and trainability."""
        found: dict[Any, list[tuple[Tensor, WS]]] = {}
        for weight, ws in self._pairs():
            if ws.center and ws.scale and weight.shape[1:].numel() > 1:
                of = weight.device, wanted_type(weight), int(ws.unbiased), ws.eps, ws.eps_outside
                found.setdefault(of, []).append((weight, ws))
        return found

    def _pairs(self) -> list[tuple[Tensor, WS]]:
        """Those that are standardized still: weights may have been folded in the meantime."""
        found = []
        for conv in self.convolutions:
            lists = conv._modules.get("parametrizations")
            steps = None if lists is None else lists._modules.get("weight")
            if isinstance(steps, ParametrizationList) and len(steps) == 1:
                ws = steps[0]
                if isinstance(ws, WS):
                    found.append((steps.original, ws))
        return found


class _Forget:
    """A hook for the end of the forward, also of one that failed."""

    def __init__(self, together: Together) -> None:
        self.together = together

    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        if not looked_into():
            self.together.forget()
