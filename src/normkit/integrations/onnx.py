"""A model as an ONNX file that is known to give the model's output.

``torch.onnx.export`` writes a file of another opset than it was asked for, a graph with training in
it, or one that fails for the second image size, and says so in its log if at all. Here these are
errors, and the file appears when onnxruntime has computed the same numbers from it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from normkit.conversion import plan_fold
from normkit.core.atomic_write import atomic_write
from normkit.core.messages import first_line
from normkit.core.optional_dependencies import require
from normkit.errors import OptionError
from normkit.inspection import call_model, refuse_wrapped, survey, undisturbed
from normkit.layers.base import Normalizer

OLDEST_OPSET = 18  # of which torch has implementations; what it asks converters for may not be done
LARGEST = 2**31  # bytes of a file in ONNX's format
SHOWN = 5


@dataclass(frozen=True)
class OnnxFile:
    """A file that was written, and how far onnxruntime is from the model with it."""

    path: Path
    opset: int
    folded: tuple[str, ...]  # norms that are part of other layers in the file
    difference: float  # the largest of |file − model| / max(1, |model|), over the inputs tried
    shapes: tuple[tuple[int, ...], ...]  # of the first input, each time

    def __str__(self) -> str:
        tried = " and ".join("×".join(map(str, shape)) for shape in self.shapes)
        return (
            f"{self.path}: opset {self.opset}, {len(self.folded)} norms folded; onnxruntime is "
            f"within {self.difference:.1e} of the model for {tried}."
        )


def export_onnx(
    model: nn.Module,
    example: Any,
    path: str | Path,
    *,
    opset: int | None = None,
    any_batch: bool = True,
    any_size: bool = False,
    fold: bool = True,
    tolerance: float | None = None,
) -> OnnxFile:
    """Write a model as it is in eval mode, and compare the file with it in onnxruntime.

        example     a tensor, a tuple of positional or a mapping of keyword arguments
        opset       from 18 on; by default torch's choice
        any_batch   whether the file takes other numbers of samples than the example's
        any_size    whether it takes other lengths, heights and widths (axes 2 and on), too
        fold        whether norms that are a fixed map become part of the layers before them
        tolerance   of max |file − model| / max(1, max |model|): for the example and, if sizes may
                    differ, for twice its samples and twice its height and width. By default
                    1e-5, and 1e-2 for a model with float16, which has three digits

    Layers that ONNX cannot hold are named in one error before anything is done; if the file cannot
    be made or gives other numbers, none is written. The model is unchanged, its mode included.
    """
    require("onnxruntime", "onnx", "export_onnx")
    require("onnxscript", "onnx", "export_onnx")
    onnx = require("onnx", "onnx", "export_onnx")
    refuse_wrapped(model)
    _check_opset(opset, onnx.defs.onnx_opset_version())
    _check_layers(model, any_size)
    _check_memory(model)
    types = {t.dtype for t in (*model.parameters(), *model.buffers(), *_tensors(example))}
    if torch.bfloat16 in types:
        raise OptionError(
            "The model or the example has torch.bfloat16, which onnxruntime does not compute "
            "with on a CPU, where files are compared. Try model.float(), with an example in "
            "float32, or model.half()."
        )
    allowed = tolerance
    if allowed is None:
        allowed = 1e-2 if torch.float16 in types else 1e-5
    with undisturbed(model), torch.no_grad():
        plan = plan_fold(model, example) if fold else None
        folds = plan is not None and bool(plan.folded or plan.weights)
        network = plan.apply() if plan is not None and folds else copy.deepcopy(model)
        program = _program(network, example, opset, any_batch, any_size)
        if opset is not None and (written := program.model.opset_imports[""]) != opset:
            raise OptionError(
                f"torch could not write this model in opset {opset}, only in {written}. "
                f"Try opset={written}."
            )
        inputs = [example]
        if any_batch:
            inputs.append(_doubled(example, first=0, last=1))
        if any_size:
            inputs.append(_doubled(example, first=2))
        differences: list[float] = []

        def save(name: Path) -> None:
            program.save(str(name), external_data=False)
            differences.extend(_compare(network, name, inputs))
            if not max(differences) <= allowed:
                raise OptionError(
                    f"In onnxruntime the file gives other numbers than the model: "
                    f"{max(differences):.1e} from them, expected {allowed:.0e} at most. "
                    "Try fold=False, any_batch=False or another opset, or tolerance= if that is "
                    "near enough; no file was written."
                )

        target = atomic_write(path, save)
    return OnnxFile(
        target,
        program.model.opset_imports[""],
        tuple(plan.folded) if plan is not None and folds else (),
        max(differences),
        tuple(tuple(_tensors(given)[0].shape) for given in inputs),
    )


def _check_opset(opset: int | None, newest: int) -> None:
    known = isinstance(opset, int) and not isinstance(opset, bool)
    if opset is not None and not (known and OLDEST_OPSET <= opset <= newest):
        raise OptionError(
            f"export_onnx expects an opset of {OLDEST_OPSET} to {newest}, got {opset!r}: torch "
            f"writes none before {OLDEST_OPSET}, and onnx knows none after {newest}."
        )


def _check_layers(model: nn.Module, any_size: bool) -> None:
    """An error that names every layer of ours which an ONNX file cannot hold."""
    reasons = {
        site.path: reason
        for site in survey(model)
        if isinstance(site.norm, Normalizer) and (reason := site.norm.not_in_onnx(any_size))
    }
    if reasons:
        listed = "; ".join(
            f"{path or 'the model'}: {reasons[path]}" for path in list(reasons)[:SHOWN]
        )
        more = f"; and {len(reasons) - SHOWN} more" if len(reasons) > SHOWN else ""
        raise OptionError(f"{len(reasons)} layers cannot be in an ONNX file: {listed}{more}.")


def _check_memory(model: nn.Module) -> None:
    size = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    if size >= LARGEST:
        raise OptionError(
            f"The model has {size:,} bytes, more than one ONNX file can hold. Try nk.fold(model), "
            "then torch.onnx.export(model, args, path, external_data=True)."
        )


def _program(
    network: nn.Module, example: Any, opset: int | None, any_batch: bool, any_size: bool
) -> Any:
    """What torch makes of the network, in memory."""
    if any_batch and all(len(t) == 1 for t in _tensors(example) if t.dim()):
        example = _doubled(example, first=0, last=1)  # of one sample, torch makes a constant
    given = example if isinstance(example, Mapping | tuple | list) else (example,)
    named = isinstance(given, Mapping)

    def varying(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return None
        axes = [*([0] if any_batch else []), *(range(2, tensor.dim()) if any_size else [])]
        return dict.fromkeys((a for a in axes if a < tensor.dim()), torch.export.Dim.DYNAMIC)

    shapes: Any = (
        {name: varying(value) for name, value in given.items()}
        if isinstance(given, Mapping)
        else tuple(varying(value) for value in given)
    )
    try:
        return torch.onnx.export(
            network,
            () if named else tuple(given),
            kwargs=dict(given) if isinstance(given, Mapping) else None,
            dynamo=True,
            dynamic_shapes=shapes if any_batch or any_size else None,
            opset_version=opset,
            verbose=False,
        )
    except torch.onnx.errors.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        lines = [line for line in str(cause).splitlines() if line.strip()]
        reason = f"{type(cause).__name__}: {lines[0] if lines else ''}".rstrip(".")
        tries = [f"{k}=False" for k, v in (("any_size", any_size), ("any_batch", any_batch)) if v]
        hint = f" Try {' or '.join(tries)}." if tries else ""
        raise OptionError(f"torch cannot write this model for ONNX: {reason}.{hint}") from error


def _tensors(example: Any) -> list[Tensor]:
    found = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    if not found:
        raise OptionError(f"export_onnx expects an example with tensors, got {example!r:.100}.")
    return found


def _doubled(example: Any, first: int, last: int | None = None) -> Any:
    """The example twice, along some axes of each tensor."""

    def twice(tensor: Tensor) -> Tensor:
        for axis in range(tensor.dim())[first:last]:
            tensor = torch.cat([tensor, tensor], axis)
        return tensor

    return tree_map_only(Tensor, twice, example)


def _compare(network: nn.Module, file: Path, inputs: list[Any]) -> list[float]:
    """Of each input, how far the file is from the network."""
    runtime = require("onnxruntime", "onnx", "export_onnx")
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    differences = []
    for given in inputs:
        expected = [t for t in tree_leaves(call_model(network, given)) if isinstance(t, Tensor)]
        # an argument that the graph does not need has no input there
        feeds = dict(zip(names, (t.cpu().numpy() for t in _tensors(given)), strict=False))
        try:
            found = [torch.as_tensor(value) for value in session.run(None, feeds)]
        except Exception as error:  # of onnxruntime's own many classes
            shape = tuple(_tensors(given)[0].shape)
            raise OptionError(
                f"onnxruntime cannot run the file for an input {shape}: "
                f"{first_line(error):.300}. Try any_batch=False or any_size=False."
            ) from error
        differences.append(
            max(
                float((a - b.cpu()).abs().max() / max(1.0, float(b.abs().max())))
                for a, b in zip(found, expected, strict=True)
                if b.numel()
            )
        )
    return differences
