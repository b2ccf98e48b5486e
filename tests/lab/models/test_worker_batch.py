"""worker_batch: a batch is what several workers with a few samples each would compute."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.catalog import ENTRIES
from normkit.errors import OptionError
from normkit.lab.experiment import Model, ModelStep, Setting, Train
from normkit.lab.models import NATIVE
from normkit.lab.models.variant import build_variant
from normkit.layers.base import Normalizer

# every normalizer is made with its default options, and bgn says what that means for it
pytestmark = pytest.mark.filterwarnings("ignore:.*Without groups=")

SHAPE = (1, 8, 8)


def pair(
    *steps: ModelStep, worker_batch: int, model: str = "native:small_cnn"
) -> tuple[nn.Module, nn.Module]:
    """A model with that many samples a worker, and the same with all in one."""
    found = []
    for samples in (worker_batch, None):
        train = Train(worker_batch=samples)
        setting = Setting(model=Model(model, options={}), steps=steps, train=train)
        found.append(build_variant(setting, 10, SHAPE, seed=3).double())
    return found[0], found[1]


def averages(models: list[nn.Module], of: str) -> dict[str, Tensor]:
    states = [model.state_dict() for model in models]
    return {key: torch.stack([s[key] for s in states]).mean(0) for key in states[0] if of in key}


# a last worker with fewer samples for a third of them: batches are cut in one place
WORKERS = [(name, 2) for name in nk.names("activation")]
WORKERS += [(name, 4) for name in nk.names("activation")[::3]]


@pytest.mark.parametrize(("name", "worker_batch"), WORKERS)
def test_runs_of_samples_are_as_separate_forwards(name: str, worker_batch: int) -> None:
    together, alone = pair(ModelStep("norm", name), worker_batch=worker_batch)
    x = torch.randn(10, *SHAPE, dtype=torch.float64)  # with 4 a worker the last has 2
    workers = [copy.deepcopy(alone) for _ in x.split(worker_batch)]
    wanted = torch.cat([m(part) for m, part in zip(workers, x.split(worker_batch), strict=True)])
    torch.testing.assert_close(together(x), wanted, rtol=1e-9, atol=1e-9)
    # dn without links between samples keeps running statistics, but does not use them
    if len(x) % worker_batch == 0 and name != "dn":
        running = averages(workers, "running_")
        for key, value in running.items():
            torch.testing.assert_close(together.state_dict()[key], value, rtol=1e-9, atol=1e-9)


def test_norms_of_torch_become_ours_with_what_they_hold() -> None:
    """Left as they are they would pool the whole batch, and the experiment would say otherwise."""
    scale = ModelStep("recipe", "scaled_bn", options={"scale": 0.1, "input_norm": False})
    together, alone = pair(scale, worker_batch=2)
    assert isinstance(alone.conv1.norm, nn.BatchNorm2d)
    assert together.conv1.norm.virtual_batch == 2
    assert torch.equal(together.conv1.norm.weight, alone.conv1.norm.weight)
    x = torch.randn(6, *SHAPE, dtype=torch.float64)
    wanted = torch.cat([copy.deepcopy(alone)(part) for part in x.split(2)])
    torch.testing.assert_close(together(x), wanted, rtol=1e-9, atol=1e-9)


def test_the_gradient_is_that_of_the_workers_together() -> None:
    together, alone = pair(ModelStep("norm", "bn"), worker_batch=2)
    x = torch.randn(6, *SHAPE, dtype=torch.float64)
    together(x).square().mean().backward()
    for part in x.split(2):
        (alone(part).square().mean() / 3).backward()
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-9, atol=1e-9)


def test_the_norm_of_the_input_is_a_workers_too() -> None:
    together, _ = pair(ModelStep("recipe", "scaled_bn"), worker_batch=2)
    assert together.input_norm.virtual_batch == 2


def test_shorter_runs_of_a_layer_are_kept() -> None:
    step = ModelStep("norm", "ghost_bn", options={"virtual_batch": 4})
    (eight, _), (two, _) = pair(step, worker_batch=8), pair(step, worker_batch=2)
    assert (eight.conv1.norm.virtual_batch, two.conv1.norm.virtual_batch) == (4, 2)


def test_layers_without_a_batch_part_are_left_alone() -> None:
    micro, _ = pair(ModelStep("norm", "bcn", options={"micro": True}), worker_batch=2)
    assert micro.conv1.norm.virtual_batch is None
    mixture, _ = pair(ModelStep("norm", "sn", options={"use_bn": False}), worker_batch=2)
    assert mixture.conv1.norm.virtual_batch is None


@pytest.mark.parametrize("name", nk.names("activation"))
def test_cards_tell_which_layers_link_samples(name: str) -> None:
    layer = ENTRIES[name]
    assert layer.card.links_samples == (layer.batch_multiple is not Normalizer.batch_multiple)
    assert nk.make(name, 8).batch_multiple == 1  # as they are by default, any batch will do


def test_linked_samples_must_fit_into_a_worker() -> None:
    step = ModelStep("norm", "dn", options={"batch": 4, "start": "bn"})
    fits, _ = pair(step, worker_batch=8)
    assert fits.conv1.norm.batch == 4
    with pytest.raises(OptionError, match="multiple of 4"):
        pair(step, worker_batch=2)


def test_a_batch_norm_that_cannot_be_converted_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    def net(classes: int, shape: Any) -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 4, 3), Odd(4), nn.Flatten(), nn.Linear(144, classes))

    monkeypatch.setitem(NATIVE, "odd", net)
    with pytest.raises(OptionError, match="forward computes more than the bn"):
        pair(worker_batch=2, model="native:odd")
