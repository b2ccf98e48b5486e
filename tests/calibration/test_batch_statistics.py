"""batch_statistics: the statistics of the batch without moving the running ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit import catalog
from normkit.errors import NothingToDo

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.BatchNorm2d(8),
    "torch, momentum=None": lambda: nn.BatchNorm2d(8, momentum=None),
    **{
        name: lambda name=name: catalog.make(name, 8)
        for name in catalog.names("activation")
        if catalog.ENTRIES[name].card.pools_samples
    },
}


def around(norm: nn.Module) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Dropout(0.5))
    model(torch.randn(8, 3, 9, 9))
    return model.eval()


def snapshot(model: nn.Module) -> dict[str, tuple[int, Tensor]]:
    return {name: (id(b), b.clone()) for name, b in model.named_buffers()}


def same(a: dict[str, tuple[int, Tensor]], b: dict[str, tuple[int, Tensor]]) -> bool:
    return a.keys() == b.keys() and all(
        a[k][0] == b[k][0] and torch.equal(a[k][1], b[k][1]) for k in a
    )


@pytest.mark.parametrize("name", LAYERS)
def test_as_in_training_but_without_a_trace(name: str) -> None:
    """There was no public way: train() moves the running statistics, and freeze("statistics"),
    which keeps them, normalizes with them."""
    model = around(LAYERS[name]())
    x = 3 + 2 * torch.randn(8, 3, 9, 9)
    before = snapshot(model)
    in_eval = model(x)
    with nk.batch_statistics(model):
        y = model(x)
        again = model(x)
    assert same(snapshot(model), before)
    assert not any(module.training for module in model.modules())
    assert torch.equal(model(x), in_eval)
    model[1].train()  # now as usual, which moves them
    expected = model(x)
    if not name.startswith(("ubn", "batch_renorm")):  # whose training batches read what was there
        assert torch.equal(y, again)
    assert torch.equal(y, expected)
    assert not torch.allclose(y, in_eval)


def test_gradients_flow_and_earlier_forwards_keep_their_backward() -> None:
    """An attack: the clean forward's graph is still needed after that on batch statistics."""
    model = around(nn.BatchNorm2d(8))
    x = torch.randn(4, 3, 9, 9, requires_grad=True)
    clean = model(x).square().sum()
    with nk.batch_statistics(model):
        attacked = model(x + 0.1).square().sum() + model(x - 0.1).square().sum()
    (clean + attacked).backward()
    assert x.grad is not None
    assert x.grad.abs().max() > 0


def test_some_norms_only_and_frozen_ones_not() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.BatchNorm2d(3)).eval()
    nk.freeze(model, where="2")
    with nk.batch_statistics(model):
        assert [norm.training for norm in model] == [True, True, False]
    with nk.batch_statistics(model, where="1"):
        assert [norm.training for norm in model] == [False, True, False]
    with pytest.raises(NothingToDo), nk.batch_statistics(nn.Sequential(nn.GroupNorm(1, 3))):
        pass


def test_after_an_error_and_a_change_of_mode() -> None:
    model = around(nn.BatchNorm2d(8))
    before = snapshot(model)
    with pytest.raises(RuntimeError), nk.batch_statistics(model):
        model(torch.randn(2, 4, 9, 9))
    assert same(snapshot(model), before)
    assert not model[1].training
    with nk.batch_statistics(model):
        model.train()
    assert model[1].training  # as train() said
    with nk.batch_statistics(model):
        model.eval()
    assert not model[1].training


def test_a_norm_with_its_activation_and_drop_layer() -> None:
    timm = pytest.importorskip("timm.layers")
    model = nn.Sequential(timm.BatchNormAct2d(3, drop_layer=nn.Dropout)).eval()
    with nk.batch_statistics(model):
        assert model[0].training
        assert not model[0].drop.training


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["torch", "bn"])
def test_blocks_that_overlap(name: str, training: bool) -> None:
    """Two generators, each with a block of its own: when the first ended, the running statistics
    moved in the second, and the norm was left in training mode with the wrong buffers."""
    model = around(LAYERS[name]()).train(training)
    before = snapshot(model)
    x = 3 + 2 * torch.randn(8, 3, 9, 9)
    first, second = nk.batch_statistics(model), nk.batch_statistics(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert model[1].training
    model(x)
    second.__exit__(None, None, None)
    assert model[1].training == training
    assert same(snapshot(model), before)


def test_a_block_in_a_block_for_some_of_its_norms() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nk.BN(8)).train()
    before = snapshot(model)
    x = 3 + 2 * torch.randn(8, 3, 9, 9)
    with nk.batch_statistics(model):
        with nk.batch_statistics(model, "1"):
            model(x)
        model(x)
    assert same(snapshot(model), before)
    assert all(module.training for module in model.modules())
    model(x)
    assert not same(snapshot(model), before)
