"""Statistics belong to steps: a step that GradScaler skips leaves none of its batches behind."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.calibration.averaging import AveragingComparison
from normkit.errors import NothingToDo, OptionError


def network(norm: str = "ours") -> nn.Sequential:
    torch.manual_seed(0)
    made: Any = {"ours": nk.BN, "torch": nn.BatchNorm2d, "ubn": nk.UBN}[norm]
    return nn.Sequential(nn.Conv2d(3, 4, 3), made(4), nn.ReLU(), nn.Conv2d(4, 2, 3))


def statistics(model: nn.Module) -> list[Tensor]:
    return [b.clone() for name, b in model.named_buffers() if "nonfinite" not in name]


def step(
    model: nn.Module, optimizer: Any, scaler: Any, x: Tensor, *more: Tensor, by: float = 1.0
) -> None:
    """One step of mixed precision, of several micro-batches."""
    for part in (x, *more):
        scaler.scale(by * model(part).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def images(by: float = 1.0) -> Tensor:
    return by * torch.randn(4, 3, 6, 6)


def optimizer_of(model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("norm", ["ours", "torch", "ubn"])
def test_a_skipped_step_leaves_no_statistics(norm: str, fused: bool) -> None:
    """The gradients of a batch overflow and the step is skipped, but running means had moved with
    it: by infinity in a norm of torch.nn, and by a batch that nobody trained on in any."""
    model = network(norm)
    optimizer, scaler = optimizer_of(model, fused), torch.amp.GradScaler("cpu")
    twin = copy.deepcopy(model)
    other, its_scaler = optimizer_of(twin, fused), torch.amp.GradScaler("cpu")
    good = [images() for _ in range(3)]
    bad = images(1e3)
    with nk.stage(model, optimizer, scaler) as staged:
        for x in good[:2]:
            step(model, optimizer, scaler, x)
        weight, scale = model[0].weight.clone(), scaler.get_scale()
        before = statistics(model)
        step(model, optimizer, scaler, bad, by=1e38)
        assert scaler.get_scale() < scale  # it was skipped
        assert torch.equal(model[0].weight, weight)
        for was, now in zip(before, statistics(model), strict=True):
            assert torch.equal(was, now)
        assert staged.skipped == int(not fused)  # fused ones decide on the device
        step(model, optimizer, scaler, good[2])
    for x in good:
        step(twin, other, its_scaler, x)
    for mine, its in zip(statistics(model), statistics(twin), strict=True):
        assert torch.equal(mine, its)  # as if the bad batch had not been


def test_all_micro_batches_of_a_step_are_taken_back() -> None:
    model = network()
    optimizer, scaler = optimizer_of(model), torch.amp.GradScaler("cpu")
    twin = copy.deepcopy(model)
    a, b, c = images(), images(), images()
    with nk.stage(model, optimizer, scaler):
        step(model, optimizer, scaler, a, b)
        assert int(model[1].num_batches_tracked) == 2
        with pytest.warns(nk.NonFiniteWarning):
            step(model, optimizer, scaler, c, images(torch.inf), images())
    twin(a)
    twin(b)
    for mine, its in zip(statistics(model), statistics(twin), strict=True):
        assert torch.equal(mine, its)
    assert int(model[1].nonfinite_batches) == 1  # what happened is still told


def test_loops_without_a_scaler_say_so() -> None:
    model = network()
    optimizer = optimizer_of(model)
    staged = nk.stage(model, optimizer)
    model(images())
    staged.rollback()
    assert int(model[1].num_batches_tracked) == 0
    model(images()).mean().backward()
    optimizer.step()
    staged.rollback()  # nothing since the step
    assert int(model[1].num_batches_tracked) == 1
    staged.remove()
    model(images())
    assert int(model[1].num_batches_tracked) == 2


def test_what_is_loaded_or_calibrated_between_steps_stays() -> None:
    model = network()
    optimizer = optimizer_of(model)
    staged = nk.stage(model, optimizer)
    nk.calibrate(model, [images(5.0)])
    kept = statistics(model)
    model(images())
    staged.rollback()
    for was, now in zip(kept, statistics(model), strict=True):
        assert torch.equal(was, now)
    model.load_state_dict(network().state_dict())
    staged.rollback()
    assert not model[1].running_mean.any()


def test_copies_of_model_and_scaler_are_their_own() -> None:
    """Copies of the model, as averages of weights are, and of the scaler know nothing of it."""
    model = network()
    optimizer, scaler = optimizer_of(model), torch.amp.GradScaler("cpu")
    staged = nk.stage(model, optimizer, scaler)
    average = torch.optim.swa_utils.AveragedModel(model)
    average(images())
    staged.rollback()
    assert int(average.module[1].num_batches_tracked) == 1
    again = pickle.loads(pickle.dumps(model))
    again(images())
    other = pickle.loads(pickle.dumps(scaler))
    assert other.step.__self__ is other
    staged.remove()
    assert "step" not in vars(scaler)


def test_two_networks_with_one_scaler() -> None:
    """As of a GAN: a skipped step of one takes nothing back from the other."""
    models = [network(), network("torch")]
    optimizers = [optimizer_of(m) for m in models]
    scaler = torch.amp.GradScaler("cpu")
    staged = [nk.stage(m, o, scaler) for m, o in zip(models, optimizers, strict=True)]
    losses = [m(images()).square().mean() for m in models]
    for loss, by in zip(losses, (1.0, 1e38), strict=True):
        scaler.scale(by * loss).backward()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [int(m[1].num_batches_tracked) for m in models] == [1, 0]
    for one in staged:
        one.remove()
    assert "step" not in vars(scaler)


def test_refusals() -> None:
    model = network()
    optimizer = optimizer_of(model)
    with pytest.raises(OptionError, match=r"optimizer of torch\.optim, got GradScaler"):
        nk.stage(model, torch.amp.GradScaler("cpu"))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="GradScaler, which has a method step, got float"):
        nk.stage(model, optimizer, 1.0)
    with pytest.raises(OptionError, match="trains no parameter"):
        nk.stage(network(), optimizer)
    plain = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(NothingToDo, match="no norm"):
        nk.stage(plain, optimizer_of(plain))


def test_buffers_of_a_functional_call_are_not_taken_for_the_models_own():
    """They were committed, and a rollback wrote them into the model."""
    model = nn.Sequential(nn.Linear(2, 4), nk.BN(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    staged = nk.stage(model, optimizer)
    model(torch.randn(8, 2)).sum().backward()
    optimizer.step()
    left = model[1].running_mean.clone()
    others = {"1.running_mean": torch.full((4,), 50.0), "1.running_var": torch.full((4,), 9.0)}
    torch.func.functional_call(model, others, torch.randn(8, 2))
    staged.rollback()
    assert torch.equal(model[1].running_mean, left)


def test_a_metric_that_is_not_a_number_is_not_the_best():
    comparison = AveragingComparison({"average": float("nan"), "copy": 0.5}, {"average": 1.0}, {})
    assert comparison.best == "copy"
