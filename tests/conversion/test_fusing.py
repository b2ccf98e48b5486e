"""fuse: norm, sum and activation in one call, and nothing else changed."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, fx, nn

import normkit as nk
from normkit.errors import NothingToDo


class Block(nn.Module):
    """A residual block as torchvision writes it: one ReLU for all, sums in place."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nk.BN(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nk.GN(channels)
        self.short = nn.Sequential(nn.Conv2d(channels, channels, 1), nk.BN(channels))
        self.relu = nn.ReLU(inplace=True)
        self.unused = nn.Linear(2, 2)
        self.note = "kept"

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.short(x)
        return self.relu(out)


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """What comes out in train mode, the gradients, and what comes out in eval mode then."""
    model.train().zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    grads = [p.grad for name, p in sorted(model.named_parameters()) if p.grad is not None]
    return [y, x.grad, *grads, model.eval()(x)]


def assert_same(one: nn.Module, other: nn.Module, x: Tensor) -> None:
    for a, b in zip(outputs(one, x), outputs(other, x), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_residual_block() -> None:
    block = Block()
    twin = copy.deepcopy(block)
    keys = list(block.state_dict())
    fused = nk.fuse(block)
    assert isinstance(fused, fx.GraphModule)
    calls = {str(n.target): n.args[1:] for n in fused.graph.nodes if n.op == "call_module"}
    assert calls["bn1"] == (None, "relu")
    assert calls["bn2"][1] == "relu"
    assert str(calls["bn2"][0]) == "short"
    assert "relu" not in calls
    assert list(fused.state_dict()) == keys
    assert fused.note == "kept"
    assert_same(fused, twin, torch.randn(4, 8, 5, 5))


def test_a_sequence_keeps_its_places_and_checkpoints() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nk.BN(8), nn.ReLU(), nk.GN(8), nn.Tanh())
    twin = copy.deepcopy(net)
    old = copy.deepcopy(net.state_dict())
    fused = nk.fuse(net)
    assert fused is net
    assert isinstance(fused[1], nk.NormAct)
    assert isinstance(fused[2], nn.Identity)
    assert isinstance(fused[3], nk.GN)
    fused.load_state_dict(old)
    assert_same(fused, twin, torch.randn(4, 3, 6, 6))


def test_what_else_uses_the_norm_is_left_alone() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nk.BN(8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return torch.relu(y) + y

    net = Two()
    assert nk.fuse(net) is net


def test_a_forward_that_depends_on_the_mode_is_left_alone() -> None:
    class Moody(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nk.BN(8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.norm(x))
            return y * 2 if self.training else y

    net = Moody().eval()
    assert nk.fuse(net) is net
    assert not net.training


def test_a_forward_that_looks_at_numbers_is_left_alone() -> None:
    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nk.BN(8)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.norm(x))
            return y if y.sum() > 0 else -y

    net = Looking()
    assert nk.fuse(net) is net
    assert net.training


def test_a_block_with_two_parents_stays_one() -> None:
    block = Block()
    net = nn.ModuleDict({"a": block, "b": block})
    nk.fuse(net)
    assert net["a"] is net["b"]
    assert isinstance(net["a"], fx.GraphModule)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvision(name: str) -> None:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    model = nk.convert(getattr(models, name)(), "bn")
    twin = copy.deepcopy(model)
    fused = nk.fuse(model)
    # every norm but those of the shortcuts has an activation after it
    calls = [
        node
        for graph in fused.modules()
        if isinstance(graph, fx.GraphModule)
        for node in graph.graph.nodes
        if node.op == "call_module" and len(node.args) == 3
    ]
    norms = [path for path, m in twin.named_modules() if isinstance(m, nk.BN)]
    assert len(calls) == len([path for path in norms if "downsample" not in path])
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(fused.eval()(x), twin.eval()(x), rtol=1e-4, atol=1e-4)
    assert list(fused.state_dict()) == list(twin.state_dict())


def test_timm() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = nk.convert(timm.create_model("resnet18d"), "gn")
    twin = copy.deepcopy(model)
    fused = nk.fuse(model)
    assert any(isinstance(m, fx.GraphModule) for m in fused.modules())
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(fused.eval()(x), twin.eval()(x), rtol=1e-4, atol=1e-4)


def test_it_can_be_copied_and_pickled() -> None:
    fused = nk.fuse(Block()).eval()
    x = torch.randn(2, 8, 4, 4)
    for again in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        torch.testing.assert_close(again(x), fused(x))


def test_a_model_without_our_norms() -> None:
    with pytest.raises(NothingToDo, match="convert"):
        nk.fuse(nn.Sequential(nn.BatchNorm2d(8), nn.ReLU()))
