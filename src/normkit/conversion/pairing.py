"""Which layer feeds which norm, and only it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from normkit.conversion.probing import Probe, probes
from normkit.inspection import Site
from normkit.inspection.flow import Flow, record_flow
from normkit.layers.norm_act import NormAct

Pairs = dict[str, "Pair | str"]
"""By the path of a norm: its pair, or why it has none."""


@dataclass(frozen=True)
class Pair:
    """A layer that feeds a norm."""

    layer: str  # its path
    axes: int | None = None  # of what passes between them; None if not known


def pairs_of(model: nn.Module, sites: Mapping[str, Site], example: Any) -> tuple[Pairs, Probe]:
    """The pairs, and the input they were seen with; without one they are guessed.

    Seen: every time the norm was called, it got the output of this layer, and nothing else in
    the model used that. Guessed: the layer comes right before the norm in the order of
    registration, and each of the two has one place in the model.
    """
    layers = {p: m for p, m in model.named_modules() if isinstance(m, _ConvNd | nn.Linear)}
    norms = {path: site.module for path, site in sites.items()}
    last = Probe(None, "no input was found that the model takes")
    for probe in probes(model, example):
        if probe.example is None:
            last = probe
            continue
        try:
            flow = record_flow(model, partial(probe.run, model), layers, norms)
        except Exception as error:
            if probe.given:
                error.add_note("normkit ran the model on the example to see which layers meet.")
                raise
            continue
        return {path: _seen(site, flow) for path, site in sites.items()}, probe
    return _guessed(model, sites), last


def _seen(site: Site, flow: Flow) -> Pair | str:
    calls = [call for call in flow.calls if call.path == site.path]
    if not calls:
        return "it was not reached by this input"
    feeders = {call.source for call in calls}
    if len(feeders) > 1:
        return "it is fed from several places"
    (layer,) = feeders
    if layer is None:
        return "no convolution or linear layer feeds it"
    uses = [use for use in flow.uses if use.source == layer]
    users = {"a change in place" if use.changed else use.user for use in uses}
    if others := sorted(users - {site.path}):
        return f"{layer} also feeds {', '.join(others)}"
    if any(call.arguments > 1 for call in calls) and not isinstance(site.module, NormAct):
        return "it is called with more than its input, as a residual"
    axes = {call.axes for call in calls}
    return Pair(layer, axes.pop() if len(axes) == 1 else None)


def _guessed(model: nn.Module, sites: Mapping[str, Site]) -> Pairs:
    places = Counter(id(m) for _, m in model.named_modules(remove_duplicate=False))
    feeds = Counter(site.fed_by for site in sites.values())
    found: Pairs = {}
    for path, site in sites.items():
        if site.fed_by is None:
            found[path] = "no convolution or linear layer stands before it"
        elif feeds[site.fed_by] > 1:
            found[path] = f"{site.fed_by} stands before several norms"
        elif site.shared or places[id(model.get_submodule(site.fed_by))] > 1:
            found[path] = "it or the layer before it has several places in the model"
        else:
            found[path] = Pair(site.fed_by)
    return found
