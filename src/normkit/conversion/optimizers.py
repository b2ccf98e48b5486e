"""Optimizers that exist already, when parameters of the model are replaced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.conversion.edit import Successor
from normkit.errors import OptionError


class Rewiring:
    """Puts the new parameters of a model into an optimizer; ``undo`` takes that back.

    A new parameter joins the group of the parameter whose place it takes. Momentum and all else
    that the optimizer remembers goes on where the parameter means the same and has the same
    shape; otherwise it starts anew. Parameters that have left the model leave the optimizer. A
    norm that was not in the optimizer is not put into it.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OptionError(
                f"Expected a torch.optim.Optimizer or several, got {type(optimizer).__name__}."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise OptionError(
                "LBFGS keeps one vector for all parameters, which cannot be rewired. Make the "
                "optimizer after the conversion."
            )
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if known.isdisjoint(map(id, model.parameters())):
            raise OptionError(
                f"The {type(optimizer).__name__} knows no parameter of this model. Give the "
                "optimizer that was made for it."
            )
        self.optimizer = optimizer
        self.note = ""
        self._groups: list[list[Tensor]] | None = None
        self._state: dict[Tensor, Any] = {}

    def do(self, gone: Sequence[nn.Parameter], come: Sequence[Successor]) -> None:
        """``gone`` have left the model, ``come`` are new to it."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        self._groups = [list(group["params"]) for group in groups]
        self._state = {}
        home = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        left = {id(p) for p in gone}
        added = carried = 0
        seen = set(home)
        arrivals: dict[int, list[nn.Parameter]] = {}  # by the parameter after which they stand
        for successor in come:
            new, after = successor.new, successor.after
            if id(new) in seen:
                continue
            if after is None:
                groups[0]["params"].append(new)
            elif id(after) in home:
                arrivals.setdefault(id(after), []).append(new)
            else:
                continue
            seen.add(id(new))
            added += 1
            same = successor.same_role and after is not None and after.shape == new.shape
            if same and after is not None and after in state:
                state[new] = _copy(state[after])
                carried += 1
        for group in groups:
            kept = []
            for p in group["params"]:
                if id(p) not in left:
                    kept.append(p)
                elif p in state:
                    self._state[p] = state.pop(p)
                kept.extend(arrivals.get(id(p), ()))
            group["params"][:] = kept  # in place: others hold the list
        removed = sum(id(p) in home for p in gone)
        self.note = (
            f"{type(self.optimizer).__name__}: {added} parameter(s) added, {carried} of them with "
            f"the state of the one before, {removed} removed"
        )

    def undo(self) -> None:
        if self._groups is None:
            return
        before = {id(p) for params in self._groups for p in params}
        for group, params in zip(self.optimizer.param_groups, self._groups, strict=False):
            for p in group["params"]:
                if id(p) not in before:
                    self.optimizer.state.pop(p, None)
            group["params"][:] = params
        self.optimizer.state.update(self._state)
        self._groups = None


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """So that steps after the conversion leave what ``undo`` gives back alone."""
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()}
