"""Statistics in files, merged, applied and switched."""

from __future__ import annotations

import copy
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cases
import normkit as nk
import subjects
from normkit import catalog
from normkit.calibration import Profiles, Statistics, apply_statistics, calibrate, measure
from normkit.errors import MissingExtra, NothingToDo, OptionError, UnknownName


def net() -> nn.Module:
    torch.manual_seed(5)
    return subjects.trained(subjects.Net()).eval()


def measured(x: Tensor, **options: Any) -> Statistics:
    return measure(net(), list(x.split(7)), **options)


def buffers(model: nn.Module) -> dict[str, Tensor]:
    return {k: b.clone() for k, b in model.named_buffers() if "running" in k}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], rel: float = 1e-6) -> None:
    assert a.keys() == b.keys() != set()
    for name, value in a.items():
        torch.testing.assert_close(value, b[name], rtol=rel, atol=rel)


def test_parts_merge_to_the_statistics_of_everything() -> None:
    x = torch.randn(50, 3, 8, 8) + torch.arange(50).view(-1, 1, 1, 1) / 10
    parts = [measured(part) for part in x.split([20, 1, 29])]
    model, whole = net(), net()
    apply_statistics(model, parts[0].merge(*parts[1:]))
    calibrate(whole, list(x.split(7)), mode="layerwise")
    assert_same(buffers(model), buffers(whole))
    assert parts[0].merge(*parts[1:]).images == 50


def test_measuring_changes_nothing_and_is_what_calibrate_writes() -> None:
    model, x = net().train(), torch.randn(20, 3, 8, 8)
    before = subjects.portrait(model)
    found = measure(model, list(x.split(7)))
    assert subjects.portrait(model) == before
    done = calibrate(model, list(x.split(7)), mode="layerwise").statistics
    for path in subjects.PATHS:
        assert torch.equal(found[path].mean, done[path].mean)
        assert torch.equal(found[path].m2, done[path].m2)
    assert found.sources[0].fingerprint == done.sources[0].fingerprint


def test_a_file_keeps_every_bit_and_what_it_is_of(tmp_path: Path) -> None:
    one = measured(torch.randn(20, 3, 8, 8), note="Monday, site B")
    path = tmp_path / "monday.safetensors"
    one.save(path)
    back = Statistics.load(path)
    assert list(back) == list(one) == subjects.PATHS
    for name, merged in one.items():
        for part in ("count", "mean", "m2"):
            assert torch.equal(getattr(back[name], part), getattr(merged, part))
            assert getattr(back[name], part).dtype == torch.float64
    assert back.sources == one.sources
    assert back.sources[0].note == "Monday, site B"
    assert (back.mode, back.model, back.state, back.kinds) == (
        "layerwise", "Net", one.state, one.kinds,
    )  # fmt: skip
    assert one.sources[0].fingerprint in repr(back)
    assert [p.name for p in tmp_path.iterdir()] == ["monday.safetensors"]  # nothing half-written
    assert path.stat().st_mode & 0o044  # not for its owner alone


@pytest.mark.parametrize(
    "case", [("bgn", {"groups": 5}), ("in", {}), ("gbgn", {})], ids=cases.label
)
def test_what_layers_keep_in_other_forms_goes_through_a_file(
    case: tuple[str, dict[str, object]], tmp_path: Path
) -> None:
    own = case[0] != "in"
    layer: nn.Module = (
        cases.build(case) if own else nn.InstanceNorm2d(8, track_running_stats=True).double()
    )
    model = nn.Sequential(layer)
    fresh = copy.deepcopy(model)
    x = cases.inputs(n=20)
    calibrate(model, list(x.split(6)), mode="layerwise").statistics.save(tmp_path / "a.safetensors")
    apply_statistics(fresh, Statistics.load(tmp_path / "a.safetensors"))
    assert_same(buffers(fresh), buffers(model), 1e-14)


def test_the_same_data_do_not_count_twice() -> None:
    x = torch.randn(20, 3, 8, 8)
    one, again = measured(x), measured(x[torch.randperm(20)])  # in another order
    with pytest.raises(OptionError, match=one.sources[0].fingerprint):
        one.merge(again)


def test_statistics_of_other_weights_kinds_or_ways_do_not_merge() -> None:
    one, x = measured(torch.randn(20, 3, 8, 8)), torch.randn(20, 3, 8, 8)
    other = net()
    with torch.no_grad():
        other.conv.weight.mul_(1.01)  # type: ignore[union-attr, operator]
    with pytest.raises(OptionError, match="different weights"):
        one.merge(calibrate(other, x, mode="layerwise").statistics)
    with pytest.raises(OptionError, match="progressive"):
        one.merge(calibrate(net(), x).statistics)
    with pytest.raises(OptionError, match="different models"):
        one.merge(calibrate(nn.BatchNorm1d(2), torch.randn(8, 2), mode="layerwise").statistics)
    with pytest.raises(OptionError, match="Statistics"):
        one.merge({"a": 1})  # type: ignore[arg-type]


