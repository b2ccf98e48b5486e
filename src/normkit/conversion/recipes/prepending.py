"""A norm before everything else."""

from __future__ import annotations

from torch import nn

from normkit.conversion.edits import AddInputNorm


class Prepend(AddInputNorm):
    """Normalize the first input of the model.

    A Sequential runs all its children, so there the norm becomes the first of them; a hook on
    top of that would let it run twice.
    """

    def do(self, model: nn.Module) -> None:
        if type(model).forward is not nn.Sequential.forward:
            super().do(model)
            return
        rest = dict(model._modules)
        model._modules.clear()
        model._modules.update({self.name: self.norm, **rest})
