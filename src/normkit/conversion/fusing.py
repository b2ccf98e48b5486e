"""Sums and activations that follow a norm, done in the norm's own pass over memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

from torch import Tensor, nn

from normkit.conversion.belongings import is_hooked
from normkit.conversion.certificate import rounding
from normkit.conversion.differing import difference, leaves
from normkit.conversion.execution import SIMILAR, UNTOUCHED
from normkit.conversion.full_precision import full_precision
from normkit.conversion.fused_forward import use_graph
from normkit.conversion.fused_graph import ACTIVATIONS, fused_graph
from normkit.conversion.measuring import measure_sensitivity
from normkit.conversion.probing import Probe, probes
from normkit.errors import NormkitError, NothingToDo, OptionError
from normkit.inspection import refuse_wrapped, undisturbed
from normkit.layers.base import Normalizer
from normkit.layers.norm_act import NormAct

Model = TypeVar("Model", bound=nn.Module)


def fuse(model: Model, example: Any = None) -> Model:
    """Let normkit's norms do the sum and the ReLU or SiLU that follow them.

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

    Left alone: a forward that cannot be traced, takes more than one argument, is another one in
    eval mode or keeps something on the module; norms and activations with hooks, which would see
    other tensors. The output in eval mode is compared before and after, with ``example`` or an
    input that is looked for (``example=False`` does without): if it differs, that is an error, and
    the model is as it was.

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
    refuse_wrapped(model)
    if not any(isinstance(m, Normalizer) for m in model.modules()):
        raise NothingToDo(
            "fuse found no normalizer of normkit in the model. Try normkit.convert(model, 'bn')."
        )
    before = _outcome(model, example)
    undo: list[Callable[[], None]] = []
    try:
        for module in list(model.modules())[::-1]:
            if type(module).forward is nn.Sequential.forward:
                undo.append(partial(_put_back, module, dict(module._modules)))
                _fuse_sequence(module)
            elif not isinstance(module, nn.Sequential | Normalizer | NormAct):
                graph = fused_graph(module)
                if graph is not None:
                    undo.append(partial(setattr, module, "__class__", type(module)))
                    use_graph(module, graph)
        if before is not None:
            _check(model, *before)
    except BaseException:
        for step in undo:
            step()
        raise
    return model


def _fuse_sequence(module: nn.Module) -> None:
    # not named_children(), which leaves out the second place of a module
    for (name, norm), (after, act) in pairwise(list(module._modules.items())):
        known = any(type(act) in kinds for kinds in ACTIVATIONS.values())
        if known and isinstance(norm, Normalizer) and not (is_hooked(norm) or is_hooked(act)):
            assert act is not None
            fused = NormAct(norm, act)
            fused.training = norm.training  # not train(): the parts keep their own mode
            module._modules[name] = fused
            module._modules[after] = nn.Identity().train(act.training)


def _put_back(module: nn.Module, children: dict[str, nn.Module | None]) -> None:
    module._modules.update(children)


def _outcome(model: nn.Module, example: Any) -> tuple[Probe, list[Tensor]] | None:
    """The first input that the model takes, and its output; None if there is none."""
    for probe in probes(model, example):
        if probe.example is None:
            return None
        try:
            with undisturbed(model), full_precision(model):
                return probe, [t.clone() for t in leaves(probe.run(model))]
        except Exception as error:
            if probe.given:
                raise OptionError(
                    f"The model fails on {probe.text}: {type(error).__name__}: {error} "
                    "Nothing was changed. Try another example, or example=False."
                ) from error
    return None


def _check(model: nn.Module, probe: Probe, before: list[Tensor]) -> None:
    """An error if the fused model gives something else."""
    try:
        with undisturbed(model), full_precision(model):
            found = difference(before, leaves(probe.run(model)))
    except Exception as error:
        raise NormkitError(f"The fused model fails: {error} {UNTOUCHED}") from error
    if found <= max((rounding(t.dtype) for t in before), default=0.0):
        return
    if not measure_sensitivity(model, probe) >= SIMILAR * found:
        raise NormkitError(
            f"The fused model differs by {found:.1e} relative with {probe.text}: a forward does "
            f"something that cannot be seen by tracing it. {UNTOUCHED} Try to fuse parts of it, "
            "normkit.fuse(model.layer1)."
        )
