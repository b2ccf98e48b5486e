"""On a GPU: the same pictures as on a CPU, in a CUDA graph as well, and no wait for the device."""

from __future__ import annotations

import pytest
import torch

from normkit.lab.data import load, mix, mixing_weights, soften
from normkit.lab.experiment import Data

NAME = "synthetic:3x32x32x10x500"
SPECS = [
    Data(NAME),
    Data(NAME, flip=True),
    Data(NAME, flip=True, crop=4),
    Data(NAME, crop=4, cutout=8),
    Data(NAME, flip=True, crop=4, rotation=15.0),
    Data(NAME, flip=True, resized_crop=True, cutout=8),
]


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_the_same_as_on_a_cpu(spec: Data) -> None:
    here, there = (load(spec, device).train for device in ("cpu", "cuda"))
    assert torch.equal(here.plan(1, 2), there.plan(1, 2).cpu())
    for (images, labels), (others, same) in zip(
        here.batches(128, seed=1, shuffle=True, augment=True),
        there.batches(128, seed=1, shuffle=True, augment=True),
        strict=True,
    ):
        assert torch.equal(labels, same.cpu())
        if spec.rotation:  # a pixel halfway between two may go either way
            assert (images != others.cpu()).float().mean() < 1e-3
        else:  # interpolation rounds 255 to 2⁻²⁴ here and there; the rest is exact
            limit = 255 * 2**-18 if spec.resized_crop else 0.0
            assert (images - others.cpu()).abs().max() <= limit


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_in_a_graph(spec: Data) -> None:
    train = load(spec, "cuda").train
    plan = train.plan(1, 0)
    weights = mixing_weights(0.2, len(train), seed=1, epoch=0, device="cuda")
    rows, shares = plan[:128].clone(), weights[:128].clone()

    def step() -> tuple[torch.Tensor, ...]:
        images, labels = train.gather(rows)
        return images, labels, *mix(images, soften(labels, 10, 0.1), shares)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # which writes the rows
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for first in (128, 256):
        rows.copy_(plan[first : first + 128])
        shares.copy_(weights[first : first + 128])
        graph.replay()
        for one, other in zip(recorded, step(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("spec", SPECS, ids=range(len(SPECS)))
def test_nothing_waits(spec: Data) -> None:
    train = load(spec, "cuda").train
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        batches = [len(labels) for _, labels in train.batches(128, shuffle=True, augment=True)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert batches == [128, 128, 128, 116]


@pytest.mark.gpu
def test_a_crop_needs_no_more_memory_than_its_images() -> None:
    """The view that windows are cut from has 28 times the set's bytes, if anything copies it."""
    train = load(Data("synthetic:3x32x32x10x20000", crop=4), "cuda").train
    plan = train.plan(1, 0)
    train.gather(plan[:128])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train.gather(plan[:128])
    images = 128 * 3 * 32 * 32
    # bytes, float32, and eight bytes for the place of each of its rows; twice that, for blocks
    assert torch.cuda.max_memory_allocated() - before < 2 * images * (1 + 4 + 8 / 32) + (1 << 20)
