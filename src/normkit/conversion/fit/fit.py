"""Scales and shifts of new norms, fitted layer by layer so that they give what the old ones gave.

Old and new network run in step on the same images: every run waits at each norm until all are
there. Then the old norm's outputs are what the new one's are to become, from the inputs that the
converted network really has by then; scale and shift of the new one are solved for, and all go on.
So one forward of each network is enough, and the maps of one layer are all that is kept. The model
is not changed: each new norm's stand-in is its carried form, followed by the fitted map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.conversion.edits import Edit, ReplaceModule
from normkit.conversion.fit.data import UNTOUCHED, Fit, ImageRun, image_runs, single_images
from normkit.conversion.fit.distill import Distilled, distill
from normkit.conversion.fit.linear import LinearSite, linear_sites
from normkit.conversion.fit.lockstep import Candidate, FitSite, Lockstep, output_map_of
from normkit.conversion.fit.report import (
    FitReport,
    FittedLayer,
    agreement,
    output_error,
    output_leaves,
    unlike_note,
)
from normkit.conversion.fit.solve import Activation
from normkit.conversion.fit.weights import StandardizedSite, standardized, standardized_sites
from normkit.conversion.forward_probe import full_precision
from normkit.errors import DtypeError, OptionError, ShapeError
from normkit.inspection import Site, is_activation, undisturbed
from normkit.inspection.batches import call_model, tensors_in
from normkit.inspection.flow import ACTIVATIONS, record_flow
from normkit.inspection.run import replaced_forward
from normkit.layers.measured import Refusal
from normkit.layers.weight import normalized_tensors

CARRIED = (
    "With scales and shifts as carried the outputs are nearer to the old ones, on the images that "
    "are held out, so nothing was fitted."
)
NORMS_ALONE = (
    "With the weights of other layers fitted as well the outputs were further from the old ones, "
    "on the images that are held out, so only norms were fitted."
)


@dataclass(frozen=True, eq=False)
class FitResult:
    """What came of a fit: the candidate of each site, and the report."""

    sites: tuple[FitSite, ...]
    report: FitReport
    distilled: dict[str, Tensor]
    """Values by their paths in the model, beside or in place of those fitted."""
    example: Any
    """An input to measure with, two of the images; None if they have another form."""
    standardizing: list[Edit]
    """What standardizes weights, after all else."""


def fit_edits(
    model: nn.Module,
    sites: Mapping[str, Site],
    candidates: Sequence[Sequence[ReplaceModule]],
    empty: set[str],
    fit: Fit,
) -> FitResult:
    """Fit what the edits bring in; of several for one norm, take the one that fits best.

    ``sites`` are the old norms by their paths, ``empty`` those whose successors have no running
    statistics yet. Nothing is changed but the statistics of these new modules.
    """
    runs = image_runs(model, fit)
    convolutions: list[StandardizedSite] = []
    standardizing: list[Edit] = []
    if fit.standardize is not None:
        paths = {edit.paths[0] for edits in candidates for edit in edits}
        convolutions, standardizing = standardized_sites(model, paths, fit.standardize, runs[0])
        empty = empty | paths  # running statistics belong to the old weights
    by_path: dict[str, list[Candidate]] = {}
    for edits in candidates:
        for edit in edits:
            path = edit.paths[0]
            by_path.setdefault(path, []).append(Candidate(edit, path in empty))
    places = [FitSite(sites[path], several) for path, several in by_path.items()]
    _refuse_unfittable(places)
    news = [c.edit.new for place in places for c in place.candidates]
    training = model.training
    with undisturbed(model), _eval(news), full_precision(model):
        linear = linear_sites(model) if fit.everything else []
        changing = {site.path for site in convolutions}
        linear = [layer for layer in linear if layer.path not in changing]
        linear = _look_around(model, places, linear, runs[0])
        computed = any(normalized_tensors(module) for module in model.modules())
        fitting = partial(_fitted, model, places, runs, fit, convolutions, training, computed)
        fresh = [place.snapshot() for place in places]
        outputs, report = fitting(linear=[])
        if linear:  # the norms alone may be better: both are tried, from the same start
            plain = [place.snapshot() for place in places]
            _restore(fresh)
            both = fitting(linear=linear)
            if _worse(both[1], report):
                _restore(plain)
                linear = []
                report = replace(report, notes=(*report.notes, NORMS_ALONE))
            else:
                outputs, report = both
        with standardized(convolutions):
            carried = _carried_outputs(model, places, runs, held_out=True)
        if _nearer(carried, report, outputs, runs):
            for place in places:
                place.keep_carried()
            linear = []
            with standardized(convolutions):
                anew = _carried_outputs(model, places, runs, held_out=False)
            outputs[len(runs) :] = anew or []
            report = _report(places, runs, outputs, training, computed)
            report = replace(report, notes=(*report.notes, CARRIED))
    example = runs[0].first(2) if len(runs[0].held_out) > 1 else None
    weights = {path: value for layer in linear for path, value in layer.values().items()}
    if not fit.distill:
        return FitResult(tuple(places), report, weights, example, standardizing)
    result = distill(model, places, weights, convolutions, runs, outputs[: len(runs)], fit)
    report = replace(
        report,
        output_error=result.output_error,
        agreement=result.agreement,
        distilled=result.best_step,
        notes=(*report.notes, _progress_note(report, result)),
    )
    return FitResult(tuple(places), report, result.values, example, standardizing)


def _fitted(
    model: nn.Module,
    places: Sequence[FitSite],
    runs: Sequence[ImageRun],
    fit: Fit,
    convolutions: Sequence[StandardizedSite],
    training: bool,
    computed: bool,
    linear: Sequence[LinearSite],
) -> tuple[list[Any], FitReport]:
    """One fit of the norms, and of the linear layers given: the outputs of both networks."""
    try:
        outputs = Lockstep(model, places, runs, fit, linear, weights=convolutions).run()
    except ShapeError as error:
        if words := single_images(fit):
            raise ShapeError(f"{words} {error}") from error
        raise _wrong_type(model, runs) or error from error
    if any(place.calls > 1 for place in places):  # once more, with what suits all its calls
        outputs = Lockstep(model, places, runs, fit, linear, True, convolutions).run()
    return outputs, _report(places, runs, outputs, training, computed)


def _restore(places: Sequence[Callable[[], None]]) -> None:
    for restore in places:
        restore()


def _worse(report: FitReport, than: FitReport) -> bool:
    """By the outputs on what is held out, where both have been compared there."""
    errors = report.output_error, than.output_error
    return errors[1] is not None and (errors[0] is None or not errors[0] <= errors[1])


def _wrong_type(model: nn.Module, runs: Sequence[ImageRun]) -> DtypeError | None:
    """What to say of a model that fails, if the numbers of the images are not of its type."""
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    came = {x.dtype for x in tensors_in(runs[0].batch.inputs) if x.dim() > 1}
    if not own or not came or came & own:
        return None
    expected = ", ".join(sorted(map(str, own)))
    return DtypeError(
        f"fit= got images of type {', '.join(sorted(map(str, came)))}, which the model does not "
        f"take: its parameters are {expected}. Try images.to({expected.split(', ')[0]}), in the "
        f"scale that it was trained with. {UNTOUCHED}"
    )


# -------------------------------------------------------------------- never worse than carried


def _carried_outputs(
    model: nn.Module, places: Sequence[FitSite], runs: Sequence[ImageRun], held_out: bool
) -> list[Any] | None:
    """What the network gives with scales and shifts as carried, for each run or the samples of it
    that are held out; None, if it gives nothing or its inputs cannot be cut."""
    inputs = [run.inputs(held_out=True) if held_out else run.batch.inputs for run in runs]
    if any(each is None for each in inputs):
        return None
    with ExitStack() as stack:
        for place in places:
            new = place.current.edit.new
            stack.enter_context(replaced_forward(place.site.module, new.forward))
        try:
            return [
                call_model(model, each) if not held_out or run.held_out.any() else None
                for run, each in zip(runs, inputs, strict=True)
            ]
        except Exception:
            return None


def _nearer(
    carried: list[Any] | None, report: FitReport, outputs: list[Any], runs: Sequence[ImageRun]
) -> bool:
    """Whether these outputs are nearer to the old ones than those of the fit."""
    if carried is None or report.output_error is None:
        return False
    old, new = [], []
    for run, out, now in zip(runs, outputs, carried, strict=False):
        if now is not None:
            old += [run.part(t, held_out=True) for t in output_leaves(out)]
            new += output_leaves(now)
    error = output_error(old, new)
    return error is not None and error < report.output_error


def _refuse_unfittable(places: Sequence[FitSite]) -> None:
    for place in places:
        for candidate in place.candidates:
            channels = place.site.channels or 1
            first = next(candidate.norm.parameters(), torch.empty(0, device="cpu"))
            like = first.detach().new_ones(channels)
            values = output_map_of(candidate.norm, like, like)
            if isinstance(values, Refusal):
                raise OptionError(f"{place.site.path} cannot be fitted: {values}. {UNTOUCHED}")


@contextmanager
def _eval(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Eval mode inside, of modules that are in no model yet."""
    inside = [m for module in modules for m in module.modules()]
    modes = [m.training for m in inside]
    try:
        for m in inside:
            m.training = False
        yield
    finally:
        for m, mode in zip(inside, modes, strict=True):
            m.training = mode


