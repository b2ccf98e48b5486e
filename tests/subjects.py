"""Small models with every difficulty that a conversion meets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normkit import catalog

EXACT = [n for n in catalog.names("activation") if catalog.find(n).card.exact_from_bn]
TARGETS = [*catalog.names("activation"), "torch_bn", "torch_gn", "sync_bn"]


class BatchNormAct2d(nn.BatchNorm2d):
    """A batch norm with drop layer and activation inside, called as timm's."""

    def __init__(self, channels: int, act: nn.Module | None = None, rate: float = 0.0) -> None:
        super().__init__(channels)
        self.drop = nn.Dropout(rate) if rate else nn.Identity()
        self.act = act or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class ConvNorm(nn.Sequential):
    """A Sequential with a name of its own, as libraries have them."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__(nn.Conv2d(inner, outer, 3, padding=1, bias=False), nn.BatchNorm2d(outer))


class Net(nn.Module):
    """Plain, fused, shared and one-dimensional batch norms. Channels are powers of two, for dn."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ConvNorm(3, 8)
        self.conv = nn.Conv2d(8, 16, 3, padding=1)
        self.bn = BatchNormAct2d(16, nn.SiLU(), rate=0.1)
        self.twice = nn.Conv2d(16, 16, 1)
        self.shared = nn.BatchNorm2d(16, eps=1e-3, momentum=0.3)
        self.again = self.shared
        self.linear = nn.Linear(16 * 16, 8)
        self.flat = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(torch.relu(self.stem(x))))
        y = torch.relu(self.shared(self.twice(y)) + y)
        y = torch.relu(self.again(self.twice(y)) + y)
        y = nn.functional.adaptive_avg_pool2d(y, 4).flatten(1)
        return self.head(torch.relu(self.flat(self.linear(y))))


PATHS = ["stem.1", "bn", "shared", "flat"]


def trained(model: nn.Module) -> nn.Module:
    """A model whose norms are not at their neutral start."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(getattr(module, "running_mean", None), Tensor):
                module.running_mean.normal_(0, 0.5)
                module.running_var.uniform_(0.5, 2)
                if hasattr(module, "num_batches_tracked"):
                    module.num_batches_tracked.fill_(7)
                for name, middle in (("weight", 1.0), ("bias", 0.0)):
                    if getattr(module, name) is not None:
                        getattr(module, name).normal_(middle, 0.3)
    return model


def images(n: int = 4) -> Tensor:
    return torch.randn(n, 3, 8, 8)


def portrait(model: nn.Module) -> dict[str, Any]:
    """All that must be the same when nothing is to have happened: objects, order and values."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "modules": [(name, id(m), type(m), m.training) for name, m in model.named_modules()],
        "tensors": [(name, id(t)) for name, t in tensors.items()],
        "values": {name: _bits(t) for name, t in tensors.items() if not t.is_meta},
        "trained": [p.requires_grad for p in model.parameters()],
        "order": list(model.state_dict()),
        "hooks": {n: [len(h) for h in _hooks(m)] for n, m in model.named_modules()},
    }


def _bits(tensor: Tensor) -> int:
    raw = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
    return hash(raw.numpy().tobytes())


def _hooks(module: nn.Module) -> list[Any]:
    return [value for name, value in vars(module).items() if name.endswith("_hooks")]


def output(model: nn.Module, x: Tensor) -> Tensor:
    """In eval mode; the modes of the modules are restored."""
    modes = [(m, m.training) for m in model.modules()]
    with torch.no_grad():
        y = model.eval()(x)
    for module, mode in modes:
        module.training = mode
    return y


def relative(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / a.abs().max()).item()
