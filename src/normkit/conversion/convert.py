"""Turn the norms of a model into another kind."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from normkit.conversion.carry import GAINS, Wish, replace_norms
from normkit.conversion.certificate import NO_INPUT
from normkit.conversion.edits import ROOT, Edit, ReplaceModule, refuse_unchangeable
from normkit.conversion.fit.data import Fit
from normkit.conversion.fit.norms import fitted_norms
from normkit.conversion.fit.report import FitReport, unlike_note
from normkit.conversion.forward_probe import check_example
from normkit.conversion.groups import bent_note, single_channel_note
from normkit.conversion.plan import Optimizers, Plan, Step
from normkit.conversion.sources import damaged, norm_of
from normkit.conversion.targets import find_target
from normkit.errors import NormkitError, OptionError
from normkit.inspection import Site, Survey, select, survey

Model = TypeVar("Model", bound=nn.Module)
FOLDING = ("reparameterize", "fuse", "switch_to_deploy", "fuse_model")
"""Methods by which models fold their batch norms, reading scale, shift and statistics."""
NUMBER = re.compile(r"\d+")
REGISTERED = ("_modules", "_parameters", "_buffers")


def convert(
    model: Model,
    to: str | type,
    where: Any = None,
    *,
    example: Any = None,
    optimizer: Optimizers = None,
    fit: Any = None,
    distill: int = 0,
    **options: Any,
) -> Model:
    """Turn the norms of a model into another kind, in place; returns the model.

    The same as ``plan_conversion(...).apply()``: see there for the arguments. Take the plan
    instead to see what will happen, or to be able to go back; ``certificates(model)`` has what was
    measured. Warns if there was nothing to convert, or only some of it could be; if the model
    could not be run, its output is not finite any more or not what was promised; and if an
    optimizer of the model does not know the new parameters.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> nk.convert(model, "gn", groups=4)[1]
    GN(8, groups=4)
    """
    plan = plan_conversion(
        model, to, where, example=example, optimizer=optimizer, fit=fit, distill=distill, **options
    )
    report = plan.fit
    if report is not None:
        note = unlike_note(report.unlike, report.unlike_first, report.computed_weights)
        if note:
            warnings.warn(note, stacklevel=2)
    certificate = plan._apply(None, stacklevel=3)  # a warning is to point at the caller
    if certificate.probe.startswith(NO_INPUT):
        warnings.warn(
            f"{plan.title}: {certificate.verdict} Give an input, example=, or example=False to do "
            "without measuring.",
            stacklevel=2,
        )
    return model


def plan_conversion(
    model: nn.Module,
    to: str | type,
    where: Any = None,
    *,
    example: Any = None,
    optimizer: Optimizers = None,
    fit: Any = None,
    distill: int = 0,
    **options: Any,
) -> Plan:
    """A plan to turn the norms of a model into another kind. Nothing is changed yet.

    ``to`` is a name of the catalog such as "gn" or "ubn", or "torch_bn", "torch_gn", "sync_bn",
    "torchvision_frozen_bn", or one of these classes; ``options`` are those of the layer, and
    ``channels_per_group`` where it has groups. ``where`` chooses norms, see ``select``; without it
    batch norms are converted, or, in a model without any, all norms. ``example`` is an input of the
    model: it shows what feeds what, and is what ``apply`` measures with. ``optimizer``, one or
    several, will get the new parameters.

    Each layer takes over what it can: scale, shift, running statistics, eps, momentum, mode,
    device and type, a fused activation, hooks. The printed plan says what is carried, what
    starts anew, what is lost, and why a norm is left as it is.

    With ``fit``, some images without labels (a tensor, a loader, batches, or a ``Fit``), scales and
    shifts are then chosen layer by layer so that each new norm gives what the old one gave, from
    the inputs that the converted network has by then: a pretrained batch-norm network stays
    accurate as gn or ln. Then ``groups="fit"``, or a list of numbers, takes for each layer the
    number of groups that fits best. The plan and the certificate hold the ``FitReport``.
    ``distill`` steps of training follow, on the same images, to match the old network's outputs;
    the best state on a held-out part is kept, so it is never worse than the fit there.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    >>> plan = nk.plan_conversion(model, "rbn")
    >>> plan.apply(torch.randn(2, 3, 9, 9)).exact
    True
    >>> plan.undo()
    """
    refuse_unchangeable(model)
    target = find_target(to)
    target.check(options)
    sites = select(_survey(model, example), where)
    if any(site.path == "" for site in sites):
        raise OptionError(ROOT)
    besides = set() if where is not None else _besides_batch_norms(sites)

    def wish(site: Site) -> Wish | str:
        if site in besides and not target.has(type(site.norm)):
            return f'no batch norm, and not asked for: try where="kind:{site.kind}"'
        return target, options

    report: FitReport | None = None
    fitting: list[Edit] = []
    if fit is None:
        if distill:
            raise OptionError("distill= goes on from a fit: give images, fit=images.")
        _refuse_fitted_options(options)
        edits, steps = replace_norms(model, sites, wish)
    else:
        images = fit if isinstance(fit, Fit) else Fit(fit)
        images = replace(images, distill=distill) if distill else images
        left = [site for site in sites if isinstance(wish(site), str)]
        asked = [site for site in sites if site not in left]
        edits, steps, fitting, result = fitted_norms(model, asked, target, options, images)
        if result is not None:
            report = result.report
            example = result.example if example is None else example
        steps = [*steps, *replace_norms(model, left, wish)[1]]
    going = {edit.paths[0] for edit in edits}
    folding = {_folding_method(site, model) for site in sites if site.path in going}
    notes = [
        f"{method} would take the new layers for batch norms: convert to torch_bn before it."
        for method in sorted(filter(None, folding))
        if target.name != "torch_bn"
    ]
    notes += also_held(model, edits)
    new = [(edit.paths[0], norm_of(edit.new)) for edit in edits]
    notes += filter(None, [bent_note(options, [norm for _, norm in new]), single_channel_note(new)])
    title = f"{type(model).__name__} to {target.name}"
    return Plan(
        model,
        [*edits, *fitting],
        steps,
        example=example,
        optimizer=optimizer,
        title=title,
        notes=notes,
        cautions=[
            *filter(None, [target.missing_choice(options) if edits else ""]),
            *_only_some(steps),
            *_gaining(steps),
            *damaged(site for site in sites if site.path in going),
        ],
        fit=report,
    )


def _refuse_fitted_options(options: Mapping[str, Any]) -> None:
    if isinstance(options.get("groups"), str | list | tuple):
        raise OptionError(
            f"groups={options['groups']!r} is chosen by how well it fits: give images, fit=images."
        )


def _besides_batch_norms(sites: Sequence[Site]) -> set[Site]:
    """The norms of other kinds, in a model that has batch norms."""
    others = {site for site in sites if not site.of_batches}
    return others if len(others) < len(sites) else set()


def _gaining(steps: Sequence[Step]) -> list[str]:
    """A caution if norms get a map to train that they had not, and the user may not want."""
    paths = [step.path for step in steps if GAINS in step.reason]
    if not paths:
        return []
    return [
        f"{len(paths)} norm(s) without scale and shift (affine=False), such as {paths[0]}, get "
        "trainable ones, which are part of the method."
    ]


def _only_some(steps: Sequence[Step]) -> list[str]:
    """A caution if what was asked for fits only some of the norms."""
    done = sum(step.action == "convert" for step in steps)
    skipped = [step for step in steps if step.action == "skip"]
    if not done or not skipped:
        return []
    kinds = Counter(NUMBER.sub("", step.reason) for step in skipped)  # 1152 or 672: one reason
    most, count = kinds.most_common(1)[0]
    first = next(step for step in skipped if NUMBER.sub("", step.reason) == most)
    others = "" if count == len(skipped) else f" {len(skipped) - count} are not for other reasons."
    return [
        f"Only {done} of {done + len(skipped)} norms are converted. {count} are not, such as "
        f"{first.path}: {first.reason.rstrip('.')}.{others}"
    ]


def _survey(model: nn.Module, example: Any) -> Survey:
    check_example(example)
    try:
        return survey(model, None if example is False else example)
    except NormkitError:
        raise
    except Exception as error:
        raise OptionError(
            f"The model fails on the given input: {type(error).__name__}: {error}"
        ) from error


def _folding_method(site: Site, model: nn.Module) -> str | None:
    """A method of a module around the norm that folds it away, such as RepVGG.reparameterize."""
    path = site.path
    while path:
        path = path.rpartition(".")[0]
        around = type(model.get_submodule(path))
        for name in FOLDING:
            if callable(getattr(around, name, None)):
                return f"{around.__name__}.{name}"
    return None


def also_held(model: nn.Module, edits: Sequence[ReplaceModule]) -> list[str]:
    """A note, if an attribute or a list of the model has a norm that will be replaced.

    A forward that calls it from there would go on with the old one. ``apply`` finds that out when
    it runs the model; on the meta device, or without an example, this is all there is.
    """
    going = {id(edit.old): edit.paths[0] for edit in edits}
    held = []
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in REGISTERED:
                at = f"{path}.{name}" if path else name
                held += [f"{going[id(v)]} in {at}" for v in _items(value) if id(v) in going]
    if not held:
        return []
    return [
        f"Also kept outside of the submodules, where it stays the old one: {', '.join(held)}. "
        "Measure with an example to see whether it is called from there."
    ]


def _items(value: Any) -> Iterator[Any]:
    yield value
    if isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
