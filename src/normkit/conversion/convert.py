"""One call that converts a model."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn

from normkit.conversion.plan import Optimizers, plan_conversion

Model = TypeVar("Model", bound=nn.Module)


def convert(
    model: Model,
    to: str | type,
    where: Any = None,
    *,
    example: Any = None,
    optimizer: Optimizers = None,
    **options: Any,
) -> Model:
    """Turn the norms of a model into another kind, in place; returns the model.

    The same as ``plan_conversion(...).apply()``: see there for the arguments. Take the plan
    instead to see what will happen, to get the certificate, or to be able to go back. Warns if
    there was nothing to convert.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> nk.convert(model, "gn", groups=4)[1]
    GN(8, groups=4)
    """
    plan = plan_conversion(model, to, where, example=example, optimizer=optimizer, **options)
    plan._apply(None, stacklevel=3)  # a warning is to point at the caller
    return model
