"""The edits and steps of a conversion that is fitted on images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from normkit.conversion.carry import Wish, replace_norms
from normkit.conversion.edits import Edit, ReplaceModule, SetTensor, SetTensors
from normkit.conversion.fit.data import Fit
from normkit.conversion.fit.fit import FitResult, fit_edits
from normkit.conversion.fit.lockstep import FitSite
from normkit.conversion.groups import refuse_misfits
from normkit.conversion.plan import Step
from normkit.conversion.sources import norm_of
from normkit.conversion.targets import Target
from normkit.core.groups import resolve_groups
from normkit.core.trained import STATISTICS
from normkit.errors import OptionError
from normkit.inspection import Site

GROUPS = (1, 2, 4, 8, 16, 32)
FITTED = ("train or calibrate it before eval mode",)  # what a fit makes unnecessary

Fitted = tuple[list[ReplaceModule], list[Step], list[Edit], FitResult | None]


def fitted_norms(
    model: nn.Module,
    sites: Sequence[Site],
    target: Target,
    options: dict[str, Any],
    fit: Fit,
) -> Fitted:
    """What ``replace_norms`` gives, and the edit that gives the new norms their fitted values."""
    wishes = [{**options, **choice} for choice in _choices(options)]
    if len(wishes) > 1:
        _refuse_if_none_divides(sites, target, wishes)
    tries = []
    for wish in wishes:

        def wanted(site: Site, wish: dict[str, Any] = wish) -> Wish | str:
            if not _is_own_candidate(site, wish, wishes):
                return f"{wish['groups']} groups do not divide its channels, or are tried already"
            if target.from_bn and "track_running_stats" in target.options and not site.tracked:
                return target, {"track_running_stats": True, **wish}  # the images have them
            return target, wish

        tries.append(replace_norms(model, sites, wanted))
    steps = _by_path([steps for _, steps in tries])
    edits = [edits for edits, _ in tries]
    if not any(edits):
        return [], [several[0] for several in steps.values()], [], None
    _refuse_tied(edits[0])
    empty = {s.path for several in steps.values() for s in several if STATISTICS in s.initialised}
    result = fit_edits(model, {site.path: site for site in sites}, edits, empty, fit)
    fitted = {place.site.path: place for place in result.sites}
    values = {
        f"{path}.{name}": value
        for path, place in fitted.items()
        if place.chosen is not None
        for name, value in place.chosen.values().items()
    } | result.distilled
    old = {name: p for name, p in model.named_parameters() if name.rpartition(".")[0] not in fitted}
    parts = [
        SetTensor(path, value, planned_for=old[path].detach().clone() if path in old else None)
        for path, value in values.items()
    ]
    chosen = [place.current.edit for place in fitted.values()]
    report = result.report
    count = sum(1 for place in fitted.values() if place.chosen is not None)
    description = (
        f"scale and shift of {count} norm(s) are fitted on {report.images - report.held_out} images"
    )
    if others := len({path.rpartition(".")[0] for path in values} - fitted.keys()):
        description += f", and what {others} other layer(s) hold"
    told = [_told(several, fitted.get(path)) for path, several in steps.items()]
    if result.standardizing:
        told = [replace(step, exact=False) for step in told]
    # weights are standardized last: until then they have their plain names
    return chosen, told, [SetTensors(parts, description), *result.standardizing], result


def _groups_here(site: Site, wish: dict[str, Any]) -> int | None:
    """What a number of groups comes to at a norm; None if it does not divide the channels."""
    try:
        return resolve_groups(site.channels or 1, wish["groups"], wish.get("group_policy", "error"))
    except OptionError:
        return None


def _is_own_candidate(site: Site, wish: dict[str, Any], wishes: Sequence[dict[str, Any]]) -> bool:
    """Whether a number of groups is to be tried at a norm, of several; each once."""
    if len(wishes) == 1:
        return True
    numbers = [_groups_here(site, each) for each in wishes]
    mine = wishes.index(wish)
    return numbers[mine] is not None and numbers[mine] not in numbers[:mine]


def _refuse_if_none_divides(
    sites: Sequence[Site], target: Target, wishes: Sequence[dict[str, Any]]
) -> None:
    """Else such a norm would stay what it is, and the network would be half of each."""
    sized = {site.path: site.channels for site in sites if site.channels}
    unfit = {
        site.path: site.channels
        for site in sites
        if site.channels and all(_groups_here(site, wish) is None for wish in wishes)
    }
    if unfit:
        refuse_misfits(
            unfit,
            wishes[0],
            list(sized.values()),
            bendable="group_policy" in target.options,
            several=[wish["groups"] for wish in wishes],
        )


def _choices(options: dict[str, Any]) -> list[dict[str, Any]]:
    """The options that are chosen by how well they fit."""
    asked = options.get("groups")
    if asked == "fit":
        return [{"groups": number} for number in GROUPS]
    if isinstance(asked, list | tuple):
        if not asked or any(type(number) is not int or number < 1 for number in asked):
            raise OptionError(f"groups expects numbers to choose from, got {asked!r}.")
        return [{"groups": number} for number in dict.fromkeys(asked)]
    return [{}]


def _by_path(tries: Sequence[Sequence[Step]]) -> dict[str, list[Step]]:
    """The steps of each norm that would convert it; the first one, if none does."""
    steps: dict[str, list[Step]] = {}
    for one in tries:
        for step in one:
            steps.setdefault(step.path, []).append(step)
    return {
        path: [s for s in several if s.action == "convert"] or several[:1]
        for path, several in steps.items()
    }


def _told(several: list[Step], place: FitSite | None) -> Step:
    """The step of the candidate that was chosen, with what was fitted and how well."""
    if place is None or place.chosen is None:
        return several[0]
    number = place.candidates.index(place.chosen)
    step = several[number]
    names = tuple(name.removeprefix("norm.") for name in place.chosen.values())
    names += place.chosen.prepared
    measured = place.chosen.empty and STATISTICS in (*step.initialised, *step.carried)
    statistics = (STATISTICS,) if measured else ()
    notes = [note for note in step.reason.split("; ") if note and note not in FITTED]
    notes.append(place.note or f"R² {place.r2:.3f}, as carried {place.plain_r2:.3f}")
    if len(place.candidates) > 1:
        tried = [
            f"{getattr(norm_of(c.edit.new), 'groups', '?')}: {place.tried[i]:.3f}"
            for i, c in enumerate(place.candidates)
            if i in place.tried
        ]
        notes.append(f"groups {', '.join(tried)}")
    return replace(
        step,
        fitted=(*names, *statistics),
        carried=tuple(what for what in step.carried if what not in (*names, *statistics)),
        initialised=tuple(w for w in step.initialised if w not in (*names, *statistics)),
        reason="; ".join(notes),
    )


def _refuse_tied(edits: Sequence[ReplaceModule]) -> None:
    holders: dict[int, str] = {}
    for edit in edits:
        for parameter in norm_of(edit.new).parameters():
            other = holders.setdefault(id(parameter), edit.paths[0])
            if other != edit.paths[0]:
                raise OptionError(
                    f"{other} and {edit.paths[0]} hold one parameter, so they cannot be fitted "
                    "each to its own. Untie them, or convert without fit=."
                )
