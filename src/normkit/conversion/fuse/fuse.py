"""Let norms do the sums and activations that follow them, in place."""

from __future__ import annotations

import copy
import importlib
import linecache
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, TypeVar

from torch import fx, nn

from normkit.conversion.certificate import (
    SIMILAR,
    UNTOUCHED,
    Before,
    measure_before,
    sensitivity,
)
from normkit.conversion.edits import count_hooks
from normkit.conversion.forward_probe import difference, full_precision, leaves, rounding
from normkit.conversion.fuse.convolution import FoldedConv2d
from normkit.conversion.fuse.graph import (
    ACTIVATED,
    HOOKED,
    HOSTS,
    fused_forward,
    not_fused,
    own_forward,
)
from normkit.conversion.fuse.saving import (
    IndexFreeMaxPool2d,
    SavesInputs,
    save_all,
    save_inputs,
)
from normkit.engine.activations import name_of_module
from normkit.errors import NormkitError, NothingToDo, OptionError, nearest
from normkit.inspection import refuse_wrapped, undisturbed
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

Model = TypeVar("Model", bound=nn.Module)
Names = tuple[tuple[str, Any], ...]


SAVED = ("all", "inputs")


def fuse(model: Model, example: Any = None, *, save: str = "all") -> Model:
    """Let normkit's norms do the sum and the activation that follow them.

    In ``relu(bn(x) + identity)`` the norm, the sum and the activation each read and write the whole
    map; a Normalizer does all three in one pass. This looks at the forward of every module that has
    norms of normkit among its children (torchvision's and timm's ResNet blocks, your own), and
    rewrites those in which a norm is followed by nothing but a sum, an activation, or both. Convert
    the model first: norms of other libraries are left alone.

    Changes the model in place and returns it. A module whose forward is rewritten stays the same
    object, with its class, children, tensors, hooks and methods; flags that its forward looks at,
    such as one for gradient checkpointing, are read now, and an Identity in it is left out. In a
    Sequential the norm becomes a NormAct, whose tensors are then named ``norm.…`` (older
    state_dicts still load), and the activation an Identity.

    It is made for GPUs, where a training step gains most. On a CPU a forward in eval mode gains two
    or three parts in a hundred, and a training step neither gains nor loses what could be measured
    (``python -m benchmarks.paired_cost fuse``).

    ``save="inputs"`` saves memory in training. A network keeps what goes into a norm, for the norm,
    and what comes out, for the convolution after it; then only the first is kept, and the second is
    made again when backward asks for it, by the same code and so to the last bit. Outputs that are
    added to others are made again one from the other. It holds while the forward of this model
    runs, in eager mode: compilers decide for themselves what they keep, and in a part that is
    checkpointed, or with hooks for saved tensors around the model, everything is as ever. A max
    pooling no longer keeps its indices, at the price that its gradient cannot be differentiated
    again. What autograd does not see must not change an output in place (``y.data.clamp_()``).
    ``save="all"`` takes it back.

    Left alone: a forward that cannot be traced, takes more than one argument, is another one in
    eval mode or keeps something on the module; norms and activations with hooks, which would see
    other tensors. The output in eval mode is compared before and after, with ``example`` or an
    input that is looked for (``example=False`` does without): if it differs, that is an error, and
    the model is as it was. ``nk.plan_fuse`` lists what is fused, and why the rest is not; where
    nothing is, a warning says so.

    >>> import torch, normkit as nk
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), nk.BN(8), torch.nn.ReLU())
    >>> nk.fuse(net)
    Sequential(
      (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1))
      (1): NormAct(
        (norm): BN(8)
        (drop): Identity()
        (act): ReLU()
      )
      (2): Identity()
    )
    """
    if save not in SAVED:
        raise OptionError(f"Unknown save={save!r}. {nearest(str(save), SAVED)}")
    plan = plan_fuse(model)
    if not plan.fused and save == "all":
        path, reason = next(iter(plan.left.items()))
        others = f", and so on for {len(plan.left) - 1} more" if len(plan.left) > 1 else ""
        message = f"fuse changed nothing. {path or 'The model'}: {reason}{others}."
        warnings.warn(f"{message} nk.plan_fuse(model) lists them.", stacklevel=2)
    before = measure_before(model, (), example)
    undo: list[Callable[[], None]] = [
        partial(setattr, module, "__class__", type(module))
        for module in model.modules()
        if isinstance(module, SavesInputs | IndexFreeMaxPool2d)
    ]
    save_all(model)
    try:
        plan.carry_out(undo)
        if isinstance(before, Before):
            _check(model, before)
    except BaseException:
        for step in undo[::-1]:
            step()
        raise
    for path in plan.fused:
        norm = model.get_submodule(path)
        norm = norm.norm if isinstance(norm, NormAct) else norm
        if isinstance(norm, Normalizer):
            norm.apart_on_cpu = True
    if save == "inputs":
        save_inputs(model)
    return model


