"""What is watched beside the score, against the measures themselves."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit as nk
from lab.train.stand_ins import network, numbers, run, sets
from normkit.diagnosis.measures import condensation, gradient_factor
from normkit.lab.experiment import Watch
from normkit.lab.experiment.variants import MEASURES as ALLOWED
from normkit.lab.results import Epoch, Result
from normkit.lab.train import Training
from normkit.lab.train.corruption import CORRUPTIONS, corrupted
from normkit.lab.train.watch import MEASURES


def watched(
    *measures: str,
    model: nn.Module | None = None,
    every: int = 1,
    epochs: int = 2,
    samples: int = 8,
) -> Training:
    watch = Watch(measures=measures, every=every, samples=samples)
    training = Training(
        run(epochs=epochs, precision="float64", watch=watch), sets(), model=model or network()
    )
    while training.step():
        pass
    return training


def last(training: Training) -> Epoch:
    return training.records[-1]


def test_a_file_may_ask_for_what_can_be_measured() -> None:
    assert set(ALLOWED) == set(MEASURES)


def test_condensation_is_of_the_first_norm_on_a_fixed_batch() -> None:
    training = watched("condensation")
    model, given = training.trainer.model, sets().train
    images, _ = next(given.batches(8, seed=0, shuffle=True))
    with torch.no_grad():
        expected = condensation(model[0](images.double())).item()
    assert last(training).measures["condensation"] == pytest.approx(expected, rel=1e-12)
    with torch.no_grad():
        start = condensation(network().double()[0](images.double())).item()
    assert training.records[0].epoch == 0
    assert training.records[0].measures["condensation"] == pytest.approx(start, rel=1e-12)


def test_a_norm_on_the_images_is_not_the_first() -> None:
    with_input = nn.Sequential(nk.InputNorm(2), *network())
    training = watched("condensation", model=with_input)
    images, _ = next(sets().train.batches(8, seed=0, shuffle=True))
    model = training.trainer.model.eval()
    with torch.no_grad():
        expected = condensation(model[1](model[0](images.double()))).item()
    assert last(training).measures["condensation"] == pytest.approx(expected, rel=1e-12)


def test_esm_is_of_the_test_set_in_eval_mode() -> None:
    training = watched("esm")
    model, given = training.trainer.model.eval(), sets().test
    with torch.no_grad():
        x = model[0](given.images.double())
        mean = (model[1].running_mean - x.mean((0, 2, 3))).norm().item()
        std = (model[1].running_var.sqrt() - x.var((0, 2, 3)).sqrt()).norm().item()
    measures = last(training).measures
    assert measures["esm_mean"][0] == pytest.approx(mean, rel=1e-9)
    # by a ratio of counts in float32 the variance is made unbiased
    assert measures["esm_std"][0] == pytest.approx(std, rel=1e-6)
    assert len(measures["esm_mean"]) == 2


def test_gradient_factors_are_of_a_batch_in_training_mode() -> None:
    training = watched("gradient_factor", epochs=1)
    model = training.trainer.model
    images, _ = next(sets().train.batches(8, seed=0, shuffle=True))
    with torch.no_grad():
        first = model[0](images.double())
        # the second norm sees what the first one makes of the batch's own statistics
        model.train()
        second = model[4](model[3](model[2](model[1](first))))
        expected = [
            gradient_factor(norm.weight, x.var((0, 2, 3), correction=0)).abs().mean().item()
            for norm, x in ((model[1], first), (model[5], second))
        ]
    # moments of norms that are not ours are taken in float32
    assert last(training).measures["gradient_factor"] == pytest.approx(expected, rel=1e-5)


def test_groups_gates_and_frozen_layers() -> None:
    grouped = watched("stat_diff", model=network(lambda c: nk.GN(c, groups=2)))
    assert len(last(grouped).measures["stat_diff"]) == 2
    gated = watched("gate_saturation", "frozen", model=network(nk.UBN))
    assert last(gated).measures["frozen"] in ([0.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0])
    assert all(0 <= share <= 1 for share in last(gated).measures["gate_saturation"])
    always = watched("frozen", model=network(lambda c: nk.UBN(c, tau=1.0)))
    assert last(always).measures["frozen"] == [1.0, 1.0]


def test_parts_of_gradients_of_standardized_weights() -> None:
    model = network()
    nk.standardize(model, "ws", example=torch.zeros(2, 2, 5, 5))
    measures = last(watched("ws_gradients", model=model)).measures
    assert {len(measures[f"ws_gradients_{part}"]) for part in "abc"} == {2}
    assert min(measures["ws_gradients_c"]) > 0
    # a norm follows: scaling a standardized weight changes almost nothing, so a is almost 0
    assert max(measures["ws_gradients_a"]) < 1e-3 * min(measures["ws_gradients_c"])


def test_disturbance_comes_last_and_harms() -> None:
    training = watched("disturbance", epochs=3)
    assert [bool(record.measures) for record in training.records] == [False, False, False, True]
    by_size = last(training).measures["disturbance"]
    assert by_size[0] == pytest.approx(last(training).test_accuracy)
    assert len(by_size) == 6
    assert all(0 <= accuracy <= 1 for accuracy in by_size)


def test_damaged_images_as_trained_and_adapted() -> None:
    training = watched("corruption", epochs=3)
    measures = last(training).measures
    plain, adapted = measures["corruption"], measures["corruption_adapted"]
    assert plain[0] == adapted[0] == pytest.approx(last(training).test_accuracy)
    assert len(plain) == len(adapted) == 1 + len(CORRUPTIONS)
    assert plain != adapted
    batch_free = last(watched("corruption", model=network(nk.GN))).measures
    assert batch_free["corruption"] == batch_free["corruption_adapted"]


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_damage_is_the_same_each_time_and_changes_images(name: str) -> None:
    batches = [(torch.randn(3, 2, 8, 8), torch.arange(3)) for _ in range(2)]
    first, again = list(corrupted(batches, name)), list(corrupted(batches, name))
    for (images, labels), (x, y), (same, _) in zip(batches, first, again, strict=True):
        assert torch.equal(x, same)
        assert torch.equal(labels, y)
        assert x.shape == images.shape
        assert (x - images).abs().mean() > 0.01


def test_what_has_no_running_statistics_cannot_be_disturbed() -> None:
    by_size = last(watched("disturbance", model=network(nk.GN))).measures["disturbance"]
    assert len(set(by_size)) == 1


def test_norms_without_a_meaning_keep_their_place() -> None:
    norms = iter([nk.GN(4, groups=2), nk.UBN(4)])
    measures = last(watched("esm", "frozen", "stat_diff", model=network(lambda _: next(norms))))
    found = measures.measures
    assert {name: [v is None for v in found[name]] for name in found} == {
        "esm_mean": [True, False],
        "esm_std": [True, False],
        "frozen": [True, False],
        "stat_diff": [False, True],
    }


def test_measures_without_a_meaning_are_left_out() -> None:
    assert last(watched("ws_gradients", "frozen", "gate_saturation")).measures == {}


@pytest.mark.parametrize(
    "norm", [nk.UBN, nn.BatchNorm2d, lambda c: nk.BCN(c, groups=2, micro=True)]
)
def test_watching_changes_nothing(norm: object) -> None:
    model = network(norm)
    nk.standardize(model, "ws", example=torch.zeros(2, 2, 5, 5))
    plain = network(norm)
    nk.standardize(plain, "ws", example=torch.zeros(2, 2, 5, 5))
    seen, unseen = watched(*MEASURES, model=model), watched(model=plain)

    def scores(training: Training) -> list[tuple[float | None, ...]]:
        rows = numbers(training.result()).epochs
        return [(e.train_loss, e.test_loss, e.test_accuracy) for e in rows if e.epoch]

    assert scores(seen) == scores(unseen)
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    result = seen.result()
    assert Result.from_json(result.to_json()) == result


def test_every_so_many_epochs_and_at_the_end() -> None:
    training = watched("condensation", every=2, epochs=5)
    assert [r.epoch for r in training.records if r.measures] == [0, 2, 4, 5]


def test_esm_without_estimates_or_norms() -> None:
    training = watched("esm")
    assert training.records[0].epoch == 0
    assert not training.records[0].measures
    bare = nn.Sequential(nn.Flatten(), nn.Linear(sets().test.images[0].numel(), 3))
    assert not last(watched("esm", model=bare)).measures
