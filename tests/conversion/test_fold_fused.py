"""fold(fuse=True): the folded function, with sums and activations done by its convolutions."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

import normkit as nk
from normkit.conversion.fuse.convolution import FoldedConv2d
from normkit.engine.activations import NAMES, activated

# as in test_fold: folded weights are rounded once
ALLOWED = 1e-5


def shaken(model: nn.Module) -> Any:
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.running_mean.normal_(0, 0.1)
                norm.running_var.uniform_(0.5, 2.0)
                norm.weight.uniform_(0.5, 2.0)
                norm.bias.normal_(0, 0.1)
    return model.eval()


class Block(nn.Module):
    """Two convolutions and their input, or what a third makes of it."""

    def __init__(self, act: nn.Module, width: int = 8, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(8, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 1)
        self.bn2 = nn.BatchNorm2d(width)
        self.act = act
        self.down: nn.Module = nn.Identity()
        if stride > 1 or width != 8:
            self.down = nn.Sequential(nn.Conv2d(8, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += self.down(x)
        return self.act(y)


def network(act: nn.Module | None = None) -> nn.Sequential:
    act = nn.ReLU(inplace=True) if act is None else act
    stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), act)
    return shaken(nn.Sequential(stem, Block(act), Block(act, 16, 2), nn.AdaptiveAvgPool2d(1)))


def relative(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max() / theirs.abs().max())


def convolutions(model: nn.Module) -> list[FoldedConv2d]:
    return [m for m in model.modules() if isinstance(m, FoldedConv2d)]


@pytest.mark.parametrize("name", ["resnet18", "resnet50", "mobilenet_v3_small", "timm:regnety_002"])
def test_models(name):
    kind, _, rest = name.rpartition(":")
    model = timm.create_model(rest) if kind else getattr(torchvision.models, rest)()
    model = shaken(model)
    folded = nk.fold(model, fuse=True)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        expected = model(x)
        assert relative(folded(x), expected) < ALLOWED
        assert torch.equal(copy.deepcopy(folded)(x), folded(x))
        assert torch.equal(pickle.loads(pickle.dumps(folded))(x), folded(x))
    assert not any(isinstance(m, nn.BatchNorm2d) for m in folded.modules())
    assert folded.state_dict().keys() == nk.fold(model).state_dict().keys()
    assert not convolutions(model)


@pytest.mark.parametrize("kind", ["one pass", "one call"])
def test_who_does_what(kind, monkeypatch):
    """As on a GPU: every sum, bias and activation is the convolution's, and none is done twice."""
    calls = []

    def one_call(x, weight, bias, *sizes):
        calls.append("relu")
        return F.conv2d(x, weight, bias, *sizes).relu()

    def one_call_with_sum(x, weight, residual, alpha, bias, *sizes):
        calls.append("sum and relu")
        return (F.conv2d(x, weight, bias, *sizes) + alpha * residual).relu()

    monkeypatch.setattr(torch, "cudnn_convolution_relu", one_call)
    monkeypatch.setattr(torch, "cudnn_convolution_add_relu", one_call_with_sum)
    monkeypatch.setattr(FoldedConv2d, "_in_eager_mode", lambda self, x, residual: True)
    if kind == "one call":
        narrow = lambda self, dtype: (self.weight, self.bias)  # noqa: E731
        monkeypatch.setattr(sys.modules[FoldedConv2d.__module__], "NARROW", (torch.float32,))
        monkeypatch.setattr(FoldedConv2d, "_narrow", narrow)
    model = network()
    folded = nk.fold(model, fuse=True, example=torch.randn(2, 3, 12, 12))
    calls.clear()
    x = torch.randn(2, 3, 12, 12).to(memory_format=torch.channels_last)
    with torch.no_grad():
        assert relative(folded(x), model(x)) < ALLOWED
    expected = ["relu", "relu", "sum and relu", "relu", "sum and relu"]
    assert calls == (expected if kind == "one call" else [])
    # nothing is left to do for the modules of the activation
    counted: list[nn.Module] = []
    for module in folded.modules():
        if isinstance(module, nn.ReLU):
            module.register_forward_hook(lambda module, *_: counted.append(module))
    with torch.no_grad():
        folded(x)
    assert not counted


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("path", ["plain", "one pass"])
def test_one_convolution(activation, path, monkeypatch):
    if path == "one pass":
        monkeypatch.setattr(FoldedConv2d, "_in_eager_mode", lambda self, x, residual: True)
    conv = nn.Conv2d(4, 6, 3, 2, 1, dilation=2, groups=2)
    assert FoldedConv2d.serves(conv)
    x = torch.randn(2, 4, 9, 9)
    y = conv(x).detach()
    conv.__class__ = FoldedConv2d
    assert isinstance(conv, FoldedConv2d)
    torch.testing.assert_close(conv(x).detach(), y)
    for residual in (None, torch.randn_like(y), torch.randn(6, 1, 1), torch.randn_like(y).double()):
        whole = y if residual is None else y + residual
        with torch.no_grad():
            mine = conv(x, residual, activation)
        torch.testing.assert_close(mine, activated(whole, activation))