@dataclass
class FusePlan:
    """What ``fuse`` would do."""

    fused: dict[str, str] = field(default_factory=dict)
    """What each norm does beside, by its path: "sum", "relu", "sum and silu" …"""
    left: dict[str, str] = field(default_factory=dict)
    """Why another one does nothing beside."""
    forwards: list[tuple[nn.Module, fx.Graph]] = field(default_factory=list)
    """Modules that get another forward."""
    sequences: list[tuple[nn.Module, dict[str, nn.Module]]] = field(default_factory=list)
    """Sequentials that get other children."""

    def carry_out(self, undo: list[Callable[[], None]]) -> None:
        """Change the model; ``undo`` gets what takes it back, last step last."""
        for module, graph in self.forwards:
            undo.append(partial(setattr, module, "__class__", type(module)))
            use_graph(module, graph)
        for module, children in self.sequences:
            undo.append(partial(module._modules.update, dict(module._modules)))
            module._modules.update(children)

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} norm(s) fused, {len(self.left)} left."]
        lines += [f"  {path} with {what}" for path, what in self.fused.items()]
        lines += [f"  {path} left: {reason}" for path, reason in self.left.items()]
        return "\n".join(lines)


def plan_fuse(model: nn.Module) -> FusePlan:
    """What ``fuse`` would do, to be printed. Nothing is changed."""
    refuse_wrapped(model)
    if not any(isinstance(m, Normalizer | FoldedConv2d) for m in model.modules()):
        raise NothingToDo(
            "fuse found no normalizer of normkit in the model. Try normkit.convert first."
        )
    plan = FusePlan()
    for path, module in list(model.named_modules())[::-1]:
        if isinstance(module, HOSTS):
            continue
        keeping: Any = module.keeping_class if isinstance(module, SavesInputs) else type(module)
        fused: dict[str, str] = {}
        left: dict[str, str] = {}
        if keeping.forward is nn.Sequential.forward:
            children = _fused_children(module, fused, left)
            if children:
                plan.sequences.append((module, children))
        elif isinstance(module, nn.Sequential):
            norms = [n for n, m in module.named_children() if isinstance(m, HOSTS)]
            left = dict.fromkeys(norms, f"{type(module).__name__} is a Sequential of its own kind")
        else:
            fusing = fused_forward(module)
            fused, left = fusing.fused, fusing.left
            if fusing.graph is not None:
                plan.forwards.append((module, fusing.graph))
        for texts, all_texts in ((fused, plan.fused), (left, plan.left)):
            for name, text in texts.items():
                all_texts[f"{path}.{name}" if path else name] = text
    return plan


def _fused_children(
    module: nn.Module, fused: dict[str, str], left: dict[str, str]
) -> dict[str, nn.Module]:
    """The children of a Sequential that change: a norm becomes a NormAct, its activation none."""
    children: dict[str, nn.Module] = {}
    # not named_children(), which leaves out the second place of a module
    items = [item for item in module._modules.items() if not _idle(item[1])]
    for (name, norm), (after, act) in pairwise([*items, ("", None)]):
        if not isinstance(norm, Normalizer | FoldedConv2d):
            continue
        act_name = name_of_module(act)
        if act is None or act_name in (None, "none"):
            left[name] = not_fused(act)
        elif getattr(norm, "own", "none") != "none":
            left[name] = ACTIVATED
        elif obstacle := own_forward(norm):
            left[name] = obstacle
        elif count_hooks(norm) or count_hooks(act):
            left[name] = HOOKED
        else:
            if isinstance(norm, FoldedConv2d):
                conv = copy.copy(norm)
                conv.own = str(act_name)
                both: nn.Module = conv
            else:
                both = NormAct(norm, act)
                both.training = norm.training  # not train(): the parts keep their own mode
            children[name] = both
            children[after] = nn.Identity().train(act.training)
            fused[name] = str(act_name)
    return children


