"""Models by reference: timm:NAME, torchvision:NAME or package.module:callable."""

from __future__ import annotations

import difflib
import importlib
import inspect
import operator
import os
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from normkit.core.messages import error_words, first_line
from normkit.core.optional_dependencies import require as require
from normkit.errors import MissingExtra as MissingExtra
from normkit.errors import NormkitError, OptionError, UnknownName, nearest

FORMS = "timm:NAME, torchvision:NAME or package.module:callable"


def build(reference: str, **options: Any) -> nn.Module:
    """A new model with random weights; options go to its constructor.

    >>> from normkit.models import build
    >>> type(build("torch.nn:Linear", in_features=2, out_features=3)).__name__
    'Linear'
    """
    make, defaults = _constructor(reference)
    try:
        model = make(**{**defaults, **options})
    except NormkitError:
        raise
    except (Exception, SystemExit) as error:  # sys.exit in a user's code ends no command
        raise OptionError(f"{reference} could not be built: {error_words(error)}") from error
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"{reference} gave a {type(model).__name__}, expected a torch.nn.Module. "
            "Try a function that returns the model."
        )
    return model


def code_for(reference: str, options: dict[str, Any]) -> tuple[str, str]:
    """The import and the expression with which a program builds the same model."""
    library, _, name = reference.partition(":")
    _, defaults = _constructor(reference)
    arguments = "".join(f", {key}={value!r}" for key, value in {**defaults, **options}.items())
    if library == "timm":
        return "import timm", f"timm.create_model({name!r}{arguments})"
    if library == "torchvision":
        return "import torchvision", f"torchvision.models.get_model({name!r}{arguments})"
    target = operator.attrgetter(name)(importlib.import_module(library))
    call = "" if isinstance(target, nn.Module) else f"({arguments.removeprefix(', ')})"
    return f"import {library}", f"{library}.{name}{call}"


def names(library: str) -> list[str]:
    """The models that timm or torchvision can build."""
    if library == "timm":
        return list(require("timm", "models", "timm:NAME").list_models())
    return list(require("torchvision", "models", "torchvision:NAME").models.list_models())


def _constructor(reference: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What builds a model, and the options without which it would load weights from the net."""
    library, colon, name = reference.partition(":")
    if not (colon and library and name):
        raise OptionError(f"{reference!r} is not a model. Expected {FORMS}, such as timm:resnet50.")
    if library == "timm":
        timm = require("timm", "models", reference)
        # a pretrained tag may follow a dot: resnet50.a1_in1k
        _check_name(name.partition(".")[0], names("timm"), "timm")
        return lambda **options: timm.create_model(name, **options), {}
    if library == "torchvision":
        models = require("torchvision", "models", reference).models
        _check_name(name, names("torchvision"), "torchvision")
        builder = models.get_model_builder(name)
        return builder, _without(builder, "weights", "weights_backbone")
    builder = callable_of(library, name)
    return builder, _without(builder, "encoder_weights")  # segmentation_models_pytorch


def _without(builder: Callable[..., Any], *weights: str) -> dict[str, None]:
    """None for those of these arguments that a callable has."""
    try:
        parameters = inspect.signature(builder).parameters
    except (TypeError, ValueError):  # some of C have none
        return {}
    return {name: None for name in weights if name in parameters}


def _check_name(name: str, names: list[str], library: str) -> None:
    if name not in names:
        close = difflib.get_close_matches(name, names, n=3)
        hint = f"Did you mean {' or '.join(map(repr, close))}?" if close else ""
        listed = (
            f"{library}.list_models()" if library == "timm" else "torchvision.models.list_models()"
        )
        raise UnknownName(f"{library} has no model {name!r}. {hint or f'See {listed}.'}")


def callable_of(module: str, name: str) -> Callable[..., Any]:
    """What package.module:callable names. The working directory comes first, as for python -m."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        target: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = f" Try {module[:-3].replace('/', '.')}:{name}." if module.endswith(".py") else ""
        raise UnknownName(
            f"{module}:{name} was not found: {first_line(error)}. Expected {FORMS}; modules are "
            f"looked for in the working directory and among installed packages.{hint}"
        ) from error
    except (Exception, SystemExit) as error:  # whatever a user's file does when it is run
        raise OptionError(f"{module} could not be imported: {error_words(error)}.") from error
    finally:
        sys.path.remove(here)
    for part in name.split("."):
        if not hasattr(target, part):
            raise UnknownName(f"{module} has no {name!r}. {nearest(part, _callables(target))}")
        target = getattr(target, part)
    if isinstance(target, nn.Module):
        return lambda: target
    if not callable(target):
        raise OptionError(f"{module}:{name} is a {type(target).__name__}, expected a callable.")
    return target


def _callables(owner: Any) -> list[str]:
    """What could have been meant: the callables that a module or class defines itself."""
    own = [name for name, value in vars(owner).items() if callable(value) and name[:1] != "_"]
    return own or ["nothing that can be called"]
