"""Batches: the seed and the epoch decide, and nothing else does."""

from __future__ import annotations

import pytest
import torch

from normkit.lab.data import TensorLoader, load
from normkit.lab.experiment import Data

BUSY = Data("synthetic:3x12x10x4x100", flip=True, crop=2, rotation=20.0, cutout=4)


def loader(spec: Data = BUSY) -> TensorLoader:
    train = load(spec).train
    assert isinstance(train, TensorLoader)
    return train


def epoch_of(train: TensorLoader, **said: object) -> list[torch.Tensor]:
    usual = {"seed": 1, "epoch": 0, "shuffle": True, "augment": True}
    return [images for images, _ in train.batches(32, **{**usual, **said})]


def test_every_sample_once_an_epoch() -> None:
    order = loader().order(seed=1, epoch=0)
    assert sorted(order.tolist()) == list(range(100))


@pytest.mark.parametrize(
    "said", [{"seed": 2}, {"epoch": 1}, {"shuffle": False}, {"augment": False}]
)
def test_what_changes_an_epoch(said: dict[str, object]) -> None:
    train = loader()
    assert all(map(torch.equal, epoch_of(train), epoch_of(loader())))
    assert not torch.equal(epoch_of(train)[0], epoch_of(train, **said)[0])


def test_other_random_numbers_change_nothing() -> None:
    train = loader()
    before = epoch_of(train)
    torch.rand(17)
    state = torch.get_rng_state()
    after = epoch_of(train)
    assert all(map(torch.equal, before, after))
    assert torch.equal(state, torch.get_rng_state())


def test_the_order_is_the_same_for_all_augmentations() -> None:
    plain = loader(Data(BUSY.name))
    assert torch.equal(plain.order(3, 4), loader().order(3, 4))
    assert torch.equal(plain.plan(3, 4), loader().plan(3, 4)[:, 0])


@pytest.mark.parametrize("spec", [BUSY, Data(BUSY.name)], ids=["busy", "plain"])
def test_an_epoch_can_be_entered_anywhere(spec: Data) -> None:
    train = loader(spec)
    for start in range(5):
        rest = epoch_of(train, start=start)
        assert len(rest) == 4 - start
        assert all(map(torch.equal, epoch_of(train)[start:], rest))


def test_batches_are_rows_of_the_plan() -> None:
    train = loader()
    plan = train.plan(seed=1, epoch=0)
    taken = [train.gather(plan[first : first + 32]) for first in range(0, 100, 32)]
    given = list(train.batches(32, seed=1, epoch=0, shuffle=True, augment=True))
    for (images, labels), (others, same) in zip(taken, given, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, same)


def test_a_static_buffer_gives_the_same() -> None:
    """A CUDA graph reads its rows from memory of its own, which may have other strides."""
    train = loader()
    plan = train.plan(seed=1, epoch=0)
    buffer = torch.zeros(32, plan.shape[1], dtype=torch.int64)
    buffer.copy_(plan[32:64])
    assert torch.equal(train.gather(buffer)[0], train.gather(plan[32:64])[0])


def test_sizes_of_batches() -> None:
    train = loader()
    assert [len(x) for x in epoch_of(train)] == [32, 32, 32, 4]
    assert [len(x) for x in epoch_of(train, drop_last=True)] == [32, 32, 32]
    assert [len(x) for x, _ in train.batches(0)] == [100]
    assert [len(x) for x, _ in train.batches(1000)] == [100]


def shades(image: torch.Tensor) -> tuple[int, ...]:
    return tuple(image.round().int().flatten().tolist())


def test_labels_belong_to_their_images() -> None:
    train = loader(Data("digits", crop=2, flip=True))
    images, labels = next(load(Data("digits", normalize="none")).train.batches(0))
    plain = dict(zip(map(shades, images * 16), labels.tolist(), strict=True))
    images, labels = next(train.batches(50, seed=5, shuffle=True))
    back = (images - train.shift) / train.scale
    assert [plain[shades(each)] for each in back] == labels.tolist()


def test_no_operation_asks_the_host() -> None:
    """On the meta device there are no numbers: whoever asks for one, fails."""
    spec = Data(BUSY.name, flip=True, resized_crop=True, cutout=4)
    for each in (BUSY, spec, Data(BUSY.name, flip=True, crop=1), Data(BUSY.name)):
        train = load(each, device="meta").train
        images, labels = train.gather(train.plan(1, 0)[:32])
        assert images.shape == (32, 3, 12, 10)
        assert images.is_meta
        assert labels.shape == (32,)


class _Kernels(torch.utils._python_dispatch.TorchDispatchMode):
    VIEWS = ("aten.slice", "aten.select.", "aten.view", "aten.unsqueeze", "aten._unsafe_view")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if not str(function).startswith(self.VIEWS):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("said", "most"),
    [
        ({}, 5),  # two selections; conversion, scale, shift
        ({"crop": 4}, 6),  # where the rows begin
        ({"flip": True, "crop": 4}, 11),  # mask, flip, three for the choice
        ({"flip": True, "crop": 4, "cutout": 8}, 15),
        ({"flip": True, "crop": 4, "rotation": 15.0}, 10),
    ],
    ids=str,
)
def test_few_operations(said: dict[str, object], most: int) -> None:
    train = load(Data("synthetic:3x32x32x10x64", **said)).train
    plan = train.plan(1, 0)
    with _Kernels() as kernels:
        train.gather(plan[:32])
    assert 0 < len(kernels.names) <= most, kernels.names
