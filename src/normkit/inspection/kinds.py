"""Which modules are norms, and of which kind.

    a name of the catalog   ours; and of other libraries what computes the same:
        bn, frozen_bn, in, gn    batch, frozen batch, instance and group norm
        pn                       LayerNorm2d and its like: over the channels (axis 1) of each pixel
    ln                      ours: over a whole sample; torch.nn's: over the last axes
    sync_bn                 batch norm with statistics over all processes
    rms                     root mean square norm, without a mean
    lazy_bn, lazy_in        they become bn and in with the first batch
    split_bn                timm's: further batch norms inside, for parts of the batch
    iabn                    in-place activated batch norm
    evo, frn, grn, lrn      EvoNorm; filter, global and local response norm
    simple                  timm's SimpleNorm
    other                   a module that calls itself a norm

Classes of timm, torchvision and others are recognised by the names of their class and of its bases,
so that none of them has to be installed.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _LazyNormBase, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from normkit.catalog import ENTRIES
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct
from normkit.layers.weight import WeightNormalizer

# names of classes, first match wins; those of torch.nn that have a class of their own come later
NAMED = (
    (r"Frozen\w*BatchNorm", "frozen_bn"),
    (r"SplitBatchNorm", "split_bn"),
    (r"In[Pp]laceA[Bb][Nn]", "iabn"),
    (r"Sync\w*BatchNorm", "sync_bn"),
    (r"EvoNorm", "evo"),
    (r"FilterResponseNorm", "frn"),
    (r"GlobalResponseNorm", "grn"),
    (r"LocalResponseNorm|CrossMapLRN", "lrn"),
    (r"SimpleNorm", "simple"),
    (r"R[Mm][Ss]Norm|T5LayerNorm", "rms"),
    (r"LayerNorm\w*2d", "pn"),
)
TORCH = (
    (_InstanceNorm, "in"),
    (_NormBase, "bn"),
    (nn.GroupNorm, "gn"),
    (nn.LayerNorm, "ln"),
)
# for classes that derive from none of those, as when a norm was written from scratch
ALIKE = (
    (r"BatchNorm", "bn"),
    (r"InstanceNorm", "in"),
    (r"GroupNorm", "gn"),
    (r"LayerNorm", "ln"),
)
A_NORM = re.compile(r"Norm(?!al)|Normali[sz]ation|In[Pp]laceA[Bb][Nn]|CrossMapLRN")
A_FUNCTION = re.compile(r"(?i)(relu|elu|gelu|silu|swish|mish|sigmoid|tanh)\d?$")
# of the kinds above that are no names of the catalog: what they are in eval mode
SAME_AS = {"sync_bn": "bn", "split_bn": "bn", "iabn": "bn"}
PLAIN_BATCH_NORMS = ("bn", "sync_bn")  # that compute in training what the layer of normkit does
# kinds of other libraries whose running statistics have the names and form of torch.nn's
STORED_AS_TORCH = ("bn", "sync_bn", "split_bn", "iabn", "evo", "frozen_bn", "in")
OVER_THE_LAST_AXIS = ("ln", "rms", "simple", "grn")  # outside of normkit
LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
WEIGHTED = (_ConvNd, nn.Linear, nn.Bilinear)
# classes that normalize their weight; first match wins
NORMALIZED_WEIGHTS = (
    (r"ScaledStdConv", "scaled_ws"),
    (r"StdConv|Conv\w*WS|WSConv|ConvAWS|WeightStandardized", "ws"),
)
# what computes a weight; torch.nn.utils has an old form, which is a hook, and a new one
COMPUTED_WEIGHTS = {
    "WeightNorm": "wn",
    "_WeightNorm": "wn",
    "SpectralNorm": "spectral",
    "_SpectralNorm": "spectral",
}


def kind_of(module: nn.Module) -> str | None:
    """The kind of a norm; None for what is none, such as a block that contains one."""
    if isinstance(module, NormAct):
        return kind_of(module.norm)
    if isinstance(module, Normalizer):
        return module.card.name
    if isinstance(module, _LazyNormBase):
        return "lazy_in" if isinstance(module, _InstanceNorm) else "lazy_bn"
    names = [base.__name__ for base in type(module).__mro__]
    based = next((kind for base, kind in TORCH if isinstance(module, base)), None)
    if based is None and not _calls_itself_a_norm(module):
        return None
    kind = _first(NAMED, names) or based or _first(ALIKE, names[:1]) or "other"
    return "pn" if kind == "ln" and channels_first(module) else kind


def layer_of(kind: str) -> type[Normalizer] | None:
    """The layer of the catalog that is this kind; None if there is none."""
    layer: type[Normalizer] | None = ENTRIES.get(SAME_AS.get(kind, kind))
    return layer


def channel_axis_of(norm: nn.Module, kind: str) -> int:
    """-1 if the channels are on the last axis, as in a transformer."""
    if isinstance(norm, Normalizer) or kind not in OVER_THE_LAST_AXIS:
        return 1
    if any("2d" in base.__name__ for base in type(norm).__mro__):
        return 1
    whole_maps = len(getattr(norm, "normalized_shape", ())) > 1  # nn.LayerNorm((C, H, W))
    return 1 if whole_maps else int(getattr(norm, "channel_dim", -1))  # timm's GRN says it


def channels_first(module: nn.Module) -> bool:
    """Whether a layer norm says that the channels are on axis 1, as in ConvNeXt's own code."""
    return getattr(module, "data_format", None) == "channels_first"


