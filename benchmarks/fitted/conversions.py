"""Conversions by name, as plain as they are carried, fitted, or distilled as well."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch
from torch import Tensor, nn

import normkit as nk

# gn:8 is gn with 8 groups, or as many as there are channels, and of that the greatest divisor
# that both have; gn is what it takes by itself: 32 groups, or four channels each where they are few
TARGETS = (
    "gn:1", "gn:8", "gn:32", "gn", "gn:fit", "ln", "in", "pn", "rms", "dyt", "sn", "ssn", "bcn",
    "bgn", "gbgn", "ibn", "iebn", "dn", "gw", "rbn", "ubn", "bnet", "batch_renorm", "ghost_bn",
)  # fmt: skip


def options_of(target: str) -> tuple[str, dict[str, Any]]:
    name, _, groups = target.partition(":")
    if not groups:
        return name, {}
    if groups == "fit":
        return name, {"groups": "fit"}
    return name, {"groups": int(groups), "group_policy": "gcd"}


def only_fitted(target: str) -> bool:
    """Whether there is no conversion without images: the fit chooses the groups."""
    return target.endswith(":fit")


def plain(model: nn.Module, target: str) -> nn.Module:
    """A converted copy; scales and shifts are carried."""
    name, options = options_of(target)
    converted: nn.Module = nk.convert(copy.deepcopy(model), name, example=False, **options)
    return converted


def fitted(
    model: nn.Module, target: str, images: Tensor, **settings: Any
) -> tuple[nn.Module, float, Any]:
    """A converted copy, the seconds that it took, and the report of the fit.

    ``settings`` are those of ``nk.Fit``.
    """
    name, options = options_of(target)
    copied = copy.deepcopy(model)
    synchronize(images.device)
    start = time.perf_counter()
    fit = nk.Fit(images, max_images=len(images), **settings)
    plan = nk.plan_conversion(copied, name, example=False, fit=fit, **options)
    plan.apply()
    synchronize(images.device)
    return copied, time.perf_counter() - start, plan.fit


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def of_device(error: BaseException) -> bool:
    """Whether the GPU failed, mostly for want of memory, and not the method.

    Its libraries say so in words of their own: where another process has taken the last of the
    memory, a handle cannot be created.
    """
    said = str(error).lower()
    return any(word in said for word in ("cuda", "cudnn", "cublas", "cusolver", "out of memory"))


def refusal(error: Exception) -> str:
    """The first sentence of what is said against a conversion; failures of the GPU are raised."""
    if of_device(error):
        raise error
    return " ".join(str(error).split())[:200]
