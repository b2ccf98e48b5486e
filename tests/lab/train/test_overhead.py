"""What the loop adds to a step, by count: times depend on the machine."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from lab.train.stand_ins import network, run, sets
from normkit.lab.data import load
from normkit.lab.experiment import Data, Run, Setting, Train
from normkit.lab.train import Training

# of a step on a CPU: right answers (argmax, equal, sum), the type of the loss, and two numbers that
# are read for the history
ADDED = 6
WAITS = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "equal")


class Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(training: Training, steps: int) -> Counter[str]:
    with Count() as count:
        for _ in range(steps):
            training.step()
    return count.found


def test_a_step_adds_a_few_operations_to_a_bare_one() -> None:
    training = Training(run(batch=11), sets(), model=network())
    training.step()  # the first one of an epoch gets its order
    found = counted(training, 1)

    model = network()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True
    )
    batches = sets().train.batches(11, shuffle=True)
    next(batches)
    with Count() as bare:
        images, labels = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    assert sum((found - bare.found).values()) <= ADDED
    assert found["convolution_backward"] == bare.found["convolution_backward"] == 2


def test_no_step_reads_a_number_from_the_device() -> None:
    # a network without norms: on a CPU ours look at their counters
    plain = lambda channels: torch.nn.Identity()  # noqa: E731
    setting = Setting(Data("synthetic:2x5x5x3x90", flip=True), train=Train(epochs=2, batch=8))
    # as on a GPU, where steps may be recorded
    sets, refused = load(setting.data), lambda action: "not here"
    training = Training(Run(setting, 1), sets, model=network(plain), capture=refused)
    steps = training.plan.steps
    found = counted(training, steps)
    assert training.at == steps
    # torch's fused kernel for CPUs reads the rate, once a step and group; that of GPUs does not
    assert sum(found[name] for name in WAITS) <= steps * len(training.trainer.rates.bases)
