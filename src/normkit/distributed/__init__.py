"""Training by several processes: statistics that they share, and whether they agree."""

from normkit.distributed.check import RankReport as RankReport
from normkit.distributed.check import check_distributed as check_distributed
from normkit.distributed.sync import sync as sync
