"""A conversion before, while and after it is done: the class Plan."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normkit.conversion.certificate import Certificate
from normkit.conversion.edit import Edit, do_all, undo_all
from normkit.conversion.execution import (
    contents,
    look_after,
    look_before,
    rehearse,
    replacements,
    unchanged,
)
from normkit.conversion.optimizers import Rewiring
from normkit.conversion.replacing import ReplaceModule
from normkit.conversion.step import Action, Step
from normkit.conversion.table import table
from normkit.conversion.wrappers import refuse_unchangeable
from normkit.errors import NothingToDo

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Plan:
    """What a conversion will do to a model: print it, ``apply`` it, ``undo`` it.

    It is made of edits, which are done in their order, and of the steps that tell of them.
    Making a plan changes nothing. ``apply`` changes all or, on an error, nothing, and measures
    what that does to the output. ``undo`` puts the original modules back, with their values.
    """

    def __init__(
        self,
        model: nn.Module,
        edits: Iterable[Edit],
        steps: Iterable[Step],
        *,
        example: Any = None,
        optimizer: Optimizers = None,
        title: str = "conversion",
        notes: Iterable[str] = (),
    ) -> None:
        refuse_unchangeable(model)
        self.model = model
        self.edits = tuple(edits)
        self.steps = tuple(steps)
        self.title = title
        self.notes = tuple(notes)
        self.example = example
        self.certificate: Certificate | None = None
        several: Any = optimizer if isinstance(optimizer, tuple | list) else [optimizer]
        self._rewirings = [Rewiring(each, model) for each in several if each is not None]
        self._contents: list[dict[str, Tensor]] = []
        rehearse(model, self.edits)  # what cannot be done is found out now

    # ---------------------------------------------------------------- what it says

    @property
    def applied(self) -> bool:
        """Whether the model is converted now."""
        return self.certificate is not None

    @property
    def exact(self) -> bool:
        """Whether every layer is expected to give the same as before in eval mode."""
        others = any(not isinstance(edit, ReplaceModule) for edit in self.edits)
        return not others and all(step.exact for step in self.steps if step.action == "convert")

    def count(self, action: Action = "convert") -> int:
        """How many steps there are of an action: "convert", "keep" or "skip"."""
        return Counter(step.action for step in self.steps)[action]

    def __str__(self) -> str:
        return table(self)

    def __repr__(self) -> str:
        state = "applied" if self.applied else "not applied"
        return f"<Plan: {self.title}, {self.count()} norm(s) to convert, {state}>"

    # ---------------------------------------------------------------- what it does

    def apply(self, example: Any = None) -> Certificate:
        """Change the model, and say what that did to its output in eval mode.

        ``example`` is an input to measure with: a tensor, a tuple of positional arguments or a
        mapping of keyword arguments. Without one an input is looked for; ``example=False`` does
        without measuring. Whatever goes wrong, the model is as it was. A plan that is applied
        already gives its certificate again.
        """
        return self._apply(example, stacklevel=3)

    def _apply(self, example: Any, stacklevel: int) -> Certificate:
        if self.certificate is not None:
            return self.certificate
        if not self.edits and not self.count("keep"):
            message = f"{self.title}: no layer is converted. {self._why()}"
            warnings.warn(message, stacklevel=stacklevel)
        refuse_unchangeable(self.model)
        before = look_before(self.model, self.edits, self.example if example is None else example)
        there = list(self.model.parameters())
        try:
            do_all(self.model, self.edits)
            self._contents = contents(self.edits)
            self._rewire(there)
            notes = [*self.notes, *self._without_statistics()]
            notes += [f"{rewiring.note}." for rewiring in self._rewirings] or self._unknown()
            self.certificate = look_after(self.model, self.edits, before, self.title, notes)
        except BaseException:
            self._restore()
            raise
        return self.certificate

    def undo(self) -> None:
        """Put the original modules back, with the values they had; optimizers likewise.

        What was trained elsewhere in the model since then stays as it is, so a warning is given
        if the new layers have changed: then the model is neither what it was nor what it became.
        """
        if self.certificate is None:
            raise NothingToDo("The plan is not applied, so there is nothing to undo.")
        for edit in self.edits:
            edit.check_undo(self.model)
        if not unchanged(self._contents, contents(self.edits)):
            warnings.warn(
                f"{self.title}: the new layers have been trained since. undo brings back the old "
                "ones as they were, while the rest of the model stays as it is.",
                stacklevel=2,
            )
        self._restore()

    def _rewire(self, there: list[nn.Parameter]) -> None:
        now = {id(p) for p in self.model.parameters()}
        gone = [p for p in there if id(p) not in now]
        come = [s for edit in self.edits for s in edit.successors() if id(s.new) in now]
        olds = [edit.old for edit in replacements(self.edits) if edit.old is not None]
        stay = {p: None for old in olds for p in old.parameters() if id(p) in now}
        for rewiring in self._rewirings:
            rewiring.do(gone, come, list(stay))

    def _restore(self) -> None:
        for rewiring in self._rewirings:
            rewiring.undo()
        undo_all(self.model, self.edits)
        self.certificate = None

    def _without_statistics(self) -> list[str]:
        empty = [s.path for s in self.steps if "running statistics" in s.initialised]
        if not empty:
            return []
        return [
            f"{len(empty)} layer(s) took over from norms without running statistics, such as "
            f"{empty[0]}: train or calibrate before eval mode, or convert the batch norms alone, "
            'where="kind:bn".'
        ]

    def _unknown(self) -> list[str]:
        """What nobody would train who has an optimizer already."""
        new = {id(s.new) for edit in self.edits for s in edit.successors() if s.new.requires_grad}
        if not new:
            return []
        return [
            f"{len(new)} parameter(s) are new: make the optimizer now, or give it to the plan with "
            "optimizer=."
        ]

    def _why(self) -> str:
        reasons = Counter(step.reason for step in self.steps if step.action == "skip")
        if not reasons:
            return "The model has no norms that normkit knows. Print normkit.survey(model)."
        return " ".join(f"{count} skipped: {reason}." for reason, count in reasons.items())
