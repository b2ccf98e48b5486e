"""What hangs on a norm beside its numbers: hooks, tensors of others, attributes."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.conversion.marks import carry, own_class, state_of
from normkit.conversion.replacing import HOOKS
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

RUNNING = [name for name in HOOKS if name.endswith("hooks")]  # the others say how to call them
OF_CHECKPOINTS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
CHILDREN = {"act", "activation", "drop", "dropout", "norm"}
# attributes of the classes that can be read, which would be wrong on another one
ITS_OWN = {
    "act_name", "act_param", "affine", "channels", "channels_last", "data_format", "dim",
    "elementwise_affine", "eps", "fast_norm", "groups", "momentum", "normalized_shape",
    "num_groups", "process_group", "track_running_stats", "training", "variance_epsilon",
}  # fmt: skip


def is_hooked(module: nn.Module | None) -> bool:
    """Whether something of others runs when the module does."""
    return module is not None and any(len(vars(module)[name] or ()) for name in RUNNING)


def carried_hooks(module: nn.Module) -> tuple[str, ...]:
    """The hooks that ReplaceModule hands over, in words."""
    count = sum(len(vars(module)[name] or ()) for name in RUNNING)
    return (f"{count} hook(s)",) if count else ()


def lost_with(module: nn.Module, shared: set[int]) -> tuple[str, ...]:
    """What no other module could use, in words; ``shared`` are parameters that go on."""
    lost = []
    if count := sum(len(vars(module)[name]) for name in OF_CHECKPOINTS):
        lost.append(f"{count} hook(s) of state_dict")
    if not isinstance(module, Normalizer | NormAct):
        known = TENSORS | CHILDREN
        own = {**module._parameters, **module._buffers, **module._modules}
        lost += [name for name, what in own.items() if name not in known and what is not None]
    for name, p in module.named_parameters():
        hooks = len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ())
        if hooks and id(p) not in shared:
            lost.append(f"{hooks} hook(s) of {name}")
    return tuple(lost)


def carry_freezing(norm: nn.Module, made: nn.Module) -> None:
    """What ``freeze`` has fixed stays fixed, and ``unfreeze`` brings back what was before."""
    carry(norm, made)
    old, new = state_of(norm), state_of(made)
    if old is not None and new is not None:
        usual = any(old.trainable.values())
        new.trainable = {name: old.trainable.get(name, usual) for name in new.trainable}


def frozen_parts(module: nn.Module) -> tuple[str, ...]:
    state = state_of(module)
    return () if state is None else state.parts


def attributes(module: nn.Module, channels: int) -> dict[str, Any]:
    """What others may have written on a module, or read from it, such as num_features."""
    if isinstance(module, Normalizer):
        usual = set(vars(own_class(module)(channels, device="meta")))
    else:
        usual = ITS_OWN
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in usual and not isinstance(value, nn.Module)
    }
