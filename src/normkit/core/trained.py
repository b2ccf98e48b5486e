"""What a norm knows and is, in terms that every other layer understands."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

STATISTICS = "running statistics"
# the groups of an optimizer: see conversion/param_groups.py
DECAYED, NOT_DECAYED, SCALES = "decayed", "not_decayed", "scales"


@dataclass(frozen=True)
class TrainedBN:
    """A norm in the terms of a batch norm: a number a channel for each of its tables.

    What it does not have reads as what changes nothing, and is named in ``missing``.
    """

    weight: Tensor  # (C,)
    bias: Tensor  # (C,)
    mean: Tensor  # (C,)
    var: Tensor  # (C,)
    batches: Tensor  # ()
    eps: float
    momentum: float | None
    trainable: bool
    training: bool
    missing: frozenset[str] = frozenset()  # of "weight", "bias", "momentum", STATISTICS
    pools_samples: bool = True  # without running statistics it takes those of the batch
    lost: tuple[str, ...] = ()  # what does not fit into these terms
    # mean, variance and number of batches of each domain, of a norm that keeps several sets; above
    # are those of the domain that it is in
    each_domain: tuple[tuple[Tensor, Tensor, Tensor], ...] = ()
    domain: int = 0  # the one that it is in

    @property
    def channels(self) -> int:
        return self.mean.shape[0]

    @property
    def affine(self) -> bool:
        return "weight" not in self.missing

    @property
    def tracked(self) -> bool:
        return STATISTICS not in self.missing

    def damage(self) -> list[str]:
        """What no training leaves in a table, in words: "running_var is negative in places"."""
        tables = (
            ("weight", self.weight),
            ("bias", self.bias),
            ("running_mean", self.mean),
            ("running_var", self.var),
        )
        found = []
        for name, table in tables:
            if table.is_meta or not table.is_floating_point():
                continue
            wrong = [] if bool(table.isfinite().all()) else ["not finite"]
            wrong += ["negative"] * (name == "running_var" and bool((table < 0).any()))
            if wrong:
                found.append(f"{name} is {' and '.join(wrong)} in places")
        return found

    def warn_of_damage(self, where: str) -> None:
        """For a function that is called by the user."""
        if damage := self.damage():
            warnings.warn(
                f"{where}, its {', its '.join(damage)}. It is taken over as it is: look at "
                "where it comes from.",
                stacklevel=3,
            )

    def having(self, **known: Tensor | float) -> TrainedBN:
        """With other values for fields, which are then no longer missing."""
        words = {STATISTICS if name in ("mean", "var") else name for name in known}
        return replace(self, **known, missing=self.missing - words)  # type: ignore[arg-type]

    def losing(self, *what: str) -> TrainedBN:
        return replace(self, lost=(*self.lost, *what))

    @classmethod
    def read(
        cls, source: nn.Module, channels: int | None = None, like: Tensor | None = None
    ) -> TrainedBN:
        """From a module whose tables have the names of torch.nn: one of torch, timm, ours.

        ``channels`` and ``like``, a tensor of the right type and device, are for a norm that has
        no tables at all.
        """
        names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
        kept = [_table(source, name) for name in names]
        weight, bias, mean, var, batches = (None if t is None else t.detach() for t in kept)
        if mean is not None and channels is not None and len(mean) != channels:
            mean = None  # of groups, or of some channels
        tracked = mean is not None and var is not None
        absent = {"weight": weight is None, "bias": bias is None, STATISTICS: not tracked}
        absent["momentum"] = not hasattr(source, "momentum")
        anchor = next(
            (t for t in (weight, mean, like) if t is not None), torch.empty(0, device="cpu")
        )
        if mean is None or var is None:
            size = anchor.shape[0] if channels is None else channels
            mean, var, batches = anchor.new_zeros(size), anchor.new_ones(size), None
        count = torch.zeros((), dtype=torch.long, device=mean.device)
        return cls(
            weight=torch.ones_like(mean) if weight is None else weight,
            bias=torch.zeros_like(mean) if bias is None else bias,
            mean=mean,
            var=var,
            batches=count if batches is None else batches,
            eps=float(getattr(source, "eps", getattr(source, "variance_epsilon", 1e-5))),
            momentum=getattr(source, "momentum", 0.1),
            trainable=kept[0] is None or kept[0].requires_grad,
            training=source.training,
            missing=frozenset(name for name, is_absent in absent.items() if is_absent),
        )


def _table(source: nn.Module, name: str) -> Tensor | None:
    table = getattr(source, name, None)
    return table if isinstance(table, Tensor) else None


class ParameterRole(NamedTuple):
    """What part a parameter plays."""

    group: str
    """Of an optimizer: "decayed", "not_decayed" or "scales"."""
    of_batch_norm: bool = False
    """It means just what a batch norm's parameter of that name does, so either can be the other."""


class FixedMap(NamedTuple):
    """y = then(scale · x + shift): all that a layer does, whatever the input."""

    scale: Tensor  # (C,), in float64 where the device has it
    shift: Tensor  # (C,)
    then: nn.Module | None = None  # a depthwise convolution
