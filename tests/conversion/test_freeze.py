"""freeze and unfreeze: what is frozen stays so whatever happens, and comes back as it was."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrize

import normkit as nk
from normkit import catalog
from normkit.conversion import freeze, frozen, unfreeze
from normkit.conversion.freeze import (
    PARTS,
    carry_freezing,
    frozen_parts,
    hold,
    release,
    state_of,
)
from normkit.errors import NothingToDo, OptionError, ShapeError
from normkit.layers.norm_act import NormAct

TRACKED = [
    name
    for name in catalog.names("activation")
    if hasattr(layer := catalog.make(name, 8), "num_batches_tracked") and name != "frozen_bn"
]
FOREIGN: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.BatchNorm2d(8),
    "sync": lambda: nn.SyncBatchNorm(8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "timm": lambda: timm.layers.BatchNormAct2d(8, drop_layer=nn.Dropout),
    "wrapped": lambda: NormAct(catalog.make("bn", 8), "relu"),
    "wrapped-torch": lambda: NormAct(nn.BatchNorm2d(8), nn.GELU()),
}


def around(norm: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 4, 1))


def images(n: int = 4) -> Tensor:
    return torch.randn(n, 3, 9, 9)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in model.named_buffers()}


def step(model: nn.Module) -> None:
    """One step of training that would move everything that can move."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(params, lr=0.5, momentum=0.9)
    loss = model(images()).square().mean()
    loss.backward()
    optimizer.step()


