"""Trained weights to start from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from normkit.errors import OptionError
from normkit.lab.experiment import Data, Model, Run, Setting, Train
from normkit.lab.experiment.problems import BadExperiment
from normkit.lab.experiment.reading import read
from normkit.lab.models.variant import build_variant
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
