"""What norms keep, read as mean and variance and written back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cases
import normkit as nk
from normkit import inspection
from normkit.core.moments import Moments
from normkit.engine.dispatch import use_backend
from normkit.inspection.statistics import (
    MomentsAccumulator,
    NormStatistics,
    channel_moments,
    pooled_statistics_of,
    running_moments,
)


def test_the_norm_of_a_site() -> None:
    inner = nk.BN(4)
    model = nn.Sequential(nk.NormAct(inner, "relu"), nn.BatchNorm2d(4))
    found = inspection.survey(model)
    assert found["0"].norm is inner
    assert found["1"].norm is model[1]


NOTHING_KEPT = {
    "instances": nn.InstanceNorm2d(4, track_running_stats=True),  # never pooled over samples
    "untracked": nn.BatchNorm2d(4, track_running_stats=False),
    "lazy": nn.LazyBatchNorm2d(),
    "group": nn.GroupNorm(2, 4),
    "own": nk.GN(4),
}


@pytest.mark.parametrize("name", NOTHING_KEPT)
def test_norms_without_statistics_over_samples(name: str) -> None:
    assert pooled_statistics_of(NOTHING_KEPT[name]) is None
    assert running_moments(NOTHING_KEPT[name]) is None


def test_a_norm_of_no_known_kind_is_read_by_the_names_of_its_buffers() -> None:
    class Scaler(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("running_mean", torch.tensor([1.0, 2.0]))
            self.register_buffer("running_var", torch.tensor([3.0, 4.0]))

    found = running_moments(Scaler())
    assert found is not None
    assert found.mean.tolist() == [[1, 2]]
    assert found.var.tolist() == [[3, 4]]


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(3), nk.GBGN(3, groups=1)], ids=["var", "second"])
def test_what_is_read_is_what_is_there(norm: nn.Module) -> None:
    """A variance below zero is a finding; where statistics are mixed it counts as zero."""
    reader = pooled_statistics_of(norm)
    assert reader is not None
    for buffer in reader.buffers.values():
        buffer.fill_(-1)
    assert bool((reader.read().var < 0).all())
    assert reader.held()[1].tolist() == [0] * reader.size
    again = reader.read()
    again.mean.zero_()  # a copy
    assert bool((reader.read().mean == -1).all())


def test_tables_do_not_depend_on_the_backend_or_the_memory() -> None:
    """A forced backend is for layers: statistics are float64, which Triton does not serve."""
    x = torch.randn(5, 4, 6, 3)
    expected = x.double().var((2, 3), correction=0)
    strided = torch.stack([x, x], -1)[..., 0]
    with use_backend("triton"):
        for each in (x, strided, x.to(memory_format=torch.channels_last)):
            torch.testing.assert_close(channel_moments(each).var, expected)
    torch.testing.assert_close(channel_moments(x, -1).mean, x.double().mean((1, 2)))


def test_large_inputs_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 4, 5)
    whole, layer = channel_moments(x), nk.BGN(4, groups=3)
    reader = pooled_statistics_of(layer)
    assert reader is not None
    kept = reader.table(x)
    monkeypatch.setattr("normkit.inspection.statistics.AT_ONCE", 40)  # two samples
    torch.testing.assert_close(channel_moments(x).mean, whole.mean)
    torch.testing.assert_close(reader.table(x).var, kept.var)
    torch.testing.assert_close(reader.pooled(whole, x).var, kept.pooled(samples=None).var)


def test_pooling_weighs_by_the_number_of_values() -> None:
    x = torch.randn(9, 3, 4, dtype=torch.float64)
    pooling = MomentsAccumulator()
    for part in x.split((1, 5, 3)):
        pooling.add(channel_moments(part).pooled(samples=None))
    assert pooling.total is not None
    torch.testing.assert_close(pooling.total.mean[0], x.mean((0, 2)))
    torch.testing.assert_close(pooling.total.var[0], x.var((0, 2), correction=0))
    assert pooling.total.count.tolist() == [[36] * 3]  # type: ignore[union-attr]


def test_the_stored_variance_is_unbiased_where_torch_has_it_so() -> None:
    x = torch.randn(6, 3, dtype=torch.float64)
    statistics = NormStatistics("", nn.BatchNorm1d(3), "bn")
    found = statistics.stored(statistics.pooled(channel_moments(x), x))
    torch.testing.assert_close(found.var[0], x.var(0))


@pytest.mark.parametrize("case", cases.every(), ids=cases.label)
def test_what_is_put_is_read_for_every_layer(case: tuple[str, dict[str, object]]) -> None:
    """And what a layer keeps of its input has as many entries as its buffers."""
    layer = cases.build(case)
    statistics = pooled_statistics_of(layer)
    if statistics is None:
        assert not any(name.startswith("running_") for name, _ in layer.named_buffers())
        return
    mean, var = torch.rand(2, 1, statistics.size, dtype=torch.float64) + 0.5
    statistics.put(Moments(mean, var, 1))
    again = statistics.read()
    torch.testing.assert_close(again.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(again.var, var, rtol=1e-6, atol=1e-6)
    x = torch.randn(6, cases.CHANNELS, 5, 4)
    assert statistics.table(x).mean.shape == (6, statistics.size)
