"""What the property tests run over: drawn from the catalog, so no layer is forgotten."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normkit import catalog

ACTIVATION = catalog.names("activation")
FORMATS = ("contiguous", "channels_last")
CHANNELS = 8  # a power of two, which dn needs

# Option sets that change which code runs. The default set is tested for every layer.
VARIANTS: dict[str, list[dict[str, object]]] = {
    "bn": [{"form": "a1"}, {"form": "a2"}, {"virtual_batch": 3}, {"momentum": None}],
    "batch_renorm": [{"r_ramp": None, "d_ramp": None}, {"virtual_batch": 3}],
    "input_norm": [{"mode": "fixed"}],
    "shifted_bn": [{"mean_spread": 1.0, "std_spread": 0.5}],
    "rbn": [{"centering": False}, {"minus": True}],
    "iebn": [{"minus": True}],
    "bnet": [{"kernel_size": 5}, {"init": "dirac"}],
    "ubn": [{"preset": "authors"}, {"preset": "paper"}, {"affine_conv": False}, {"tau": 1.0}],
    "gn": [{"groups": 4}, {"affine": False}],
    "gw": [{"groups": 4}, {"method": "eigh"}],
    "pn": [{"unbiased": True}, {"affine": False}],
    "ibn": [{"ratio": 0.25}],
    "sn": [{"use_bn": False}],
    "ssn": [{"anneal_steps": 4}],
    "dn": [{"batch": 2, "start": "bn"}, {"start": "gn", "groups": 2}],
    "bgn": [{"groups": 1}, {"groups": 16}, {"groups": 5}, {"groups": 5, "virtual_batch": 3}],
    "gbgn": [{"groups": 2, "examples_per_group": 3}, {"groups": 2, "eval_weight": 0.3}],
    "bcn": [{"groups": 2, "micro": True, "update_rate": 0.1}, {"affine_per": "channel"}],
}


def every(kind: list[str] = ACTIVATION) -> list[tuple[str, dict[str, object]]]:
    """Every layer with its default options and with each of its variants."""
    return [(name, options) for name in kind for options in ({}, *VARIANTS.get(name, []))]


def label(case: object) -> str:
    if isinstance(case, tuple):
        name, options = case
        return "-".join([name, *(f"{k}={v}" for k, v in options.items())])
    return str(case)


def build(case: tuple[str, dict[str, object]], dtype: torch.dtype = torch.float64) -> nn.Module:
    """A layer whose parameters and statistics are not at their neutral start."""
    name, options = case
    layer = catalog.make(name, CHANNELS, dtype=dtype, **options)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if "gates" not in key:  # dn's gates are signs
                parameter.add_(0.3 * torch.randn_like(parameter))
        for key, buffer in layer.named_buffers():
            if key in ("running_mean", "running_var", "running_std", "running_second_moment"):
                buffer.add_(0.3 * torch.rand_like(buffer))
    return layer


def inputs(
    n: int = 6,
    size: tuple[int, ...] = (4, 4),
    memory: str = "contiguous",
    dtype: torch.dtype = torch.float64,
    channels: int = CHANNELS,
) -> Tensor:
    x = 0.5 + 1.5 * torch.randn(n, channels, *size, dtype=dtype)
    if memory == "channels_last" and size:
        return x.movedim(1, -1).contiguous().movedim(-1, 1)
    return x


def within(**axes: Sequence[object]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As pytest.mark.parametrize, for all values and their products in one test: thousands of tests
    would cost more time to be listed and reported than to be run."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every_value(*args: Any, **given: Any) -> None:
            for values in itertools.product(*axes.values()):
                with noted(*values):
                    test(*args, **given, **dict(zip(axes, values, strict=True)))

        whole = inspect.signature(test)
        left = [each for name, each in whole.parameters.items() if name not in axes]
        every_value.__signature__ = whole.replace(parameters=left)  # type: ignore[attr-defined]
        return every_value

    return decorate


@contextmanager
def noted(*case: object) -> Iterator[None]:
    """Says which of many cases in one test has failed."""
    try:
        yield
    except Exception as error:
        error.add_note(f"Case: {', '.join(label(part) for part in case)}")
        raise


@contextmanager
def same_buffers(layer: nn.Module) -> Iterator[None]:
    """Restores the buffers afterwards: numerical gradients need one function, not a moving one."""
    kept = {key: buffer.clone() for key, buffer in layer.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for key, buffer in layer.named_buffers():
                buffer.copy_(kept[key])
