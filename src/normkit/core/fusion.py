"""How a layer describes its coefficients to a backend that computes them in one kernel.

A description is a promise: the map is exactly what the class says, from these tensors. The
generic path, ``coefficients(moments)`` on tables, gives the same; a test holds them equal.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Memory(NamedTuple):
    """Running statistics that the kernel updates, whole or, if one is not finite, not at all."""

    mean: Tensor
    second: Tensor  # variance, or what a layer keeps in its place
    batches: Tensor  # counters
    nonfinite: Tensor
    arrivals: Tensor  # int32: how many programs of a launch have come by
    weight: float  # of the new value
    correction: float  # factor that makes the variance unbiased


class Ramps(NamedTuple):
    """The clips of batch renormalization: from (1, 0) to (r_max, d_max) between two counts."""

    r_max: float
    r_start: float
    r_end: float
    d_max: float
    d_start: float
    d_end: float
    mean: Tensor  # what is corrected towards
    std: Tensor
    seen: Tensor  # the counter


class Pool(NamedTuple):
    """(x − mean) / √(var + eps), then weight and bias per channel.

    A mean and variance belong to groups of channels: of all samples ("batch"), or of each
    ("sample"). With ramps it is batch renormalization.
    """

    kind: str
    eps: float
    groups: int
    weight: Tensor | None
    bias: Tensor | None
    memory: Memory | None = None
    ramps: Ramps | None = None

    def leaves_moments(self, channels: int) -> bool:
        """Whether a kernel leaves mean and variance of each channel of the batch."""
        return self.kind == "batch" and self.groups == channels and self.ramps is None


class Condensation(NamedTuple):
    """How the similarity of the first samples enters the score before it is asked."""

    samples: int
    decay: float  # weight of the old score
    factor: float
    arrivals: Tensor


class Gate(NamedTuple):
    """A batch norm of x + center·m, times sigmoid(gate_weight·p + gate_bias), weight and bias.

    p is the mean of each sample of what ``looks_at`` says: "normalized", "input" or "nothing".
    ``given`` statistics replace those of the batch; if there is a score too, only where it is not
    above tau.
    """

    eps: float
    looks_at: str
    weight: Tensor | None
    bias: Tensor | None
    gate_weight: Tensor | None
    gate_bias: Tensor
    center: Tensor | None
    given: tuple[Tensor, Tensor] | None = None
    score: Tensor | None = None
    tau: float = 0.0
    memory: Memory | None = None
    keeps_gates: bool = False  # whether the gates (N, C) are wanted too, with their gradient
    condensation: Condensation | None = None

    def leaves_moments(self, channels: int) -> bool:
        return False


class Channel(NamedTuple):
    """A batch norm, then a group norm of its output with parameters per group or per channel.

    With a rate, the statistics about the old mean enter the memory first, at that rate, and the
    memory is what normalizes.
    """

    eps: float
    groups: int
    weight: Tensor | None
    bias: Tensor | None
    group_weight: Tensor | None
    group_bias: Tensor | None
    given: tuple[Tensor, Tensor] | None = None
    memory: Memory | None = None
    rate: Tensor | None = None

    def leaves_moments(self, channels: int) -> bool:
        return self.given is None and self.rate is None


class Mix(NamedTuple):
    """(x − mean) / √(var + eps), then weight and bias per channel, with mixtures of statistics.

    Those of each sample and channel, of each sample, and of each channel of the batch, in shares
    softmax(mean_weight) and softmax(var_weight); if these have two entries there is no batch part.
    ``given`` statistics replace those of the batch. All variances are times ``unbias``.
    """

    eps: float
    unbias: float
    weight: Tensor | None
    bias: Tensor | None
    mean_weight: Tensor
    var_weight: Tensor
    given: tuple[Tensor, Tensor] | None = None
    memory: Memory | None = None

    def leaves_moments(self, channels: int) -> bool:
        return False


Fusion = Pool | Gate | Channel | Mix


def lie_dense(*tables: Tensor | None) -> bool:
    """Whether kernels can read these: they take a table as it lies in memory, without strides.

    Parameters have gaps if they are slices of others', and one value for all if expanded.
    """
    for table in tables:  # noqa: SIM110 : every forward asks, and a generator takes longer
        if table is not None and not table.is_contiguous():
            return False
    return True


def kept_dense(fusion: Fusion) -> bool:
    """The same of the statistics that a description reads or updates."""
    memory = fusion.memory
    if memory is not None and not (memory.mean.is_contiguous() and memory.second.is_contiguous()):
        return False
    if isinstance(fusion, Pool):
        ramps = fusion.ramps
        return ramps is None or lie_dense(ramps.mean, ramps.std)
    return fusion.given is None or lie_dense(*fusion.given)
