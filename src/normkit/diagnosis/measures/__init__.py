"""What the papers measure, as pure functions of tensors."""

from normkit.diagnosis.measures.parameters import Drift as Drift
from normkit.diagnosis.measures.parameters import GradientParts as GradientParts
from normkit.diagnosis.measures.parameters import drift as drift
from normkit.diagnosis.measures.parameters import gradient_factor as gradient_factor
from normkit.diagnosis.measures.parameters import (
    ws_gradient_decomposition as ws_gradient_decomposition,
)
from normkit.diagnosis.measures.statistics import ESM as ESM
from normkit.diagnosis.measures.statistics import Statistics as Statistics
from normkit.diagnosis.measures.statistics import esm as esm
from normkit.diagnosis.measures.statistics import output_error as output_error
from normkit.diagnosis.measures.statistics import stat_diff as stat_diff
from normkit.diagnosis.measures.statistics import under_represented as under_represented
from normkit.diagnosis.measures.values import ActivityBounds as ActivityBounds
from normkit.diagnosis.measures.values import condensation as condensation
from normkit.diagnosis.measures.values import condensation_matrix as condensation_matrix
from normkit.diagnosis.measures.values import dead_channels as dead_channels
from normkit.diagnosis.measures.values import frozen_share as frozen_share
from normkit.diagnosis.measures.values import gate_saturation as gate_saturation
from normkit.diagnosis.measures.values import saturated_channels as saturated_channels
from normkit.diagnosis.measures.values import share_beyond as share_beyond
