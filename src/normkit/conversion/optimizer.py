"""Optimizers that exist already, when parameters of the model are replaced."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.conversion.edits import Successor
from normkit.conversion.param_groups import roles_by_module
from normkit.core.trained import DECAYED, NOT_DECAYED
from normkit.errors import OptionError


class Rewiring:
    """Puts the new parameters of a model into an optimizer; ``undo`` takes that back.

    A new parameter joins the group of the parameter whose place it takes, or of the old shift if
    it takes none; where the groups are those of ``param_groups``, the one that is made for it.
    Momentum and all else that the optimizer remembers goes on where the parameter means the same
    and has the same shape; otherwise it starts anew. Parameters that have left the model leave
    the optimizer. A norm that was not in the optimizer is not put into it.
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
        if _has_other_groups(optimizer):
            raise OptionError(
                f"{type(optimizer).__name__} holds another optimizer with groups of its own, which "
                "cannot be rewired. Make the optimizer after the conversion."
            )
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if trained.isdisjoint(map(id, model.parameters())):
            raise OptionError(
                f"The {type(optimizer).__name__} knows no parameter of this model. Give the "
                "optimizer that was made for it."
            )
        self.optimizer, self.model = optimizer, model
        self.note = ""
        self._groups: list[list[Tensor]] | None = None
        self._state: dict[Tensor, Any] = {}
        self._stayed: dict[Tensor, dict[str, Any]] = {}

    def do(
        self,
        gone: Sequence[nn.Parameter],
        come: Sequence[Successor],
        stay: Sequence[nn.Parameter] = (),
    ) -> None:
        """``gone`` have left the model, ``come`` are new to it; ``stay`` have only moved."""
        groups, state = self.optimizer.param_groups, self.optimizer.state
        self._groups = [list(group["params"]) for group in groups]
        self._state = {}
        home = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
        left = {id(p) for p in gone}
        added = carried = 0
        by_role = self._by_role()
        seen = set(home)
        arrivals: dict[int, list[nn.Parameter]] = {}  # by the parameter after which they stand
        for successor in come:
            new, after = successor.new, successor.after
            if id(new) in seen:
                continue
            if after is not None and id(after) not in home:
                continue
            if new in by_role:
                by_role[new].append(new)
            elif after is None:
                groups[0]["params"].append(new)
            else:
                arrivals.setdefault(id(after), []).append(new)
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
        self._stayed = {p: _copy(state.get(p, {})) for p in stay if id(p) in home}
        removed = sum(id(p) in home for p in gone)
        parts = [
            f"{len(self._stayed)} norm parameter(s) stay as they are" if self._stayed else "",
            f"{added} added, {carried} of them with the state of the one before" if added else "",
            f"{removed} removed" if removed else "",
        ]
        text = "; ".join(filter(None, parts)) or "no parameter is concerned"
        self.note = f"{type(self.optimizer).__name__}: {text}"

    def _by_role(self) -> dict[nn.Parameter, list[Tensor]]:
        """Where the groups are those of ``param_groups``: the one for each parameter."""
        groups = {group.get("name"): group["params"] for group in self.optimizer.param_groups}
        named = len(groups) == len(self.optimizer.param_groups)
        if not named or groups.keys().isdisjoint((DECAYED, NOT_DECAYED)):
            return {}
        roles = roles_by_module(self.model)
        return {p: groups[role] for p, role in roles.items() if role in groups}

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
        for p, then in self._stayed.items():
            self._bring_back(p, then)
        self._groups = None

    def _bring_back(self, parameter: Tensor, then: dict[str, Any]) -> None:
        """Its values are what they were: so is what was remembered of them."""
        if not then:
            self.optimizer.state.pop(parameter, None)
            return
        now = self.optimizer.state[parameter]
        for name in set(now) - set(then):
            del now[name]
        for name, value in then.items():
            held = now.get(name)
            if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape == value.shape:
                held.copy_(value)  # in place: a graph of CUDA may know the tensor
            else:
                now[name] = value


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """The optimizers in this process that hold parameters of a model."""
    own = {id(p) for p in model.parameters()}
    held = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [
        each
        for each in held
        if any(id(p) in own for group in each.param_groups for p in group["params"])
    ]


def _has_other_groups(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer inside, as of ZeroRedundancyOptimizer, has a list of its own."""
    held = {id(group["params"]) for group in optimizer.param_groups}
    inside = [o for o in vars(optimizer).values() if isinstance(o, torch.optim.Optimizer)]
    return any(id(group["params"]) not in held for o in inside for group in o.param_groups)


def _copy(state: dict[str, Any]) -> dict[str, Any]:
    """So that steps after the conversion leave what ``undo`` gives back alone."""
    return {name: v.clone() if isinstance(v, Tensor) else v for name, v in state.items()}
