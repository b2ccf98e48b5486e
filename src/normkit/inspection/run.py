"""The observation engine: a user's model runs, is watched, and nothing has happened afterwards.

Calibration, conversion, diagnosis and the lab all look at models through these:

    batches.BatchReader    the batches of a loader as LoaderBatch(inputs, target), on the device of
                           the model; ``reader.run(batch, number)`` runs it and explains failures
    run.undisturbed        eval mode without gradients; modes, buffers, random numbers come back
    run.watch_inputs       listeners get what their modules are called with, while in the block:

                               with undisturbed(model), watch_inputs({norm: listener}):
                                   for number, batch in enumerate(reader, 1):
                                       reader.run(batch, number)

    run.replaced_forward   another forward in the place of a module's own, while in the block
    run.call_counts        how often the first batch reaches each module, in the order of calls
    run.progressive        norm after norm, each seeing the corrected ones below
    flow.record_flow       whose output was used by which module or function
    statistics.NormStatistics   what a norm keeps: from its input, from and into its buffers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from normkit.inspection.batches import BatchReader, StopForward
from normkit.inspection.statistics import NormStatistics
from normkit.layers.masking import call_mask
from normkit.layers.synchronised import sharing_nothing

Listener = Callable[[Tensor], None]
# a norm that a batch reaches repeatedly: its input depends on its own statistics
REPEATS = 50  # passes at most
SETTLED = 1e-6  # a change of mean or variance, as the normalized output feels it


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside; outside nothing has happened, even after an error.

    Restores the mode of each module, the buffers and torch's random states bit for bit. The modes
    are set as attributes: a ``train`` method that does more must not run. Modules that were
    compiled in place run as they are written: compiled code does not run hooks that come later.
    A backward pass that is still to come finds its buffers untouched: their versions come back too.
    Norms that are put into training mode inside share nothing with other processes, which may not
    be looking.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
    compiled = [(m, m._compiled_call_impl) for m in modules if m._compiled_call_impl is not None]
    buffers = [dict(module._buffers) for module in modules]
    tensors = [t for t in model.buffers() if not t.is_meta]
    values = [(t, t.detach().clone(), version(t)) for t in tensors]
    devices = {t.device for t in chain(model.parameters(), model.buffers())}
    with ExitStack() as stack:
        for kind in {d.type for d in devices if d.type in ("cuda", "xpu")} or {"cuda"}:
            ours = [d.index for d in devices if d.type == kind]  # none: the CPU's state alone
            stack.enter_context(torch.random.fork_rng(ours, device_type=kind))
        stack.enter_context(torch.inference_mode(False))  # its tensors do not count their changes
        stack.enter_context(torch.no_grad())
        stack.enter_context(sharing_nothing(modules))
        counting = tuple(t for t in tensors if not t.is_inference())
        stack.enter_context(torch.autograd._unsafe_preserve_version_counter(counting))
        try:
            for module in modules:
                module.training = False
            for module, _ in compiled:
                module._compiled_call_impl = None
            yield
        finally:
            for module, code in compiled:
                module._compiled_call_impl = code
            for module, mode, kept in zip(modules, modes, buffers, strict=True):
                module.training = mode
                module._buffers.clear()
                module._buffers.update(kept)
            for tensor, value, before in values:
                if version(tensor) != before or not torch.equal(tensor, value):
                    if tensor.shape != value.shape:  # observers of quantization grow theirs
                        tensor.resize_(value.shape)
                    tensor.copy_(value)


def version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; tensors of inference mode do not know."""
    return None if tensor.is_inference() else tensor._version


@contextmanager
def watch_inputs(
    listeners: Mapping[nn.Module, Listener], stop_at: nn.Module | None = None
) -> Iterator[None]:
    """Inside, each listener gets the tensor that its module is called with, call by call.

    Inputs without statistics (see ``input_tensor``) are left out. ``stop_at`` ends each forward
    where that module begins, after its listener: what comes later is not needed.
    """

    def hook_for(listener: Listener) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            x = input_tensor(args, kwargs)
            if x is not None:
                with call_mask(kwargs.get("mask")):
                    listener(x)

        return hook

    def stop(*_: Any) -> None:
        raise StopForward

    with ExitStack() as stack:
        for module, listener in listeners.items():
            hook = module.register_forward_pre_hook(hook_for(listener), with_kwargs=True)
            stack.callback(hook.remove)
        if stop_at is not None:
            stack.callback(stop_at.register_forward_pre_hook(stop).remove)
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, ``forward`` is in the place of that of the module, and its hooks run as ever."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own


def input_tensor(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The input among the arguments of a norm; None if it is none that has statistics."""
    x = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor)), None)
    if x is None or not x.is_floating_point() or x.dim() < 2 or x.numel() == 0:
        return None
    return x.detach()


def call_counts(reader: BatchReader, modules: Sequence[nn.Module]) -> dict[nn.Module, int]:
    """How often the first batch reaches each module, in the order of first calls.

    Modules that it does not reach are missing. The model is left as it was.
    """
    counts: dict[nn.Module, int] = {}

    def count(module: nn.Module, _: Any) -> None:
        counts[module] = counts.get(module, 0) + 1

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(count).remove)
        stack.enter_context(undisturbed(reader.model))
        reader.run(next(iter(reader)), 1)
    return counts


def progressive(
    reader: BatchReader,
    norms: Sequence[NormStatistics],
    measure: Callable[[NormStatistics, nn.Module | None], bool],
) -> Iterator[tuple[NormStatistics, bool]]:
    """Norm after norm, from the input on: each is measured with the new statistics below it.

    ``measure(norm, stop_at)`` makes a pass over the batches and writes what the norm got into its
    buffers, or returns False if it got nothing. A pass ends at the norm, so that all together
    cost about half as many forwards as there are norms. A norm that runs several times in one
    forward sees what comes from itself, so it is measured until that has settled. Gives each norm
    that was measured, and whether it has settled. An iterator is kept in memory.
    """
    reader.keep()
    by_module = {one.norm: one for one in norms}
    for module, calls in call_counts(reader, list(by_module)).items():
        norm, settled, measured = by_module[module], calls == 1, False
        for _ in range(REPEATS if calls > 1 else 1):
            before = norm.held()
            if not measure(norm, module if calls == 1 else None):
                break
            measured = True
            settled = settled or _same(before, norm.held(), norm.eps)
            if settled:
                break
        if measured:
            yield norm, settled


def _same(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], eps: float) -> bool:
    """Whether statistics have not moved any more."""
    scale = after[1] + eps
    moved = torch.maximum(
        (after[0] - before[0]).abs() / scale.sqrt(), (after[1] - before[1]).abs() / scale
    )
    return bool((moved <= SETTLED).all())
