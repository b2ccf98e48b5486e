"""What the results of an experiment show, and how sure one can be: pure functions.

``compare`` makes Comparisons of Results; the other names are its parts. scipy is needed when
they are called, not to import them.
"""

from __future__ import annotations

from normkit.lab.statistics.comparing import compare
from normkit.lab.statistics.correction import holm
from normkit.lab.statistics.flipping import sign_flip
from normkit.lab.statistics.intervals import interval
from normkit.lab.statistics.power import more_seeds
from normkit.lab.statistics.reaching import reach
from normkit.lab.statistics.spread import ALPHA, effect
from normkit.lab.statistics.t_tests import paired_t, tost
from normkit.lab.statistics.verdicts import verdict

__all__ = [
    "ALPHA",
    "compare",
    "effect",
    "holm",
    "interval",
    "more_seeds",
    "paired_t",
    "reach",
    "sign_flip",
    "tost",
    "verdict",
]