def state(model: nn.Module) -> dict[str, Any]:
    return {
        "classes": [type(m) for m in model.modules()],
        "modes": [m.training for m in model.modules()],
        "trainable": {name: p.requires_grad for name, p in model.named_parameters()},
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "repr": repr(model),
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -------------------------------------------------------------------- what is frozen does not move


@pytest.mark.parametrize("what", ["statistics", "affine", "both"])
@pytest.mark.parametrize("kind", ["torch", "timm", "wrapped", "bn", "ubn", "bcn", "sn"])
def test_train_does_not_undo_it(kind: str, what: str) -> None:
    model = around(FOREIGN[kind]() if kind in FOREIGN else catalog.make(kind, 8))
    assert freeze(model, what) == ["1"]
    model.eval().train()
    before, parameters = buffers(model), copy.deepcopy(dict(model.named_parameters()))
    step(model)
    assert same(buffers(model), before) == (what != "affine")
    for name, p in model.named_parameters():
        still = torch.equal(p, parameters[name])
        if name.startswith("1."):
            assert still == (what != "statistics") or (p.grad == 0).all(), name
    assert not torch.equal(model[2].weight, parameters["2.weight"])


@pytest.mark.parametrize("name", TRACKED)
def test_frozen_layers_compute_in_train_what_they_compute_in_eval(name: str) -> None:
    """Every layer with running statistics, frozen after it has seen a batch."""
    options = {"update_rate": 0.1, "micro": True} if name == "bcn" else {}
    model = nn.Sequential(catalog.make(name, 8, **options))
    model(torch.randn(8, 8, 5, 5))
    freeze(model, "statistics")
    before, x = buffers(model), torch.randn(8, 8, 5, 5)
    trained = model.train()(x)
    assert same(buffers(model), before)
    assert torch.equal(trained, model.eval()(x))


@pytest.mark.parametrize("kind", FOREIGN)
def test_the_norms_of_others(kind: str) -> None:
    model = around(FOREIGN[kind]())
    if kind != "sync":  # needs a GPU in training
        model(images())
    norm = model[1].norm if isinstance(model[1], NormAct) else model[1]
    its_class = type(norm)
    freeze(model)
    assert isinstance(norm, its_class)
    before, x = buffers(model), images()
    model.train()
    frozen_mode = model(x) if kind != "timm" else None  # its drop layer is random in training
    assert same(buffers(model), before)
    if kind != "timm":
        assert frozen_mode is not None
        assert torch.equal(frozen_mode, model.eval()(x))


def test_a_fused_drop_layer_goes_on() -> None:
    model = around(FOREIGN["timm"]())
    freeze(model)
    model.train()
    assert model[1].drop.training
    assert not model[1].training


def test_a_fused_activation_keeps_its_parameters() -> None:
    model = around(NormAct(catalog.make("bn", 8), nn.PReLU()))
    freeze(model)
    assert model[1].act.weight.requires_grad
    assert not model[1].norm.weight.requires_grad


def test_a_gradient_that_is_there_already_is_not_applied() -> None:
    model = around(nn.BatchNorm2d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(images()).square().mean().backward()
    freeze(model, "affine")
    before = model[1].weight.detach().clone()
    optimizer.step()
    assert torch.equal(model[1].weight, before)


def test_norms_without_statistics_have_an_affine_part_only() -> None:
    model = around(nn.GroupNorm(2, 8))
    assert freeze(model) == ["1"]
    assert frozen(model) == {"1": "affine"}
    assert model.train()[1].training


def test_update_bn_leaves_frozen_statistics_alone() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.BatchNorm2d(8))
    model(images())
    freeze(model, "statistics", where="1")
    kept, moved = buffers(model[1]), buffers(model[2])
    torch.optim.swa_utils.update_bn([images(), images()], model)
    assert same(buffers(model[1]), kept)
    assert not same(buffers(model[2]), moved)
    unfreeze(model)
    model[1].reset_running_stats()
    assert model[1].running_mean.abs().max() == 0


# -------------------------------------------------------------------- and back


@pytest.mark.parametrize("kind", [*FOREIGN, "ubn", "gn"])
@pytest.mark.parametrize("what", ["statistics", "affine", "both"])
def test_unfreeze_gives_back_what_was(kind: str, what: str) -> None:
    model = around(FOREIGN[kind]() if kind in FOREIGN else catalog.make(kind, 8))
    next(iter(model[1].parameters())).requires_grad_(False)  # frozen before, and to stay so
    if (kind, what) == ("gn", "statistics"):
        with pytest.raises(NothingToDo, match="single samples keep no running statistics"):
            freeze(model, what)
        return
    before, ids = state(model), [id(t) for t in (*model.parameters(), *model.buffers())]
    freeze(model, what)
    assert state(model) != before
    unfreeze(model)
    assert state(model) == before
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == ids


def test_unfreeze_follows_the_mode_asked_for_in_the_meantime() -> None:
    model = around(nn.BatchNorm2d(8)).eval()
    freeze(model)
    model.train()
    assert not model[1].training
    unfreeze(model)
    assert model[1].training
    freeze(model)
    model.eval()
    unfreeze(model)
    assert not model[1].training


def test_parameters_that_were_told_to_train_since() -> None:
    """After model.requires_grad_(True) `frozen` and the repr still said "both" of a norm whose
    weight trained; and unfreeze would have stopped one that the user had just told to train."""
    model = around(nn.BatchNorm2d(8))
    model[1].bias.requires_grad_(False)
    freeze(model)
    model.requires_grad_(True)
    assert frozen(model) == {"1": "statistics"}
    assert "frozen='statistics'" in repr(model[1])
    converted = nk.convert(copy.deepcopy(model), "rbn", example=False)
    assert frozen(converted) == {"1": "statistics"}
    assert converted[1].weight.requires_grad
    assert unfreeze(model) == ["1"]
    assert model[1].weight.requires_grad
    assert model[1].bias.requires_grad  # as it was told last
    freeze(model, "affine")
    model[1].weight.requires_grad_(True)
    assert frozen(model) == {}  # half of it trains
    assert "frozen" not in repr(model[1])
    model[1].weight.requires_grad_(False)
    assert frozen(model) == {"1": "affine"}


def test_in_parts() -> None:
    model = around(nn.BatchNorm2d(8))
    freeze(model, "statistics")
    freeze(model, "affine")
    assert frozen(model) == {"1": "both"}
    freeze(model)  # a second time must not take "frozen" for the original state
    unfreeze(model, "affine")
    assert frozen(model) == {"1": "statistics"}
    assert model[1].weight.requires_grad
    unfreeze(model, "statistics")
    assert frozen(model) == {}
    assert type(model[1]) is nn.BatchNorm2d


# -------------------------------------------------------------------- copies, files, checkpoints


@pytest.mark.parametrize("kind", ["torch", "timm", "wrapped", "ubn"])
def test_copies_and_files_keep_it(kind: str) -> None:
    model = around(FOREIGN[kind]() if kind in FOREIGN else catalog.make(kind, 8))
    model(images())
    plain = type(model[1])
    freeze(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = {
        "deepcopy": copy.deepcopy(model),
        "pickle": pickle.loads(pickle.dumps(model)),
        "oldest pickle": pickle.loads(pickle.dumps(model, protocol=0)),
        "torch.save": torch.load(file, weights_only=False),
    }
    x = images()
    for way, each in copies.items():
        assert frozen(each) == frozen(model), way
        assert repr(each) == repr(model), way
        each.train()
        before = buffers(each)
        each(x)
        assert same(buffers(each), before), way
        unfreeze(each)
        assert type(each[1]) is plain, way
        assert all(p.requires_grad for p in each.parameters()), way
    assert list(frozen(model).values()) == ["both"], "copies must not share the mark"


def test_a_shallow_copy_has_a_mode_of_its_own() -> None:
    norm = around(nn.BatchNorm2d(8))
    freeze(norm, "affine")
    twin = copy.copy(norm[1])
    twin.train(False)
    assert norm[1].training


@pytest.mark.parametrize("into", ["frozen", "plain"])
def test_a_state_dict_brings_values_and_nothing_else(into: str) -> None:
    source, target = around(nn.BatchNorm2d(8)), around(nn.BatchNorm2d(8))
    source(images())
    freeze(source)
    if into == "frozen":
        freeze(target)
    was = frozen(target), state(target)
    assert source.state_dict().keys() == target.state_dict().keys()
    target.load_state_dict(source.state_dict())
    assert (frozen(target), state(target)) == was
    x = images()
    assert torch.equal(target.eval()(x), source.eval()(x))


def test_frozen_layers_load_the_checkpoints_of_plain_ones() -> None:
    plain, model = around(nn.BatchNorm2d(8)), around(nn.BatchNorm2d(8))
    plain(images())
    freeze(model)
    for assign in (False, True):
        model.load_state_dict(plain.state_dict(), assign=assign)
        assert frozen(model) == {"1": "both"}
        assert not model[1].weight.requires_grad
        assert torch.equal(model[1].running_mean, plain[1].running_mean)
    unfreeze(model)
    assert model[1].weight.requires_grad


# -------------------------------------------------------------------- which norms


def test_by_name() -> None:
    model = torchvision.models.resnet18()
    paths = freeze(model, where=["bn1", "layer1.*"])
    assert paths == ["bn1", "layer1.0.bn1", "layer1.0.bn2", "layer1.1.bn1", "layer1.1.bn2"]
    assert list(frozen(model)) == paths
    assert unfreeze(model, where="layer1.0.*") == ["layer1.0.bn1", "layer1.0.bn2"]
    assert list(frozen(model)) == ["bn1", "layer1.1.bn1", "layer1.1.bn2"]


def test_a_shared_norm_is_frozen_once() -> None:
    norm = nn.BatchNorm2d(8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.Conv2d(8, 8, 1), norm)
    assert freeze(model) == ["1"]
    unfreeze(model)
    assert state(model) == state(model.train())
    assert type(norm) is nn.BatchNorm2d


def test_it_shows_in_the_repr() -> None:
    model = nn.Sequential(nn.BatchNorm2d(8), catalog.make("bn", 8), nn.BatchNorm1d(8))
    freeze(model, "statistics", where="0")
    freeze(model, "both", where="1")
    lines = repr(model).splitlines()
    assert lines[1].endswith("track_running_stats=True, frozen='statistics')")
    assert lines[2].strip() == "(1): BN(8, frozen='both')"
    assert "frozen" not in lines[3]


def test_a_replacement_can_take_the_mark_over() -> None:
    old, plain = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
    hold(old, ("statistics", "affine"), ["weight", "bias"])
    old.train()
    news = {name: catalog.make(name, 8) for name in ("bn", "gn", "frozen_bn")}
    for new in news.values():
        carry_freezing(plain, new)
        assert state_of(new) is None
        carry_freezing(old, new)
    assert frozen_parts(news["bn"]) == ("statistics", "affine")
    assert frozen_parts(news["gn"]) == ("affine",)
    release(news["bn"], PARTS)
    assert news["bn"].training


# -------------------------------------------------------------------- compilers


@pytest.mark.parametrize("kind", ["torch", "bn"])
def test_compiled_code_sees_it_and_sees_it_go(kind: str) -> None:
    model = around(nn.BatchNorm2d(8) if kind == "torch" else catalog.make("bn", 8))
    model(images())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    x = images()
    for _ in range(2):
        freeze(model, "statistics")
        before = buffers(model)
        with nk.use_backend("torch"):  # whose sums are those of graphs
            assert torch.equal(compiled.train()(x), model(x))
        assert same(buffers(model), before)
        unfreeze(model)
        compiled.train()(x)
        assert not same(buffers(model), before)


# -------------------------------------------------------------------- bad input


def test_bad_input_changes_nothing() -> None:
    model = around(nn.BatchNorm2d(8))
    before = state(model)
    with pytest.raises(OptionError, match="Did you mean 'statistics'"):
        freeze(model, "statistic")
    with pytest.raises(OptionError, match="Did you mean 'affine'"):
        unfreeze(model, "afine")
    with pytest.raises((OptionError, NothingToDo), match=r"layer9"):
        freeze(model, where="layer9.*")
    with pytest.raises(NothingToDo, match="unfreeze found no norm"):
        unfreeze(model)
    assert state(model) == before
    with pytest.raises(OptionError, match="OptimizedModule"):
        freeze(torch.compile(model, backend="eager"))
    assert frozen(model) == {}


def test_lazy_norms_are_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.LazyBatchNorm2d())
    with pytest.raises(ShapeError, match="2 is lazy"):
        freeze(model)
    assert type(model[1]) is nn.BatchNorm2d


def test_what_is_frozen_by_nature_has_nothing_to_freeze() -> None:
    model = around(torchvision.ops.FrozenBatchNorm2d(8))
    with pytest.raises(NothingToDo, match="by their nature"):
        freeze(model)


def test_an_error_on_the_way_undoes_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torchvision.models.resnet18()
    freeze(model, "statistics", where="stem")
    before, calls = state(model), []

    def fails_late(*arguments: Any) -> None:
        hold(*arguments)
        calls.append(arguments)
        if len(calls) == 5:
            raise KeyboardInterrupt

    # normkit.conversion.freeze is the function; this is the module
    monkeypatch.setattr(sys.modules[freeze.__module__], "hold", fails_late)
    with pytest.raises(KeyboardInterrupt):
        freeze(model)
    assert state(model) == before


def test_a_class_that_was_changed_since_is_not_guessed_at() -> None:
    model = around(nn.BatchNorm2d(8))
    freeze(model)
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    with pytest.raises(OptionError, match="as by a parametrization"):
        unfreeze(model)
    assert not model[1].training
    parametrize.remove_parametrizations(model[1], "weight")
    assert unfreeze(model) == ["1"]
    assert type(model[1]) is nn.BatchNorm2d
