"""Layers whose statistics follow the learning rate of an optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from normkit.errors import NothingToDo, OptionError
from normkit.layers.bcn import BCN


class Following:
    """Writes an optimizer's learning rate into the micro-batch layers of a model.

    A forward pre-hook of the model, so that a scheduler's change counts from the next forward
    on. ``remove()`` ends it. A pickled copy forgets the optimizer and does nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: int) -> None:
        self.optimizer: torch.optim.Optimizer | None = optimizer
        self.group = group
        self.handles: list[Any] = []

    def __call__(self, model: nn.Module, *_: Any) -> None:
        if self.optimizer is not None and model.training:
            rate = float(self.optimizer.param_groups[self.group]["lr"])
            for layer in _micro_layers(model):
                layer.set_update_rate(rate)

    def remove(self) -> None:
        """Stop following; the layers keep the last rate."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.optimizer = None

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": None, "group": self.group, "handles": []}


def follow_learning_rate(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, group: int = 0
) -> Following:
    """Let every BCN(micro=True) of the model update at the optimizer's current learning rate.

    ``group`` is the parameter group whose rate is followed. One call after both exist; works
    with any scheduler. Layers with update_every="step" are updated after each optimizer step.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(nk.BCN(8, micro=True))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> handle = nk.follow_learning_rate(model, optimizer)
    >>> _ = model(torch.randn(1, 8, 5, 5))
    >>> round(model[0].rate.item(), 3)
    0.1
    """
    layers = _micro_layers(model)
    if not layers:
        raise NothingToDo("The model has no BCN(micro=True) layer. Try nk.BCN(..., micro=True).")
    if not 0 <= group < len(optimizer.param_groups):
        raise OptionError(
            f"The optimizer has {len(optimizer.param_groups)} parameter group(s), "
            f"got group={group}."
        )
    following = Following(optimizer, group)

    def commit(*_: Any) -> None:
        for layer in layers:
            layer.commit()

    following(model)
    following.handles = [
        model.register_forward_pre_hook(following),
        optimizer.register_step_post_hook(commit),
    ]
    return following


def _micro_layers(model: nn.Module) -> list[BCN]:
    return [m for m in model.modules() if isinstance(m, BCN) and m.micro]
