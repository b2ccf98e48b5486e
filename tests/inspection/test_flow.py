"""Which convolution feeds which norm, and that looking leaves no trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normkit.errors import OptionError, ShapeError
from normkit.inspection import channels_of, convolutions_before_norms, undisturbed
from normkit.layers.bn import BN

IMAGE = (2, 3, 8, 8)


class Wired(nn.Module):
    """A model from its parts and a function that says how they are wired."""

    def __init__(self, wire: Callable[[Any, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.wire = wire
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.wire(self, x)


class Residual(nn.Module):
    """Post-activation, with a projection; the parts are registered in the order of their use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 6, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(6)
        self.shortcut = nn.Sequential(nn.Conv2d(3, 6, 1), nn.GroupNorm(2, 6))
        self.head = nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return self.head((y + self.shortcut(x)).relu())


RESIDUAL = {"conv1": "bn1", "conv2": "bn2", "shortcut.0": "shortcut.1"}


class NormAct(nn.Module):
    """Like timm's: a norm with an activation, known by its name and its channel count."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.num_features = channels
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


class ConvNormAct(nn.Sequential):
    """A block with a norm in its name that is none."""

    num_features = 4


class Counting(nn.Module):
    """Called a norm; changes, replaces and adds state in eval mode too, and draws numbers."""

    num_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("counted", torch.zeros(3))
        self.register_buffer("behind", torch.full((2,), float("nan")))
        self.register_buffer("replaced", torch.ones(2), persistent=False)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.counted += torch.rand(3, device=x.device)
        self.behind.data.fill_(7.0)
        self.replaced = self.replaced + 1
        self.register_buffer("late", torch.ones(1))
        if self.fails:
            raise RuntimeError("failed on purpose")
        return nn.functional.dropout(x)


class CountingNorm(Counting):
    pass


@pytest.mark.parametrize("example", [None, torch.zeros(IMAGE)], ids=["registered", "observed"])
def test_residual_block(example: Tensor | None) -> None:
    assert convolutions_before_norms(Residual(), example) == RESIDUAL


def test_examples_of_every_form() -> None:
    x = torch.zeros(IMAGE)
    for example in (x, (x,), [x], {"x": x}):
        assert convolutions_before_norms(Residual(), example) == RESIDUAL
    assert convolutions_before_norms(Residual().to("meta"), x.to("meta")) == RESIDUAL
    with torch.inference_mode():
        assert convolutions_before_norms(Residual(), torch.zeros(IMAGE)) == RESIDUAL


@pytest.mark.parametrize(
    ("norm", "counts"),
    [
        (nn.BatchNorm2d(4), True),
        (nn.SyncBatchNorm(4), True),
        (nn.InstanceNorm2d(4), True),
        (nn.GroupNorm(2, 4), True),
        (nn.LayerNorm((4, 8, 8)), True),
        (BN(4), True),
        (NormAct(4), True),
        (CountingNorm(), True),
        (nn.LocalResponseNorm(2), False),
        (nn.ReLU(), False),
        (Counting(), False),
        (ConvNormAct(nn.Conv2d(4, 4, 1), nn.ReLU()), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_a_norm(norm: nn.Module, counts: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm)
    expected = {"0": "1"} if counts else {}
    assert convolutions_before_norms(model) == expected
    assert convolutions_before_norms(model, torch.zeros(IMAGE)) == expected
    assert channels_of(norm) == (4 if counts else None)


def test_another_channel_count_is_another_layer() -> None:
    model = Wired(lambda m, x: m.norm(m.conv(x)[:, :4]), conv=nn.Conv2d(3, 6, 3), norm=BN(4))
    assert convolutions_before_norms(model) == {}
    assert convolutions_before_norms(model, torch.zeros(IMAGE)) == {}


@pytest.mark.parametrize(
    ("wire", "feeds"),
    [
        (lambda m, x: m.norm(m.conv(x)), True),
        (lambda m, x: m.norm(x=m.conv(x)), True),
        (lambda m, x: m.norm(m.none(m.conv(x))), True),
        (lambda m, x: m.norm(m.act(m.conv(x))), False),
        (lambda m, x: m.norm(m.conv(x).relu()), False),
        (lambda m, x: m.norm(m.conv(x) + 1), False),
        (lambda m, x: m.conv(m.norm(x.repeat(1, 2, 1, 1))[:, :3]), False),
    ],
    ids=["straight", "keyword", "identity", "in place", "activation", "sum", "norm first"],
)
def test_the_example_decides_not_the_order(wire: Any, feeds: bool) -> None:
    parts = {"act": nn.ReLU(inplace=True), "conv": nn.Conv2d(3, 6, 3), "none": nn.Identity()}
    model = Wired(wire, **parts, norm=BN(6))
    found = convolutions_before_norms(model, torch.randn(IMAGE))
    assert found == ({"conv": "norm"} if feeds else {})


def test_a_shared_convolution_has_one_path() -> None:
    conv = nn.Conv2d(3, 3, 3, padding=1)
    model = nn.Sequential(nn.Sequential(conv, BN(3)), nn.Sequential(conv, BN(3)))
    assert convolutions_before_norms(model) == {"0.0": "0.1"}
    assert convolutions_before_norms(model, torch.zeros(IMAGE)) == {"0.0": "0.1"}


def test_transposed_convolutions_do_not_count() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 3), BN(4))
    assert convolutions_before_norms(model) == {}
    assert convolutions_before_norms(model, torch.zeros(IMAGE)) == {}


def photograph(model: nn.Module) -> dict[str, Any]:
    """Everything that looking must not change."""
    modules = dict(model.named_modules())
    return {
        "modes": {name: m.training for name, m in modules.items()},
        "hooks": {
            name: (len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in modules.items()
        },
        "buffers": {name: (id(b), b.clone()) for name, b in model.named_buffers()},
        "parameters": {name: (id(p), p.detach().clone()) for name, p in model.named_parameters()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "random": torch.get_rng_state(),
    }


@pytest.mark.parametrize("fails", [False, True])
def test_looking_leaves_no_trace(fails: bool) -> None:
    counting = CountingNorm()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), counting, nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model[3].eval()  # mixed modes, as of a frozen backbone
    before = photograph(model)
    counting.fails = fails
    if fails:
        with pytest.raises(RuntimeError, match="failed on purpose"):
            convolutions_before_norms(model, torch.randn(IMAGE, generator=torch.Generator()))
    else:
        found = convolutions_before_norms(model, torch.randn(IMAGE, generator=torch.Generator()))
        assert found == {"0": "1", "2": "3"}
    torch.testing.assert_close(photograph(model), before, rtol=0, atol=0, equal_nan=True)


def test_a_state_dict_of_training_is_the_same_after_a_look() -> None:
    model = Residual()
    model(torch.randn(IMAGE)).sum().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    convolutions_before_norms(model, torch.randn(IMAGE))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_look_between_forward_and_backward_does_no_harm() -> None:
    """Copying a buffer back into itself would count as a change to what autograd has saved."""
    model = Residual().eval()
    loss = model(torch.randn(IMAGE)).sum()
    convolutions_before_norms(model, torch.randn(IMAGE))
    loss.backward()
    assert model.bn1.weight.grad is not None


def test_modes_change_without_calling_train() -> None:
    class Merging(nn.Module):
        calls = 0

        def train(self, mode: bool = True) -> Merging:
            self.calls += 1
            return super().train(mode)

    model = Merging()
    with undisturbed(model):
        assert not model.training
        assert not torch.is_grad_enabled()
    assert model.training
    assert model.calls == 0


def test_buffers_that_grow_are_what_they_were() -> None:
    class Observer(nn.Module):
        """As those that prepare a model for quantization."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.empty(0))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.resize_(3).fill_(x.mean())
            self.count += 1
            return x

    model = Observer()
    before = model.seen
    with undisturbed(model):
        model(torch.ones(2))
        assert model.seen.shape == (3,)
    assert model.seen is before
    assert model.seen.shape == (0,)
    assert model.count == 0


def test_what_cannot_be_looked_at_is_refused_in_words() -> None:
    lazy = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d())
    with pytest.raises(ShapeError, match="one batch"):
        convolutions_before_norms(lazy)
    compiled = torch.compile(Residual(), backend="eager")
    with pytest.raises(OptionError, match=r"model\._orig_mod"):
        convolutions_before_norms(compiled)


@pytest.mark.gpu
def test_random_numbers_of_the_gpu_are_left_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), CountingNorm()).cuda()
    state = torch.cuda.get_rng_state()
    assert convolutions_before_norms(model, torch.zeros(IMAGE, device="cuda")) == {"0": "1"}
    assert torch.equal(torch.cuda.get_rng_state(), state)
