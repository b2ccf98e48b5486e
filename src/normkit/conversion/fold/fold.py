"""A copy of a model with its norms folded into the layers that feed them."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_map_only

from normkit.conversion.edits import count_hooks, refuse_unchangeable
from normkit.conversion.fold.absorb import absorb, can_be_plain, fixed_map, plain_form, refusal
from normkit.conversion.forward_probe import Probe, difference, leaves, not_finite, probes, rounding
from normkit.conversion.fuse.fuse import fuse_folded
from normkit.conversion.sources import damaged
from normkit.core.trained import FixedMap
from normkit.errors import NormkitError, NothingToDo
from normkit.inspection import Site, survey, undisturbed
from normkit.inspection.flow import Flow, record_flow
from normkit.layers.domain_in_use import use_domain
from normkit.layers.norm_act import NormAct

NARROW = (torch.float16, torch.bfloat16)
# relative, in float64: far above its rounding, and far below what any mistake makes of a model
IN_DOUBLE = 1e-8


def fold(
    model: nn.Module, example: Any = None, *, domain: int | None = None, fuse: bool = False
) -> nn.Module:
    """A copy of the model for inference, with its norms folded into the layers before them.

    Folded are norms in eval mode that are a fixed map: bn in all forms, sync, frozen and ghost,
    shifted_bn, batch_renorm, bgn with whole channels and gbgn, of normkit, torch.nn, timm and
    torchvision; of bnet the depthwise convolution stays. Weights computed by ws, wn and cwn, or
    by classes such as timm's StdConv2d, become plain ones. A fused activation stays where it was.
    ``plan_fold`` tells what is left, and why.

    A norm is folded only if its layer feeds nothing else. That is seen in a run of the model on
    the example (a tensor, a tuple of positional or a mapping of keyword arguments) or on an input
    that is found by trying. The copy must then give the same output, or there is an error. Where
    no input is found, the order of registration decides and a warning says that nothing was
    checked.

    ``fuse=True`` is for inference on a GPU, in eager mode: there torch adds a convolution's bias in
    a pass of its own, and the folded model is slower than it was. Convolutions of the copy then do
    the bias and the sum and activation that follow, in one call of cuDNN (bfloat16 and float16,
    channels_last, ReLU) or in one pass; what is traced, compiled or gets gradients is computed as
    ever. Such a copy needs normkit where it is loaded.

    The copy has fewer layers and no statistics: it is not for training. The model is unchanged.
    Norms with statistics of several domains are folded with those of ``domain``, or of the one that
    ``use_domain`` has chosen: a copy for each domain.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    >>> nk.fold(model)
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): Identity()
    )
    """
    with nullcontext() if domain is None else use_domain(model, domain):
        return plan_fold(model, example, fuse=fuse).apply()


def plan_fold(model: nn.Module, example: Any = None, *, fuse: bool = False) -> FoldPlan:
    """What ``fold`` would do, to be printed; ``plan.apply()`` gives the copy.

    Nothing is changed: the model is run, if there is an input for it, and left as it was.
    """
    refuse_unchangeable(model)
    norms = survey(model)
    weights = tuple(site.path for site in norms.weights if can_be_plain(site.module))
    sites = {site.path: site for site in norms}
    pairs, probe = _pairs(model, sites, example)
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    plan = FoldPlan(model, probe, weights, fuse)
    for path, pair in pairs.items():
        if isinstance(pair, str):
            plan.left[path] = pair
        elif reason := _refusal(model, sites[path], pair, owners, pair.layer in weights):
            plan.left[path] = reason
        else:
            plan.folded[path] = pair
    return plan


@dataclass(frozen=True)
class Pair:
    """A layer that feeds a norm."""

    layer: str  # its path
    axes: int | None = None  # of what passes between them; None if not known


Pairs = dict[str, Pair | str]
"""By the path of a norm: its pair, or why it has none."""


@dataclass(eq=False)
class FoldPlan:
    """Which norms are folded into which layers, and why the others are not."""

    model: nn.Module
    probe: Probe  # the input with which it was seen, and is checked
    weights: tuple[str, ...]  # layers whose computed weight becomes a plain one
    fuse: bool = False  # whether convolutions do the sum and activation that follow them
    folded: dict[str, Pair] = field(default_factory=dict)  # by the path of the norm
    left: dict[str, str] = field(default_factory=dict)  # likewise, the reason
    difference: float | None = None  # max |folded − model| / max |model|, once applied
    compared: bool = True  # whether there were finite numbers to compare

    @property
    def seen(self) -> bool:
        """Whether a run of the model has shown what feeds what; else it was guessed."""
        return self.probe.example is not None

    def apply(self) -> nn.Module:
        """The folded copy, once it is known to give the same output."""
        if not (self.folded or self.weights):
            reasons = "; ".join(f"{path}: {why}" for path, why in list(self.left.items())[:3])
            raise NothingToDo(f"fold found nothing to fold. {reasons or 'There are no norms.'}")
        folded = [site for site in survey(self.model) if site.path in self.folded]
        cautions = damaged(folded)
        if self.seen:
            self._check()
            if not self.compared:
                path = not_finite(self.model)
                why = "" if path is None else f": {path} is not finite"
                cautions.append(f"The model gives no finite number to compare{why}.")
        if cautions:
            warnings.warn(f"fold: {' '.join(cautions)}", stacklevel=3)
        if not self.seen:
            warnings.warn(
                f"fold could not check the result: {self.probe.text}. What feeds what was guessed "
                "from the order of registration. Try example=x with an input of the model.",
                stacklevel=3,
            )
        return self._folded(_copied(self.model))

    def _folded(self, model: nn.Module) -> nn.Module:
        """Fold a copy of the model, in place."""
        sites = {site.path: site for site in survey(model)}
        for path in self.weights:
            layer = model.get_submodule(path)
            places = model.named_modules(remove_duplicate=False)
            _put(model, [p for p, m in places if m is layer], plain_form(layer))
        for path, pair in self.folded.items():
            fixed = fixed_map(sites[path], pair.axes)
            assert isinstance(fixed, FixedMap)
            absorb(model.get_submodule(pair.layer), fixed.scale, fixed.shift)
            _remove(model, sites[path], fixed.then)
        if self.fuse:
            fuse_folded(model, {pair.layer for pair in self.folded.values()})
        return model

    def _check(self) -> None:
        """Compare in float32 or wider: the rounding of narrower types would hide a mistake."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        narrow = any(t.dtype in NARROW for t in tensors)
        self.difference, allowed = self._measured(torch.float32 if narrow else None)
        if self.difference <= allowed:
            return
        with suppress(Exception):  # not every device and not every model can do float64
            if self._measured(torch.float64)[0] <= IN_DOUBLE:  # some blow up last digits
                return
        raise NormkitError(
            f"The folded model differs by {self.difference:.1e} relative, where rounding "
            f"explains {allowed:.0e}, so it is not given out; the model is as it was. "
            "Print plan_fold(model) to see what was folded."
        )

    def _measured(self, dtype: torch.dtype | None) -> tuple[float, float]:
        """How far model and folded model are apart in a type, and what rounding explains."""
        model, probe = self.model, self.probe
        if dtype is not None:
            model = _copied(model).to(dtype)
            wide = lambda t: t.to(dtype) if t.is_floating_point() else t  # noqa: E731
            example = tree_map_only(Tensor, wide, probe.example)
            probe = Probe(example, probe.text, probe.given)
        new = self._folded(_copied(model))
        outputs = []
        with undisturbed(model), undisturbed(new):
            for each in (model, new):
                torch.manual_seed(0)  # for models that draw numbers; undone by ``undisturbed``
                outputs.append(leaves(probe.run(each)))
        self.compared = not outputs[0] or any(bool(t.isfinite().any()) for t in outputs[0])
        allowed = max((rounding(t.dtype) for t in outputs[0]), default=0.0)
        return difference(*outputs), allowed

    def __str__(self) -> str:
        how = f"seen with {self.probe.text}" if self.seen else f"guessed: {self.probe.text}"
        lines = [
            f"{len(self.folded)} norm(s) folded, {len(self.left)} left, "
            f"{len(self.weights)} computed weight(s) made plain; {how}."
        ]
        lines += [f"  {path} into {pair.layer}" for path, pair in self.folded.items()]
        lines += [f"  {path} left: {why}" for path, why in self.left.items()]
        lines += [f"  {path} gets a plain weight" for path in self.weights]
        if self.difference is not None:
            lines.append(f"The output differs by {self.difference:.1e} relative.")
        return "\n".join(lines)


