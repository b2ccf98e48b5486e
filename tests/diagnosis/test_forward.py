"""Batches that are neither tensors nor pairs: mappings with classes in them, lists of images."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normkit as nk
from normkit.diagnosis import collect, disturbance_test
from normkit.errors import OptionError, ShapeError


class Wrapped(nn.Module):
    """Takes an image, and gives a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(),
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
        )  # fmt: skip

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"logits": self.net(image)}


class Detector(Wrapped):
    """Takes images of several sizes, and cuts them to one."""

    def forward(self, images: list[Tensor], targets: Any = None) -> list[Tensor]:  # type: ignore[override]
        return list(self.net(torch.stack([image[:, :8, :8] for image in images])))


def samples(count: int = 4) -> list[dict[str, Tensor]]:
    one = [{"label": torch.randint(4, (16,)), "image": torch.randn(16, 3, 8, 8) + 1}]
    return [{name: t.clone() for name, t in one[0].items()} for _ in range(count)]


def of_image(model: nn.Module, batch: Any) -> Any:
    return model(batch["image"])


def loss(output: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output["logits"], batch["label"])


def trained(model: Any) -> Any:
    for _ in range(60):
        model.net(torch.randn(16, 3, 8, 8) + 1)
    return model


def test_forward_is_used_for_every_pass() -> None:
    model, batches = trained(Wrapped()), samples()
    model.net[1].running_mean += 9
    with pytest.raises(ShapeError, match="forward=lambda"):
        nk.diagnose(model, batches)
    found = nk.diagnose(
        model, batches, forward=of_image, loss=loss, train_loader=batches, attribution="swap"
    )
    assert found.findings[0].kind == "stale-statistics"
    assert found.gap is not None
    assert found.gap.worst == "net.1"
    assert found.facts["samples"] == 64


def test_the_other_measurements_take_it_too() -> None:
    model, batches = trained(Wrapped()), samples()
    plain = [batch["image"] for batch in batches]
    for mode in ("eval", "progressive"):
        ours = collect(model, batches, mode=mode, forward=of_image)
        assert ours.records == collect(model, plain, mode=mode).records
    gap = nk.attribute_gap(model, batches, loss, method="swap", forward=of_image)
    assert set(gap.shares) == {"net.1"}
    found = disturbance_test(model, batches, loss, deltas=[0.5], seeds=1, forward=of_image)
    assert found.layers == ("net.1",)


@pytest.mark.parametrize("form", ["pairs", "images"])
def test_a_detector_gets_lists_and_images_are_counted(form: str) -> None:
    """A list of images was taken for positional arguments, and channels for images."""
    model = trained(Detector())
    lists = [[torch.randn(3, 8 + i, 9) + 1 for i in range(5)] for _ in range(4)]
    batches = [(images, [{}] * 5) for images in lists] if form == "pairs" else lists
    found = nk.diagnose(model, batches)
    assert found.facts["samples"] == 20
    assert [f.kind for f in found.findings if f.alarm] == []
    done = nk.calibrate(model, batches)
    assert done.statistics.images == 20
    assert "20 images in 4 batches" in str(done)
    stacked = torch.cat([torch.stack([i[:, :8, :8] for i in images]) for images in lists])
    expected = model.net[0](stacked).mean((0, 2, 3))
    torch.testing.assert_close(model.net[1].running_mean, expected, rtol=1e-5, atol=1e-6)


def test_lists_of_the_same_images_have_the_same_fingerprint() -> None:
    model = trained(Detector())
    images = [torch.randn(3, 8, 9 + i) for i in range(6)]
    whole = nk.measure(model, [images])
    parts = nk.measure(model, [images[3:], images[:3]])
    assert whole.sources[0].fingerprint == parts.sources[0].fingerprint
    with pytest.raises(OptionError, match="count twice"):
        whole.merge(parts)
    other = nk.measure(model, [[image + 1 for image in images]])
    assert other.sources[0].fingerprint != whole.sources[0].fingerprint


def test_a_model_on_meta_is_refused() -> None:
    with pytest.raises(OptionError, match="meta device"):
        nk.diagnose(Wrapped().to("meta"), [torch.randn(4, 3, 8, 8)])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("look", ["diagnose", "collect", "attribute_gap", "disturbance_test"])
