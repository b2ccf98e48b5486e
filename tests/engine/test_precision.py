"""Numbers where the mean is far from zero: no layer loses more digits than straightforward code.

The error is that of float32 against float64, over several draws; the mean of the input is up to
10,000 of its standard deviations. A mixture of backends would hide one: each is asked by name.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from benchmarks.straightforward import plain
from cases import ACTIVATION, FORMATS
from normkit.engine.normalize import moments

CHANNELS = 8
DRAWS = 8
FARTHER = 1.5  # times the error of the other
CHANCE = 2**-22  # relative: two units in the last place,
CHANCE_OF_KERNELS = 2**-21  # whose sums are short and many: four
RATIOS = (0.0, 10.0, 1e3, 1e4)
# every layer with every ratio and in both memories, which take turns; the next layer the other way
TURNS = [
    (name, FORMATS[(i + j) % 2], ratio)
    for i, name in enumerate(ACTIVATION)
    for j, ratio in enumerate(RATIOS)
]
OPTIONS = {
    "bcn": {"groups": 2},
    "bgn": {"groups": 2},
    "gn": {"groups": 2},
    "gw": {"groups": 4},
    "ghost_bn": {"virtual_batch": 2},
}
TORCH = {
    "bn": lambda: nn.BatchNorm2d(CHANNELS),
    "gn": lambda: nn.GroupNorm(2, CHANNELS),
    "ln": lambda: nn.GroupNorm(1, CHANNELS),
    "in": lambda: nn.InstanceNorm2d(CHANNELS, affine=True),
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def build(name, device="cpu"):
    layer = nk.make(name, CHANNELS, **OPTIONS.get(name, {})).to(device)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if "gates" not in key:  # dn's gates are signs
                parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def step(layer, x, grad):
    """y, dx and the gradients of the parameters, by name."""
    layer = copy.deepcopy(layer)
    x = x.detach().requires_grad_()
    y = layer(x)
    y.backward(grad.to(y.dtype))
    learned = {key: p.grad for key, p in layer.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **learned}


def draw(ratio, memory, device, size=(6, 7)):
    x = ratio + torch.randn(4, CHANNELS, *size, device=device)
    grad = torch.randn_like(x)
    if memory == "contiguous":
        return x, grad
    return tuple(t.to(memory_format=torch.channels_last) for t in (x, grad))


def no_worse(mine, theirs, ratio, memory, backend, chance=CHANCE):
    totals = {}
    for _ in range(DRAWS):
        x, grad = draw(ratio, memory, DEVICE if backend == "triton" else "cpu")
        with nk.use_backend("torch"):
            truth = step(copy.deepcopy(mine).double(), x.double(), grad.double())
            other = step(theirs, x, grad)
        with nk.use_backend(backend):
            ours = step(mine, x, grad)
        assert ours.keys() == truth.keys()
        for key, exact in truth.items():
            sums = totals.setdefault(key, [0.0, 0.0, 0.0])
            for place, value in enumerate((ours[key] - exact, other[key] - exact, exact)):
                sums[place] += float(value.double().square().sum())
    for key, (error, usual, size) in totals.items():
        size = max(size, 1e-30)  # the gradient of a gate that is shut is 0
        error, usual = (error / size) ** 0.5, (usual / size) ** 0.5
        assert error <= FARTHER * max(usual, chance), f"{key}: {error:.1e}, usual {usual:.1e}"


@pytest.mark.parametrize(("name", "memory", "ratio"), TURNS)
def test_no_worse_than_straightforward(name, memory, ratio):
    layer = build(name)
    no_worse(layer, plain(copy.deepcopy(layer)), ratio, memory, "torch")


@pytest.mark.parametrize("ratio", RATIOS[::3])
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("name", TORCH)
def test_no_worse_than_torch(name, memory, ratio):
    layer, other = build(name), TORCH[name]()
    with torch.no_grad():
        other.weight.copy_(layer.weight)
        other.bias.copy_(layer.bias)
    no_worse(layer, other, ratio, memory, "torch")


@pytest.mark.parametrize(
    ("name", "memory", "ratio"),
    [
        *((name, "contiguous", 1e4) for name in ACTIVATION),  # where digits can be lost
        *((name, "channels_last", 0.0) for name in ACTIVATION[::2]),
    ],
)
def test_kernels_are_no_worse(name, memory, ratio):
    pytest.importorskip("triton", reason="Triton is not installed")
    if name == "gw":
        pytest.skip("gw has no kernels of its own")
    layer = build(name, DEVICE)
    no_worse(layer, plain(copy.deepcopy(layer)), ratio, memory, "triton", CHANCE_OF_KERNELS)


@pytest.mark.parametrize("ratio", [0.0, 1e4])
@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("name", ["bn", "gn", "in", "rbn", "bcn", "sn"])
def test_loops_are_no_worse(name, memory, ratio):
    layer = build(name)
    if "C++" not in nk.why(layer, torch.randn(2, CHANNELS, 3, 3)):
        pytest.skip("there is no C++ compiler")
    no_worse(layer, plain(copy.deepcopy(layer)), ratio, memory, "auto")


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
@pytest.mark.parametrize("memory", FORMATS)
def test_equal_values_have_no_variance(memory, backend):
    """However large, and however many: the mean is the value, and the variance is 0."""
    if backend == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    value = torch.full((5, CHANNELS, 13, 11), 1e6 + 0.3, device=DEVICE)
    if memory == "channels_last":
        value = value.to(memory_format=torch.channels_last)
    with nk.use_backend(backend):
        table = moments(value)
        for part in (table, table.pooled(samples=None), table.pooled(channels=CHANNELS)):
            assert (part.mean == value[0, 0, 0, 0]).all()
            assert (part.var == 0).all()
        layer = nk.BN(CHANNELS, momentum=1.0, device=DEVICE)
        assert (layer(value) == 0).all()
        assert (layer.running_var == 0).all()


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_sums_of_a_gradient_keep_their_digits(format: torch.memory_format) -> None:
    """Where x was channels_last the gradient of β in float32 had 7 times the error of torch's, 1e-6
    and more: a kernel added one position to the next. 2¹⁴ times 1 + 2⁻¹² can be added without any
    error, but not one by one: partial sums above 2¹² have no room for 2⁻¹² beside them."""
    x = torch.randn(16, 16, 32, 32).to(memory_format=torch.channels_last)
    layer = nk.BN(16)
    dy = torch.full_like(x, 1 + 2**-12, memory_format=torch.contiguous_format)
    layer(x).backward(dy.to(memory_format=format))
    assert layer.bias.grad is not None
    assert layer.bias.grad.tolist() == 16 * [2**14 + 4]