# -------------------------------------------------------------------- what follows a norm


def _look_around(
    model: nn.Module, places: Sequence[FitSite], linear: Sequence[LinearSite], run: ImageRun
) -> list[LinearSite]:
    """How often each norm is called, and the activation that gets its very output, if there is one;
    and of the linear layers those that are called once.

    Seen on two samples; the fit itself will say what is wrong with a model that fails.
    """
    sources = {place.site.path: place.site.module for place in places}
    users = {path: m for path, m in model.named_modules() if path and is_activation(m)}
    layers = {layer.path: layer.module for layer in linear}
    counts = dict.fromkeys((*sources, *layers), 0)

    def count(path: str, *_: Any) -> None:
        counts[path] += 1

    few = run.first(2)
    small = run.batch.inputs if few is None else few
    with ExitStack() as stack:
        for path, module in (*sources.items(), *layers.items()):
            stack.callback(module.register_forward_pre_hook(partial(count, path)).remove)
        try:
            flow = record_flow(model, lambda: call_model(model, small), sources, users)
        except Exception:
            return []
    meets: dict[str, set[str]] = {}
    for use in flow.uses:
        if not use.changed:  # by an activation in place, whose output it is then
            meets.setdefault(use.source, set()).add(use.user)
    for place in places:
        path = place.site.path
        place.calls = counts[path]
        met = meets.get(path, set())
        if place.site.act is not None:
            place.activation = _applied(place.site.act)
        elif len(met) == 1:  # what is used twice is wanted as it is
            user = next(iter(met))
            name = user.rstrip("_")
            if user in users:
                place.activation = _applied(users[user])
            elif name in ACTIVATIONS and name not in ("prelu", "rrelu"):
                place.activation = getattr(F, name, None) or getattr(torch, name)
    return [layer for layer in linear if counts[layer.path] == 1]


