"""Old names, until all callers have the new ones."""

from normkit.inspection.statistics import pooled_statistics_of as reader_of
from normkit.inspection.statistics import running_moments as running_of
from normkit.inspection.statistics import statistics_of as keeper_of

__all__ = ["keeper_of", "reader_of", "running_of"]
