"""What a norm knows, in the terms of a batch norm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from normkit.layers.bnet import centre

TINY = 1e-12  # torch 2.11 refuses an eps of zero


@dataclass(frozen=True)
class Reading:
    """Scale, shift and running statistics of a norm, one number a channel each."""

    weight: Tensor | None
    bias: Tensor | None
    mean: Tensor | None = None
    """None: it keeps no running statistics."""
    var: Tensor | None = None
    eps: float = 1e-5
    plain: tuple[str, ...] = ("weight", "bias")
    """The parameters of the norm that are scale and shift as they stand."""
    lost: tuple[str, ...] = ()
    """What does not fit into these terms."""

    def as_batch_norm(self, norm: Any, channels: int, like: Tensor) -> Any:
        """Something with the fields of a batch norm, for ``from_batch_norm``."""
        like = next((t for t in (self.weight, self.mean) if t is not None), like)
        count = getattr(norm, "num_batches_tracked", None)
        untold = torch.zeros((), dtype=torch.long, device=like.device)
        found = SimpleNamespace(
            weight=self.weight,
            bias=self.bias,
            running_mean=like.new_zeros(channels) if self.mean is None else self.mean,
            running_var=like.new_ones(channels) if self.var is None else self.var,
            num_batches_tracked=untold if self.mean is None or count is None else count,
            eps=self.eps,
            training=norm.training,
        )
        if hasattr(norm, "momentum"):
            found.momentum = norm.momentum
        return found


def plain(norm: Any) -> Reading:
    """Of a norm with the names that torch.nn gives."""
    return Reading(
        weight=getattr(norm, "weight", None),
        bias=getattr(norm, "bias", None),
        mean=getattr(norm, "running_mean", None),
        var=getattr(norm, "running_var", None),
        eps=float(getattr(norm, "eps", getattr(norm, "variance_epsilon", 1e-5))),
    )


# ------------------------------------------------------------------ normkit's own layers


def _bn(norm: Any) -> Reading:
    found = plain(norm)
    if getattr(norm, "given_mean", None) is not None:  # input_norm with fixed numbers
        var = norm.given_std.square()
        return replace(found, mean=norm.given_mean, var=var, eps=TINY)
    if norm.form == "standard" or norm.weight is None:
        return found
    scale = norm.weight if norm.inner_weight is None else norm.weight * norm.inner_weight
    return replace(found, weight=scale, bias=norm.weight * norm.bias, plain=())


def _shifted(norm: Any) -> Reading:
    found = plain(norm)
    one = torch.ones_like(norm.target_std) if norm.weight is None else norm.weight
    zero = torch.zeros_like(norm.target_std) if norm.bias is None else norm.bias
    if norm.mean_spread == norm.std_spread == 0:
        return found
    weight, bias = one * norm.target_std, one * norm.target_mean + zero
    return replace(found, weight=weight.to(one.dtype), bias=bias.to(one.dtype), plain=())


def _renorm(norm: Any) -> Reading:
    return replace(plain(norm), var=norm.running_std.square() - norm.eps)


def _gated(norm: Any) -> Reading:
    weight = None if norm.weight is None else norm.weight * torch.sigmoid(norm.gate_bias)
    lost = ("gate", "centering") if getattr(norm, "center_weight", None) is not None else ("gate",)
    return replace(plain(norm), weight=weight, plain=("bias",), lost=lost)


def _bnet(norm: Any) -> Reading:
    if norm.weight is None:
        return plain(norm)
    taps = () if norm.kernel_size == 1 else ("kernel but for its centre",)
    return replace(plain(norm), weight=centre(norm.weight), plain=("bias",), lost=taps)


def _ubn(norm: Any) -> Reading:
    weight, bias, lost = norm.weight, norm.bias, ["score"]
    if norm._convolves:
        weight = centre(weight)
        lost.append("kernel but for its centre")
    if norm.gate_bias is not None and weight is not None:
        lost.append("gate")
        s = torch.sigmoid(norm.gate_bias)
        weight = weight * s
        bias = bias * s if norm.reading["gate"] == "after" else bias
    if norm.center_weight is not None:
        lost.append("centering")
    return replace(plain(norm), weight=weight, bias=bias, plain=(), lost=tuple(lost))


def _bgn(norm: Any) -> Reading:
    found, channels, groups = plain(norm), norm.channels, norm.groups
    if found.mean is None or found.var is None:
        return found
    if channels % groups == 0:
        wide = channels // groups
        mean, var = (t.repeat_interleave(wide) for t in (found.mean, found.var))
        return replace(found, mean=mean, var=var)
    if groups % channels:
        return replace(found, mean=None, var=None, lost=("statistics of uneven groups",))
    strips = found.mean.reshape(channels, -1)
    var = found.var.reshape(channels, -1).mean(1) + strips.var(1, correction=0)
    lost = ("statistics by position",)
    return replace(found, mean=strips.mean(1), var=var, lost=lost)


def _gbgn(norm: Any) -> Reading:
    if norm.running_mean is None:
        return plain(norm)
    wide = norm.channels // norm.groups
    groups = norm.population(None)
    mean, var = (t[0].repeat_interleave(wide) for t in (groups.mean, groups.var))
    return replace(plain(norm), mean=mean, var=var)


def _ibn(norm: Any) -> Reading:
    found = plain(norm)
    if found.mean is None or found.var is None or norm.split == 0:
        return found
    mean = torch.cat([found.mean.new_zeros(norm.split), found.mean])
    var = torch.cat([found.var.new_ones(norm.split), found.var])
    return replace(found, mean=mean, var=var, lost=("instance part",))


def _losing(*lost: str) -> Callable[[Any], Reading]:
    return lambda norm: replace(plain(norm), lost=lost)


OWN: dict[str, Callable[[Any], Reading]] = {
    "bn": _bn,
    "ghost_bn": _bn,
    "input_norm": _bn,
    "shifted_bn": _shifted,
    "batch_renorm": _renorm,
    "rbn": _gated,
    "iebn": _gated,
    "bnet": _bnet,
    "ubn": _ubn,
    "bgn": _bgn,
    "gbgn": _gbgn,
    "ibn": _ibn,
    "sn": _losing("mixture"),
    "ssn": _losing("mixture"),
    "dn": _losing("links"),
    "bcn": _losing("group norm after it"),
}
"""How to read each layer of the catalog that is not plain."""
