"""Switching between training and eval mode without waiting for the device."""

from __future__ import annotations

from torch import nn


class Modes:
    """The mode of every module of a model, in training and in evaluation.

    ``model.train()`` runs once, so that frozen layers may keep their mode; afterwards flags are
    set directly, since some layers read a counter from the device in ``train``.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        model.eval()
        self.in_evaluation = [module.training for module in self.modules]
        model.train()
        self.in_training = [module.training for module in self.modules]

    def train(self) -> None:
        self._set(self.in_training)

    def evaluate(self) -> None:
        self._set(self.in_evaluation)

    def _set(self, flags: list[bool]) -> None:
        for module, flag in zip(self.modules, flags, strict=True):
            module.training = flag
