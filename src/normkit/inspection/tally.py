"""Old names, until all callers have the new ones."""

from normkit.inspection.statistics import MergedMoments as Tally
from normkit.inspection.statistics import MomentsAccumulator as Pooling
from normkit.inspection.statistics import weights_of_rows as weights

__all__ = ["Pooling", "Tally", "weights"]
