"""What four processes check together: see ranks.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed, nn

import normkit as nk
from cases import build, every, inputs, noted
from normkit.layers.synchronised import Synchronised

Groups = dict[int, Any]
# multiples of the runs in tests/cases.py, whose samples share statistics within a process
SPLITS = {1: [6], 2: [6, 12], 3: [12, 0, 6], 4: [6, 0, 12, 6]}
COUNTERS = ("arrivals", "nonfinite_batches")


def pooled_cases() -> list[tuple[str, dict[str, object]]]:
    return [case for case in every() if can_synchronise(build(case))]


def can_synchronise(layer: nn.Module) -> bool:
    return isinstance(layer, Synchronised) and layer.can_synchronise()


def close(mine: Tensor, joined: Tensor, tolerance: float = 1e-9) -> None:
    scale = max(1.0, float(joined.detach().abs().max())) if joined.numel() else 1.0
    torch.testing.assert_close(mine, joined, rtol=0, atol=tolerance * scale)


def equal_to_joined(
    layer: nn.Module,
    split: list[int],
    rank: int,
    group: Any,
    x: Tensor,
    tolerance: float = 1e-9,
    run: Callable[[Any, Tensor], Tensor] | None = None,
) -> None:
    """Outputs, gradients and statistics of two steps, against one process with the joined batch."""
    run = run or (lambda layer, x: layer(x))
    alone = copy.deepcopy(layer)
    nk.sync(layer, group)
    for _ in range(2):
        whole, weight = x.clone().requires_grad_(), torch.randn_like(x)
        own = x.split(split)[rank].clone().requires_grad_()
        y, joined = run(layer, own), run(alone, whole)
        (y * weight.split(split)[rank]).sum().backward()
        (joined * weight).sum().backward()
        close(y, joined.split(split)[rank], tolerance)
        close(own.grad, whole.grad.split(split)[rank], tolerance)
        x = x * 0.7 + 0.3
    for (name, mine), parameter in zip(layer.named_parameters(), alone.parameters(), strict=True):
        grad = mine.grad.clone()
        distributed.all_reduce(grad, group=group)
        with noted(name):
            close(grad, parameter.grad, tolerance)
    for (name, mine), buffer in zip(layer.named_buffers(), alone.named_buffers(), strict=True):
        if name not in COUNTERS:
            with noted(name):
                close(mine, buffer[1], tolerance)


def check_every_layer_is_as_with_the_joined_batch(rank: int, groups: Groups) -> None:
    for case in pooled_cases():
        for size in (2, 4):
            torch.manual_seed(size)  # the same on ranks that sit out and draw nothing
            x, layer = inputs(sum(SPLITS[size])), build(case).requires_grad_(True)
            if layer.virtual_batch is not None:
                layer.virtual_batch = 3  # runs that end where those of a process end
            if rank < size:
                with noted(case, size):
                    equal_to_joined(layer, SPLITS[size], rank, groups[size], x)