def test_applying_can_be_undone_and_mixed() -> None:
    model, x = net(), 1 + torch.randn(30, 3, 8, 8)
    found = measured(x)
    before = subjects.portrait(model)
    done = apply_statistics(model, found)
    assert "given statistics" in str(done)
    assert len(done.layers) == 4
    full = buffers(model)
    done.undo()
    assert subjects.portrait(model) == before
    start = buffers(model)
    apply_statistics(model, found, prior=30)  # as many images as were measured: half and half
    half = (start["bn.running_mean"] + full["bn.running_mean"]) / 2
    torch.testing.assert_close(model.bn.running_mean, half, rtol=1e-5, atol=1e-6)


def test_statistics_of_a_batch_norm_fit_what_it_was_converted_to() -> None:
    """gbgn keeps second moments and batch_renorm deviations; the statistics are the same."""
    x = 2 + torch.randn(40, 8, 3, 3)
    found = calibrate(nn.Sequential(nn.BatchNorm2d(8)), x).statistics
    for name in ("bn", "gbgn", "batch_renorm"):
        one, other = (nn.Sequential(nk.make(name, 8)) for _ in range(2))
        apply_statistics(one, found)
        calibrate(other, x)
        assert_same(buffers(one), buffers(other))
    with pytest.raises(OptionError, match="is rbn in the model"):
        apply_statistics(nn.Sequential(nk.RBN(8)), found)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 8)], ids=str)
def test_statistics_that_do_not_fit_leave_the_model_untouched(norm: nn.Module) -> None:
    found = calibrate(nn.Sequential(nn.BatchNorm2d(8)), torch.randn(40, 8, 3, 3)).statistics
    model = nn.Sequential(norm)
    before = subjects.portrait(model)
    with pytest.raises((OptionError, NothingToDo)):
        apply_statistics(model, found)
    with pytest.raises(OptionError, match="'0'"):
        apply_statistics(nn.ModuleDict({"a": nn.BatchNorm2d(8)}), found)
    assert subjects.portrait(model) == before


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    found = measured(torch.randn(9, 3, 8, 8))
    with pytest.raises(OptionError, match="no file"):
        Statistics.load(tmp_path / "none.safetensors")
    with pytest.raises(OptionError, match="end in"):
        found.save(tmp_path / "a.pt")
    with pytest.raises(OptionError, match="no directory"):
        found.save(tmp_path / "no" / "a.safetensors")
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    with pytest.raises(OptionError, match="other tensors"):
        Statistics.load(tmp_path / "w.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"nonsense")
    with pytest.raises(OptionError, match="no safetensors file"):
        Statistics.load(tmp_path / "b.safetensors")


def test_without_safetensors_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    found = measured(torch.randn(9, 3, 8, 8))
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(MissingExtra, match=r"pip install 'normkit\[lab\]'"):
        found.save(tmp_path / "a.safetensors")


def test_a_path_without_statistics_is_named() -> None:
    with pytest.raises(UnknownName, match="Did you mean 'shared'"):
        measured(torch.randn(9, 3, 8, 8))["shard"]


# ---------------------------------------------------------------- profiles


@pytest.mark.parametrize("in_place", [False, True])
def test_profiles_switch_bit_for_bit(in_place: bool) -> None:
    model, x = net(), torch.randn(12, 3, 8, 8)
    start = subjects.portrait(model)
    day, night = (
        calibrate(net(), shift + torch.randn(30, 3, 8, 8)).statistics for shift in (3, -3)
    )
    held = dict(model.named_buffers())
    profiles = Profiles(model, in_place=in_place)
    profiles.add("day", day)
    profiles.add("night", night)
    assert subjects.portrait(model) == start  # adding is not switching
    outputs = {}
    for name in ("day", "night", "start", "day"):
        profiles.use(name)
        y = model(x)
        assert torch.equal(outputs.setdefault(name, y), y)
    assert not torch.equal(outputs["day"], outputs["night"])
    with profiles.using("start"):
        assert subjects.portrait(model) == start
        assert profiles.active == "start"
    assert profiles.active == "day"
    profiles.use("start")
    assert subjects.portrait(model) == start
    assert all(buffer is held[name] for name, buffer in model.named_buffers())


def domain_losses(model: nn.Module, profiles: Profiles, xs: list[Tensor]) -> list[Tensor]:
    losses = []
    for name, x in zip(("start", "other"), xs, strict=True):
        profiles.use(name)
        losses.append(model(x).square().mean())
    return losses


def statistical_layers() -> list[str]:
    made = [(name, catalog.make(name, 4)) for name in catalog.names("activation")]
    return ["torch", *(n for n, layer in made if any("running" in b for b in layer._buffers))]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", statistical_layers())
def test_two_profiles_before_one_backward(kind: str, training: bool) -> None:
    """Domain-specific batch norm runs each domain under its statistics and takes one step for all.
    Switching used to write over the buffers that torch had saved for the backward pass, which then
    raised "modified by an inplace operation"; the gradient has to be that of both."""
    torch.manual_seed(3)
    norm = nn.BatchNorm2d(4) if kind == "torch" else catalog.make(kind, 4)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm)
    xs = [torch.randn(8, 3, 6, 6), 3 + 2 * torch.randn(8, 3, 6, 6)]
    profiles = Profiles(model)
    profiles.add("other", measure(model, xs[1], frozen=True))
    model.train(training)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    sum(domain_losses(model, profiles, xs)).backward()  # type: ignore[union-attr]
    both = model[0].weight.grad.clone()  # type: ignore[union-attr]
    profiles.use("start")
    model.load_state_dict(start)
    again = Profiles(model)
    again.add("other", measure(model, xs[1], frozen=True))
    expected = torch.zeros_like(both)
    for name, x in zip(("start", "other"), xs, strict=True):  # a backward at a time
        again.use(name)
        model.zero_grad()
        model(x).square().mean().backward()
        expected += model[0].weight.grad  # type: ignore[operator]
    torch.testing.assert_close(both, expected, rtol=1e-5, atol=1e-6)


