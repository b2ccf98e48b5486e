"""Old names, until all callers have the new ones."""

from normkit.inspection.statistics import NormStatistics as Keeper
from normkit.inspection.statistics import channel_moments as table_of

__all__ = ["Keeper", "table_of"]
