"""Where runs and results are kept: one SQLite file, and a folder of checkpoints beside it."""

from normkit.lab.store.database import VERSION as VERSION
from normkit.lab.store.database import DiskFull as DiskFull
from normkit.lab.store.database import StoreError as StoreError
from normkit.lab.store.experiments import StoredExperiment as StoredExperiment
from normkit.lab.store.owner import Owner as Owner
from normkit.lab.store.store import CLAIMED as CLAIMED
from normkit.lab.store.store import DONE as DONE
from normkit.lab.store.store import FAILED as FAILED
from normkit.lab.store.store import WAITING as WAITING
from normkit.lab.store.store import Reader as Reader
from normkit.lab.store.store import RunState as RunState
from normkit.lab.store.store import Store as Store
