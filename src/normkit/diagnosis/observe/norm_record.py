"""What is recorded about one norm while batches pass it, and the measures that come of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from normkit.core.moments import Moments
from normkit.diagnosis.measures import (
    condensation,
    condensation_matrix,
    drift_rms,
    esm_and_error,
    gate_saturation,
    gradient_factor,
    saturated_channels,
    share_beyond,
    stat_diff,
    under_represented,
    wide,
)
from normkit.diagnosis.observe.activations import AfterActivation, Listener, bounds_of, closes
from normkit.inspection import Site
from normkit.inspection.foreign import measured
from normkit.inspection.run import watch_inputs
from normkit.inspection.statistics import (
    MomentsAccumulator,
    channel_moments,
    pooled_statistics_of,
)
from normkit.layers.measured import Refusal

LIMIT = 6.0  # standard deviations
NO_INPUT = Refusal("it was given nothing that has statistics")
NOT_ASKED = Refusal("it was not asked for")
NO_ACTIVATION = Refusal("no activation is seen after it")
AnyRecord = TypeVar("AnyRecord", bound="NormRecord")


class Share:
    """A share of values over several calls, without waiting for the device."""

    def __init__(self) -> None:
        self.sum: Tensor | float = 0.0
        self.of = 0
        self.refused: Refusal = NOT_ASKED

    def add(self, share: Tensor, values: int) -> None:
        self.sum = self.sum + wide(share) * values
        self.of += values

    @property
    def value(self) -> Tensor | float | Refusal:
        return self.sum / self.of if self.of else self.refused


@dataclass
class LayerMeasures:
    """The measures of one norm: numbers, reasons for those that it has not, and channels."""

    numbers: dict[str, Tensor | float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    channels: dict[str, Tensor] = field(default_factory=dict)  # (C,)

    def add(self, measure: str, value: Tensor | float | Refusal | None) -> None:
        """A value, or why there is none."""
        if isinstance(value, Refusal):
            self.refused[measure] = str(value)
        elif value is not None:
            self.numbers[measure] = value


class NormRecord:
    """Statistics of what one norm gets and gives, over all batches and calls."""

    def __init__(
        self, site: Site, act: nn.Module | str | None, wanted: frozenset[str], samples: int
    ) -> None:
        self.site, self.act, self.wanted, self.samples = site, act, wanted, samples
        self.norm, self.measured = site.norm, measured(site)
        self.statistics = pooled_statistics_of(self.norm, site.kind)
        self.kept = None if self.statistics is None else self.statistics.read()
        self.calls = 0
        self.channels = MomentsAccumulator()  # mean and variance of each channel of the input
        self.expected = MomentsAccumulator()  # the same in the form the norm keeps
        self.beyond, self.gates = Share(), Share()
        self.condensation: Tensor | None = None
        self.matrix: Tensor | None = None
        self.highest: Tensor | None = None  # of each channel after the activation
        self.at_bounds: Tensor | None = None  # channels that have been nowhere else
        self.activated = False  # whether the activation was seen

    def take_input(self, x: Tensor) -> None:
        """The input of one call."""
        self.take(x, channel_moments(x, self.site.channel_axis))

    def take(self, x: Tensor, table: Moments) -> None:
        """An input and its moments, of each sample and channel."""
        self.calls += 1
        self.channels.add(table.pooled(samples=None))
        if self.statistics is not None:
            self.expected.add(self.statistics.pooled(table, x))
        if "beyond_6" in self.wanted:
            values = self.measured.standardized(x, table, batch=self.norm.training)
            if isinstance(values, Refusal):
                self.beyond.refused = values
            else:
                self.beyond.add(share_beyond(values, LIMIT), values.numel())
        if "gate_saturation" in self.wanted:
            gates = self.measured.gates(table)
            if isinstance(gates, Refusal):
                self.gates.refused = gates
            else:
                self.gates.add(gate_saturation(gates), gates.numel())
        if "condensation" in self.wanted and self.condensation is None:
            self.condensation = condensation(x, self.samples)
        if "condensation_matrix" in self.wanted and self.matrix is None:
            self.matrix = condensation_matrix(x, self.samples).cpu()

    def after(self, y: Tensor) -> None:
        """The output of the activation after the norm."""
        act = self.act
        if act is None or y.dim() < 2 or y.numel() == 0:
            return
        self.activated = True
        values = y.detach().movedim(self.site.channel_axis, -1).flatten(0, -2)
        if closes(act):
            highest = values.amax(0)
            self.highest = highest if self.highest is None else torch.maximum(self.highest, highest)
        bounds = bounds_of(act)
        if None not in bounds:
            at = saturated_channels(values, bounds)
            self.at_bounds = at if self.at_bounds is None else self.at_bounds & at

    # ---------------------------------------------------------------- measures

    def measures(
        self, running: Moments | None, start: Mapping[str, Tensor] | None = None
    ) -> LayerMeasures:
        """All measures of the norm, scalars on its device; ``running`` statistics are judged.

        Drift is from ``start``, a state_dict; without one there is none.
        """
        result = LayerMeasures()
        inputs = self.channels.total
        if inputs is None:
            result.refused = dict.fromkeys(self.wanted, str(NO_INPUT))
            return result
        result.channels = {"mean": inputs.mean[0], "var": inputs.var[0]}
        self._shift(result, running)
        self._groups(result, inputs)
        self._activity(result)
        for measure, share in (("beyond_6", self.beyond), ("gate_saturation", self.gates)):
            result.add(measure, share.value)
        threshold = self.measured.threshold()
        for number, measure in enumerate(("frozen", "score")):
            refused = isinstance(threshold, Refusal)
            result.add(measure, threshold if refused else wide(threshold[number]))  # type: ignore[arg-type]
        result.add("condensation", self.condensation)
        self._drift(result, start)
        return result

    def _shift(self, result: LayerMeasures, running: Moments | None) -> None:
        expected = self.expected.total
        if running is None or expected is None or self.statistics is None:
            for measure in ("esm_mean", "esm_std", "output_error"):
                result.add(measure, Refusal("it keeps no running statistics of batches"))
            return
        stored = self.statistics.stored(expected)  # the variance unbiased where the layer's is
        shift, error = esm_and_error(running, stored, self.site.eps or 0.0)
        result.channels["output_error"] = error
        result.numbers |= {
            "esm_mean": shift.mean,
            "esm_std": shift.std,
            "output_error": error.mean(),
        }

    def _groups(self, result: LayerMeasures, inputs: Moments) -> None:
        groups = self.measured.channel_groups(inputs)
        if isinstance(groups, Refusal):
            result.add("stat_diff", groups)
            result.add("under_represented", groups)
        else:
            (given, count), drowned = groups, "under_represented"
            result.add("stat_diff", stat_diff(given.mean[0], given.var[0], count).mean())
            result.channels[drowned] = under_represented(given.mean[0], given.var[0], count)
            result.add(drowned, wide(result.channels[drowned]).mean())
        divisor, gamma = self.measured.divided_by(inputs), self.measured.gamma()
        if isinstance(divisor, Refusal) or isinstance(gamma, Refusal):
            result.add("gradient_factor", divisor if isinstance(divisor, Refusal) else gamma)
        else:
            factor = gradient_factor(gamma, divisor, self.site.eps or 0.0)
            result.channels["gradient_factor"] = factor
            result.add("gradient_factor", factor.abs().mean())

    def _activity(self, result: LayerMeasures) -> None:
        dead = None if self.highest is None else self.highest <= 0
        for measure, channels, refused in (
            ("dead", dead, "its activation lets values below 0 pass"),
            ("saturated", self.at_bounds, "its activation is not bounded on both sides"),
        ):
            if channels is not None:
                result.channels[measure] = channels
                result.add(measure, wide(channels).mean())
            elif measure in self.wanted:
                result.add(measure, Refusal(refused) if self.activated else NO_ACTIVATION)

    def _drift(self, result: LayerMeasures, start: Mapping[str, Tensor] | None) -> None:
        for last in ("weight", "bias"):
            refused = Refusal(f"it has no {last} to train")
            for name, parameter in self.site.module.named_parameters():
                key = f"{self.site.path}.{name}" if self.site.path else name
                if name.rpartition(".")[2] != last:
                    continue
                if start is not None and key in start and start[key].shape == parameter.shape:
                    result.add(f"{last}_drift", drift_rms(parameter, start[key]))
                    break
                refused = Refusal(f"no start= has its {last}")
            else:
                result.add(f"{last}_drift", refused)


@contextmanager
def watch_norms(
    model: nn.Module, sites: Iterable[Site], record: Callable[[Site, Any], AnyRecord]
) -> Iterator[dict[str, AnyRecord]]:
    """Inside, records hear what norms get and what their activations give.

    Those of norms that run are in the dictionary, by path, in the order of first calls.
    """
    activations = AfterActivation(model)
    called: dict[str, AnyRecord] = {}
    listeners: dict[nn.Module, Listener] = {}

    def listener(record: AnyRecord) -> Listener:
        def take(x: Tensor) -> None:
            called.setdefault(record.site.path, record)
            record.take_input(x)

        return take

    with ExitStack() as stack:
        for site in sites:
            new = record(site, activations.of(site))
            listeners[site.module] = listener(new)
            if new.wanted & {"dead", "saturated"}:
                for handle in activations.listen(site, new.after):
                    stack.callback(handle.remove)
        stack.enter_context(watch_inputs(listeners))
        yield called
