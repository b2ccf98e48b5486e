"""Every layer of the catalog once more, as one would write it from its paper.

``plain(layer)`` is a module with the layer's own parameters and a copy of its buffers. Its
formulas use mean and var over axes and elementwise arithmetic, and nothing of the engine: what
they cost is what the engine saves, and where they disagree one of the two is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from keyword import iskeyword

import torch
from torch import Tensor, nn

import normkit
from benchmarks import formulas
from benchmarks.formulas import State
from normkit.errors import OptionError
from normkit.layers.base import Normalizer

Formula = Callable[[State, Tensor], Tensor]

FORMULAS: dict[str, Formula] = {
    name: formula
    for name in normkit.names("activation")
    if (formula := getattr(formulas, f"{name}_" if iskeyword(name) else name, None)) is not None
}

# attributes of a layer that a formula reads, or that change nothing it computes
# fmt: off
FOLLOWED = {
    "channels", "training", "eps", "affine", "scale_init", "momentum", "on_single", "groups",
    "group_policy", "ratio", "split", "kernel_size", "init", "affine_init", "tau",
    "score_decay", "iterations", "mean_spread", "std_spread", "seed", "sigma_act", "r_max",
    "d_max", "r_ramp", "d_ramp", "batch", "start",
}
# fmt: on


class Plain(nn.Module):
    """A formula over the parameters of a layer."""

    def __init__(self, layer: Normalizer, formula: Formula) -> None:
        super().__init__()
        for name, value in vars(layer).items():
            if not name.startswith("_"):  # options and what the layer made of them
                setattr(self, name, value)
        for name, parameter in layer.named_parameters():
            self.register_parameter(name, parameter)
        for name, buffer in layer.named_buffers():
            self.register_buffer(name, buffer.clone())
        for name in {**layer._parameters, **layer._buffers}:
            if not hasattr(self, name):
                setattr(self, name, None)
        self.formula = formula

    def forward(self, x: Tensor) -> Tensor:
        # statistics of half-precision inputs are taken in float32, as everywhere
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.formula(self, wide).to(x.dtype)


def plain(layer: Normalizer) -> Plain:
    """The straightforward version of a layer: its parameters, its mode, a copy of its buffers."""
    name = layer.card.name
    followed = FOLLOWED | {"virtual_batch"} if name == "ghost_bn" else FOLLOWED
    usual = vars(type(layer)(layer.channels))
    for option, value in vars(layer).items():
        if not (option.startswith("_") or option in followed or value == usual.get(option)):
            raise OptionError(
                f"There is no straightforward version of {name} with {option}={value!r}. "
                f"Try the default, {usual.get(option)!r}."
            )
    return Plain(layer, FORMULAS[name])