def is_activation(module: nn.Module) -> bool:
    """Whether a module is an activation function: of torch.nn, timm or named like one."""
    if isinstance(module, nn.MultiheadAttention) or not all(map(is_activation, module.children())):
        return False
    for base in type(module).__mro__:
        if re.search(r"(^|\.)activations?(_\w+)?$", base.__module__):
            return True
    return A_FUNCTION.search(type(module).__name__) is not None


def is_weighted(module: nn.Module) -> bool:
    """Whether a module has a weight matrix or kernel of its own."""
    if isinstance(module, WEIGHTED):
        return True
    lazy = nn.UninitializedParameter
    own = (p for p in module._parameters.values() if p is not None and not isinstance(p, lazy))
    return any(p.dim() > 1 for p in own)


def _calls_itself_a_norm(module: nn.Module) -> bool:
    """By its name, unless it holds what a norm has not: weights, other norms, a list of layers."""
    named = any(A_NORM.search(base.__name__) for base in type(module).__mro__)
    if not named or isinstance(module, LISTS):
        return False
    inside = [m for m in module.modules() if m is not module]
    return not any(isinstance(m, (*WEIGHTED, *LISTS)) or kind_of(m) for m in inside)


def _first(table: tuple[tuple[str, str], ...], names: list[str]) -> str | None:
    kinds = (kind for pattern, kind in table for name in names if re.search(pattern, name))
    return next(kinds, None)


def is_parametrization(module: nn.Module) -> bool:
    """Whether a module computes a weight: SpectralNorm is no norm, whatever its name."""
    return isinstance(module, ParametrizationList)


def weight_kind_of(module: nn.Module) -> str | None:
    """How the weight of a layer is normalized: by its class, a parametrization, or a hook."""
    steps: list[Any] = list(module._forward_pre_hooks.values())  # that compute its tensors
    if is_parametrized(module):
        for computed in module.parametrizations.values():  # type: ignore[operator]
            steps += computed
    for step in steps:
        if isinstance(step, WeightNormalizer):
            return step.card.name
        if (kind := COMPUTED_WEIGHTS.get(type(step).__name__)) is not None:
            return kind
    if not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None
    names = [base.__name__ for base in type(module).__mro__]
    return next(
        (kind for mark, kind in NORMALIZED_WEIGHTS for n in names if re.search(mark, n)), None
    )
