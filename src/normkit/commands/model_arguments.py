"""The model that a command works on, as its arguments describe it."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normkit.errors import OptionError

if TYPE_CHECKING:
    from torch import Tensor, nn

WORDS = {"true": True, "false": False, "none": None}
REFERENCES = """\
models:
  timm:NAME, torchvision:NAME, or package.module:callable, where the callable returns the model.
  Its file is looked for in the working directory first, and is run.
  Options of the constructor are given with --build, as --build num_classes=10."""
WHERE = """\
where:
  'layer4.*'       a path, with * for anything        stem            before the first block
  kind:bn          norms of a kind                    first … last    in each block; also shortcut
  every:2          every second block                 '!stem'         all but these
  Commas mean "and", a second --where means "or":  --where 'layer4.*,!shortcut' --where stem"""


def add_model(parser: argparse.ArgumentParser) -> None:
    """The model and its weights."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="timm:NAME, torchvision:NAME or package.module:callable")
    add(
        "--build",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of its constructor",
    )
    add("--weights", type=Path, metavar="FILE", help=".safetensors, or a state_dict of torch.save")


def add_where(parser: argparse.ArgumentParser) -> None:
    """Which norms of it."""
    add = parser.add_argument
    add("--where", action="append", metavar="WHICH", help="only these norms; see below")
    add(
        "--example",
        metavar="SHAPE",
        help="shape of an input to run the model on, such as 2x3x224x224",
    )


def model_of(options: argparse.Namespace, meta: bool = False) -> nn.Module:
    """The model, with its weights if there are any; without memory, if meta is enough."""
    from normkit import checkpoints, models

    build_options = pairs("--build", options.build)
    if options.weights is not None and not options.weights.is_file():
        raise OptionError(f"There is no file {options.weights}.")  # before a large model is built
    model = _on_meta(options.model, build_options) if meta else None
    if model is None:
        model = models.build(options.model, **build_options)
    if options.weights is not None:
        checkpoints.load(model, options.weights)
    return model


def _on_meta(reference: str, build_options: dict[str, Any]) -> nn.Module | None:
    """The model without memory; None for those that compute with tensors as they are built."""
    import torch

    from normkit import models

    try:
        with torch.device("meta"):
            return models.build(reference, **build_options)
    except OptionError:  # the error is a real one if it comes again on the CPU
        return None


def where_of(options: argparse.Namespace) -> Any:
    """The selection in the form of normkit.convert: a list means or, a tuple and."""
    if not options.where:
        return None
    parts = [tuple(p.strip() for p in text.split(",") if p.strip()) for text in options.where]
    if () in parts:
        raise OptionError(f"--where got {options.where!r}. Expected a path, such as 'layer4.*'.")
    single = [part[0] if len(part) == 1 else part for part in parts]
    return single[0] if len(single) == 1 else single


def example_of(options: argparse.Namespace) -> Tensor | None:
    """A random input of the shape that was asked for; the same at each call."""
    if options.example is None:
        return None
    sizes = options.example.split("x")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise OptionError(f"--example got {options.example!r}. Expected sizes such as 2x3x224x224.")
    import torch

    return torch.randn(*map(int, sizes), generator=torch.Generator().manual_seed(0))


def pairs(option: str, given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE arguments; a value that is not a Python literal is a word."""
    result: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise OptionError(f"{option} got {text!r}. Expected KEY=VALUE, such as groups=16.")
        if name in result:
            raise OptionError(f"{option} got {name} twice.")
        result[name] = _value(value)
    return result


def _value(text: str) -> Any:
    if text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
