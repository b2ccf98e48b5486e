"""Hundreds of models in a minute: what constructors spend on random numbers is saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

DRAWN = 65_521  # how many numbers of a large tensor are random; a prime, out of step with its rows
# methods that change values and nothing else; functions of torch.nn.init are known by their module
CHANGES = frozenset(
    {"add_", "clamp_", "copy_", "div_", "erfinv_", "fill_", "log_normal_", "mul_", "normal_"}
    | {"sub_", "trunc_normal_", "uniform_", "zero_"}
)
PLAIN = ("normal_", "uniform_")
BY_FAN = ("kaiming_normal_", "kaiming_uniform_")


class _Fills(TorchFunctionMode):
    """Changes how tensors are filled with values; everything else happens as ever."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in CHANGES or getattr(func, "__module__", "") == "torch.nn.init":
            # methods get their tensor as the first argument, functions of torch.nn.init by name
            tensor = args[0] if args else kwargs.pop("tensor", None)
            if not isinstance(tensor, Tensor):
                return func(*args, **kwargs)
            if not self.fill(name, tensor, lambda t: func(t, *args[1:], **kwargs), kwargs):
                func(tensor, *args[1:], **kwargs)
            return tensor
        return func(*args, **kwargs)

    def fill(
        self, name: str, tensor: Tensor, draw: Callable[[Tensor], Any], options: dict[str, Any]
    ) -> bool:
        """Fill the tensor, or say that it has to be filled as ever."""
        raise NotImplementedError


class _Valueless(_Fills):
    """On the meta device nothing has a value, so that filling it in is lost time."""

    def fill(
        self, name: str, tensor: Tensor, draw: Callable[[Tensor], Any], options: dict[str, Any]
    ) -> bool:
        return tensor.is_meta


class _Repeated(_Fills):
    """Draws the first numbers of a large tensor, and repeats them to its end.

    As good as fresh ones for finding out whether a model runs: the largest models would spend
    more time on their start than on the run.
    """

    def fill(
        self, name: str, tensor: Tensor, draw: Callable[[Tensor], Any], options: dict[str, Any]
    ) -> bool:
        fan_in = name in BY_FAN and options.get("mode") == "fan_in" and tensor.dim() > 1
        if not (name in PLAIN or fan_in) or tensor.numel() <= DRAWN or not tensor.is_contiguous():
            return False
        with torch.no_grad():
            # whole rows where the spread depends on their length
            rows = tensor.detach() if fan_in else tensor.detach().view(-1, 1)
            drawn = min(len(rows), -(-DRAWN // rows[0].numel()))
            draw(rows[:drawn] if fan_in else rows[:drawn].view(-1))
            for start in range(drawn, len(rows), drawn):
                part = rows[start : start + drawn]
                part.copy_(rows[: len(part)])
        return True


@contextmanager
def without_values() -> Iterator[None]:
    """Models built inside are on the meta device: modules and shapes, but no memory."""
    with torch.device("meta"), _Valueless():
        yield


@contextmanager
def with_quick_values() -> Iterator[None]:
    """Models built inside have random values of the right size, not all of them independent."""
    with _Repeated():
        yield