def test_looking_between_forward_and_backward_changes_nothing(look: str, training: bool) -> None:
    """Buffers were put back by writing, which autograd counts as a change: a diagnosis between
    forward and backward made backward raise "modified by an inplace operation"."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    x, y = torch.randn(8, 3, 6, 6), torch.arange(8) % 3
    model.train(training)
    loss = nn.functional.cross_entropy(model(x), y)
    options = {"mode": "progressive"} if look == "collect" else {}
    getattr(nk, look)(model, [(x, y)], **options)
    loss.backward()


# ---------------------------------------------------------------- detectors, two images a batch


def pairs_of_images(brightness: list[float]) -> list[tuple[list[Tensor], list[Any]]]:
    """Pairs of images of two sizes, which differ in brightness as a whole."""
    images = [torch.randn(3, 8 + 2 * (i % 2), 9) + shift for i, shift in enumerate(brightness)]
    return [(images[i : i + 2], [None, None]) for i in range(0, len(images), 2)]


def test_a_detector_is_asked_whether_to_freeze_at_two_images_a_batch() -> None:
    """The oldest question about batch norm in detectors, answered by two numbers: how far off the
    statistics of a batch are, and how far the running ones."""
    model = Detector().eval()
    shifts = torch.linspace(-2, 2, 24)[torch.randperm(24)].tolist()
    batches = pairs_of_images(shifts)
    nk.calibrate(model, [images for images, _ in batches])
    diagnosis = nk.diagnose(model, batches, train_loader=batches, attribution=None)
    (tiny,) = [f for f in diagnosis.findings if f.kind == "tiny-batch"]
    assert tiny.numbers["running_error"] < 0.01 < tiny.numbers["batch_error"]
    assert "frozen, by nk.freeze(model, 'statistics'), they would be nearer" in tiny.said
    model.net[1].running_mean.add_(3 * model.net[1].running_var.sqrt())
    diagnosis = nk.diagnose(model, batches, train_loader=batches, attribution=None)
    (tiny,) = [f for f in diagnosis.findings if f.kind == "tiny-batch"]
    assert tiny.numbers["running_error"] == pytest.approx(3, rel=0.01)
    assert "calibrate them first" in tiny.said
    assert "can be compared" not in str(diagnosis)  # all of them were


def test_images_of_several_sizes_that_come_in_order_are_seen() -> None:
    """Lists of images were not compared: the doctor said that no batch could be, and a detector's
    loader in order went unseen."""
    model, shifts = Detector().eval(), torch.linspace(-2, 2, 24)
    mixed = shifts[torch.randperm(24, generator=torch.Generator().manual_seed(1))]
    for order, expected in ((shifts, True), (mixed, False)):
        loader = pairs_of_images(order.tolist())
        found = nk.diagnose(model, loader, train_loader=loader, attribution=None).findings
        assert ("unshuffled-batches" in {f.kind for f in found}) is expected


def test_a_list_without_images_is_named() -> None:
    """It ended in "list index out of range", with a hint about pairs and mappings."""
    batches: list[Any] = [*pairs_of_images([0.0, 1.0]), ([], [])]
    for look in (nk.diagnose, nk.calibrate):
        with pytest.raises(ShapeError, match=r"^Batch 2: It has no images, expected a list"):
            look(Detector().eval(), batches)  # type: ignore[operator]
    with pytest.raises(ShapeError, match="Batch 1: A batch is an empty list"):
        nk.calibrate(Detector().eval(), [[]])
    with pytest.raises(OptionError, match="example= is an empty list"):
        nk.convert(Detector(), "gn", example=[])


def test_video() -> None:
    """(N, C, T, H, W): statistics are of all frames and places, and stale ones are found."""
    model = nn.Sequential(
        nn.Conv3d(2, 6, 3), nn.BatchNorm3d(6), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(),
        nn.Linear(6, 3),
    ).eval()  # fmt: skip
    batches = [(2 + torch.randn(8, 2, 5, 7, 7), torch.randint(3, (8,))) for _ in range(4)]
    assert "untrained" in {f.kind for f in nk.diagnose(model, batches).findings}
    nk.calibrate(model, batches)
    maps = torch.cat([model[0](x) for x, _ in batches])
    assert torch.allclose(model[1].running_mean, maps.mean((0, 2, 3, 4)), atol=1e-5)
    assert torch.allclose(model[1].running_var, maps.var((0, 2, 3, 4)), rtol=1e-4)
    gap = nk.attribute_gap(model, batches)
    assert gap.eval_loss == pytest.approx(gap.train_loss, abs=0.01)


def test_frames_are_samples_of_a_network_for_clips() -> None:
    """(N, frames · C, H, W), as the lab has them: two clips of eight frames are sixteen samples
    for a norm, but not sixteen independent ones."""
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(1))

    class Clips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor) -> Tensor:
            return self.network(x.reshape(-1, 1, *x.shape[2:])).unflatten(0, (len(x), -1)).mean(1)

    model = Clips().eval()
    still = [torch.randn(2, 1, 6, 6).mul(3).repeat(1, 8, 1, 1) for _ in range(8)]
    batches = [x + 2 * torch.randn(2, 1, 1, 1) for x in still]
    nk.calibrate(model, batches)
    diagnosis = nk.diagnose(model, batches, train_loader=batches, attribution=None)
    (tiny,) = [f for f in diagnosis.findings if f.kind == "tiny-batch"]
    assert tiny.numbers["batch_size"] == 2
    assert tiny.numbers["independent_values"] < 150