def _idle(module: nn.Module | None) -> bool:
    return type(module) is nn.Identity and not count_hooks(module)


def fuse_folded(model: nn.Module, convolutions: Iterable[str]) -> dict[str, str]:
    """Let the convolutions of a folded model, and norms of normkit that are left in it, do what
    follows them, in place. What each does beside; for what ``fold`` does with its copies."""
    for path in convolutions:
        conv = model.get_submodule(path)
        if FoldedConv2d.serves(conv):
            conv.__class__ = FoldedConv2d
    try:
        plan = plan_fuse(model)
    except NothingToDo:
        return {}
    plan.carry_out([])
    return plan.fused


def _check(model: nn.Module, before: Before) -> None:
    """An error if the fused model gives something else."""
    probe = before.probe
    try:
        with undisturbed(model), full_precision(model):
            gap = difference(before.output, leaves(probe.run(model)))
    except Exception as error:
        raise NormkitError(f"The fused model fails: {error} {UNTOUCHED}") from error
    if gap <= max((rounding(t.dtype) for t in before.output), default=0.0):
        return
    if not sensitivity(model, probe) >= SIMILAR * gap:
        raise NormkitError(
            f"The fused model differs by {gap:.1e} relative with {probe.text}: a forward does "
            f"something that cannot be seen by tracing it. {UNTOUCHED} Try to fuse parts of it, "
            "normkit.fuse(model.layer1)."
        )


# -------------------------------------------------------------------- another forward

# The class of the module becomes a subclass with that forward, as in freezing: hooks, tensors,
# methods and what others hold stay what they were, and copies and pickles have it too.

_classes: dict[tuple[type, str], type] = {}  # by the class before, and the source of the forward


class Fused(nn.Module):
    """What comes before the module's own class."""

    fused_source: str
    fused_names: Names
    unfused_class: type

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # pickle finds classes by name, and this one has none
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        _, _, *state = reduced
        return (_blank, (self.unfused_class, self.fused_source, self.fused_names), *state)


def use_graph(module: nn.Module, graph: fx.Graph) -> None:
    """Let a module compute the graph from now on."""
    code = graph.python_code("self")
    names = tuple((name, _portable(value)) for name, value in code.globals.items())
    module.__class__ = _fused_class(type(module), code.src, names)


def _fused_class(plain: type, source: str, names: Names) -> Any:
    if (plain, source) not in _classes:
        scope = {name: _loaded(value) for name, value in names}
        name = f"<fused forward {len(_classes)} of {plain.__name__}>"
        # so that tracebacks show the lines
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        exec(compile(source, name, "exec"), scope)
        own = {
            "forward": scope["forward"],
            "fused_source": source,
            "fused_names": names,
            "unfused_class": plain,
            "__module__": plain.__module__,
            "__qualname__": plain.__qualname__,
            "__doc__": plain.__doc__,
        }
        _classes[plain, source] = type(plain.__name__, (Fused, plain), own)
    return _classes[plain, source]


def _blank(plain: type, source: str, names: Names) -> Any:
    """A module without contents, which copy and pickle fill."""
    fused = _fused_class(plain, source, names)
    return fused.__new__(fused)


class _Named:
    """A module of Python by its name: pickle does not take modules."""

    def __init__(self, name: str) -> None:
        self.name = name


def _portable(value: Any) -> Any:
    return _Named(value.__name__) if isinstance(value, ModuleType) else value


def _loaded(value: Any) -> Any:
    return importlib.import_module(value.name) if isinstance(value, _Named) else value
