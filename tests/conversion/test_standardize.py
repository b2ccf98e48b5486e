"""standardize and fold_weights: all that should change does, all else does not."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize, prune

from normkit.conversion import fold_weights, standardize
from normkit.errors import NothingToDo, OptionError, UnknownName
from normkit.layers.cwn import CWN
from normkit.layers.wn import WN
from normkit.layers.ws import WS

METHODS = {"ws": WS, "wn": WN, "cwn": CWN}
CHANGED = ["stem.0", "body.0", "body.3", "body.6"]


class Net(nn.Module):
    """Plain, grouped, depthwise and depthwise 1×1 convolutions, and a head without a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(
            nn.Conv2d(8, 8, 3, groups=8),
            nn.GroupNorm(2, 8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 3, groups=2),
            nn.InstanceNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 6, 1),
            nn.BatchNorm2d(6),
            nn.Conv2d(6, 6, 1, groups=6),
            nn.BatchNorm2d(6),
        )
        self.head = nn.Conv2d(6, 5, 1)
        self.linear = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.head(self.body(self.stem(x))).mean((2, 3)))


def images() -> Tensor:
    return torch.randn(2, 3, 12, 12)


def shape_of(model: nn.Module) -> dict[str, Any]:
    """Classes and tensors of a model, by identity and by value."""
    return {
        "classes": {name: type(m) for name, m in model.named_modules()},
        "ids": {name: id(p) for name, p in model.named_parameters()},
        "order": list(model.state_dict()),
        "values": {name: t.tolist() for name, t in model.state_dict().items()},
    }


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("observed", [False, True])
def test_every_convolution_that_feeds_a_norm(method: str, observed: bool) -> None:
    model = Net()
    plain = copy.deepcopy(model)
    assert standardize(model, method, example=images() if observed else None) == CHANGED
    for path, module in plain.named_modules():
        changed = model.get_submodule(path)
        assert parametrize.is_parametrized(changed) == (path in CHANGED)
        if path in CHANGED:
            expected = METHODS[method].attach(module).weight
            assert torch.equal(changed.weight, expected)
    model(images()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_options_reach_the_layers() -> None:
    model = Net()
    standardize(model, variant="timm", center=False)
    layer = model.stem[0].parametrizations.weight[0]
    assert repr(layer) == "WS(8, variant='timm', center=False)"


@pytest.mark.parametrize("method", METHODS)
def test_twice_is_once(method: str) -> None:
    model = Net()
    standardize(model, method)
    before = shape_of(model)
    for again in METHODS:
        assert standardize(model, again) == []
    assert shape_of(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_fold_gives_plain_modules_with_the_same_function(method: str) -> None:
    model = Net().eval()
    classes, order = shape_of(model)["classes"], list(model.state_dict())
    standardize(model, method)
    x = images()
    expected = model(x)
    assert fold_weights(model) == CHANGED
    assert torch.equal(model(x), expected)
    assert shape_of(model)["classes"] == classes
    assert list(model.state_dict()) == order
    assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)
    with pytest.raises(NothingToDo, match="no weight"):
        fold_weights(model)


def test_folding_a_copy_leaves_the_model_in_training() -> None:
    model = Net()
    standardize(model)
    averaged = copy.deepcopy(model)
    fold_weights(averaged)
    x = images()
    assert torch.equal(model(x), averaged(x))
    assert fold_weights(model) == CHANGED


def test_ws_keeps_an_optimizer_that_was_made_before() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    standardize(model)
    before = model.stem[0].weight.detach().clone()
    model(images()).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model.stem[0].weight, before)


# -------------------------------------------------------------------- left alone


def test_what_is_computed_already_is_left_alone() -> None:
    class StdConv2d(nn.Conv2d):
        """A class that standardizes in its own forward, as timm's."""

    model = nn.Sequential()
    for convolution in (
        parametrizations.spectral_norm(nn.Conv2d(3, 3, 3, padding=1)),
        prune.l1_unstructured(nn.Conv2d(3, 3, 3, padding=1), "weight", 0.5),
        StdConv2d(3, 3, 3, padding=1),
        nn.Conv2d(3, 3, 3, padding=1),
    ):
        model.extend([convolution, nn.BatchNorm2d(3)])
    assert standardize(model, example=images()) == ["6"]
    assert not parametrize.is_parametrized(model[2])
    assert not parametrize.is_parametrized(model[4])


