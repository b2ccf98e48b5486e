"""How a model is given a batch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

Forward = Callable[[nn.Module, Any], Any]
LISTS = ("list[", "List[", "typing.List[", "Sequence[", "typing.Sequence[")
DETECTION = "torchvision.models.detection"  # some of its models say it in a comment only


@dataclass(frozen=True, eq=False)
class Call:
    """A batch with a rule of its own for giving it to a model.

    ``samples`` is for what has no axis of samples, such as a list of images of several sizes.
    """

    forward: Forward
    batch: Any
    samples: int | None = None


def run(model: nn.Module, example: Any) -> Any:
    """The model's output for an example: a tensor, positional or keyword arguments, or a call.

    A list or tuple of tensors is one argument for a model whose forward says that it takes a list.
    """
    if isinstance(example, Call):
        return example.forward(model, example.batch)
    if isinstance(example, Mapping):
        return model(**example)
    if not isinstance(example, tuple | list):
        return model(example)
    one = all(isinstance(x, Tensor) for x in example) and takes_list(model)
    return model(example) if one else model(*example)


def images_in(model: nn.Module, inputs: Any) -> Sequence[Tensor] | None:
    """The images, if inputs are a list of them for a model that takes a list; else None."""
    if not isinstance(inputs, tuple | list) or not inputs or not takes_list(model):
        return None
    return inputs if all(isinstance(x, Tensor) and x.dim() == 3 for x in inputs) else None


def takes_list(model: nn.Module) -> bool:
    """Whether the first argument of a model's forward is a list, as it says itself."""
    if type(model).__module__.startswith(DETECTION):
        return True
    try:
        first = next(iter(inspect.signature(model.forward).parameters.values()), None)
    except (TypeError, ValueError):
        return False
    annotation = None if first is None else first.annotation
    text = annotation if isinstance(annotation, str) else str(annotation)
    return annotation is list or text == "list" or text.startswith(LISTS)
