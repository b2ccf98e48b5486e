"""Old names, until all callers have the new ones."""

from normkit.inspection.batches import Forward as Forward
from normkit.inspection.batches import ModelCall as Call
from normkit.inspection.batches import call_model as run
from normkit.inspection.batches import images_in as images_in
from normkit.inspection.batches import takes_list as takes_list

__all__ = ["Call", "Forward", "images_in", "run", "takes_list"]
