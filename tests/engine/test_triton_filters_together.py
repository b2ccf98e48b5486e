"""Many weights standardized in one launch: the same as each alone, whatever their sizes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.conversion.forward_probe import full_precision
from normkit.engine.special import standardized_together

pytest.importorskip("triton", reason="Triton is not installed")
from normkit.engine.families import filters
from normkit.engine.families.filters import WIDTH

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# one weight short of a filter of two parts, just two parts, a small one, and a vector
SHAPES = [(3, WIDTH - 1), (2, 2 * WIDTH + 5), (5, 4, 3, 3), (2, 7)]


def weights(last: bool = False) -> list[Tensor]:
    made = [torch.randn(shape, device=DEVICE) + 0.3 for shape in SHAPES]
    if last:
        made[2] = made[2].to(memory_format=torch.channels_last)
    return [w.requires_grad_() for w in made]


def plain(weight: Tensor, less: int, eps: float, outside: bool) -> Tensor:
    axes = tuple(range(1, weight.dim()))
    apart = weight - weight.mean(axes, keepdim=True)
    square = apart.square().sum(axes, keepdim=True) / (weight[0].numel() - less)
    return apart / (square.sqrt() + eps if outside else (square + eps).sqrt())


@pytest.mark.parametrize(("less", "outside"), [(0, False), (1, True)])
@pytest.mark.parametrize("last", [False, True])
def test_equal_to_the_formula(less: int, outside: bool, last: bool) -> None:
    given = weights(last)
    wide = [w.detach().double().requires_grad_() for w in given]
    grads = [torch.randn(w.shape, device=DEVICE) for w in given]  # not in channels_last memory
    with nk.use_backend("triton"):
        found = standardized_together(given, less, 1e-3, outside)
        assert found is not None
        mine = torch.autograd.grad(found, given, grads)
    truth = [plain(w, less, 1e-3, outside) for w in wide]
    theirs = torch.autograd.grad(truth, wide, [g.double() for g in grads])
    for value, expected, weight in zip(found, truth, given, strict=True):
        assert value.stride() == weight.stride()
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-5)
    for value, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-4)


def test_a_weight_that_was_not_used_has_no_gradient() -> None:
    given = weights()
    with nk.use_backend("triton"):
        found = standardized_together(given, 0, 1e-5, False)
        assert found is not None
        mine = torch.autograd.grad(found[1].square().sum(), given, allow_unused=True)
    assert [g is None for g in mine] == [True, False, True, True]


def test_the_backward_of_a_backward() -> None:
    given = weights()
    grads = [torch.randn_like(w) for w in given]

    def penalty(found: Any) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(found, given, grads, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)

    with nk.use_backend("triton"):
        mine = penalty(standardized_together(given, 0, 1e-3, False))
    theirs = penalty([plain(w, 0, 1e-3, False) for w in given])
    for value, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-3)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6), nn.ReLU()),
        *(nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4)),
    ).to(DEVICE)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many weights each call for several has computed."""
    calls: list[int] = []
    apply = filters._Together.apply
    monkeypatch.setattr(
        filters._Together,
        "apply",
        lambda *given: calls.append(len(given) - 4) or apply(*given),
    )
    return calls


def test_a_model_computes_its_weights_once_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In full precision: weights may differ in their last digit, and TF32, in which cuDNN computes
    by default, makes of that one of its own ten digits."""
    calls = counted(monkeypatch)
    model, twin = network(), network()
    nk.standardize(model)
    for conv in (twin[0], twin[3]):
        nk.WS.attach(conv)
    x = torch.randn(2, 3, 7, 7, device=DEVICE)
    with nk.use_backend("triton"), full_precision(model, twin):
        for net in (model, twin):
            net(x).square().sum().backward()
    assert calls == [2]
    # gradients in front of a norm are what is left of terms as large as those behind it
    largest = max(float(p.grad.abs().max()) for p in twin.parameters())
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        near = 1e-5 * max(1.0, largest)
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=near)


def test_nothing_stays_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after the forward nor after one that failed; a part alone computes its own."""
    calls = counted(monkeypatch)
    model = network()
    nk.standardize(model)
    x = torch.randn(2, 3, 7, 7, device=DEVICE)
    with nk.use_backend("triton"):
        before = model(x)
        with pytest.raises(RuntimeError):
            model(x[:, :2])
        with torch.no_grad():
            model[0].parametrizations.weight.original.mul_(-1.0)
        assert not torch.equal(model(x), before)
        assert calls == [2, 2, 2]
        model[0](x)
    assert calls == [2, 2, 2]
    assert all(m.ready is None for m in model.modules() if isinstance(m, nk.WS))


def test_copies_and_folded_models(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    model = network()
    nk.standardize(model)
    x = torch.randn(2, 3, 7, 7, device=DEVICE)
    with nk.use_backend("triton"):
        twin = copy.deepcopy(model)
        with torch.no_grad():
            ramp = torch.arange(3.0, device=DEVICE).view(3, 1, 1)
            model[0].parametrizations.weight.original.zero_().add_(ramp)
        other = twin(x)
        assert not torch.allclose(model(x), other)
        assert calls == [2, 2]
        nk.fold_weights(twin)
        torch.testing.assert_close(twin(x), other)
    assert calls == [2, 2]
    assert not twin._forward_pre_hooks
    assert not twin._forward_hooks