def test_transposed_convolutions_are_left_alone() -> None:
    model = nn.Sequential(
        nn.ConvTranspose2d(3, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
    )
    assert standardize(model) == ["2"]
    assert not parametrize.is_parametrized(model[0])


# -------------------------------------------------------------------- nothing to do, errors


@pytest.mark.parametrize(
    ("model", "example", "words"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), None, "Try example=x"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.zeros(1, 3, 5, 5), "transposed"),
        (nn.Sequential(nn.Conv2d(3, 3, 1, groups=3), nn.BatchNorm2d(3)), None, "one weight"),
    ],
    ids=["registered", "observed", "fan-in one"],
)
def test_nothing_to_do_is_said(model: nn.Module, example: Tensor | None, words: str) -> None:
    before = shape_of(model)
    with pytest.raises(NothingToDo, match=words):
        standardize(model, example=example)
    assert shape_of(model) == before


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        (("wss",), {}, UnknownName, "Did you mean 'ws'"),
        (("ws",), {"varient": "bcn"}, OptionError, "Did you mean 'variant'"),
        (("ws",), {"variant": "bnc"}, OptionError, r"stem\.0: WS got variant='bnc'"),
        (("ws",), {"dtype": torch.float64}, OptionError, "no option 'dtype'"),
        (("wn",), {"eps": 0.1}, OptionError, "no option 'eps'. It has none"),
    ],
)
def test_wrong_names_suggest_the_nearest(
    arguments: tuple[str, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    model = Net()
    before = shape_of(model)
    with pytest.raises(error, match=words):
        standardize(model, *arguments, **options)
    assert shape_of(model) == before


def test_a_filter_of_zeros_is_found_before_anything_changes() -> None:
    model = Net()
    with torch.no_grad():
        model.body[6].weight[1] = 0
    before = shape_of(model)
    with pytest.raises(OptionError, match=r"body\.6: WN .*output channels \[1\]"):
        standardize(model, "wn")
    assert shape_of(model) == before


@pytest.mark.parametrize("method", METHODS)
def test_an_error_on_the_way_undoes_what_was_done(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Net()
    before, x = shape_of(model), images()
    expected = copy.deepcopy(model)(x)
    register, calls = parametrize.register_parametrization, []

    def fails_late(module: nn.Module, *rest: Any, **options: Any) -> nn.Module:
        result = register(module, *rest, **options)
        calls.append(module)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(parametrize, "register_parametrization", fails_late)
    with pytest.raises(KeyboardInterrupt):
        standardize(model, method)
    assert len(calls) == 3
    assert shape_of(model) == before
    assert torch.equal(model(x), expected)


def test_shared_weights_are_refused() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
    )
    model[2].weight = model[0].weight
    with pytest.raises(OptionError, match="share the whole module"):
        standardize(model)
    assert not parametrize.is_parametrized(model[0])


def test_a_foreign_parametrization_stops_folding_before_it_begins() -> None:
    model = Net()
    standardize(model)
    parametrize.register_parametrization(model.body[6], "weight", nn.Identity())
    before = shape_of(model)
    with pytest.raises(OptionError, match="Identity"):
        fold_weights(model)
    assert shape_of(model) == before


# -------------------------------------------------------------------- wrapped models


def test_compiled_models_are_refused() -> None:
    model = torch.compile(Net(), backend="eager")
    for change in (standardize, fold_weights):
        with pytest.raises(OptionError, match=r"OptimizedModule.*model\._orig_mod"):
            change(model)
    assert standardize(model._orig_mod) == CHANGED


def test_distributed_models_are_refused_wherever_they_hide(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    try:
        model = nn.Sequential(DistributedDataParallel(Net()))
        for change in (standardize, fold_weights):
            with pytest.raises(OptionError, match=r"DistributedDataParallel.*model\.0\.module"):
                change(model)
        assert standardize(model[0].module) == CHANGED
    finally:
        dist.destroy_process_group()