def test_profiles_follow_a_model_to_another_number_type() -> None:
    layer = nn.BatchNorm1d(2)
    profiles = Profiles(layer)
    profiles.add("site")
    layer.double()
    profiles.use("site")
    assert layer.running_mean.dtype == torch.float64
    assert layer.eval()(torch.randn(3, 2).double()).dtype == torch.float64


def test_what_training_changes_belongs_to_the_active_profile() -> None:
    layer = nn.BatchNorm1d(2)
    profiles = Profiles(layer)
    profiles.add("site")
    profiles.use("site")
    layer.train()(5 + torch.randn(40, 2))
    moved = layer.running_mean.clone()
    profiles.use("start")
    assert layer.running_mean.abs().max() == 0
    profiles.use("site")
    assert torch.equal(layer.running_mean, moved)


def test_profiles_refuse_what_makes_no_sense() -> None:
    layer = nn.BatchNorm1d(2)
    profiles = Profiles(layer)
    with pytest.raises(UnknownName, match="start"):
        profiles.use("nigth")
    with pytest.raises(OptionError, match="active"):
        profiles.remove("start")
    with pytest.raises(OptionError, match="name"):
        profiles.add("")
    with pytest.raises(OptionError):
        profiles.add("wrong", measured(torch.randn(9, 3, 8, 8)))
    assert profiles.names == ("start",)
    with pytest.raises(RuntimeError), profiles.using("start"):
        raise RuntimeError
    assert "start (active)" in repr(profiles)


def other_weights() -> nn.Module:
    model = net()
    with torch.no_grad():
        model.conv.weight.mul_(1.01)  # type: ignore[union-attr, operator]
    return model


def test_progressive_statistics_of_other_weights_do_not_merge_either(tmp_path: Path) -> None:
    """Only layerwise ones said which weights they were measured with."""
    one = calibrate(net(), torch.randn(20, 3, 8, 8)).statistics
    other = calibrate(other_weights(), torch.randn(20, 3, 8, 8)).statistics
    one.save(tmp_path / "one.safetensors")
    for first in (one, Statistics.load(tmp_path / "one.safetensors")):
        with pytest.raises(OptionError, match="different weights"):
            first.merge(other)
    more = calibrate(net(), torch.randn(20, 3, 8, 8) + 1).statistics
    assert one.merge(more).images == 40


def test_statistics_of_other_weights_are_applied_with_a_warning() -> None:
    """That is the disease "weights of the last epoch with statistics of the first"."""
    found = measured(torch.randn(20, 3, 8, 8))
    apply_statistics(net(), found)  # no warning, which would be an error here
    calibrated = net()
    calibrate(calibrated, torch.randn(20, 3, 8, 8))
    apply_statistics(calibrated, found)  # other statistics are none either
    with pytest.warns(UserWarning, match="Do they belong to this checkpoint"):
        apply_statistics(other_weights(), found)


def test_files_without_a_print_of_the_weights_are_still_read() -> None:
    found = measured(torch.randn(20, 3, 8, 8))
    found.weights = ""
    apply_statistics(other_weights(), found)
    assert found.merge(measured(torch.randn(20, 3, 8, 8))).images == 40
