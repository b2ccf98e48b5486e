"""normkit: the normalizers of five papers as tested, fast drop-in layers for PyTorch."""

from normkit.catalog import make, names
from normkit.conversion.weights import fold_weights, standardize
from normkit.core.card import Card
from normkit.engine.backends import use_backend
from normkit.errors import NonFiniteWarning, NormkitError
from normkit.layers import (
    BCN,
    BGN,
    BN,
    BNET,
    CWN,
    DN,
    GBGN,
    GN,
    GW,
    IBN,
    IEBN,
    IN,
    LN,
    PN,
    RBN,
    SN,
    SSN,
    UBN,
    WN,
    WS,
    BatchRenorm,
    FrozenBN,
    GhostBN,
    InputNorm,
    ShiftedBN,
)
from normkit.layers.base import Normalizer
from normkit.layers.following import follow_learning_rate
from normkit.layers.norm_act import NormAct
from normkit.layers.reasons import why

__version__ = "0.1.0"

__all__ = [
    "BatchRenorm",
    "BCN",
    "BGN",
    "BN",
    "BNET",
    "Card",
    "CWN",
    "DN",
    "fold_weights",
    "follow_learning_rate",
    "FrozenBN",
    "GBGN",
    "GhostBN",
    "GN",
    "GW",
    "IBN",
    "IEBN",
    "IN",
    "InputNorm",
    "LN",
    "make",
    "names",
    "NonFiniteWarning",
    "NormAct",
    "Normalizer",
    "NormkitError",
    "PN",
    "RBN",
    "ShiftedBN",
    "SN",
    "SSN",
    "standardize",
    "UBN",
    "use_backend",
    "why",
    "WN",
    "WS",
]
