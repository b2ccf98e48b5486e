"""Running a user's model so that nothing has happened afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from normkit.errors import ShapeError


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients inside; outside nothing has happened, even after an error.

    Restores the mode of each module, the buffers and torch's random states bit for bit. The modes
    are set as attributes: a ``train`` method that does more must not run.
    """
    modules = list(model.modules())
    modes = [module.training for module in modules]
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
            yield
        finally:
            for module, mode, kept in zip(modules, modes, buffers, strict=True):
                module.training = mode
                module._buffers.clear()
                module._buffers.update(kept)
            for tensor, value, before in values:
                if version(tensor) != before or not torch.equal(tensor, value):
                    tensor.copy_(value)


def run(model: nn.Module, example: Any) -> Any:
    """The model's output for an example: a tensor, positional or keyword arguments."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple | list) else model(example)


def refuse_lazy(model: nn.Module) -> None:
    """An error for a model whose first run would create its parameters."""
    lazy = (nn.UninitializedParameter, nn.UninitializedBuffer)
    if any(isinstance(t, lazy) for t in chain(model.parameters(), model.buffers())):
        raise ShapeError("The model has lazy layers. Run one batch through it first.")


def version(tensor: Tensor) -> int | None:
    """How often a tensor was changed in place; tensors of inference mode do not know."""
    return None if tensor.is_inference() else tensor._version
