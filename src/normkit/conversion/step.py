"""What a plan does to one norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Action = Literal["convert", "skip", "keep"]

SHOWN = ("activation ", "drop layer ")  # the change shows them on both sides


@dataclass(frozen=True)
class Step:
    """One line of a plan: a norm, what becomes of it, and what that costs."""

    path: str
    """Where it is in the model: the first path, if it has several."""
    was: str
    """The module that is there."""
    becomes: str = ""
    """The module that will be; empty where nothing changes."""
    action: Action = "convert"
    """"convert"; "keep", since it is what was asked for already; or "skip", see the reason."""
    carried: tuple[str, ...] = ()
    """What the new module takes over."""
    initialised: tuple[str, ...] = ()
    """What the new module has beside that, at its start values."""
    lost: tuple[str, ...] = ()
    """What the old module knew and the new one has no place for."""
    exact: bool = False
    """Whether the new module equals the old one in eval mode."""
    reason: str = ""
    """Why it is skipped or kept, or anything else worth knowing."""
    paths: tuple[str, ...] = ()
    """Every path, where the module is shared."""

    @property
    def change(self) -> str:
        """From what to what."""
        return f"{self.was} → {self.becomes}" if self.action == "convert" else self.was

    @property
    def contents(self) -> str:
        """What is carried, what starts anew, what is lost, and whether it is exact, in words."""
        if self.action != "convert":
            return ""
        parts = (
            ("carries", [what for what in self.carried if not what.startswith(SHOWN)]),
            ("starts", self.initialised),
            ("loses", self.lost),
        )
        said = [f"{word} {', '.join(what)}" for word, what in parts if what]
        said.append("exact in eval mode" if self.exact else "another function in eval mode")
        return "; ".join(said)

    @property
    def note(self) -> str:
        """The reason, with the action where that is not to convert."""
        if self.action == "convert":
            return self.reason
        return f"{self.action}: {self.reason}" if self.reason else self.action
