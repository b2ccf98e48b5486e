"""normkit: the normalizers of five papers as tested, fast drop-in layers for PyTorch.

Public names are imported with this package where torch is imported already, and otherwise when the
first of them is asked for: the help pages of the command line do not wait for torch.
"""

import importlib
import sys
import typing

if "torch" in sys.modules:
    from normkit.calibration import (
        Accumulation,
        AveragingComparison,
        Calibration,
        Profiles,
        Staged,
        Statistics,
        accumulate,
        adapt,
        apply_statistics,
        averaged_statistics,
        batch_statistics,
        calibrate,
        calibrate_domains,
        compare_averaging,
        measure,
        stage,
    )
    from normkit.catalog import make, names
    from normkit.conversion import (
        Certificate,
        Fit,
        FitReport,
        FoldPlan,
        Plan,
        PooledLevels,
        Step,
        certificates,
        convert,
        fold,
        fold_weights,
        freeze,
        frozen,
        fuse,
        param_groups,
        plan_conversion,
        plan_fold,
        plan_fuse,
        pool_levels,
        recipes,
        standardize,
        unfreeze,
        unpool_levels,
    )
    from normkit.core.card import Card
    from normkit.diagnosis import (
        Diagnosis,
        Finding,
        GapAttribution,
        Measurements,
        Observer,
        attribute_gap,
        collect,
        diagnose,
        disturbance_test,
        disturbed,
        observe,
    )
    from normkit.distributed import RankReport, check_distributed, sync
    from normkit.engine.dispatch import use_backend
    from normkit.engine.replay.build import build_extension
    from normkit.errors import NonFiniteWarning, NormkitError
    from normkit.inspection import Site, Survey, select, survey
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
        RMS,
        SN,
        SSN,
        UBN,
        WN,
        WS,
        BatchRenorm,
        DyT,
        FrozenBN,
        GhostBN,
        InputNorm,
        ShiftedBN,
    )
    from normkit.layers.base import Normalizer
    from normkit.layers.bcn import follow_learning_rate
    from normkit.layers.domain_in_use import use_domain
    from normkit.layers.masking import masked
    from normkit.layers.norm_act import NormAct
    from normkit.layers.reasons import why

__version__ = "0.1.0"

__all__ = [
    "accumulate",
    "Accumulation",
    "adapt",
    "apply_statistics",
    "attribute_gap",
    "averaged_statistics",
    "AveragingComparison",
    "batch_statistics",
    "BatchRenorm",
    "BCN",
    "BGN",
    "BN",
    "BNET",
    "build_extension",
    "calibrate",
    "calibrate_domains",
    "Calibration",
    "Card",
    "Certificate",
    "certificates",
    "check_distributed",
    "collect",
    "compare_averaging",
    "convert",
    "CWN",
    "diagnose",
    "Diagnosis",
    "disturbance_test",
    "disturbed",
    "DN",
    "DyT",
    "Finding",
    "Fit",
    "FitReport",
    "fold",
    "fold_weights",
    "FoldPlan",
    "follow_learning_rate",
    "freeze",
    "frozen",
    "FrozenBN",
    "fuse",
    "GapAttribution",
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
    "masked",
    "measure",
    "Measurements",
    "names",
    "NonFiniteWarning",
    "NormAct",
    "Normalizer",
    "NormkitError",
    "observe",
    "Observer",
    "param_groups",
    "Plan",
    "plan_conversion",
    "plan_fold",
    "plan_fuse",
    "PN",
    "pool_levels",
    "PooledLevels",
    "Profiles",
    "RankReport",
    "RBN",
    "recipes",
    "RMS",
    "select",
    "ShiftedBN",
    "Site",
    "SN",
    "SSN",
    "stage",
    "Staged",
    "standardize",
    "Statistics",
    "Step",
    "Survey",
    "survey",
    "sync",
    "UBN",
    "unfreeze",
    "unpool_levels",
    "use_backend",
    "use_domain",
    "why",
    "WN",
    "WS",
]

if not typing.TYPE_CHECKING:  # of a module with __getattr__, type checkers believe every name

    def __getattr__(name: str) -> object:
        if name in __all__:
            importlib.import_module("torch")
            importlib.reload(sys.modules[__name__])  # this file again, now with its imports
            if name in globals():
                return globals()[name]
        elif not name.startswith("_"):
            try:
                return importlib.import_module(f"{__name__}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{__name__}.{name}":
                    raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
