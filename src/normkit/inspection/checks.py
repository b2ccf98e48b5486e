"""Models that cannot be looked into, run or changed as they are, and what to do instead."""

from __future__ import annotations

from itertools import chain

from torch import nn
from torch._ops import OpOverload

from normkit.errors import OptionError, ShapeError
from normkit.inspection.kinds import kind_of

# by the name of a class among the bases, since importing compilers and the like takes seconds
INSIDE = {  # where the model is that they wrap
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "module",
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "OptimizedModule": "_orig_mod",
}
LOOKED_THROUGH = {"DistributedDataParallel", "DataParallel", "OptimizedModule"}
EXPORTED = (
    "was made by torch.export or a compiler: its norms are operators of a graph, no modules. Call "
    "this on the nn.Module that was exported, and export it again afterwards."
)
GONE = {  # what has happened to the modules, and what to do instead
    "FSDPModule": "is sharded by fully_shard, which owns its parameters. Call this before "
    "fully_shard(model), and shard it afterwards.",
    "ScriptModule": "is compiled by TorchScript. Call this on the nn.Module that was scripted or "
    "traced, and compile it again afterwards.",
    "UnflattenedModule": EXPORTED,
    "InterpreterModule": EXPORTED,
}


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of wrappers, for what only looks at it. Sharded parameters stay refused."""
    while isinstance(model, nn.Module):
        names = {kind.__name__ for kind in type(model).__mro__} & LOOKED_THROUGH
        if not names:
            break
        model = getattr(model, INSIDE[names.pop()])
    return model


def refuse_wrapped(model: nn.Module) -> None:
    """An error for a model whose wrapper has taken note of its parameters or its code."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        if kind == "ExportedProgram":
            raise OptionError(f"The model {EXPORTED}")
        raise OptionError(f"Expected a model, that is an nn.Module, got {kind}.")
    for path, module in model.named_modules():
        names = [kind.__name__ for kind in type(module).__mro__]
        place = f"The model's {path}" if path else "The model"
        for name in names:
            if name in INSIDE:
                inner = ".".join(filter(None, ("model", path, INSIDE[name])))
                raise OptionError(
                    f"{place} is wrapped in {name}, which may not notice a change. "
                    f"Try {inner}, and wrap or compile it again afterwards."
                )
            if name in GONE:
                raise OptionError(f"{place} {GONE[name]}")
        # a GraphModule of symbolic_trace calls modules, not operators, and is fine
        nodes = module.graph.nodes if "GraphModule" in names else ()
        if any(isinstance(node.target, OpOverload) for node in nodes):
            raise OptionError(f"{place} {EXPORTED}")
    _refuse_quantized(model)


def _refuse_quantized(model: nn.Module) -> None:
    """An error for a model of integers, in which no floating-point norm is left."""
    integers = [path for path, module in model.named_modules() if is_quantized(module)]
    if integers and not any(
        kind_of(m) is not None and not is_quantized(m) for m in model.modules()
    ):
        more = f" and {len(integers) - 1} more" if len(integers) > 1 else ""
        raise OptionError(
            f"The model is quantized: {integers[0] or 'it'}{more} work with integers, into which "
            "its norms have gone. Call this on the model before quantization, and quantize it "
            "again afterwards."
        )


def is_quantized(module: nn.Module) -> bool:
    """Whether it works with integers, as torch.ao's modules of the same names as torch's do."""
    if type(module).__name__ in ("FloatFunctional", "FXFloatFunctional"):  # not yet
        return False
    # those in dynamic/ and reference/ work with floating-point numbers
    return any(".quantized.modules" in kind.__module__ for kind in type(module).__mro__)


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
