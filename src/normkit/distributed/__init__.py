"""Training by several processes: statistics that they share, and whether they agree."""

from normkit.distributed.sync import sync as sync
