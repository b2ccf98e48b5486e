"""An author's folder: an experiment with a task of its own beside it."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

TASK = '''
import torch
from torch.nn import functional as F
from distance import nearest
from normkit.lab.tasks import Evaluation, Task, TaskMetric


class Contrastive(Task):
    """Two noisy views of each image belong together."""

    metrics = {"nearest": TaskMetric(), "spread": TaskMetric(False, percent=False)}

    def __init__(self, noise=0.1):
        self.noise = noise

    def views(self, batch):
        images, _ = batch
        return [images + self.noise * torch.randn_like(images) for _ in range(2)]

    def loss(self, model, batch):
        first, second = (F.normalize(model(each)) for each in self.views(batch))
        match = F.cross_entropy(5 * first @ second.T, torch.arange(len(first)))
        return {"match": match, "size": 0.01 * first.pow(2).mean()}

    def evaluation(self, part):
        return Views(self)


class Views(Evaluation):
    def __init__(self, task):
        self.task, self.right = task, []

    def add(self, model, batch):
        self.right += nearest(*(model(each) for each in self.task.views(batch)))

    def values(self):
        return {"nearest": self.right, "spread": 0.5}
'''

DISTANCE = """
import torch

def nearest(first, second):
    found = torch.cdist(first, second).argmin(1)
    return (found == torch.arange(len(first))).double().tolist()
"""

EXPERIMENT = """
title = "Which norm for pairs?"
baseline = "torch"
seeds = 2
task = "mytask.py:Contrastive"
data = "synthetic:1x8x8x3x40"
model = "native:small_cnn"
[train]
epochs = 2
batch = 16
lr = 0.05
[[variants]]
name = "torch"
[[variants]]
name = "gn"
norm = "gn"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mytask.py").write_text(dedent(TASK))
    (tmp_path / "distance.py").write_text(dedent(DISTANCE))
    (tmp_path / "mine.toml").write_text(EXPERIMENT)
    return tmp_path
