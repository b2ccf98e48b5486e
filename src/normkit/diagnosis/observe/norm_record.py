"""What is recorded about one norm while batches pass it, and the measures that come of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normkit.core.moments import Moments
from normkit.diagnosis.measures import (
    ActivityBounds,
    condensation,
    condensation_matrix,
    gate_saturation,
    gradient_factor,
    saturated_channels,
    share_beyond,
    stat_diff,
    under_represented,
)
from normkit.diagnosis.measures.parameters import drift_rms
from normkit.diagnosis.measures.statistics import esm_and_error, wide
from normkit.inspection import Site
from normkit.inspection.foreign import measured
from normkit.inspection.keepers import table_of
from normkit.inspection.keeping import reader_of
from normkit.inspection.tally import Pooling
from normkit.layers.measured import Refusal

LIMIT = 6.0  # standard deviations
NO_INPUT = Refusal("it was given nothing that has statistics")
NOT_ASKED = Refusal("it was not asked for")
NO_ACTIVATION = Refusal("no activation is seen after it")


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
        self.reader = reader_of(self.norm, site.kind)
        self.kept = None if self.reader is None else self.reader.read()
        self.calls = 0
        self.channels = Pooling()  # mean and variance of each channel of the input
        self.expected = Pooling()  # the same in the form the norm keeps
        self.beyond, self.gates = Share(), Share()
        self.condensation: Tensor | None = None
        self.matrix: Tensor | None = None
        self.highest: Tensor | None = None  # of each channel after the activation
        self.at_bounds: Tensor | None = None  # channels that have been nowhere else
        self.activated = False  # whether the activation was seen

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The input of one call."""
        x = measurable(args, kwargs)
        if x is not None:
            self.take(x, table_of(x, self.site.channel_axis))

    def take(self, x: Tensor, table: Moments) -> None:
        """An input and its moments, of each sample and channel."""
        self.calls += 1
        self.channels.add(table.pooled(samples=None))
        if self.reader is not None:
            self.expected.add(self.reader.pooled(table, x))
        if "beyond_6" in self.wanted:
            found = self.measured.standardized(x, table, batch=self.norm.training)
            if isinstance(found, Refusal):
                self.beyond.refused = found
            else:
                self.beyond.add(share_beyond(found, LIMIT), found.numel())
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
        if running is None or expected is None or self.reader is None:
            for measure in ("esm_mean", "esm_std", "output_error"):
                result.add(measure, Refusal("it keeps no running statistics of batches"))
            return
        stored = self.reader.stored(expected)  # the variance unbiased where the layer's is
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


def measurable(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The input among the arguments of a norm; None if it is none that has statistics."""
    x = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    if x is None or not x.is_floating_point() or x.dim() < 2 or x.numel() == 0:
        return None
    return x.detach()


# by name, in lower case: how far the output reaches; those that are 0, or nearly, below 0
BOUNDS = {
    "relu": ActivityBounds(0.0, None),
    "relu6": ActivityBounds(0.0, 6.0),
    "sigmoid": ActivityBounds(0.0, 1.0),
    "hardsigmoid": ActivityBounds(0.0, 1.0),
    "tanh": ActivityBounds(-1.0, 1.0),
    "hardtanh": ActivityBounds(-1.0, 1.0),
}
CLOSES = ("relu", "relu6", "silu", "swish", "gelu", "mish", "hardswish", "hardmish")

Listener = Callable[[Tensor], None]


def name_of(act: nn.Module | str) -> str:
    """The name of an activation, without what libraries put around it: "gelutanh" is a gelu."""
    name = act if isinstance(act, str) else type(act).__name__
    name = name.lower().replace("_", "").removesuffix("me")  # timm's memory-efficient forms
    known = sorted({*BOUNDS, *CLOSES}, key=len, reverse=True)
    return next((word for word in known if name.startswith(word)), name)


def bounds_of(act: nn.Module | str) -> ActivityBounds:
    """Between which values the output of an activation lies."""
    if isinstance(act, nn.Hardtanh) and not isinstance(act, nn.ReLU6):
        return ActivityBounds(float(act.min_val), float(act.max_val))
    return BOUNDS.get(name_of(act), ActivityBounds())


def closes(act: nn.Module | str) -> bool:
    """Whether values below 0 are lost, or nearly: then a channel can be dead."""
    return name_of(act) in CLOSES


class AfterActivation:
    """Hands the output of the activation after each norm to whoever asked for that norm.

    A module that serves several norms, as the one ReLU of a residual block does, is told apart by
    whose output it gets; what is no norm's own output is the sum of a block, and belongs to all
    norms that have run since and wait for that module. An activation that is called as a function
    is not seen: a norm's own output tells of it, except before a sum.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = dict(model.named_modules())
        self.waiting: dict[str, dict[str, Tensor]] = {}  # by activation: norms and their outputs
        self.listeners: dict[str, Listener] = {}
        self.met: list[str] = []  # norms whose activation is running

    def listen(self, site: Site, listener: Listener) -> list[RemovableHandle]:
        """Hooks that hand on what follows a norm; none if nothing is known to follow."""
        act = site.followed_by
        if site.act is not None or (act is not None and act not in self.modules):
            if site.act is None and (site.last_in_block or site.shortcut):
                return []
            return [site.module.register_forward_hook(lambda *call: _hand(listener, call[-1]))]
        if act is None:
            return []
        self.listeners[site.path] = listener
        handles = [
            site.module.register_forward_hook(lambda *call: self._wait(act, site.path, call[-1]))
        ]
        if act not in self.waiting:
            self.waiting[act] = {}
            module = self.modules[act]
            # before: an activation in place leaves nothing to recognise
            handles.append(module.register_forward_pre_hook(lambda _, args: self._meet(act, args)))
            handles.append(module.register_forward_hook(lambda *call: self._done(act, call[-1])))
        return handles

    def _wait(self, act: str, path: str, output: Any) -> None:
        if isinstance(output, Tensor):
            self.waiting[act][path] = output

    def _meet(self, act: str, args: tuple[Any, ...]) -> None:
        """Find those norms whose output, or a sum with it, came."""
        x = args[0] if args else None
        waiting = self.waiting[act]
        own = [path for path, output in waiting.items() if output is x]
        self.met = own or list(waiting)

    def _done(self, act: str, output: Any) -> None:
        for path in self.met:
            self.waiting[act].pop(path, None)
            _hand(self.listeners[path], output)
        self.met = []


def _hand(listener: Listener, output: Any) -> None:
    if isinstance(output, Tensor):
        listener(output)
