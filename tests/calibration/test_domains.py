"""Calibration and diagnosis of layers with statistics of several domains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.errors import NormkitError


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    return nk.convert(
        nn.Sequential(*model, nn.BatchNorm2d(4)), "bn", domains=2, example=torch.randn(2, 3, 8, 8)
    )


def data(domain: int, batches: int = 4) -> list[Tensor]:
    torch.manual_seed(domain)
    return [torch.randn(16, 3, 8, 8) * (1 + domain) + 3 * domain for _ in range(batches)]


def test_each_domain_gets_its_own_statistics() -> None:
    """From loaders of each, or from mixed batches: as a model of its own for each domain would."""
    mixed = [
        (torch.cat([a, b])[order], torch.tensor([0] * 16 + [1] * 16)[order])
        for a, b in zip(data(0), data(1), strict=True)
        for order in [torch.randperm(32)]
    ]
    ways: list[tuple[Any, dict[str, Any]]] = [
        ({0: data(0), 1: data(1)}, {}),
        ([data(0), data(1)], {"together": True}),
        (iter(mixed), {"domain_of": lambda batch: batch[1]}),
    ]
    singles = [network(), network()]
    for domain, single in enumerate(singles):
        nk.calibrate(single, data(domain), domain=0)
    for batches, options in ways:
        model = network()
        done = nk.calibrate_domains(model, batches, **options)
        assert sorted(done) == [0, 1]
        for domain, one in done.items():  # it printed a dictionary with whole models
            assert f"domain {domain}: {one}" in str(done)
        assert len(repr(done)) < 60
        for domain, single in enumerate(singles):
            for path in (1, 4):
                for name in ("running_mean", "running_var"):
                    found = getattr(model[path], name)[domain]
                    torch.testing.assert_close(found, getattr(single[path], name)[0])
        before = model[1].running_mean[1].clone()
        done[0].undo()  # the other stays
        assert not model[1].running_mean[0].any()
        assert torch.equal(model[1].running_mean[1], before)


def test_the_survey_shows_domains() -> None:
    """Layers with domains looked like any other."""
    assert "statistics running of 2 domains" in str(nk.survey(network()))
    assert "domains" not in str(nk.survey(nn.Sequential(nk.BN(4))))


def test_a_domain_that_was_never_seen_can_be_calibrated() -> None:
    model = network()
    model.train()(data(0)[0])
    with nk.use_domain(model.eval(), 1), pytest.raises(NormkitError, match="never seen domain 1"):
        model(data(1)[0])
    nk.calibrate(model, data(1), domain=1)
    assert model[1].num_batches_tracked.tolist() == [1, 4]
    with nk.use_domain(model, 1):
        model(data(1)[0])


@pytest.mark.parametrize(
    ("batches", "domain_of", "message"),
    [
        (
            [(torch.randn(4, 3, 8, 8), [0, 0, 0, 0])],
            lambda b: b[1],
            "no sample of domain 1|No batch",
        ),
        ([(torch.randn(4, 3, 8, 8), [0, 1])], lambda b: b[1], r"has 4 samples, .* shape \(2,\)"),
        ([(torch.randn(2, 3, 8, 8), [0, 2])], lambda b: b[1], "a sample of domain 2"),
        ({0: []}, None, r"domains 0 to 1, got \[0\]"),
        (torch.randn(4, 3, 8, 8), None, "a loader for each domain"),
    ],
)
def test_batches_that_lack_a_domain_change_nothing(
    batches: Any, domain_of: Callable[[Any], Any] | None, message: str
) -> None:
    model = network()
    with pytest.raises(NormkitError, match=message):
        nk.calibrate_domains(model, batches, domain_of=domain_of)
    assert not model[1].running_mean.any()
    assert not model[1].num_batches_tracked.any()


def test_the_doctor_sees_the_domain_in_use() -> None:
    """Statistics of the right domain are no finding, those of the other are one."""
    model = network()
    for _ in range(30):
        for domain in (0, 1):
            with nk.use_domain(model.train(), domain):
                for x in data(domain, 2):
                    model(x)
    model.eval()
    for domain in (0, 1):
        with nk.use_domain(model, domain):
            own = nk.diagnose(model, data(domain, 8), attribution=None)
            other = nk.diagnose(model, data(1 - domain, 8), attribution=None)
        assert own.facts["domain"] == f"{domain} of 0 to 1"
        assert [f.kind for f in own.findings if f.severity != "note"] == []
        assert any("1" in f.paths for f in other.findings if f.severity in ("warning", "serious"))
