"""All that is known about one norm when it is judged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from normkit.core.moments import Moments
from normkit.diagnosis.findings.bounds import WRONG, average_error, sampling_error
from normkit.diagnosis.findings.looking import Traffic
from normkit.diagnosis.findings.norm_facts import NormFacts, finite
from normkit.diagnosis.measures import output_error


@dataclass(frozen=True, eq=False)
class Layer(NormFacts):
    """A norm, and what passed it.

    ``eval`` is what came with all norms on running statistics, ``own`` with all on batch
    statistics, so that nothing wrong further down is seen; ``trained`` the same on training data.
    """

    eval: Traffic | None = None
    own: Traffic | None = None
    trained: Traffic | None = None

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

    def error_on(self, traffic: Traffic | None) -> float:
        """√ of the mean output error over the channels; NaN if there is nothing to compare."""
        if traffic is None or self.kept is None or traffic.expected.total is None:
            return math.nan
        found = self.distance(self.kept, traffic.expected.total)
        if math.isnan(found) and finite(traffic.expected.total.var):
            return math.inf  # statistics that are not finite are as wrong as can be
        return found

    def distance(self, kept: Moments, expected: Moments) -> float:
        """Output error of statistics where others are right."""
        return average_error(output_error(kept, expected, self.site.eps or 0.0))

    def uncertainty(self, traffic: Traffic | None) -> float:
        """Output error that statistics of as much data may have by chance."""
        if traffic is None or traffic.expected.total is None:
            return math.inf
        if len(traffic.of_batches) > 1:
            return sampling_error(self.values(traffic) * len(traffic.of_batches))
        return sampling_error(float(traffic.shape[0]) if traffic.shape else 0.0)

    def values(self, traffic: Traffic) -> float:
        """How many independent values the statistics of a batch are worth.

        From how much they differ between batches: 1/n is the variance of a mean in units of σ²,
        1/(2n) that of a standard deviation. Positions of an image are not independent.
        """
        total, count = traffic.of_calls[0].total, len(traffic.of_batches)
        assert total is not None
        mean = torch.cat([batch.mean for batch in traffic.of_batches])
        var = torch.cat([batch.var for batch in traffic.of_batches])
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
