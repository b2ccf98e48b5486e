"""How a layer describes its coefficients to a backend that computes them in one kernel.

A description is a promise: the map is exactly what the class says, from these tensors. The
generic path, ``coefficients(moments)`` on tables, gives the same; a test holds them equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

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

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """What gets a gradient."""
        return self.weight, self.bias

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

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """What gets a gradient."""
        return self.weight, self.bias, self.gate_weight, self.gate_bias, self.center

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

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """What gets a gradient."""
        return self.weight, self.bias, self.group_weight, self.group_bias

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

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """What gets a gradient."""
        return self.weight, self.bias, self.mean_weight, self.var_weight

    def leaves_moments(self, channels: int) -> bool:
        return False


class Traced(NamedTuple):
    """A layer that is in no family, by the list of operations that its coefficients are."""

    parameters: tuple[Tensor, ...]
    plan: Any  # engine.tracing.TracedPlan
    statistics: Mapping[str, Tensor | None]  # which its kernels read and update
    memory: None = None

    def leaves_moments(self, channels: int) -> bool:
        return False


class Fixed(NamedTuple):
    """(x − mean) / √(var + eps) with statistics that are given, of groups of channels; then weight
    and bias per channel."""

    eps: float
    groups: int
    mean: Tensor
    var: Tensor
    weight: Tensor | None
    bias: Tensor | None
    memory: None = None

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """What gets a gradient."""
        return self.weight, self.bias

    def leaves_moments(self, channels: int) -> bool:
        return False


class Squash(NamedTuple):
    """tanh(alpha · x), then weight and bias per channel."""

    alpha: Tensor
    weight: Tensor | None
    bias: Tensor | None
    memory: None = None

    @property
    def parameters(self) -> tuple[Tensor | None, ...]:
        """What gets a gradient."""
        return self.weight, self.bias, self.alpha

    def leaves_moments(self, channels: int) -> bool:
        return False


Pointwise = Fixed | Squash  # no value looks at another one
Fusion = Pool | Gate | Channel | Mix | Traced | Pointwise


class Depthwise(NamedTuple):
    """A norm without weight and bias, and the depthwise convolution (C, 1, *k) after it."""

    norm: Fusion
    kernel: Tensor
    bias: Tensor | None


class Pixel(NamedTuple):
    """(x − mean) / √(var + eps) of each pixel, over its channels; then weight and bias."""

    eps: float
    correction: int  # 1: unbiased variance
    weight: Tensor | None
    bias: Tensor | None


Description = Fusion | Depthwise | Pixel


def is_half(description: Description) -> bool:
    """Whether it has a scale without a shift, or the other way round: kernels take both or none."""
    if isinstance(description, Depthwise):
        return is_half(description.norm)
    if isinstance(description, Traced):
        return False
    half = (description.weight is None) != (description.bias is None)
    if isinstance(description, Channel):
        half |= (description.group_weight is None) != (description.group_bias is None)
    return half


def has_gaps(description: Description) -> bool:
    """Whether kernels cannot read its tensors: they take a table as it lies in memory.

    Parameters have gaps if they are slices of others', and one value for all if expanded.
    """
    if isinstance(description, Pixel):
        return not _dense(description.weight, description.bias)
    if isinstance(description, Depthwise):
        own = _dense(description.kernel, description.bias)
        return not own or has_gaps(description.norm)
    if isinstance(description, Fixed):
        return not _dense(*description[2:6])
    if isinstance(description, Squash):
        return not _dense(*description[:3])
    memory, given = description.memory, getattr(description, "given", None)
    if isinstance(description, Pool):
        ramps = description.ramps
        given = None if ramps is None else (ramps.mean, ramps.std)
    return not (
        _dense(*description.parameters)
        and (memory is None or _dense(memory.mean, memory.second))
        and (given is None or _dense(*given))
    )


def _dense(*tables: Tensor | None) -> bool:
    for table in tables:  # noqa: SIM110 : every forward asks, and a generator takes longer
        if table is not None and not table.is_contiguous():
            return False
    return True


def graph_family(fusion: Fusion) -> str | None:
    """The name of a description in a compiled graph; None if it has none.

    A map that depends on what the same batch changes, as batch renormalization's does on the
    running statistics, cannot be computed again for the backward of a graph.
    """
    if isinstance(fusion, Pool):
        return None if fusion.ramps is not None else f"pool-{fusion.kind}"
    if isinstance(fusion, Gate):
        return None if fusion.score is not None or fusion.keeps_gates else "gate"
    if isinstance(fusion, Mix):
        return "mix"
    if isinstance(fusion, Traced | Fixed | Squash):
        return None
    return None if fusion.rate is not None else "channel"
