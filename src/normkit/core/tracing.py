"""What a layer is to torch.fx: one node of a graph, as those of torch.nn are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx, nn

from normkit.core.messages import title
from normkit.errors import DtypeError


def node_of(layer: nn.Module, x: Any, *args: Any, mask: Any = None) -> Any:
    """The call of a layer with what is no tensor: a node if it is traced, else an error.

    Tracers look into every module that is not torch's own, with stand-ins for tensors. These have
    no shape, and a graph with our checks and caches in it would help nobody.
    """
    if isinstance(x, fx.Proxy) and isinstance(x.tracer, fx.Tracer):
        path = x.tracer.path_of_module(layer)
        named = {} if mask is None else {"mask": mask}
        return x.tracer.create_proxy("call_module", path, (x, *args), named)
    raise DtypeError(f"{title(layer)} expects a tensor (N, C, *spatial), got {_said(x)}.")


def _said(x: Any) -> str:
    parts = isinstance(x, list | tuple) and any(isinstance(part, Tensor) for part in x)
    hint = ". Try torch.stack" if parts else ""
    return f"{type(x).__name__}{hint}"
