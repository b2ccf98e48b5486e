"""Who feeds whom in a model: seen while it runs, or guessed from the order of registration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from normkit.inspection.batches import call_model
from normkit.inspection.checks import refuse_lazy, refuse_wrapped
from normkit.inspection.kinds import is_activation
from normkit.inspection.run import undisturbed, version
from normkit.inspection.site import channels_of
from normkit.inspection.tree import Node, tree_of

OUTPUT = "the model's output"
KEPT = "what keeps it after the run"
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
SUMS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__"})
ACTIVATIONS = (
    *("relu", "relu6", "leaky_relu", "prelu", "rrelu", "elu", "selu", "celu", "gelu", "silu"),
    *("mish", "hardswish", "hardtanh", "hardsigmoid", "softplus", "sigmoid", "tanh"),
)
# what turns a tensor into numbers of Python; all else that gives no tensor asks for its form
READERS = {"item", "tolist", "numpy", "__array__", "__float__", "__int__", "__bool__"}

Neighbours = dict[str, tuple[str | None, str | None]]
"""By the path of a norm: what feeds it, and the activation that follows it."""


# -------------------------------------------------------------------- seen while a model runs


@dataclass(frozen=True)
class Use:
    """The output of a source was used."""

    source: str  # a path
    user: str  # the path of a module, the name of a function, OUTPUT or KEPT
    direct: bool = True  # it was the very tensor, not what functions made of it
    changed: bool = False  # in place, since the source gave it


@dataclass
class UserCall:
    """What a watched module was given in one call."""

    path: str
    source: str | None  # whose very output its input is, changed in place or not
    axes: int  # of its input; 0 if that is no tensor
    arguments: int  # how many that are not None


@dataclass
class Flow:
    """What ``record_flow`` has seen, in the order in which it happened."""

    uses: list[Use] = field(default_factory=list)
    calls: list[UserCall] = field(default_factory=list)


def record_flow(
    model: nn.Module,
    forward: Callable[[], Any],
    sources: Mapping[str, nn.Module],
    users: Mapping[str, nn.Module],
    through: Callable[[str], bool] = lambda name: False,
) -> Flow:
    """Run a model and see where the outputs of ``sources`` go: into ``users``, functions, the end.

    ``forward`` runs the model, which is in eval mode for it and left as it was. What functions
    for whose names ``through`` is true give counts as the output of the same source still, used
    indirectly. Calls of torch inside of users are not looked at: their input is theirs. A tensor
    that a source gives anew is its own, whatever went into it.
    """
    recorder = _Recorder(through)
    with ExitStack() as stack:
        for path, module in users.items():
            enter, leave = recorder.around(path)
            stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(leave, always_call=True).remove)
        for path, module in sources.items():
            stack.callback(module.register_forward_hook(recorder.made_by(path)).remove)
        stack.enter_context(undisturbed(model))
        stack.enter_context(recorder)
        output = forward()
        recorder.use(tree_leaves(output), OUTPUT)
        del output
    flow = recorder.flow
    flow.uses += [
        Use(path, KEPT) for paths, _, direct in recorder.labels.values() if direct for path in paths
    ]
    return flow


class _Recorder(TorchFunctionMode):
    """Sees every call of torch while it is entered."""

    def __init__(self, through: Callable[[str], bool]) -> None:
        super().__init__()
        self.flow = Flow()
        self.through = through
        # tensor -> sources, version, directness; weak: activations are to be freed as ever
        self.labels: Any = WeakIdKeyDictionary()
        self.inside = 0  # of how many users

    def made_by(self, path: str) -> Any:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            for x in tree_leaves(output):
                if isinstance(x, Tensor):
                    self.labels[x] = (path,), version(x), True

        return after

    def around(self, path: str) -> tuple[Any, Any]:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = [x for x in chain(args, kwargs.values()) if x is not None]
            x: Any = given[0] if given else None
            axes = x.dim() if isinstance(x, Tensor) else 0
            source = None
            if axes and x in self.labels and self.labels[x][2]:
                source = self.labels[x][0][0]
            self.flow.calls.append(UserCall(path, source, axes, len(given)))
            self.use([x], path)
            self.inside += 1

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            self.inside -= 1

        return enter, leave

    def use(self, values: list[Any], user: str) -> list[str]:
        """Note a use of what sources gave; their paths."""
        used: list[str] = []
        for x in values:
            if isinstance(x, Tensor) and x in self.labels:
                paths, then, direct = self.labels[x]
                changed = version(x) != then
                self.flow.uses += [Use(path, user, direct, changed) for path in paths]
                used += [] if changed else paths
        return used

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", str(func))
        if self.inside:
            return func(*args, **kwargs)
        taken = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        before, versions = len(self.flow.uses), [version(x) for x in taken]
        used = self.use(taken, name)
        result = func(*args, **kwargs)
        given = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        given += [x for x, then in zip(taken, versions, strict=True) if version(x) != then]
        if not given and name not in READERS:
            del self.flow.uses[before:]  # it asked for a shape or the like
        elif used and self.through(name):
            for x in given:
                self.labels[x] = tuple(dict.fromkeys(used)), version(x), False
        return result


def observed_neighbours(tree: Node, example: Any) -> Neighbours:
    """Neighbours in one run of the model in eval mode, which leaves no trace.

    A norm is fed by a layer whose very output it got, not changed in place on the way. It is
    followed by the activation that got its output, or a sum with it as at the end of a residual
    block: by the path of a module, or by the name of a function.
    """
    norms = {node.path: node.module for node in tree.norms()}
    feeders, activations = {}, {}
    for node in tree.walk():
        if not node.is_norm and out_channels(node.module) is not None:
            feeders[node.path] = node.module
        elif not node.is_norm and is_activation(node.module):
            activations[node.path] = node.module
    flow = _flow_of(tree.module, example, {**feeders, **norms}, {**norms, **activations})
    fed: dict[str, str] = {}
    followed: dict[str, str] = {}
    for use in flow.uses:
        if use.changed:
            continue
        if use.source in feeders and use.user in norms and use.direct:
            fed.setdefault(use.user, use.source)
        if use.source in norms and use.user in activations:
            followed.setdefault(use.source, use.user)
        elif use.source in norms and use.user.rstrip("_") in ACTIVATIONS:
            followed.setdefault(use.source, use.user.rstrip("_"))
    return {path: (fed.get(path), followed.get(path)) for path in norms}


def convolutions_before_norms(model: nn.Module, example: Any = None) -> dict[str, str]:
    """The path of every convolution whose output goes straight into a norm, and of that norm.

    With an example input (a tensor, a tuple of positional or a mapping of keyword arguments) the
    model is run once in eval mode and the answer is exact for what that run does: the norm got
    the very tensor the convolution returned, not changed in place on the way. The model is
    afterwards what it was, bit for bit; so are torch's random numbers.

    Without, a convolution counts if the next child of the same parent, in the order of
    registration, is a norm with as many channels: right for most networks, but a guess.

    Norms are what ``survey`` lists, if their channel count matches. Transposed convolutions do
    not count: their weights are laid out in another way.
    """
    refuse_wrapped(model)
    refuse_lazy(model)
    modules = dict(model.named_modules())
    paths = {module: path for path, module in modules.items()}
    convolutions = {p: m for p, m in modules.items() if isinstance(m, CONVOLUTIONS)}
    if example is None:
        children = (pairwise(parent.children()) for parent in modules.values())
        pairs = [(paths[a], paths[b]) for a, b in chain.from_iterable(children)]
    else:
        norms = {node.path: node.module for node in tree_of(model).norms()}
        uses = _flow_of(model, example, convolutions, norms).uses
        meet = [u for u in uses if u.user in norms and u.direct and not u.changed]
        pairs = [(u.source, u.user) for u in meet]
    result: dict[str, str] = {}
    for convolution, norm in pairs:
        if convolution in convolutions:
            channels: Any = convolutions[convolution].out_channels
            if channels_of(modules[norm]) == channels:
                result.setdefault(convolution, norm)
    return result


def _flow_of(
    model: nn.Module,
    example: Any,
    sources: Mapping[str, nn.Module],
    users: Mapping[str, nn.Module],
) -> Flow:
    """The flow of one example, sums included."""
    refuse_lazy(model)
    try:
        return record_flow(
            model, lambda: call_model(model, example), sources, users, lambda name: name in SUMS
        )
    except Exception as error:
        error.add_note("normkit ran the model on the example to see which layers meet.")
        raise


# -------------------------------------------------------------------- guessed


def guessed_neighbours(tree: Node) -> Neighbours:
    """Neighbours in the order in which modules were registered: right for most, but a guess.

    A norm is fed by the convolution or linear layer right before it if the channels agree. It is
    followed by the activation right after it or, if a convolution feeds it, by the only
    activation that its parent has, which many blocks use several times.
    """
    result: Neighbours = {}
    for owner in tree.walk():
        steps = [node for node in _sequence(owner) if not _does_nothing(node.module)]
        for i, norm in enumerate(steps):
            if norm.is_norm:
                feeder = _feeder(steps[i - 1], norm) if i else None
                after = steps[i + 1] if i + 1 < len(steps) else None
                act = after.path if after is not None and is_activation(after.module) else None
                result[norm.path] = feeder, act or (_only_activation(norm) if feeder else None)
    if tree.is_norm:
        result[""] = None, None
    return result


def out_channels(module: Any) -> int | None:
    """The channels a convolution or linear layer gives, 0 if lazy; None for other modules."""
    if isinstance(module, _ConvNd):
        return module.out_channels
    return module.out_features if isinstance(module, nn.Linear) else None


def _sequence(owner: Node) -> list[Node]:
    """What runs one after the other under a module: its children, nested Sequentials opened."""
    if not _is_plain(owner):
        return owner.children
    if owner.parent is not None and _is_plain(owner.parent):
        return []  # has been opened with its parent
    return list(_opened(owner))


def _opened(owner: Node) -> Iterator[Node]:
    for child in owner.children:
        if _is_plain(child):
            yield from _opened(child)
        else:
            yield child


def _is_plain(node: Node) -> bool:
    return isinstance(node.module, nn.Sequential) and not node.has_forward and not node.is_norm


def _does_nothing(module: nn.Module) -> bool:
    """Whether a module hands its input on in eval mode."""
    return isinstance(module, nn.Identity) or type(module).__name__.startswith("Drop")


def _feeder(before: Node, norm: Node) -> str | None:
    """The layer before a norm; of a module made of convolutions alone, the last of them."""
    leaves = [node for node in before.walk() if not node.children]
    separable = all(isinstance(node.module, _ConvNd) for node in leaves)
    if not separable and out_channels(before.module) is None:
        return None
    given, taken = out_channels(leaves[-1].module), channels_of(norm.module)
    fits = not given or not taken or given == taken  # lazy ones may
    return leaves[-1].path if fits else None


def _only_activation(norm: Node) -> str | None:
    parent = norm.parent
    siblings = [] if parent is None or parent.is_list else parent.children
    acts = [node.path for node in siblings if is_activation(node.module)]
    return acts[0] if len(acts) == 1 else None
