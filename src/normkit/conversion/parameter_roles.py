"""What part a parameter plays for an optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrize

from normkit.inspection.kinds import kind_of
from normkit.layers.base import Normalizer
from normkit.layers.weight import WeightNormalizer

DECAYED, PLAIN, SCALE = "decayed", "not_decayed", "scales"  # names of the groups
# what the parameters of norms are; all that is not named here is learned in full, not decayed
ROLES = {
    "weight": SCALE,
    "group_weight": SCALE,  # the second scale of bcn
    "mean_weight": DECAYED,  # what sn mixes, decayed by its authors: towards an equal mixture
    "var_weight": DECAYED,
}


def roles_by_module(model: nn.Module) -> dict[nn.Parameter, str]:
    """The role of every parameter, by the module that owns it."""
    strength = {DECAYED: 0, PLAIN: 1, SCALE: 2}
    roles: dict[nn.Parameter, str] = {}
    for owner, name, parameter in _owned(model):
        role = _role(owner, name, parameter)
        # shared by a norm and something else: what the norm needs
        if strength[role] >= strength[roles.get(parameter, role)]:
            roles[parameter] = role
    return roles


def _owned(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Every parameter with its module and name there; a parametrized one is what it stands for."""
    stands_for: dict[nn.Module, tuple[nn.Module, str]] = {}
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name, steps in module.parametrizations.items():  # type: ignore[operator, union-attr]
                stands_for[steps] = module, name
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield (*stands_for.get(module, (module, name)), parameter)


def _role(owner: nn.Module, name: str, parameter: nn.Parameter) -> str:
    if isinstance(owner, WeightNormalizer) or kind_of(owner) is not None:
        role = ROLES.get(name, PLAIN)
        # bnet and ubn have a kernel where others have a scale: a convolution's weight
        kernel = isinstance(owner, Normalizer) and parameter.dim() > 1
        return DECAYED if role == SCALE and kernel else role
    # a weight of any layer has two axes at least; one is a scale such as that of LayerScale
    return PLAIN if parameter.dim() < 2 or "bias" in name.split("_") else DECAYED


def roles_by_shape(model: nn.Module) -> dict[nn.Parameter, str]:
    """The rule of the official code: by the number of axes after squeeze(), and by the name."""
    return {
        p: DECAYED if p.squeeze().dim() != 1 else SCALE if "weight" in name else PLAIN
        for name, p in model.named_parameters()
    }
