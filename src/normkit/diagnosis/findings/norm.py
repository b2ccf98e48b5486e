"""All that is known about one norm when it is judged."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.diagnosis.findings.bounds import MOSTLY, WRONG, average_error, sampling_error
from normkit.diagnosis.measures import output_error
from normkit.diagnosis.observe.passes import PassRecord
from normkit.inspection import Site
from normkit.inspection.foreign import measured
from normkit.inspection.statistics import NormStatistics, running_moments
from normkit.layers.measured import Measured

ROUNDED = 1e-3


@dataclass(frozen=True, eq=False)
class NormEvidence:
    """A norm, and what passed it.

    ``eval`` is what came with all norms on running statistics, ``own`` with all on batch
    statistics, so that nothing wrong further down is seen; ``trained`` the same on training data.
    """

    site: Site
    eval: PassRecord | None = None
    own: PassRecord | None = None
    trained: PassRecord | None = None

    @property
    def path(self) -> str:
        return self.site.path

    @cached_property
    def norm(self) -> nn.Module:
        return self.site.norm

    @cached_property
    def measured(self) -> Measured:
        return measured(self.site)

    @property
    def code(self) -> str:
        """The norm as an expression."""
        inner = f"{self.path}.norm" if self.site.module is not self.norm else self.path
        return f"model.get_submodule({inner!r})" if inner else "model"

    @property
    def prefix(self) -> str:
        """What stands before the names of its tensors in a state_dict."""
        inner = "norm." if self.site.module is not self.norm else ""
        return f"{self.path}.{inner}" if self.path else inner

    # ---------------------------------------------------------------- what it keeps

    @cached_property
    def kept(self) -> Moments | None:
        """Its running statistics as mean and variance (1, K)."""
        return running_moments(self.norm)

    @cached_property
    def statistics(self) -> NormStatistics:
        return NormStatistics(self.path, self.norm, self.site.kind)

    @property
    def running_buffers(self) -> dict[str, Tensor]:
        """What it keeps: a mean, and beside it a variance or what the layer has in its place."""
        return self.statistics.buffers

    def buffer(self, name: str) -> Tensor | None:
        """A tensor of the norm by its name."""
        buffer = getattr(self.norm, name, None)
        return buffer.detach() if isinstance(buffer, Tensor) else None

    @cached_property
    def count(self) -> int | None:
        """How many batches it has counted."""
        counter = self.statistics.source.batch_counter()
        return None if counter is None else int(counter)

    @cached_property
    def at_start(self) -> bool:
        """Whether its statistics are what a new layer has, or one that such a layer became."""
        if len(self.running_buffers) < 2:
            return False
        mean, second = self.running_buffers.values()
        start = getattr(self.norm, "second_start", 1.0)
        # no training leaves all means at exactly 0; a deviation of √(1 + eps) is a converted 1
        return bool((mean == 0).all() and ((second - start).abs() <= ROUNDED).all())

    @cached_property
    def scale(self) -> Tensor | None:
        """γ as one number a channel; None if it has none, or a kernel."""
        weight = self.buffer("weight")
        return weight if weight is not None and weight.dim() == 1 else None

    # ---------------------------------------------------------------- what it does

    @property
    def momentum(self) -> float | None:
        """The weight of a new batch; None for a plain average, or if it has no such thing."""
        momentum = getattr(self.norm, "momentum", None)
        follows = self.measured.followed_rate() is not None
        return float(momentum) if isinstance(momentum, int | float) and not follows else None

    @property
    def pools(self) -> bool:
        """Whether samples share statistics in training."""
        return self.measured.pools_samples()

    @cached_property
    def frozen(self) -> bool:
        """Whether it stays on fixed statistics, in train() too."""
        if self.measured.is_fixed:
            return True
        return self.site.tracked and not self.norm.training and not _starts(self.norm)

    @property
    def learns(self) -> bool:
        """Whether training moves its statistics, and these are of whole batches."""
        return self.site.tracked and not self.frozen and self.measured.sample_groups() is None

    # ---------------------------------------------------------------- what passed it

    @cached_property
    def error(self) -> float:
        """Output error of its running statistics on the data, all norms below being right."""
        return self.error_on(self.own)

    @cached_property
    def error_in_eval(self) -> float:
        """The same in eval mode, with what comes from below."""
        return self.error_on(self.eval)

    @cached_property
    def error_on_training(self) -> float:
        return self.error_on(self.trained)

    def error_on(self, record: PassRecord | None) -> float:
        """√ of the mean output error over the channels; NaN if there is nothing to compare."""
        if record is None or self.kept is None or record.expected.total is None:
            return math.nan
        error = self.distance(self.kept, record.expected.total)
        if math.isnan(error) and finite(record.expected.total.var):
            return math.inf  # statistics that are not finite are as wrong as can be
        return error

    def distance(self, kept: Moments, expected: Moments) -> float:
        """Output error of statistics where others are right."""
        return average_error(output_error(kept, expected, self.site.eps or 0.0))

    def without_start(self, share: float) -> Moments | None:
        """Its statistics without a share of their start values; None if they cannot hold it.

        What batches add to a running average of variances is not below zero, so that no channel
        has less than the share of the start.
        """
        if len(self.running_buffers) < 2:
            return None
        (first, mean), (second, spread) = self.running_buffers.items()
        start = share * getattr(self.norm, "second_start", 1.0)
        if bool((spread < start * (1 - ROUNDED)).any()):
            return None
        freed = {first: mean / (1 - share), second: (spread - start).clamp(min=0) / (1 - share)}
        mean, var = self.statistics.source.decode_statistics(freed)
        return Moments(mean[None], var[None], 1)

    def owed_to_start(self, share: float) -> bool:
        """Whether a share of start values explains most of what its statistics are off by, on the
        training data or else the data, but for chance: they are so much nearer without it."""
        record = self.own if self.trained is None else self.trained
        freed = self.without_start(share)
        if record is None or freed is None or record.expected.total is None or self.kept is None:
            return False
        right = record.expected.total
        now, then = self.distance(self.kept, right), self.distance(freed, right)
        return then < now and then**2 < (1 - MOSTLY) * now**2 + self.uncertainty(record) ** 2

    def uncertainty(self, record: PassRecord | None) -> float:
        """Output error that statistics of as much data may have by chance."""
        if record is None or record.expected.total is None:
            return math.inf
        if len(record.of_batches) > 1:
            return sampling_error(self.values(record) * len(record.of_batches))
        return sampling_error(float(record.shape[0]) if record.shape else 0.0)

    def values(self, record: PassRecord) -> float:
        """How many independent values the statistics of a batch are worth.

        From how much they differ between batches: 1/n is the variance of a mean in units of σ²,
        1/(2n) that of a standard deviation. Positions of an image are not independent.
        """
        total, count = record.of_calls[0].total, len(record.of_batches)
        assert total is not None
        mean = torch.cat([batch.mean for batch in record.of_batches])
        var = torch.cat([batch.var for batch in record.of_batches])
        varies = total.var[0] > 0
        squares = (mean - total.mean).square() / total.var + (var / total.var - 1).square() / 4
        noise = float(squares[:, varies].mean()) * count / max(count - 1, 1)
        return 1.5 / noise if noise > 0 else math.inf

    @property
    def wrong(self) -> bool:
        """Whether the error is as strong as the signal, by itself or with what comes from below."""
        return self.error >= WRONG or self.error_in_eval >= WRONG

    def fits(self, bound: float) -> bool:
        """Whether its statistics fit the training data, or else the data, within a bound."""
        errors = [e for e in (self.error_on_training, self.error) if not math.isnan(e)]
        return bool(errors) and errors[0] < bound


def _starts(norm: nn.Module) -> bool:
    """Whether train() puts a norm into training mode. Tried on a copy: it may remember."""
    try:
        return copy.deepcopy(norm).train(True).training
    except Exception:  # a norm that cannot be copied is taken for an ordinary one
        return True


def finite(tensor: Tensor | None) -> bool:
    return tensor is None or bool(torch.isfinite(tensor).all())
