"""fuse: norm, sum and activation in one call, and nothing else changed."""

from __future__ import annotations

import copy
import pickle
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.conversion import plan_fuse
from normkit.engine.replay import build
from normkit.errors import NormkitError, NothingToDo, OptionError


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


def calls(model: nn.Module, size: int = 5) -> list[str]:
    """How the norms are called that do more than to normalize, in order."""
    seen = []
    with ExitStack() as stack:
        for path, norm in model.named_modules():
            if isinstance(norm, nk.BN | nk.GN):

                def note(norm: nn.Module, args: tuple, path: str = path) -> None:
                    if len(args) > 1:
                        seen.append(f"{path}(x, {'None' if args[1] is None else 'sum'}, {args[2]})")

                stack.callback(norm.register_forward_pre_hook(note).remove)
        channels = next(p for p in model.parameters() if p.dim() == 4).shape[1]
        copy.deepcopy(model).eval()(torch.randn(2, channels, size, size))
    return seen


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
    assert fused is block
    assert isinstance(fused, Block)
    assert calls(fused) == ["bn1(x, None, relu)", "bn2(x, sum, relu)"]
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
    [(path, reason)] = plan_fuse(net).left.items()
    assert path == "norm"
    assert "neither a sum nor a known activation alone follows it" in reason
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
    assert plan_fuse(net).left == {"norm": "the forward of Moody is another one in eval mode"}
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
    assert plan_fuse(net).left == {"norm": "the forward of Looking cannot be traced (TraceError)"}
    assert nk.fuse(net) is net
    assert net.training


def test_a_block_with_two_parents_stays_one() -> None:
    block = Block()
    net = nn.ModuleDict({"a": block, "b": block})
    nk.fuse(net)
    assert net["a"] is net["b"]
    assert len(calls(block)) == 2


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_torchvision(name: str) -> None:
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    model = nk.convert(getattr(models, name)(), "bn")
    twin = copy.deepcopy(model)
    fused = nk.fuse(model)
    # every norm but those of the shortcuts has an activation after it
    norms = [path for path, m in twin.named_modules() if isinstance(m, nk.BN)]
    assert len(calls(fused, 64)) == len([path for path in norms if "downsample" not in path])
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(fused.eval()(x), twin.eval()(x), rtol=1e-4, atol=1e-4)
    assert list(fused.state_dict()) == list(twin.state_dict())


def test_timm() -> None:
    timm = pytest.importorskip("timm", reason="timm is not installed")
    model = nk.convert(timm.create_model("resnet18d"), "gn")
    twin = copy.deepcopy(model)
    fused = nk.fuse(model)
    assert len(calls(fused, 64)) == 19  # 3 of the stem, 16 of the blocks
    assert fused.forward_features(torch.randn(1, 3, 64, 64)).shape == (1, 512, 2, 2)
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


class Net(nn.Module):
    """Two convolutions and norms, for forwards that are not as simple as they look."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(8, 8, 3, padding=1), nk.BN(8)
        self.conv2, self.bn2 = nn.Conv2d(8, 8, 3, padding=1), nk.BN(8)
        self.relu = nn.ReLU(inplace=True)
        self.register_buffer("calls", torch.zeros(()))


class StatementInPlace(Net):
    """The second activation is a statement; it was once dropped as dead code."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y.mul_(2)
        y = self.bn2(self.conv2(y)) + x
        self.relu(y)
        return y


class InputChangedLater(Net):
    """The norm must see its input before the activation has changed it."""

    def forward(self, x: Tensor) -> Tensor:
        t = self.conv1(x)
        y = self.bn1(t)
        return torch.relu(y + self.relu(t))


class Broadcast(Net):
    """What is added is of another shape: this failed at the first forward."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn1(self.conv1(x)) + x.mean((2, 3), keepdim=True))


class Optional(Net):
    """As timm's DLA: the shortcut was forgotten when it was not given."""

    def forward(self, x: Tensor, shortcut: Tensor | None = None) -> Tensor:
        if shortcut is None:
            shortcut = x
        return torch.relu(self.bn1(self.conv1(x)) + shortcut)


