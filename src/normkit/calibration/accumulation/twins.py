"""A bn of ours in the place of a batch norm of torch.nn or timm."""

from __future__ import annotations

from typing import Any

from torch import nn

from normkit.layers.bn import BN

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def twin_of(module: nn.Module) -> BN:
    """A bn that computes what another batch norm would; ``follow`` gives it its tensors."""
    norm: Any = module
    twin = BN(
        norm.num_features,
        eps=norm.eps,
        momentum=norm.momentum,
        affine=norm.weight is not None,
        track_running_stats=norm.running_mean is not None,
    )
    follow(twin, module)
    return twin


def follow(twin: BN, module: nn.Module) -> None:
    """The parameters, buffers, mode and options that the other one has now: they are shared.

    Asked for before each call, since moving a model to another device gives it new buffers.
    """
    norm: Any = module
    twin.training, twin.momentum, twin.eps = norm.training, norm.momentum, norm.eps
    twin._parameters["weight"], twin._parameters["bias"] = norm.weight, norm.bias
    if norm.running_mean is not None:
        twin._buffers.update({name: getattr(norm, name) for name in STATISTICS})
    anchor = norm.weight if norm.weight is not None else norm.running_mean
    for name in ("nonfinite_batches", "arrivals"):
        count = twin._buffers[name]
        if anchor is not None and count is not None and count.device != anchor.device:
            twin._buffers[name] = count.to(anchor.device)
