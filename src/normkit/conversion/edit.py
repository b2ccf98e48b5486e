"""A change to a model that can be taken back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, eq=False)
class Successor:
    """A parameter that an edit brings into the model, as optimizers have to know it."""

    new: nn.Parameter
    after: nn.Parameter | None
    """The parameter of the old model whose group it joins; None: there is none."""
    same_role: bool = False
    """Whether it means the same as that one, so that momentum can go on."""


class Edit(ABC):
    """One change, all of it or nothing; ``undo`` gives back the very objects that were there."""

    description: str

    def check(self, model: nn.Module) -> None:  # noqa: B027  most edits can always be done
        """Raise a NormkitError if ``do`` could not be done now."""

    def check_undo(self, model: nn.Module) -> None:  # noqa: B027  likewise
        """Raise a NormkitError if something else stands on the change by now."""

    @abstractmethod
    def do(self, model: nn.Module) -> None:
        """Change the model."""

    @abstractmethod
    def undo(self, model: nn.Module) -> None:
        """Take the change back."""

    def successors(self) -> list[Successor]:
        """The parameters that ``do`` has brought, and whose places they take."""
        return []

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.description}>"


def do_all(model: nn.Module, edits: tuple[Edit, ...]) -> None:
    """Do all edits in their order; on an error those done so far are taken back."""
    done: list[Edit] = []
    try:
        for edit in edits:
            edit.check(model)
            done.append(edit)
            edit.do(model)
    except BaseException:
        undo_all(model, tuple(done))
        raise


def undo_all(model: nn.Module, edits: tuple[Edit, ...]) -> None:
    """Take edits back, the last first."""
    for edit in reversed(edits):
        edit.undo(model)
