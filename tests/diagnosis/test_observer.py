"""Watching a model train: what is recorded, what it disturbs (nothing), and that it goes away."""

from __future__ import annotations

import copy
import csv
import math
import pickle
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit import catalog
from normkit.diagnosis import Observed, observe
from normkit.diagnosis.measures import condensation
from normkit.diagnosis.observe import step
from normkit.errors import NormkitError, NothingToDo, OptionError
from normkit.layers.base import Normalizer

OURS = [name for name in catalog.names("activation") if issubclass(catalog.find(name), Normalizer)]
ALL = (*("esm_mean", "esm_std", "gradient_factor", "beyond_6", "dead"), "stat_diff")


def net(norm: Any = nn.BatchNorm2d) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), norm(8), nn.ReLU(inplace=True)),
        *(nn.Conv2d(8, 8, 3), norm(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 2)),
    )


def batch(size: int = 4) -> Tensor:
    return torch.randn(size, 3, 8, 8)


def is_clean(model: nn.Module) -> bool:
    """No hook and no listener is left."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or getattr(m, "listeners", ())
        for m in model.modules()
    )


# ---------------------------------------------------------------- what is recorded


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nk.BN], ids=["torch", "normkit"])
def test_values_are_those_of_the_formulas(norm: Any) -> None:
    """Running statistics from before the batch, statistics of the batch by NumPy."""
    model = net(norm)
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    model[1].weight.data.normal_()
    mean, var = (t.double().numpy().copy() for t in (model[1].running_mean, model[1].running_var))
    x = batch()
    data = model[0](x).detach().double().numpy()
    with observe(model, measures=ALL) as observer:
        model(x)
    found = {r.measure: r.value for r in observer.records if r.path == "1"}
    true_mean, true_var = data.mean((0, 2, 3)), data.var((0, 2, 3))
    near = {"rel": 1e-4}  # float32 statistics of the batch
    assert found["esm_mean"] == pytest.approx(np.linalg.norm(mean - true_mean), **near)
    shift = np.linalg.norm(np.sqrt(var) - data.std((0, 2, 3), ddof=1))
    assert found["esm_std"] == pytest.approx(shift, **near)
    weight = model[1].weight.detach().double().numpy()
    factor = np.abs(weight / np.sqrt(true_var + 1e-5)).mean()
    assert found["gradient_factor"] == pytest.approx(factor, **near)
    hat = (data - true_mean[:, None, None]) / np.sqrt(true_var + 1e-5)[:, None, None]
    assert found["beyond_6"] == pytest.approx((np.abs(hat) > 6).mean(), abs=1e-7)
    out = hat * weight[:, None, None]
    assert found["dead"] == pytest.approx((out.max((0, 2, 3)) <= 0).mean())


def test_every_other_step_is_measured_and_validation_is_not() -> None:
    model = net()
    with observe(model, every=3) as observer:
        for _ in range(7):
            model.train()
            model(batch())
            model.eval()
            model(batch())
    assert sorted({r.step for r in observer.records}) == [0, 3, 6]
    assert observer.step == 7
    assert [step for step, _ in observer.series("4", "esm_mean")] == [0, 3, 6]


def test_drift_is_measured_from_the_beginning_or_a_start() -> None:
    model = net()
    start = {name: tensor.clone() - 1 for name, tensor in model.state_dict().items()}
    with observe(model, every=1) as first, observe(model, every=1, start=start) as second:
        model(batch())
        with torch.no_grad():
            model[1].weight += 2
            model[4].bias[:] = 3
        model(batch())
    assert first.series("1", "weight_drift") == [(0, 0.0), (1, 2.0)]
    assert first.series("4", "bias_drift") == [(0, 0.0), (1, 3.0)]
    assert second.series("1", "weight_drift") == [(0, 1.0), (1, 3.0)]


def test_gates_and_frozen_layers() -> None:
    model = nn.Sequential(nk.UBN(4), nk.UBN(4), nk.RBN(4), nn.BatchNorm2d(4))
    with torch.no_grad():
        model[0].score.fill_(-1.0)
        model[2].gate_bias[:3] = -20.0
    with observe(model, every=1) as observer:
        model(torch.randn(6, 4, 3, 3))
    assert observer.series("0", "frozen") == [(0, 1.0)]
    assert observer.series("1", "frozen") == [(0, 0.0)]
    assert observer.series("", "frozen_share") == [(0, 0.5)]
    assert observer.series("2", "gate_saturation") == [(0, 0.75)]
    assert observer.series("3", "gate_saturation") == []


def test_condensation_is_that_of_the_first_norm() -> None:
    model, x = net(), batch(6)
    with observe(model) as observer:
        model(x)
    found = [r for r in observer.records if r.measure == "condensation"]
    assert [r.path for r in found] == ["1"]
    expected = condensation(model[0](x))
    assert found[0].value == pytest.approx(float(expected), abs=1e-6)


def test_norms_of_timm_and_transformers() -> None:
    model = timm.create_model("mobilenetv3_small_050", num_classes=2)
    with observe(model, every=1, measures=["esm_mean", "dead"]) as observer:
        model(torch.randn(2, 3, 32, 32))
    assert {r.path for r in observer.records if r.measure == "esm_mean"} == {
        site.path for site in nk.survey(model)
    }
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1, num_classes=2)
    with observe(vit, every=1) as observer:
        vit(torch.randn(2, 3, 32, 32))
    assert observer.series("blocks.0.norm1", "stat_diff")


# ---------------------------------------------------------------- no extra pass


@pytest.mark.parametrize("name", OURS)
def test_layers_of_normkit_need_no_second_pass(name: str, monkeypatch: Any) -> None:
    """They have the moments already, unless they are of another kind or need none."""
    model = nn.Sequential(catalog.make(name, 8))
    passes = []
    plain = step.moments_for

    def counted(*args: Any, **options: Any) -> Any:
        passes.append(args)
        return plain(*args, **options)

    monkeypatch.setattr(step, "moments_for", counted)
    x = torch.randn(8, 8, 4, 4)
    twin = copy.deepcopy(model)
    with observe(model, every=1) as observer:
        y = model(x)
    card = catalog.ENTRIES[name].card
    has_moments = (card.family or card.pools_samples) and card.statistics == "input"
    assert len(passes) == (not has_moments)
    assert torch.equal(y, twin(x))
    assert len(observer.records) > 0
    assert is_clean(model)


@pytest.mark.parametrize("name", OURS)
def test_what_is_heard_is_what_a_pass_would_find(name: str) -> None:
    model = nn.Sequential(catalog.make(name, 8))
    x = (torch.randn(8, 8, 4, 4) + 1).to(memory_format=torch.channels_last)
    wanted = ["esm_mean", "esm_std", "stat_diff", "gradient_factor", "gate_saturation"]
    with observe(copy.deepcopy(model), every=1, measures=wanted) as heard:
        heard.model(x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "reusable", lambda *_: None)
        with observe(copy.deepcopy(model), every=1, measures=wanted) as counted:
            counted.model(x)
    assert [r[:3] for r in heard.records] == [r[:3] for r in counted.records]
    for one, other in zip(heard.records, counted.records, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-4, abs=1e-6)


LEFT = ("bn", "ghost_bn", "bnet", "bcn")  # layers whose kernels leave the statistics of a batch


@pytest.mark.parametrize("name", [*LEFT, "gn", "rbn", "ubn", "batch_renorm"])
def test_kernels_that_leave_no_tables(name: str, monkeypatch: Any) -> None:
    """On a GPU the statistics come from where a kernel has left them, or from another pass."""
    pytest.importorskip("triton", reason="Triton is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(catalog.make(name, 8)).to(device)
    x = torch.randn(6, 8, 4, 4, device=device)
    found, passes, plain = [], [], step.moments_for
    monkeypatch.setattr(step, "moments_for", lambda *a, **k: passes.append(a) or plain(*a, **k))
    for backend in ("torch", "triton"):
        twin = copy.deepcopy(model)
        with nk.use_backend(backend), observe(twin, every=1) as observer:
            twin(x)
        assert is_clean(twin)
        found.append(observer.records)
    assert [r[:3] for r in found[0]] == [r[:3] for r in found[1]]
    assert len(passes) == (name not in LEFT)
    for one, other in zip(*found, strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-4, abs=1e-5)


def test_a_listener_hears_moments_until_it_ends() -> None:
    layer, heard = nk.BN(4), []
    first, second = step.listen(layer, heard.append), step.listen(layer, lambda _: None)
    x = torch.randn(6, 4, 3, 3)
    layer(x)
    assert len(heard) == 1
    torch.testing.assert_close(heard[0].pooled(samples=None).mean[0], x.mean((0, 2, 3)))
    first()
    layer(x)
    assert len(heard) == 1
    assert not is_clean(layer)
    second()
    second()
    assert is_clean(layer)


# ---------------------------------------------------------------- training is not disturbed


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nk.BN, nk.UBN, nk.RBN])
def test_training_goes_as_without(norm: Any) -> None:
    torch.manual_seed(0)
    model = net(norm)
    twin = copy.deepcopy(model)
    data = [batch() for _ in range(4)]
    for each, watched in ((model, True), (twin, False)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        observer = observe(each, every=2, measures=[*ALL, "condensation"])
        if watched:
            observer.__enter__()
        for x in data:
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
        if watched:
            observer.__exit__(None, None, None)
    for name, value in model.state_dict().items():
        assert torch.equal(value, twin.state_dict()[name]), name


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = net(nk.BN), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_is_counted_once(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    with observe(model, every=1) as whole, observe(model.inner, every=1) as part:
        for _ in range(2):
            model(batch().requires_grad_()).sum().backward()
    assert whole.step == part.step == 2
    for observer, path in ((whole, "inner.1"), (part, "1")):
        assert [step for step, _ in observer.series(path, "esm_mean")] == [0, 1]
    assert is_clean(model)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nk.BN])
def test_autocast_and_no_grad(norm: Any) -> None:
    model = net(norm)
    with observe(model, every=1) as observer:
        with torch.no_grad():
            model(batch())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            model(batch())
        with torch.inference_mode():
            model(batch())
    values = observer.series("1", "esm_mean")
    assert [step for step, _ in values] == [0, 1, 2]
    assert all(math.isfinite(value) for _, value in values)


def test_nested_observers_see_the_same() -> None:
    model = net(nk.BN)
    with observe(model, every=1) as outer:
        model(batch())
        with observe(model, every=1) as inner:
            model(batch())
        model(batch())
    assert outer.step == 3
    assert inner.step == 1
    of_second = [r[1:] for r in outer.records if r.step == 1 and "drift" not in r.measure]
    assert of_second == [r[1:] for r in inner.records if "drift" not in r.measure]
    assert is_clean(model)


# ---------------------------------------------------------------- it goes away


def test_it_goes_away_after_an_error_in_the_model_or_outside() -> None:
    for norm in (nn.BatchNorm2d, nk.BN):
        model = net(norm)
        with pytest.raises(RuntimeError), observe(model, every=1):
            model(torch.randn(4, 3, 9, 9))  # the linear layer does not take it
        assert is_clean(model)
        with pytest.raises(KeyError), observe(model, every=1):
            {}[float(model(batch()).sum().detach())]
        assert is_clean(model)


def test_a_failed_forward_does_not_spoil_the_next() -> None:
    model = net(nk.BN)
    with observe(model, every=1) as observer:
        with pytest.raises(RuntimeError):
            model(torch.randn(4, 3, 9, 9))
        model(batch())
    # the norm of the first was measured before the linear layer failed
    assert [step for step, _ in observer.series("4", "esm_mean")] == [0, 1]
    assert is_clean(model)


def test_hooks_are_off_between_measured_steps() -> None:
    model = net(nk.BN)
    with observe(model, every=5):
        model(batch())
        assert all(is_clean(child) for child in model.children())
    assert is_clean(model)


def test_a_copy_or_pickle_of_the_model_is_not_observed() -> None:
    """Averaged weights are copies made in the middle of a training."""
    model = net()
    with observe(model, every=1) as observer:
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(batch())
        assert observer.step == 0
        model(batch())
    assert observer.step == 1


def test_nothing_seen_is_said() -> None:
    model = net().eval()
    with pytest.warns(UserWarning, match="2 forwards in the other mode"), observe(model):
        [model(batch()) for _ in range(2)]
    with pytest.warns(UserWarning, match="no forward"), observe(model):
        model[0](batch())
    with observe(model, when="eval") as observer:
        model(batch())
    assert observer.records


# ---------------------------------------------------------------- files and writers


def test_csv(tmp_path: Path) -> None:
    model = net()
    with observe(model, every=1) as observer:
        model(batch())
    observer.save(tmp_path / "seen.csv")
    with (tmp_path / "seen.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    assert rows[0] == ["step", "path", "measure", "value"]
    read = [Observed(int(s), p, m, float(v)) for s, p, m, v in rows[1:]]
    assert read == observer.records
    with pytest.raises(OptionError, match=r"\.csv or \.parquet"):
        observer.save(tmp_path / "seen.json")


def test_parquet_says_what_it_needs(tmp_path: Path, monkeypatch: Any) -> None:
    with observe(net(), every=1) as observer:
        observer.model(batch())
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(NormkitError, match=r"pip install 'normkit\[lab\]'"):
        observer.save(tmp_path / "seen.parquet")
    assert not list(tmp_path.iterdir())


def test_parquet_gets_columns(tmp_path: Path, monkeypatch: Any) -> None:
    written: list[Any] = []
    arrow: Any = types.ModuleType("pyarrow")
    arrow.table = dict
    arrow.parquet = types.ModuleType("pyarrow.parquet")
    arrow.parquet.write_table = lambda table, path: written.append((table, path))
    monkeypatch.setitem(sys.modules, "pyarrow", arrow)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", arrow.parquet)
    with observe(net(), every=1) as observer:
        observer.model(batch())
    observer.save(tmp_path / "seen.parquet")
    table, path = written[0]
    assert path.name == "seen.parquet"
    assert list(zip(*table.values(), strict=True)) == [tuple(r) for r in observer.records]
    assert list(table) == ["step", "path", "measure", "value"]


def test_tensorboard_gets_scalars() -> None:
    class Writer:
        def __init__(self) -> None:
            self.scalars: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars.append((tag, value, step))

    with observe(net(), every=1) as observer:
        observer.model(batch())
    writer = Writer()
    observer.to_tensorboard(writer)
    assert len(writer.scalars) == len(observer.records)
    assert writer.scalars[0][0] == f"{observer.records[0].measure}/{observer.records[0].path}"


# ---------------------------------------------------------------- bad input


def test_bad_input() -> None:
    model = net()
    for options, message in (
        ({"every": 0}, "at least 1"),
        ({"every": 2.5}, "at least 1"),
        ({"measures": ["esm_men"]}, "esm_mean"),
        ({"measures": ["condensation_matrix"]}, "cannot be observed"),
        ({"when": "always"}, "Unknown when"),
        ({"where": "layer9"}, "fits none"),
    ):
        with pytest.raises(NormkitError, match=message):
            observe(model, **options)  # type: ignore[arg-type]
    with pytest.raises(NothingToDo, match="no norms"):
        observe(nn.Linear(2, 2))
    with pytest.raises(OptionError, match=r"model\.module"):
        observe(nn.DataParallel(model))
    compiled = net()
    compiled.compile()
    with pytest.raises(OptionError, match="compiled"):
        observe(compiled)
    with observe(model) as observer:
        model(batch())
        with pytest.raises(OptionError, match="running already"):
            observer.__enter__()
    assert is_clean(model)


def test_saving_makes_the_directory(tmp_path: Path) -> None:
    """A long training ended in an error because nobody had made the directory of the records."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with nk.observe(model, every=1) as observer:
        model(torch.randn(8, 3))
    observer.save(tmp_path / "runs" / "1" / "norms.csv")
    assert (tmp_path / "runs" / "1" / "norms.csv").read_text().startswith("step,path,")
    with pytest.raises(OptionError, match=r"\.csv or \.parquet"):
        observer.save(tmp_path / "other" / "norms.txt")
    assert not (tmp_path / "other").exists()
