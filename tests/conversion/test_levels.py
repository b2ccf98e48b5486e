"""pool_levels: a head that several levels share has one set of batch statistics for all of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.errors import NothingToDo, OptionError, ShapeError
from subjects import relative

heads = pytest.importorskip(
    "torchvision.models.detection.retinanet", reason="torchvision is an extra"
)
SIDES = (8, 4, 2)


class Detector(nn.Module):
    """A pyramid of three levels and the head of RetinaNet."""

    def __init__(self, norm: Any = nn.BatchNorm2d) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 3, padding=1)
        self.head = heads.RetinaNetHead(8, 1, 2, norm_layer=norm)

    def forward(self, x: Tensor) -> Any:
        maps = self.backbone(x)
        return self.head([nn.functional.adaptive_avg_pool2d(maps, side) for side in SIDES])


def pyramid() -> list[Tensor]:
    return [torch.randn(2, 8, side, side) * side for side in SIDES]


def in_one_row(maps: list[Tensor]) -> Tensor:
    return torch.cat([each.flatten(2) for each in maps], 2)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nk.BN])
def test_a_norm_of_the_head_sees_all_levels_at_once(norm: Any) -> None:
    """Every value counts once: without it a head of five levels has 5 steps a batch, and the
    smallest map, of a few values, weighs most in the running statistics."""
    model = Detector(norm).train()
    assert nk.pool_levels(model, torch.randn(2, 3, 8, 8)) == [
        "head.classification_head.conv",
        "head.regression_head.conv",
    ]
    tower = model.head.classification_head.conv
    inputs: list[Tensor] = []
    tower[0][1].register_forward_pre_hook(lambda module, args: inputs.append(args[0]))
    maps = pyramid()
    model.head(maps)
    row = in_one_row([tower[0][0](each) for each in maps])
    assert len(inputs) == 1
    assert torch.equal(inputs[0].squeeze(3), row)
    mean, var = row.mean((0, 2)), row.var((0, 2), correction=1)
    kept = tower[0][1]
    assert kept.num_batches_tracked == 1
    assert torch.allclose(kept.running_mean, 0.1 * mean, atol=1e-6)
    assert torch.allclose(kept.running_var, 0.9 + 0.1 * var, atol=1e-5)


def test_gradients_are_those_of_one_row() -> None:
    """Against the formula, written for all positions of all levels."""
    head = nk.PooledLevels(nn.Conv2d(8, 4, 1), nk.BN(4), nn.Tanh()).double()
    maps = [each.double().requires_grad_() for each in pyramid()]
    weights = [torch.randn(2, 4, side, side, dtype=torch.float64) for side in SIDES]
    loss = sum((y * w).sum() for y, w in zip(head(maps), weights, strict=True))
    found = torch.autograd.grad(loss, [*maps, *head.parameters()])
    row = in_one_row([head[0](each) for each in maps])
    mean, var = row.mean((0, 2), keepdim=True), row.var((0, 2), correction=0, keepdim=True)
    y = (row - mean) / (var + head[1].eps).sqrt() * head[1].weight[:, None] + head[1].bias[:, None]
    plain = (y.tanh() * in_one_row(weights)).sum()
    expected = torch.autograd.grad(plain, [*maps, *head.parameters()])
    for a, b in zip(expected, found, strict=True):  # of the convolution's bias both are nought
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)


def test_eval_mode_and_names_stay_and_it_can_be_taken_back() -> None:
    model, x = Detector(), torch.randn(2, 3, 8, 8)
    model(x)
    names, before = list(model.state_dict()), model.eval()(x)
    paths = nk.pool_levels(model, x)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(each.state_dict()) == names
        after = each(x)
        assert all(relative(before[k], after[k]) < 1e-5 for k in before)
        each.train()(x)
        counts = {n: int(b) for n, b in each.named_buffers() if n.endswith("num_batches_tracked")}
        assert set(counts.values()) == {len(SIDES) + 1}, counts  # three before, and one
        each.eval()
    assert nk.unpool_levels(model) == paths
    model.train()(x)
    assert model.head.regression_head.conv[0][1].num_batches_tracked == 2 * len(SIDES) + 1
    with pytest.raises(NothingToDo, match="found nothing that pool_levels"):
        nk.unpool_levels(model)


def test_the_doctor_sees_levels_that_differ_and_is_content_when_they_are_pooled() -> None:
    model = Detector(nk.BN)
    batches = [torch.randn(4, 3, 8, 8) for _ in range(4)]
    model.backbone.weight.data.mul_(9)  # means over places are near nought, single ones are not
    kinds = {f.kind for f in nk.diagnose(model.eval(), batches).findings}
    assert "shared-statistics" in kinds
    nk.pool_levels(model, batches[0])
    nk.calibrate(model, batches)
    assert "shared-statistics" not in {f.kind for f in nk.diagnose(model, batches).findings}


def test_norms_of_single_samples_see_one_level_at_a_time() -> None:
    """With its batch norms the head becomes one that pools; gn in it stays what it is."""
    head = nk.PooledLevels(nn.Conv2d(8, 4, 1), nk.GN(4, groups=2), nk.NormAct(nk.BN(4), nn.ReLU()))
    shapes: list[Any] = []
    for norm in (head[1], head[2].norm):
        norm.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    maps = head(pyramid())
    assert [tuple(y.shape) for y in maps] == [(2, 4, s, s) for s in SIDES]
    assert shapes == [(2, 4, 8, 8), (2, 4, 4, 4), (2, 4, 2, 2), (2, 4, 64 + 16 + 4, 1)]


def test_what_cannot_be_pooled_is_refused() -> None:
    x = torch.randn(2, 3, 8, 8)
    with pytest.raises(NothingToDo, match=r"conv.* is called for several maps, but has no batch"):
        nk.pool_levels(Detector(None), x)
    with pytest.raises(NothingToDo, match=r"found no nn\.Sequential with batch norms"):
        nk.pool_levels(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), x)
    with pytest.raises(OptionError, match=r"head\.classification_head\.conv: UBN looks at neigh"):
        nk.pool_levels(Detector(nk.UBN), x)
    with pytest.raises(OptionError, match="fails on the given input"):
        nk.pool_levels(Detector(), torch.randn(2, 5, 8, 8))
    model = Detector()
    nk.pool_levels(model, x)
    with pytest.raises(OptionError, match="pools over its levels already"):
        nk.pool_levels(model, x)
    with pytest.raises(ShapeError, match="The levels have 2, 3 samples"):
        nk.PooledLevels(nk.BN(8))([torch.randn(2, 8, 4, 4), torch.randn(3, 8, 2, 2)])
