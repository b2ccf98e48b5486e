"""Train what an experiment lacks, in worker processes that may be lost without losing anything.

    launcher ──Job──> worker ──Told, Done, Broke, Left──> launcher ──> store

The launcher alone writes the store. Workers train and write checkpoints, one a run. Whoever is
killed, and whenever, the same command goes on from there and comes to the same numbers.
"""

from normkit.lab.sweep.launcher import SweepError
from normkit.lab.sweep.sweep import ENGINES, run
from normkit.lab.sweep.watcher import Entry, Lines, Plan, Watcher, entries

__all__ = ["ENGINES", "Entry", "Lines", "Plan", "SweepError", "Watcher", "entries", "run"]