def _applied(act: nn.Module) -> Activation:
    """An activation on wide copies: it may work in place, and have parameters of its own type."""
    dtype = next((p.dtype for p in act.parameters()), None)

    def apply(x: Tensor) -> Tensor:
        y: Tensor = act(x.to(dtype, copy=True) if dtype is not None else x.clone())
        return y.to(x.dtype)

    return apply


# -------------------------------------------------------------------- in words


def _progress_note(before: FitReport, after: Distilled) -> str:
    was = "" if before.output_error is None else f" from {before.output_error:.1%}"
    return (
        f"Distilling took the error of the outputs{was} to {after.output_error:.1%}; of "
        f"{after.steps} steps, {'with' if after.augmented else 'without'} flips and crops, the "
        f"first {after.best_step} are kept."
    )


def _report(
    places: Sequence[FitSite],
    runs: Sequence[ImageRun],
    outputs: list[Any],
    training: bool,
    computed: bool,
) -> FitReport:
    images = sum(len(run.held_out) for run in runs)
    held_out = sum(int(run.held_out.sum()) for run in runs)
    old, new = [], []
    for i, run in enumerate(runs):
        a, b = (output_leaves(outputs[k]) for k in (i, i + len(runs)))
        if not all(bool(torch.isfinite(t).all()) for t in a):
            raise OptionError(
                f"The outputs of the model are not finite for batch {run.number}, so nothing can "
                f"be fitted to them. {UNTOUCHED}"
            )
        old.append([run.part(t, True) for t in a])
        new.append([run.part(t, True) for t in b])
    flat_old = [t for each in old for t in each]
    flat_new = [t for each in new for t in each]
    firsts = [(a[0], b[0]) for a, b in zip(old, new, strict=True) if a and b]
    same = bool(firsts) and all(
        a.shape == b.shape and a.shape[1:] == firsts[0][0].shape[1:] for a, b in firsts
    )
    notes: list[str] = []
    drifts = sorted(place.drift for place in places if place.drift is not None)
    unlike = drifts[len(drifts) // 2] if drifts else None
    seen = [place for place in places if place.drift is not None]
    first = min(seen, key=lambda place: place.turn).drift if seen else None
    notes += filter(None, [unlike_note(unlike, first, computed)])
    if training:
        notes.append("The model is in train mode: it was fitted to what it gives in eval mode.")
    idle = [place.site.path for place in places if place.chosen is None]
    if idle:
        notes.append(f"Not called for these images, so carried as it is: {', '.join(idle)}.")
    return FitReport(
        images=images,
        held_out=held_out,
        layers=tuple(
            FittedLayer(place.site.path, place.r2, place.plain_r2, place.note)
            for place in places
            if place.chosen is not None
        ),
        output_error=output_error(flat_old, flat_new),
        agreement=agreement(
            [torch.cat([a for a, _ in firsts])], [torch.cat([b for _, b in firsts])]
        )
        if same
        else None,
        unlike=unlike,
        unlike_first=first,
        computed_weights=computed,
        notes=tuple(notes),
    )
