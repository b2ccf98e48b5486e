"""Running a user's model so that nothing has happened afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

from normkit.errors import OptionError, ShapeError


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside; outside nothing has happened, even after an error.

    Restores the mode of each module, the buffers and torch's random states bit for bit. The modes
    are set as attributes: a ``train`` method that does more must not run. Modules that were
    compiled in place run as they are written: compiled code does not run hooks that come later.
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


def refuse_lazy(model: nn.Module) -> None:
    """An error for a model whose first run would create its parameters."""
    lazy = (nn.UninitializedParameter, nn.UninitializedBuffer)
    if any(isinstance(t, lazy) for t in chain(model.parameters(), model.buffers())):
        raise ShapeError("The model has lazy layers. Run one batch through it first.")


def refuse_meta(model: nn.Module) -> None:
    """An error for a model that has shapes and no values."""
    if any(t.is_meta for t in chain(model.parameters(), model.buffers())):
        raise OptionError(
            "The model is on the meta device, which has no values. Try model.to_empty(device=...) "
            "and load its weights."
        )


def version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; tensors of inference mode do not know."""
    return None if tensor.is_inference() else tensor._version
