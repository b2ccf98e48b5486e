"""One step: the loss, accumulation, records of steps, number types."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import normkit as nk
from lab.train.stand_ins import network, run, sets
from normkit.lab.data.transforms import mix, mixing_weights, soften
from normkit.lab.experiment import Data
from normkit.lab.tasks.classification import correct, loss_of
from normkit.lab.train import Training
from normkit.lab.train.cuda_graph import WARM_UP, Action, Recorded


def called(action: Action) -> Action:
    """In the place of a record where there is none to be had, and with the same warm-up."""
    for _ in range(WARM_UP):
        action()
    return action


def trained(model: nn.Module, capture: Any = None, **options: Any) -> Training:
    """Two epochs of a model on the stand-in set."""
    training = Training(run(epochs=2, **options), sets(), model=model, capture=capture)
    while training.step():
        pass
    return training


def weights(training: Training) -> Tensor:
    return torch.cat([p.detach().flatten() for p in training.trainer.model.parameters()])


# ------------------------------------------------------------------------------------ the loss


def test_smoothed_labels_are_torch_s() -> None:
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.arange(6) % 5
    expected = F.cross_entropy(logits, labels, label_smoothing=0.1)
    assert loss_of(logits, labels, 0.1) == expected
    soft = soften(labels, 5).double()
    torch.testing.assert_close(loss_of(logits, soft, 0.1), expected, rtol=1e-12, atol=0)


def test_mixed_labels_are_the_mixed_losses() -> None:
    # cross-entropy is linear in the labels: a blend of two has the blend of both losses
    logits = torch.randn(6, 5, dtype=torch.float64)
    labels, weight = torch.arange(6) % 5, torch.rand(6, dtype=torch.float64)
    _, soft = mix(torch.zeros(6, 1, 1, 1).double(), soften(labels, 5).double(), weight)
    own = F.cross_entropy(logits, labels, reduction="none", label_smoothing=0.1)
    other = F.cross_entropy(logits, labels.roll(1), reduction="none", label_smoothing=0.1)
    expected = (weight * own + (1 - weight) * other).mean()
    torch.testing.assert_close(loss_of(logits, soft, 0.1), expected, rtol=1e-7, atol=0)


def test_narrow_logits_have_a_wide_loss() -> None:
    logits = torch.randn(4, 3).bfloat16()
    assert loss_of(logits, torch.zeros(4, dtype=torch.long)).dtype == torch.float32


def test_right_answers_are_counted() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 0.0], [0.0, 3.0]])
    assert correct(logits, torch.tensor([1, 1, 1])) == 2
    assert correct(logits, torch.tensor([[0.2, 0.8], [0.6, 0.4], [0.9, 0.1]])) == 2


def test_training_with_mixup_uses_the_weights_of_the_epoch() -> None:
    given = sets()
    mixed = run(epochs=1, batch=22, precision="float64", data=Data(mixup=0.2))
    training = Training(mixed, given, model=network())
    seed = mixed.torch_seed()
    images, labels = next(given.train.batches(22, seed=seed, epoch=0, shuffle=True))
    weight = mixing_weights(0.2, 22, seed=seed, epoch=0).double()
    images, soft = mix(images.double(), soften(labels, 3).double(), weight)
    expected = F.cross_entropy(network().double()(images), soft)
    training.step()
    assert training.trainer.losses(1)[0] == pytest.approx(expected.item(), rel=1e-12)


# ------------------------------------------------------------------------------------ steps


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("capture", [None, called])
def test_accumulation_is_a_larger_batch(drop_last: bool, capture: Any) -> None:
    # 22 samples: five batches of 4 and one of 2 against two of 8 and one of 6
    options = {"precision": "float64", "drop_last": drop_last, "clip": 0.5}
    norm = lambda c: nk.GN(c, groups=2)  # noqa: E731
    apart = trained(network(norm), capture, batch=4, accumulate=2, **options)
    whole = trained(network(norm), batch=8, **options)
    torch.testing.assert_close(weights(apart), weights(whole), rtol=1e-12, atol=1e-12)
    assert not torch.equal(weights(whole), weights(Training(run(), sets(), model=network(norm))))
    assert apart.records[-1].train_loss == pytest.approx(whole.records[-1].train_loss, rel=1e-12)


def test_a_clipped_gradient_has_the_norm_asked_for() -> None:
    # without momentum, decay or schedule the first step is lr times the gradient
    options = {"momentum": 0.0, "weight_decay": 0.0, "schedule": "constant", "lr": 1.0}
    before = torch.cat([p.detach().flatten() for p in network().parameters()])
    for clip in (0.0, 0.01):
        training = Training(run(clip=clip, **options), sets(), model=network())
        training.step()
        length = (weights(training) - before).norm().item()
        assert (length == pytest.approx(0.01, rel=1e-4)) == bool(clip)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"batch": 0},
    {"accumulate": 2, "batch": 5},
    {"precision": "bf16"},
    {"precision": "fp16"},
    {"precision": "fp16", "accumulate": 2, "clip": 1.0},
    {"optimizer": "adam", "lr": 0.01},
    {"channels_last": True},
    {"clip": 0.1, "label_smoothing": 0.1},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_recorded_step_is_a_step(options: dict[str, Any]) -> None:
    # the same buffers as for a CUDA graph, the same warm-up, called instead of replayed
    direct = trained(network(dropout=0.2), **options)
    recorded = trained(network(dropout=0.2), called, **options)
    assert recorded.trainer.is_recorded
    assert not direct.trainer.is_recorded
    assert torch.equal(weights(direct), weights(recorded))
    # not equal to what nothing was done to
    assert not torch.equal(weights(direct), weights(Training(run(), sets(), model=network())))
    for a, b in zip(direct.records, recorded.records, strict=True):
        assert (a.train_loss, a.test_loss) == (b.train_loss, b.test_loss)


def test_a_batch_of_another_size_is_called_directly() -> None:
    calls: list[str] = []
    total = torch.zeros(1)

    def add(x: Tensor) -> None:
        calls.append("direct")
        total.add_(x.sum())

    def capture(action: Any) -> Any:
        action()
        calls.clear()

        def replay() -> None:
            action()
            calls[-1] = "replayed"

        return replay

    recorded = Recorded(add, 3, lambda: [total], capture)
    for size in (2, 3, 3, 2):
        recorded(torch.ones(size))
    assert calls == ["replayed", "replayed", "direct"]
    assert total.item() == 2 + 3 + 3 + 2  # the call for the record was taken back


def test_what_cannot_be_recorded_is_called_and_says_why() -> None:
    total = torch.zeros(1)
    recorded = Recorded(total.add_, 1, lambda: [total], lambda _: "because")
    recorded(torch.ones(1))
    recorded(torch.ones(1))
    assert (total.item(), recorded.obstacle) == (2.0, "because")


@pytest.mark.parametrize("precision", ["float32", "float64", "bf16", "fp16"])
def test_number_types(precision: str) -> None:
    seen: set[torch.dtype] = set()
    model = network()
    model[4].register_forward_hook(lambda *args: seen.add(args[2].dtype))
    training = trained(model, precision=precision)
    narrow = {"bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}
    assert seen == {narrow.get(precision, torch.float32)}
    wide = torch.float64 if precision == "float64" else torch.float32
    assert {p.dtype for p in training.trainer.model.parameters()} == {wide}
    assert (training.trainer.scaler is not None) == (precision == "fp16")
    assert all(math.isfinite(record.train_loss or math.nan) for record in training.records)


def test_channels_last_reaches_the_network() -> None:
    formats: list[bool] = []
    model = network()
    model[0].register_forward_pre_hook(
        lambda _, given: formats.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    trained(model, channels_last=True)
    assert all(formats)
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_pending_micro_batches_are_committed_once_a_step() -> None:
    norm = lambda c: nk.BCN(c, groups=2, micro=True, update_every="step")  # noqa: E731
    training = trained(network(norm), batch=2, accumulate=4)
    layer = training.trainer.model[1]
    assert layer.num_batches_tracked.item() == 2 * training.plan.steps
    assert layer.pending_count.item() == 0