class OwnSequence(nn.Sequential):
    """Neighbours by registration, but not in the forward."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(8, 8, 3, padding=1), nk.BN(8), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self[2](self[1](self[0](x)) + x)


class Recurrent(nn.Sequential):
    """A layer with two places, between the norm and the activation."""

    def __init__(self) -> None:
        conv = nn.Conv2d(8, 8, 3, padding=1)
        super().__init__(conv, nk.BN(8), conv, nn.ReLU())


TRAPS = [StatementInPlace, InputChangedLater, Broadcast, Optional, OwnSequence, Recurrent]


@pytest.mark.parametrize("kind", TRAPS)
def test_traps_of_tracing(kind: type[nn.Module]) -> None:
    """Each of these gave other numbers, or an error, after fuse."""
    net = kind().eval()
    twin = copy.deepcopy(net)
    x = torch.randn(4, 8, 5, 5)
    torch.testing.assert_close(nk.fuse(net, example=False)(x), twin(x), rtol=1e-5, atol=1e-5)


def test_buffers_and_counting_stay() -> None:
    """The buffer was gone from the module, and so from its state_dict."""

    class Counting(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.calls.add_(1)
            return torch.relu(self.bn1(self.conv1(x)))

    net = nk.fuse(Counting(), example=False)
    net(torch.randn(2, 8, 4, 4))
    assert net.state_dict()["calls"] == 1


def test_a_forward_that_keeps_something_is_left_alone() -> None:
    class Keeping(Net):
        seen: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.seen = torch.relu(self.bn1(self.conv1(x)))
            return self.seen

    assert "keeps something on the module" in plan_fuse(Keeping()).left["bn1"]
    net = nk.fuse(Keeping(), example=False)
    assert type(net) is Keeping
    assert net.seen is None
    y = net(torch.randn(2, 8, 4, 4))
    assert net.seen is y


def test_a_forward_that_collects_something_is_left_alone() -> None:
    class Collecting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.bn1(self.conv1(x)))
            self.seen.append(y)
            return y

    assert "keeps something on the module" in plan_fuse(Collecting()).left["bn1"]
    net = nk.fuse(Collecting(), example=False)
    assert type(net) is Collecting
    assert net.seen == []


def test_hooks_see_what_they_saw() -> None:
    block, seen = Block(), []
    block.register_forward_hook(lambda *_: seen.append("block"))
    block.bn1.register_forward_hook(lambda norm, args, out: seen.append(bool((out < 0).any())))
    plan = plan_fuse(block)
    assert plan.fused == {"bn2": "sum and relu"}
    assert "bn1 left: it or what follows it has hooks" in str(plan)
    nk.fuse(block, example=False)
    block(torch.randn(2, 8, 5, 5))
    assert seen == [True, "block"]
    assert calls(block) == ["bn2(x, sum, relu)"]


def test_what_tracing_does_not_see_is_found_out() -> None:
    """isinstance sees a stand-in and not a tensor."""

    class Blind(Net):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.relu(self.bn1(self.conv1(x)))
            return y * 2 if isinstance(x, Tensor) else y

    net = Blind()
    twin = copy.deepcopy(net)
    with pytest.raises(NormkitError, match="differs by"):
        nk.fuse(net)
    assert type(net) is Blind
    assert_same(net, twin, torch.randn(4, 8, 5, 5))


def test_an_example_that_does_not_fit() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nk.BN(8), nn.ReLU())
    with pytest.raises(OptionError, match="Nothing was changed"):
        nk.fuse(net, example=torch.randn(2, 4, 8, 8))
    assert isinstance(net[1], nk.BN)


def test_undo_after_fuse_is_refused() -> None:
    """A torch.nn norm cannot do what the rewritten forward asks of it: the model was broken."""
    torchs = copy.deepcopy(Block())
    torchs.bn1 = nn.BatchNorm2d(8)
    plan = nk.plan_conversion(torchs, "bn")
    plan.apply(torch.randn(2, 8, 5, 5))
    nk.fuse(torchs)
    for back in (plan.undo, lambda: nk.convert(torchs, "torch_bn", "bn1", example=False)):
        with pytest.raises(OptionError, match=r"bn1 does the activation after it since .*fuse"):
            back()
    assert len(calls(torchs)) == 2
    nk.convert(torchs, "rbn", "bn1")
    torchs(torch.randn(2, 8, 5, 5))


def test_on_a_cpu_a_backward_does_not_pay_for_the_fusion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow ResNet-18 trained 30 % slower on a CPU once it was fused: a ReLU in the same pass is
    not vectorized there and its mask is recomputed. Where there will be a backward, torch's own
    operations do the sum and the activation; without one they stay in the pass. (Loops in C++
    have them in the pass.)"""
    monkeypatch.setattr(build, "extension_on_cpu", lambda: None)
    seen: list[tuple[bool, str]] = []
    run = nk.BN.run

    def note(norm: nk.BN, path: Any, x: Tensor, *more: Any) -> Any:
        seen.append((len(more) > 2 and more[3] != "none", path.name))
        return run(norm, path, x, *more)

    monkeypatch.setattr(nk.BN, "run", note)
    net = nk.fuse(nn.Sequential(nk.BN(3), nn.ReLU()), example=False)
    x = torch.randn(4, 3, 5, 5, requires_grad=True)
    y = net(x)
    with torch.no_grad():
        again = net(x)
    assert seen == [(False, "torch"), (True, "torch")]
    torch.testing.assert_close(y, again)
    assert y.grad_fn is not None
    assert "Relu" in type(y.grad_fn).__name__


