"""native:small_cnn is small, and still shows what small batches do to a batch norm."""

from __future__ import annotations

import pytest
import torch

from normkit.lab.experiment import ModelStep, Run, Setting, Train
from normkit.lab.models.variant import build_variant

EPOCHS, BATCH = 5, 64


def accuracy(worker_batch: int, seed: int) -> float:
    """On 360 digits, after training on the others: plain SGD, nothing of the lab's own loop."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:360], order[360:]
    setting = Setting(steps=(ModelStep("norm", "bn"),), train=Train(worker_batch=worker_batch))
    model = build_variant(setting, 10, (1, 8, 8), Run(setting, seed).torch_seed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    drawn = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        for chosen in train[torch.randperm(len(train), generator=drawn)].split(BATCH):
            if len(chosen) == BATCH:
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
                loss.backward()
                optimizer.step()
        schedule.step()
    with torch.no_grad():
        found = model.eval()(images[test]).argmax(1)
    return (found == labels[test]).float().mean().item()


def test_two_samples_a_worker_cost_a_batch_norm_more_than_a_percent() -> None:
    small, large = (sum(accuracy(k, seed) for seed in (1, 2)) / 2 for k in (2, 64))
    assert large > 0.95, "the network should learn the digits"
    assert large - small > 0.01
