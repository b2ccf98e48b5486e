"""Train what an experiment lacks, in worker processes that may be lost without losing anything.

    launcher ──Job──> worker ──Progressed, Finished, Failed, Stopped──> launcher ──> store

The launcher alone writes the store. Workers train and write checkpoints, one a run. Whoever is
killed, and whenever, the same command goes on from there and comes to the same numbers.
"""

from normkit.lab.sweep.launcher import ENGINES as ENGINES
from normkit.lab.sweep.launcher import run as run
from normkit.lab.sweep.messages import SweepError as SweepError
from normkit.lab.sweep.progress import ProgressLines as ProgressLines
from normkit.lab.sweep.progress import ProgressListener as ProgressListener
from normkit.lab.sweep.progress import RunLabel as RunLabel
from normkit.lab.sweep.progress import SweepPlan as SweepPlan
from normkit.lab.sweep.progress import outcome as outcome
from normkit.lab.sweep.progress import run_labels as run_labels
