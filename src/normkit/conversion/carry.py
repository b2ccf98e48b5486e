"""From a norm to the module that takes its place: what goes over, starts anew and is lost."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, distributed, nn

from normkit.conversion.edits import ReplaceModule, count_hooks
from normkit.conversion.freeze import carry_freezing, frozen_parts, state_of, unfrozen_class
from normkit.conversion.groups import is_misfit, refuse_misfits
from normkit.conversion.plan import Action, Step
from normkit.conversion.sources import is_exact, norm_of, numbers, read
from normkit.conversion.targets import Taken, Target, find_target
from normkit.core.processes import Processes
from normkit.core.trained import STATISTICS, TrainedBN
from normkit.errors import NormkitError, OptionError
from normkit.inspection import Site
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct
from normkit.layers.synchronised import Synchronised

Wish = tuple[str | type | Target, dict[str, Any]]
"""What a norm is to become, and with which options."""
GAINS = "gets a trainable scale and shift, which it had not"
UNTRAINED = "{} stay untrained, as it had none (requires_grad_(True) on the model would train them)"
STAYS_FROZEN = "weight and bias stay untrained, as they were: requires_grad_(True) would train them"
USUAL_RANK = 2  # spatial axes, as of images
OF_CHECKPOINTS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
TENSORS = {"weight", "bias", "running_mean", "running_var", "num_batches_tracked"}
CHILDREN = {"act", "activation", "drop", "dropout", "norm"}
# attributes of the classes that can be read, which would be wrong on another one
NOT_FOR_OTHERS = {
    "act_name", "act_param", "affine", "channels", "channels_last", "data_format", "dim",
    "elementwise_affine", "eps", "fast_norm", "groups", "momentum", "normalized_shape",
    "num_groups", "process_group", "track_running_stats", "training", "variance_epsilon",
}  # fmt: skip


def replace_norms(
    model: nn.Module, sites: Iterable[Site], wish: Callable[[Site], Wish | str]
) -> tuple[list[ReplaceModule], list[Step]]:
    """The edits that give each norm what is wished for it, and the steps that tell of them.

    A wish that is a text says why the norm stays. Ties between parameters of norms live on.
    """
    edits: list[ReplaceModule] = []
    steps: list[Step] = []
    asked: dict[str, tuple[Site, Wish]] = {}
    misfits: dict[str, Wish] = {}
    for site in sites:
        wanted = wish(site)
        if isinstance(wanted, str):
            steps.append(_left(site, "keep", wanted))
            continue
        asked[site.path] = site, wanted
        rank, like = _rank(site, model), _neighbour(site, model)
        try:
            with torch.inference_mode(False):  # its tensors could not be trained
                new, step = build(site, *wanted, rank=rank, like=like)
        except OptionError:
            if not is_misfit(site.channels, wanted[1]):
                raise
            misfits[site.path] = wanted  # all of them are named at once
            continue
        if new is not None:
            edits.append(ReplaceModule(site.paths, new, old=site.module))
        steps.append(step)
    if misfits:
        _refuse_misfits(misfits, asked)
    _tie(edits)
    return edits, _with_broken_ties(model, edits, steps)


def _refuse_misfits(misfits: dict[str, Wish], asked: dict[str, tuple[Site, Wish]]) -> None:
    """Of several wishes, as recipes have, the first one that does not fit."""
    to, options = next(iter(misfits.values()))
    alike = {p: site.channels or 1 for p, (site, wanted) in asked.items() if wanted[1] == options}
    target = to if isinstance(to, Target) else find_target(to)
    unfit = {path: alike[path] for path, wanted in misfits.items() if wanted[1] == options}
    bendable = "group_policy" in target.options
    refuse_misfits(unfit, options, list(alike.values()), bendable=bendable)


def _rank(site: Site, model: nn.Module) -> int:
    """How many spatial axes its input has: by its class, or what feeds it, or as for images."""
    fed_by = [] if site.fed_by is None else [model.get_submodule(site.fed_by)]
    for module in (site.module, *fed_by):
        for kind in type(module).__mro__:
            if match := re.search(r"([123])d$", kind.__name__, re.IGNORECASE):
                return int(match[1])
        if isinstance(module, nn.Linear):
            return 1
        if isinstance(dims := getattr(module, "dims", None), int):  # ours, with a kernel
            return dims
    return USUAL_RANK


def _neighbour(site: Site, model: nn.Module) -> Tensor:
    """A tensor with the device and type of the model where the norm stands."""
    path = site.path
    while path:
        path = path.rpartition(".")[0]
        for parameter in model.get_submodule(path).parameters():
            lazy = isinstance(parameter, nn.UninitializedParameter)
            if not lazy and parameter.is_floating_point():
                return parameter.detach()
    return torch.empty(0, device="cpu")


def build(
    site: Site,
    to: str | type | Target,
    options: dict[str, Any] | None = None,
    *,
    rank: int = 2,
    like: Tensor | None = None,
) -> tuple[nn.Module | None, Step]:
    """The module that takes the place of a norm, None if nothing is to be done; and the step.

    ``rank`` is the number of spatial axes of its input; ``like`` tells device and type where the
    norm has no tensors.
    """
    options = options or {}
    target = to if isinstance(to, Target) else find_target(to)
    target.check(options)
    norm = site.norm
    if _is_already(norm, target, options):
        return None, _left(site, "keep", f"it is {target.name} already")
    bn = read(site, rank, like)
    if isinstance(bn, str):
        return None, _left(site, "skip", bn)
    try:
        layer, taken = target.make(bn, rank, options)
    except NormkitError as error:
        if options:  # the caller's error, if it would do without them
            try:
                target.make(bn, rank, {})
            except NormkitError as without:
                return None, _left(site, "skip", str(without))
            raise type(error)(f"{site.path}: {error}") from error
        return None, _left(site, "skip", str(error))
    if type(layer) is type(norm) and repr(layer) == repr(norm):
        return None, _left(site, "keep", f"it is {target.name} with these options already")
    shared = _share_parameters(norm, layer)
    for name, value in _attributes(norm, bn.channels).items():
        if not hasattr(layer, name):
            setattr(layer, name, value)
    carry_freezing(norm, layer)
    _carry_sharing(norm, layer)
    new = _with_activation(layer, site)
    if bn.weight.is_meta:
        exact = target.from_bn and bn.tracked and not options and not bn.lost
    else:
        exact = is_exact(site.module, new, numbers(bn, rank, norm))
    gained = "" if "affine" in options else _gained(bn, layer)
    return new, _account(site, bn, layer, taken, new, shared, exact, gained)


def _left(site: Site, action: Action, reason: str) -> Step:
    was = describe(site.module)
    return Step(site.path, was, action=action, reason=reason.rstrip("."), paths=site.paths)


def _is_already(norm: nn.Module, target: Target, options: dict[str, Any]) -> bool:
    if not target.has(unfrozen_class(norm)):
        return False
    asked = {"num_groups" if isinstance(norm, nn.GroupNorm) and k == "groups" else k: v
             for k, v in options.items()}  # fmt: skip
    return all(hasattr(norm, name) and getattr(norm, name) == v for name, v in asked.items())


def _with_activation(layer: nn.Module, site: Site) -> nn.Module:
    """The activation and drop layer of a fused norm live on: the same modules."""
    if site.act is None and site.drop is None:
        return layer
    new = NormAct(layer, site.act, drop=site.drop)
    state = state_of(site.module)  # a frozen norm does not show the mode of the model
    # not train(): activation and drop layer keep their own mode
    new.training = site.module.training if state is None else state.mode
    return new


# -------------------------------------------------------------------- in words


def _account(
    site: Site,
    bn: TrainedBN,
    layer: nn.Module,
    taken: Taken,
    new: nn.Module,
    shared: set[str],
    exact: bool,
    gained: str,
) -> Step:
    """The step for a norm that becomes ``new``, whose norm is ``layer``."""
    norm = site.norm
    tensors = {**layer._parameters, **layer._buffers}
    hidden = layer._non_persistent_buffers_set
    visible = [n for n, tensor in tensors.items() if tensor is not None and n not in hidden]
    words = dict.fromkeys(taken.get(name, name) for name in visible)
    carried = [w for w in words if w in taken.values() and w not in bn.missing]
    started = [w for w in words if w not in carried]
    has = [w for w in ("weight", "bias", STATISTICS) if w not in bn.missing]
    started.sort(key=lambda word: word not in ("weight", "bias", STATISTICS))
    lost = [*bn.lost, *(w for w in has if w not in carried)]
    if bn.each_domain and getattr(layer, "domains", None) != len(bn.each_domain):
        lost.append("statistics of the other domains")
    options: tuple[str, ...] = ("eps", "momentum")
    if isinstance(layer, Normalizer):  # others may have one by name that means nothing to them
        options = tuple(n for n in options if n in layer.options_from(bn, {}))
    carried += [n for n in options if _same(norm, layer, n)]
    for after, word in ((site.act, "activation"), (site.drop, "drop layer")):
        if after is not None:
            carried.append(f"{word} {type(after).__name__}")
    for part in frozen_parts(norm):
        (carried if part in frozen_parts(layer) else lost).append(f"freezing of {part}")
    if (processes := _sharing(norm)) is not None:
        among = f"sharing with {processes.size} processes"
        (lost if _sharing(layer) is None else carried).append(among)
    if hooks := count_hooks(site.module):
        carried.append(f"{hooks} hook(s)")
    lost += _lost_with(site.module, {id(norm._parameters[name]) for name in shared})
    notes = []
    if STATISTICS in started:
        notes.append("train or calibrate it before eval mode")
    if gained:
        notes.append(gained)
    if site.shared:
        notes.append(f"shared by {', '.join(site.paths)}")
    if norm._parameters.get("weight") is not None and "weight" in layer._buffers:
        notes.append("weight and bias become buffers, which are not trained")
    elif norm._buffers.get("weight") is not None and layer._parameters.get("weight") is not None:
        notes.append(STAYS_FROZEN)
    return Step(
        path=site.path,
        was=describe(site.module),
        becomes=describe(new),
        action="convert",
        carried=tuple(carried),
        initialised=tuple(started),
        lost=tuple(lost),
        exact=exact,
        reason="; ".join(notes),
        paths=site.paths,
    )


def _gained(bn: TrainedBN, layer: nn.Module) -> str:
    """What the new norm has of scale and shift that the user had ruled out, in words."""
    tables = {n: layer._parameters.get(n) for n in ("weight", "bias") if n in bn.missing}
    gained = {name: table for name, table in tables.items() if table is not None}
    if "weight" in gained and gained["weight"].requires_grad:
        return GAINS
    return UNTRAINED.format(" and ".join(gained)) if gained and bn.trainable else ""


def describe(module: nn.Module) -> str:
    """A norm in a few words: its class, channels and groups, and what is fused to it."""
    norm = norm_of(module)
    if isinstance(norm, Normalizer):
        text = repr(norm)
    else:
        names = ("num_features", "num_channels", "normalized_shape")
        sizes = [getattr(norm, name, None) for name in names]
        size = next((str(v) for v in sizes if isinstance(v, int | tuple)), "")
        groups = getattr(norm, "num_groups", None)
        text = f"{type(norm).__name__}({size}{f', groups={groups}' if groups else ''})"
    children = dict(module.named_children())
    inside = [children.get(name) for name in ("drop", "act")]
    fused = [type(m).__name__ for m in inside if m is not None and not isinstance(m, nn.Identity)]
    return " + ".join([text, *fused])


def _same(old: nn.Module, new: nn.Module, name: str) -> bool:
    both = hasattr(old, name) and hasattr(new, name)
    return both and bool(getattr(old, name) == getattr(new, name))


def _lost_with(module: nn.Module, shared: set[int]) -> Iterator[str]:
    """What no other module could use, in words; ``shared`` are parameters that go on."""
    if count := sum(len(vars(module)[name]) for name in OF_CHECKPOINTS):
        yield f"{count} hook(s) of state_dict"
    if not isinstance(module, Normalizer | NormAct):
        usual = TENSORS | CHILDREN
        own = {**module._parameters, **module._buffers, **module._modules}
        yield from (name for name, what in own.items() if name not in usual and what is not None)
    for name, p in module.named_parameters():
        hooks = len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ())
        if hooks and id(p) not in shared:
            yield f"{hooks} hook(s) of {name}"


def _attributes(module: nn.Module, channels: int) -> dict[str, Any]:
    """What others may have written on a module, or read from it, such as num_features."""
    if isinstance(module, Normalizer):
        usual = set(vars(unfrozen_class(module)(channels, device="meta")))
    else:
        usual = NOT_FOR_OTHERS
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in usual and not isinstance(value, nn.Module)
        if name != "processes"  # see _carry_sharing
    }


# -------------------------------------------------------------------- other processes


def _sharing(norm: nn.Module) -> Processes | None:
    """The processes with which a norm shares the statistics of its batches."""
    if isinstance(norm, Synchronised):
        return norm.processes
    known = distributed.is_available() and distributed.is_initialized()
    if not isinstance(norm, nn.SyncBatchNorm) or not known:
        return None
    return Processes.of(norm.process_group or distributed.group.WORLD)


def _carry_sharing(norm: nn.Module, layer: nn.Module) -> None:
    """What pools over samples goes on to do so over those of the same processes."""
    processes = _sharing(norm)
    if processes is None:
        return
    if isinstance(layer, Synchronised) and layer.can_synchronise():
        layer.synchronise(processes)
    elif isinstance(layer, nn.SyncBatchNorm) and layer.process_group is None:
        if isinstance(norm, nn.SyncBatchNorm):
            layer.process_group = norm.process_group
        elif processes.name and distributed.is_initialized():
            resolve = distributed.distributed_c10d._resolve_process_group
            layer.process_group = resolve(processes.name)  # type: ignore[arg-type]


# -------------------------------------------------------------------- parameters that live on


def _share_parameters(norm: nn.Module, layer: nn.Module) -> set[str]:
    """Let the new norm hold the very parameters of the old one where they mean the same.

    So optimizers, averages, hooks and ties that know a parameter go on to know it, even those
    that nobody has told of the conversion. Returns their names.
    """
    shared = set()
    for name, new in list(layer._parameters.items()):
        old = norm._parameters.get(name)
        if new is None or old is None:
            continue
        if _is_plain(norm, name) and _is_plain(layer, name) and _equal(old, new):
            layer._parameters[name] = old
            shared.add(name)
        else:
            new.requires_grad_(old.requires_grad)
    return shared


def _is_plain(norm: nn.Module, name: str) -> bool:
    """Whether a parameter is scale or shift of a batch norm as it stands."""
    return not isinstance(norm, Normalizer) or norm.parameter_role(name).of_batch_norm


def _equal(old: Any, new: Any) -> bool:
    alike = old.shape == new.shape and old.dtype == new.dtype and old.device == new.device
    return alike and (old.is_meta or torch.equal(old, new))


def _tie(edits: Sequence[ReplaceModule]) -> None:
    """Where two old norms hold one parameter, let the new ones do so too."""
    first: dict[tuple[int, str], nn.Parameter] = {}
    for edit in edits:
        for name, old, new in _replaced(edit):
            other = first.setdefault((id(old), name), new)
            if other is not new and _equal(other, new):
                norm_of(edit.new)._parameters[name] = other


def _with_broken_ties(
    model: nn.Module, edits: Sequence[ReplaceModule], steps: Iterable[Step]
) -> list[Step]:
    """The steps, with the ties to modules that stay among what is lost."""
    going = {id(norm_of(edit.old)) for edit in edits if edit.old is not None}
    stay = {id(p) for m in model.modules() if id(m) not in going for p in m._parameters.values()}
    broken: dict[str, list[str]] = {}
    for edit in edits:
        for name, old, _ in _replaced(edit):
            if id(old) in stay:
                broken.setdefault(edit.paths[0], []).append(f"tie of {name} with another module")
    return [replace(s, lost=(*s.lost, *broken.get(s.path, ()))) for s in steps]


def _replaced(edit: ReplaceModule) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
    """The parameters of the new norm that are not those of the old one, with both."""
    assert edit.old is not None
    old, new = norm_of(edit.old), norm_of(edit.new)
    for name, parameter in list(new._parameters.items()):
        source = old._parameters.get(name)
        if parameter is not None and source is not None and parameter is not source:
            yield name, source, parameter
