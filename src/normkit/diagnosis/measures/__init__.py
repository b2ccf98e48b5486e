"""What the papers measure, as pure functions of tensors."""

from normkit.diagnosis.measures.activity import ActivityBounds as ActivityBounds
from normkit.diagnosis.measures.activity import dead_channels as dead_channels
from normkit.diagnosis.measures.activity import saturated_channels as saturated_channels
from normkit.diagnosis.measures.activity import share_beyond as share_beyond
from normkit.diagnosis.measures.gates import frozen_share as frozen_share
from normkit.diagnosis.measures.gates import gate_saturation as gate_saturation
from normkit.diagnosis.measures.groups import stat_diff as stat_diff
from normkit.diagnosis.measures.groups import under_represented as under_represented
from normkit.diagnosis.measures.scale import Drift as Drift
from normkit.diagnosis.measures.scale import drift as drift
from normkit.diagnosis.measures.scale import gradient_factor as gradient_factor
from normkit.diagnosis.measures.shift import ESM as ESM
from normkit.diagnosis.measures.shift import Statistics as Statistics
from normkit.diagnosis.measures.shift import esm as esm
from normkit.diagnosis.measures.shift import output_error as output_error
from normkit.diagnosis.measures.similarity import condensation as condensation
from normkit.diagnosis.measures.similarity import condensation_matrix as condensation_matrix
from normkit.diagnosis.measures.weights import GradientParts as GradientParts
from normkit.diagnosis.measures.weights import (
    ws_gradient_decomposition as ws_gradient_decomposition,
)
