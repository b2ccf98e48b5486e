"""What a variant looks like in every chart of a page: colour, dash and symbol.

Three marks, so that it can be told apart without colours. The baseline is grey and comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = 8  # besides the grey of the baseline; page.css has them, for light and dark
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "triangle-down", "cross", "star", "x")
# the same dashes for SVG
STROKES = {"solid": "none", "dash": "7 4", "dot": "2 3", "dashdot": "7 3 2 3"}


@dataclass(frozen=True)
class Look:
    """The place of a variant in the key, and its marks."""

    place: int
    name: str
    colour: int  # --v0 is the baseline's
    dash: str
    symbol: str

    @property
    def stroke(self) -> str:
        return STROKES[self.dash]


def looks(names: Sequence[str]) -> dict[str, Look]:
    """The baseline comes first in ``names``."""
    made = {}
    for place, name in enumerate(names):
        turn, colour = divmod(place - 1, COLOURS) if place else (0, -1)
        dash = "dash" if place == 0 else DASHES[(2 * turn) % len(DASHES)]
        symbol = SYMBOLS[place % len(SYMBOLS)]
        made[name] = Look(place, name, colour + 1, dash, symbol)
    return made