@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_on_a_cpu_a_fused_sum_takes_no_memory_of_its_own(
    monkeypatch: pytest.MonkeyPatch, activation: str
) -> None:
    """torchvision adds and rectifies in place; the fused block made a new tensor for each, so that
    a training step took 1.05 to 1.08 times as long as without fusing. Where no backward needs what
    came before, the sum and the ReLU are written over it; gradients are those of the parts."""
    written: list[int] = []
    run = nk.BN.run

    def note(norm: nk.BN, *args: Any) -> Any:
        result = run(norm, *args)
        written.append(result[0].data_ptr())
        return result

    monkeypatch.setattr(nk.BN, "run", note)
    torch.manual_seed(0)
    norm = nk.BN(3, dtype=torch.float64)
    norm.apart_on_cpu = True
    x, skip = (torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    y = norm(x, skip, activation)
    assert (y.data_ptr() == written[0]) == (activation != "silu")  # silu's gradient needs its input
    twin = nk.BN(3, dtype=torch.float64)
    apart = twin(x) + skip
    apart = apart if activation == "none" else getattr(nn.functional, activation)(apart)
    torch.testing.assert_close(y, apart)
    dy = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, skip, norm.weight, norm.bias), dy)
    parts = torch.autograd.grad(apart, (x, skip, twin.weight, twin.bias), dy)
    for a, b in zip(ours, parts, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("activation", [torch.nn.Softplus(), torch.nn.PReLU(), torch.nn.Tanh()])
def test_where_nothing_is_fused_a_warning_says_so(activation):
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), nk.BN(8), activation)
    with pytest.warns(UserWarning, match=r"fuse changed nothing. 1: .*plan_fuse"):
        nk.fuse(net, example=False)
    assert nk.plan_fuse(net).left.keys() == {"1"}


class Doubled(nk.GN):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * super().forward(x)


class ConvNormReLU(nn.Module):
    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.conv, self.norm, self.act = parts

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


def patched() -> nk.GN:
    norm = nk.GN(8, groups=2)
    norm.forward = lambda x: 2 * nk.GN.forward(norm, x)
    return norm


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (Doubled(8, groups=2), "Doubled has a forward of its own"),
        (patched(), "the forward of this GN was replaced on the instance"),
    ],
    ids=["class", "instance"],
)
@pytest.mark.parametrize(("inside", "name"), [(nn.Sequential, "1"), (ConvNormReLU, "norm")])
def test_a_norm_with_a_forward_of_its_own_is_left_alone(
    inside: Any, name: str, norm: nn.Module, reason: str
) -> None:
    """fuse asked it for what it cannot do: an error without a path, and nothing was fused."""
    first = inside(nn.Conv2d(3, 8, 3), norm, nn.ReLU())
    model = nn.Sequential(first, nn.Conv2d(8, 8, 3), nk.GN(8, groups=2), nn.ReLU())
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    plan = nk.plan_fuse(model)
    assert plan.fused == {"2": "relu"}
    assert plan.left == {f"0.{name}": reason}
    torch.testing.assert_close(nk.fuse(model)(x), expected)