def test_gradients_are_as_ever():
    model = network()
    folded, plain = nk.fold(model, fuse=True), nk.fold(model)
    x = torch.randn(2, 3, 12, 12)
    for each in (folded, plain):
        each(x).square().sum().backward()
    for mine, theirs in zip(folded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_compiled_and_exported():
    folded = nk.fold(network(), fuse=True)
    x = torch.randn(2, 3, 12, 12)
    with torch.no_grad():
        expected = folded(x)
        compiled = torch.compile(folded, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
        torch.testing.assert_close(torch.export.export(folded, (x,)).module()(x), expected)


def test_fuse_after_it_changes_no_activation():
    """A convolution that has an activation already does not get that of what follows."""
    act = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Sigmoid())
    folded = nk.fold(shaken(act), fuse=True)
    assert [conv.own for conv in convolutions(folded)] == ["relu"]
    x = torch.randn(2, 3, 5, 5)
    with torch.no_grad():
        expected = act(x)
        assert relative(folded(x), expected) < ALLOWED
        with pytest.warns(UserWarning, match="fuse changed nothing"):
            nk.fuse(folded)
        assert relative(folded(x), expected) < ALLOWED


def test_hooks_see_what_they_saw():
    model = network()
    seen: list[Tensor] = []
    model[1].conv1.register_forward_hook(lambda module, given, y: seen.append(y))
    model[1].act.register_forward_hook(lambda module, given, y: None)
    folded = nk.fold(model, fuse=True)
    x = torch.randn(2, 3, 12, 12)
    seen.clear()
    with torch.no_grad():
        assert relative(folded(x), model(x)) < ALLOWED
    assert len(seen) == 2
    assert seen[0].min() < 0  # what the convolution alone gives


def test_weights_that_change_are_cast_again():
    conv = nn.Conv2d(2, 2, 1)
    conv.__class__ = FoldedConv2d
    assert isinstance(conv, FoldedConv2d)
    first = conv._narrow(torch.bfloat16)
    assert conv._narrow(torch.bfloat16)[0] is first[0]
    with torch.no_grad():
        conv.weight.mul_(2)
    assert torch.equal(conv._narrow(torch.bfloat16)[0], conv.weight.bfloat16())
    conv.load_state_dict(nn.Conv2d(2, 2, 1).state_dict())
    assert torch.equal(conv._narrow(torch.bfloat16)[1], conv.bias.bfloat16())
    assert "_cast" not in pickle.loads(pickle.dumps(conv)).__dict__
    assert "_cast" not in conv.double().__dict__


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("memory", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("act", [nn.ReLU(inplace=True), nn.SiLU()], ids=["relu", "silu"])
def test_on_a_gpu(dtype, memory, act):
    """Rounded once where torch rounds after each step: never further from the truth than twice
    what the folded model of torch is, and a rounding of the type."""
    model = network(act).double()
    x = torch.randn(4, 3, 16, 16, dtype=torch.float64)
    truth = model(x).cuda()
    plain = nk.fold(model).to("cuda", dtype).to(memory_format=memory)
    folded = nk.fold(model, fuse=True).to("cuda", dtype).to(memory_format=memory)
    given = x.to("cuda", dtype).to(memory_format=memory)
    with torch.no_grad():
        near = relative(plain(given).double(), truth)
        assert relative(folded(given).double(), truth) <= 2 * near + torch.finfo(dtype).eps
        with torch.autocast("cuda", torch.bfloat16):
            near = relative(plain(given).double(), truth)
            mine = folded(given)
            assert relative(mine.double(), truth) <= 2 * near + torch.finfo(torch.bfloat16).eps
            assert mine.dtype == plain(given).dtype


@pytest.mark.gpu
def test_calls_on_a_gpu(monkeypatch):
    """cuDNN's, with a sum and without; and what is not finite stays so."""
    calls = []
    for name in ("cudnn_convolution_relu", "cudnn_convolution_add_relu"):
        call = getattr(torch, name)

        def counted(*given, call=call, name=name):
            calls.append(name)
            return call(*given)

        monkeypatch.setattr(torch, name, counted)
    folded = nk.fold(network(), fuse=True).cuda().to(memory_format=torch.channels_last)
    x = torch.randn(4, 3, 16, 16).cuda().to(memory_format=torch.channels_last)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        folded(x)
        alone, summed = "cudnn_convolution_relu", "cudnn_convolution_add_relu"
        assert calls == [alone, alone, summed, alone, summed]
        x[0, 0, 3, 3] = float("nan")
        assert folded(x)[0].isnan().any()
        assert folded(x)[1:].isfinite().all()
