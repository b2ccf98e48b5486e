"""Which code computes a layer, in words."""

from __future__ import annotations

from torch import Tensor, nn

from normkit.engine import dispatch
from normkit.errors import DtypeError, OptionError
from normkit.layers.base import Normalizer
from normkit.layers.masking import mask_in_force, path_with_mask
from normkit.layers.norm_act import NormAct
from normkit.layers.synchronised import Synchronised
from normkit.layers.weight import WeightNormalizer

IN_GRAPHS = {
    "expression": "an expression",
    "moments": "expressions, its moments an operator",
    "split": "an expression, its coefficients an operator",
    "whole": "one operator",
}


def why(layer: nn.Module, x: Tensor, *, compiled: bool = False, mask: Tensor | None = None) -> str:
    """Says which code would compute an input, and what keeps a faster one from it.

    ``compiled`` asks for the graph that torch.compile would make, ``mask`` for a padded
    batch. For ws, wn and cwn x is a weight.

    >>> import torch, normkit as nk
    >>> with nk.use_backend("torch"):
    ...     nk.why(nk.BN(8), torch.randn(2, 8, 4, 4))
    "bn runs on torch, because use_backend('torch') is in force."
    >>> nk.why(nk.BN(8), torch.randn(2, 8, 4, 4), compiled=True)
    'bn is an expression, because the tensor is on cpu.'
    """
    followed = isinstance(layer, NormAct) and layer.fused not in (None, "none")
    if isinstance(layer, NormAct):
        layer = layer.norm
    if not isinstance(layer, Normalizer | WeightNormalizer):
        raise OptionError(
            f"why expects a layer of normkit, got {type(layer).__name__}. "
            "Try why(model.layer1[0].bn1, x): a layer, not a model, and what it gets."
        )
    if not isinstance(x, Tensor):
        raise DtypeError(
            f"why expects the tensor that the layer would get, got {type(x).__name__}. "
            "Try why(layer, torch.randn(2, 8, 4, 4))."
        )
    layer.check(x)
    name = layer.card.name
    try:
        if isinstance(layer, WeightNormalizer):
            path = layer.path(x, compiled=compiled or None)
        elif mask is not None or mask_in_force(layer) is not None:
            path = path_with_mask(compiled=compiled or None)
        else:
            path = layer.path(x, compiled=compiled or None, followed=followed)
        shares = isinstance(layer, Synchronised) and layer.sharing() is not None
        if shares and path.name in ("triton", "moments"):
            path = path._replace(reason="other processes share its statistics")
    except dispatch.NotServed as refusal:
        return f"{name} runs on no backend: Triton is asked for, but {refusal.obstacle}."
    reason = f", because {path.reason}" if path.reason else ""
    if path.name in IN_GRAPHS:
        text = f"{name} is {IN_GRAPHS[path.name]}"
    elif path.name == "torch":
        text = f"{name} runs on torch"
    elif path.name in ("cpp", "loops"):
        made = "" if path.name == "loops" else ", coefficients by torch"
        text = f"{name} runs in C++{made}"
    else:
        forced = " (forced)" if dispatch.forced() == "triton" else ""
        made = ", fused" if path.name == "fused" else ", coefficients by torch"
        if path.traced:
            made = ", fused, by its own coefficients, compiled"
        text = f"{name} runs on triton{forced}{made}"
    again = ""
    obstacle = layer.__dict__.get("_record_obstacle")
    if path.name == "fused" and obstacle and not layer.__dict__.get("_replays"):
        again = f" Its steps are not replayed: {obstacle}."
    return f"{text}{', its convolution by torch' if path.part else ''}{reason}.{again}"