def _remove(model: nn.Module, site: Site, then: nn.Module | None) -> None:
    """Leave of a norm what remains: nothing, a convolution, its drop layer and activation."""
    if isinstance(site.module, NormAct):
        site.module.norm = then or nn.Identity()
        return
    rest = [part for part in (then, site.drop, site.act) if part is not None]
    new = rest[0] if len(rest) == 1 else nn.Sequential(*rest) if rest else nn.Identity()
    if len(rest) != 1:
        new.training = site.module.training
    _put(model, site.paths, new)


def _put(model: nn.Module, paths: Sequence[str], new: nn.Module) -> None:
    for path in paths:
        above, _, name = path.rpartition(".")
        model.get_submodule(above)._modules[name] = new


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        text = str(error).strip().partition(".")[0]
        raise NormkitError(
            f"fold gives a copy, and this model cannot be copied: {type(error).__name__}: {text}. "
            "Perhaps it keeps tensors of its last forward: run it under torch.no_grad()."
        ) from error


# -------------------------------------------------------------------- which layer feeds which norm


def _pairs(model: nn.Module, sites: Mapping[str, Site], example: Any) -> tuple[Pairs, Probe]:
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
    pairs: Pairs = {}
    for path, site in sites.items():
        if site.fed_by is None:
            pairs[path] = "no convolution or linear layer stands before it"
        elif feeds[site.fed_by] > 1:
            pairs[path] = f"{site.fed_by} stands before several norms"
        elif site.shared or places[id(model.get_submodule(site.fed_by))] > 1:
            pairs[path] = "it or the layer before it has several places in the model"
        else:
            pairs[path] = Pair(site.fed_by)
    return pairs


def _refusal(model: nn.Module, site: Site, pair: Pair, owners: Counter[int], computed: bool) -> str:
    """Why a norm cannot be folded into its layer; empty if it can."""
    fixed = fixed_map(site, pair.axes)
    if isinstance(fixed, str):
        return fixed
    if count_hooks(site.module):
        return "it has hooks that see its output"
    layer = model.get_submodule(pair.layer)
    if count_hooks(layer):
        return f"{pair.layer} has hooks that see its output"
    if any(owners[id(p)] > 1 for p in layer._parameters.values() if p is not None):
        return f"{pair.layer} shares its weight or bias with another layer"
    return refusal(plain_form(layer) if computed else layer, site.channels, pair.axes)
