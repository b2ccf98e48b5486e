"""Weights of convolutions and linear layers, so that they give what they gave, from new inputs.

Where norms are exchanged, the layers between them get other inputs, from which their old weights
do not give what they gave. The weights W that do are those of a linear regression: the change of W
is solved for, with a ridge, so that what the images do not tell stays as it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normkit.conversion.fit.data import ImageRun
from normkit.core.precision import widest

ROWS = 1 << 12  # positions that enter, of all images together
AT_ONCE = 1 << 23  # numbers in the table of inputs, at most: 64 MB in float64
UNKNOWNS = 9216  # of one output, at most
RIDGE = 0.3  # times the mean square of the inputs


@dataclass(eq=False)
class LinearSite:
    """A layer that may be fitted, and its new weights."""

    path: str
    module: nn.Conv2d | nn.Linear
    weight: Tensor | None = None
    bias: Tensor | None = None

    def values(self) -> dict[str, Tensor]:
        """Its new tensors by their paths in the model; none, if it stays as it is."""
        pairs = (("weight", self.weight), ("bias", self.bias))
        return {f"{self.path}.{name}": value for name, value in pairs if value is not None}

    def __call__(self, x: Tensor) -> Tensor:
        """What the layer gives with them."""
        module, kind = self.module, self.module.weight.dtype
        weight = module.weight if self.weight is None else self.weight.to(kind)
        bias = module.bias if self.bias is None else self.bias.to(kind)
        if isinstance(module, nn.Linear):
            return F.linear(x, weight, bias)
        y: Tensor = module._conv_forward(x, weight, bias)
        return y

    def fit(
        self, inputs: Sequence[Tensor], wanted: Sequence[Tensor], runs: Sequence[ImageRun]
    ) -> None:
        """New weights, if with them it is nearer to ``wanted`` on the samples held out."""
        dims = 4 if isinstance(self.module, nn.Conv2d) else 2
        if any(x.dim() < dims or (dims == 4 and x.dim() != 4) for x in inputs):
            return
        if not all(x.numel() for x in inputs):  # as of a detector that finds no boxes
            return
        tables = _Tables(self.module, inputs, wanted)
        x, gap = tables.part(runs, held_out=False)
        change, moved = ridge_regression(x, gap, RIDGE, self.module.bias is not None)
        x, gap = tables.part(runs, held_out=True)
        if not gap.numel():  # rows that are not images, as boxes: nothing says whether it helps
            return
        after = gap - torch.baddbmm(moved, x, change)
        if not float(after.square().sum()) < float(gap.square().sum()):
            return
        old = self.module.weight.detach().to(change.dtype)
        self.weight = old + change.transpose(1, 2).reshape(old.shape)
        if self.module.bias is not None:
            self.bias = self.module.bias.detach().to(change.dtype) + moved.reshape(-1)


def linear_sites(model: nn.Module) -> list[LinearSite]:
    """The layers that can be fitted: what is peculiar, shared, tied or frozen stays as it is."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return [
        LinearSite(path, module)
        for path, module in model.named_modules()
        if path
        and _usual(module)
        and all(holders[id(p)] == 1 and p.requires_grad for p in module.parameters())
    ]


def _usual(module: nn.Module) -> bool:
    if type(module) not in (nn.Linear, nn.Conv2d) or "forward" in vars(module):
        return False
    weight: Any = module.weight
    if not weight.is_floating_point() or weight[0].numel() > UNKNOWNS:
        return False
    return isinstance(module, nn.Linear) or (
        module.padding_mode == "zeros"
        and module.dilation == (1, 1)
        and not isinstance(module.padding, str)
    )


def ridge_regression(x: Tensor, gap: Tensor, ridge: float, shift: bool) -> tuple[Tensor, Tensor]:
    """(change, shift) with which x @ change + shift is nearest to gap, batched: (G, rows, ·).

    The ridge is relative to the mean square of the inputs, and the system that is solved has as
    many unknowns as there are inputs, or rows, if these are fewer.
    """
    zero = gap.new_zeros(len(gap), 1, gap.shape[2])
    means = (x.mean(1, keepdim=True), gap.mean(1, keepdim=True)) if shift else (x[:, :1] * 0, zero)
    a, b = x - means[0], gap - means[1]
    rows, size = a.shape[1:]
    level = (ridge * a.square().sum((1, 2)) / size).clamp(min=torch.finfo(a.dtype).tiny)
    across = a.transpose(1, 2)
    eye = torch.eye(min(rows, size), dtype=a.dtype, device=a.device) * level[:, None, None]
    if rows >= size:
        change = torch.linalg.solve(across @ a + eye, across @ b)
    else:
        change = across @ torch.linalg.solve(a @ across + eye, b)
    return change, means[1] - means[0] @ change


class _Tables:
    """What enters at some positions of each map, and what is missing there with the old weights."""

    def __init__(
        self, module: nn.Conv2d | nn.Linear, inputs: Sequence[Tensor], wanted: Sequence[Tensor]
    ) -> None:
        self.groups = getattr(module, "groups", 1)
        self.wide = widest(module.weight.device)
        size = module.weight[0].numel()
        self.old = module.weight.detach().to(self.wide).reshape(self.groups, -1, size)
        self.bias = None if module.bias is None else module.bias.detach().to(self.wide)
        samples = max(sum(len(x) for x in inputs), 1)
        self.each = max(1, min(ROWS, AT_ONCE // (size * self.groups)) // samples)
        pairs = [self._picked(module, x, t) for x, t in zip(inputs, wanted, strict=True)]
        self.x, self.t = [x for x, _ in pairs], [t for _, t in pairs]

    def _picked(self, module: nn.Module, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """(N, positions, groups, inputs) and (N, positions, outputs)."""
        if isinstance(module, nn.Conv2d):
            padding: Any = module.padding  # no string: see _usual
            (ph, pw), (kh, kw), (sh, sw) = padding, module.kernel_size, module.stride
            x = F.pad(x, (pw, pw, ph, ph)).unfold(2, kh, sh).unfold(3, kw, sw)
            n, channels, height, width = x.shape[:4]
            at = self._positions(height * width).to(x.device)
            x = x[:, :, at // width, at % width]  # (N, C, P, kh, kw)
            x = x.reshape(n, self.groups, channels // self.groups, len(at), kh * kw)
            return x.permute(0, 3, 1, 2, 4).flatten(3), t.flatten(2)[:, :, at].transpose(1, 2)
        x, t = (v.reshape(len(v), -1, v.shape[-1]) for v in (x, t))
        at = self._positions(x.shape[1]).to(x.device)
        return x[:, at].unsqueeze(2), t[:, at]

    def _positions(self, count: int) -> Tensor:
        generator = torch.Generator().manual_seed(count)
        return torch.randperm(count, generator=generator)[: self.each]

    def part(self, runs: Sequence[ImageRun], held_out: bool) -> tuple[Tensor, Tensor]:
        """Inputs (groups, rows, inputs) and the gap (groups, rows, outputs of a group)."""

        def rows(tables: Sequence[Tensor]) -> Tensor:
            pairs: Iterator[tuple[ImageRun, Tensor]] = zip(runs, tables, strict=True)
            return torch.cat([run.part(table, held_out).flatten(0, 1) for run, table in pairs])

        x, t = rows(self.x).to(self.wide), rows(self.t).to(self.wide)
        if self.bias is not None:
            t = t - self.bias
        each = t.shape[1] // self.groups  # no -1: there may be no rows
        x, t = x.transpose(0, 1), t.reshape(len(t), self.groups, each).transpose(0, 1)
        return x, t - x @ self.old.transpose(1, 2)
