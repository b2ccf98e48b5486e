"""A model with what is known about it, and a disease for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from normkit.diagnosis.diagnose import diagnose
from normkit.diagnosis.diagnosis import Diagnosis

if TYPE_CHECKING:
    from normkit.diagnosis.diseases.ward import Ward


@dataclass(eq=False)
class Patient:
    """A model and the arguments of ``diagnose`` for it, ``loader`` among them."""

    model: nn.Module
    arguments: dict[str, Any] = field(default_factory=dict)

    def diagnose(self) -> Diagnosis:
        return diagnose(self.model, **self.arguments)


@dataclass(frozen=True)
class Disease:
    """A fault: how it comes about, how it is injected, and the finding that has to name it."""

    name: str
    finding: str
    story: str
    inject: Callable[[Ward], Patient]


@dataclass(frozen=True)
class Reference:
    """A healthy model: none of its findings may be an alarm."""

    name: str
    about: str
    make: Callable[[Ward], Patient]
