"""Where runs and results are kept: one SQLite file, and a folder of checkpoints beside it."""

from normkit.lab.store.database import VERSION, DiskFull, StoreError
from normkit.lab.store.owner import Owner
from normkit.lab.store.records import CLAIMED, DONE, FAILED, WAITING, State
from normkit.lab.store.store import Store

__all__ = [
    "CLAIMED",
    "DONE",
    "FAILED",
    "VERSION",
    "WAITING",
    "DiskFull",
    "Owner",
    "State",
    "Store",
    "StoreError",
]
