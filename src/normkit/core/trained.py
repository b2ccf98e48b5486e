"""What a trained batch norm knows, read from any module that has its fields."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normkit.errors import OptionError


@dataclass(frozen=True)
class TrainedBN:
    """A batch norm with running statistics. Missing weight and bias read as 1 and 0."""

    weight: Tensor  # (C,)
    bias: Tensor  # (C,)
    mean: Tensor  # (C,)
    var: Tensor  # (C,)
    batches: Tensor  # ()
    eps: float
    momentum: float | None
    affine: bool
    trainable: bool
    training: bool

    @property
    def channels(self) -> int:
        return self.mean.shape[0]

    @classmethod
    def read(cls, source: nn.Module) -> TrainedBN:
        """From nn.BatchNorm1d/2d/3d, nn.SyncBatchNorm, frozen forms, or normkit's own BN."""
        mean, var = (getattr(source, f"running_{what}", None) for what in ("mean", "var"))
        if not (isinstance(mean, Tensor) and isinstance(var, Tensor)):
            raise OptionError(
                f"from_batch_norm expects a batch norm with running_mean and running_var, "
                f"got {type(source).__name__} without them. "
                "Try a module built with track_running_stats=True."
            )
        weight, bias = getattr(source, "weight", None), getattr(source, "bias", None)
        batches = getattr(source, "num_batches_tracked", None)
        return cls(
            weight=torch.ones_like(mean) if weight is None else weight.detach(),
            bias=torch.zeros_like(mean) if bias is None else bias.detach(),
            mean=mean.detach(),
            var=var.detach(),
            batches=torch.zeros((), dtype=torch.long) if batches is None else batches.detach(),
            eps=float(getattr(source, "eps", 1e-5)),
            momentum=getattr(source, "momentum", 0.1),
            affine=weight is not None,
            trainable=weight is None or weight.requires_grad,
            training=source.training,
        )
