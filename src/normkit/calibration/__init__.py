"""Statistics that fit the data: measured exactly, adapted, kept in files, shared by batches."""

from normkit.calibration.accumulation import Accumulation as Accumulation
from normkit.calibration.accumulation import accumulate as accumulate
from normkit.calibration.adapt import adapt as adapt
from normkit.calibration.apply import apply_statistics as apply_statistics
from normkit.calibration.averaging import AveragingComparison as AveragingComparison
from normkit.calibration.averaging import averaged_statistics as averaged_statistics
from normkit.calibration.averaging import compare_averaging as compare_averaging
from normkit.calibration.batch_statistics import batch_statistics as batch_statistics
from normkit.calibration.calibrate import calibrate as calibrate
from normkit.calibration.calibrate import measure as measure
from normkit.calibration.domains import calibrate_domains as calibrate_domains
from normkit.calibration.profiles import Profiles as Profiles
from normkit.calibration.result import Calibration as Calibration
from normkit.calibration.staging import Staged as Staged
from normkit.calibration.staging import stage as stage
from normkit.calibration.statistics import Statistics as Statistics
