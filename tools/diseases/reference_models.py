"""Small models trained once a seed, and the cases for a diagnosis that are made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from normkit.core.optional_dependencies import require
from normkit.diagnosis.diagnose import diagnose
from normkit.diagnosis.diagnosis import Diagnosis
from tools.diseases.networks import Cnn, Mlp, Norm, ResNet

BATCH = 64
EPOCHS = 6
RATE = 0.1
HELD_OUT = 360  # images to test on

Loader = DataLoader[tuple[Tensor, ...]]
State = dict[str, Tensor]
Trained = tuple[nn.Module, int, list[State]]
"""A model, the steps of its training, and its states: at the start and after each epoch."""


class Digits(NamedTuple):
    """Images (N, 1, 8, 8) with values from 0 to 1, and classes (N,): to train and to test on."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load_digits() -> Digits:
    """scikit-learn's digits: 1,437 to train on and 360 to test on, in a fixed random order."""
    datasets = require("sklearn.datasets", "lab", "The suite of diseases")
    images, labels = datasets.load_digits(return_X_y=True)
    x = torch.as_tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.as_tensor(labels, dtype=torch.long)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    kept, held_out = order[:-HELD_OUT], order[-HELD_OUT:]
    return Digits((x[kept], y[kept]), (x[held_out], y[held_out]))


def loader_of(
    images: Tensor,
    labels: Tensor,
    seed: int | None,
    batch: int = BATCH,
    drop_last: bool = True,
) -> Loader:
    """Batches in an order that depends on the seed; in that of the data if it is None."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return DataLoader(
        TensorDataset(images, labels),
        batch,
        shuffle=seed is not None,
        drop_last=drop_last,
        generator=generator,
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of a seed inside; those of the caller go on as before."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        yield


def train(
    model: nn.Module,
    loader: Loader,
    *,
    epochs: int = EPOCHS,
    rate: float = RATE,
    before: Callable[[int], Any] | None = None,
    after: Callable[[int], Any] | None = None,
    prepare: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> int:
    """Train with a rate that rises and falls; ``before`` and ``after`` each epoch something else.

    Returns how many steps were made. The modes of the model are the caller's.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9, weight_decay=1e-4)
    steps = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
    if prepare is not None:
        prepare(optimizer)
    with torch.enable_grad():
        for epoch in range(epochs):
            if before is not None:
                before(epoch)
            for images, labels in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()
                schedule.step()
            if after is not None:
                after(epoch)
    return steps


@dataclass(eq=False)
class Case:
    """A model and the arguments of ``diagnose`` for it, ``loader`` among them."""

    model: nn.Module
    arguments: dict[str, Any] = field(default_factory=dict)

    def diagnose(self) -> Diagnosis:
        return diagnose(self.model, **self.arguments)


@dataclass(frozen=True)
class Disease:
    """A fault: how it comes about, how it is injected, and the finding that has to name it."""

    name: str
    finding: str
    story: str
    inject: Callable[[ReferenceModels], Case]


@dataclass(frozen=True)
class HealthyModel:
    """A healthy model: none of its findings may be an alarm."""

    name: str
    about: str
    make: Callable[[ReferenceModels], Case]


class ReferenceModels:
    """Trains models on digits, and hands out copies with the arguments for their diagnosis."""

    def __init__(self, digits: Digits, seed: int = 0) -> None:
        self.digits = digits
        self.seed = seed
        self._trained: dict[str, Trained] = {}

    def train_loader(self, batch: int = 64, shift: int = 0) -> Loader:
        return loader_of(*self.digits.train, seed=self.seed + 1000 + shift, batch=batch)

    def test_loader(self, change: Callable[[Tensor], Tensor] | None = None) -> Loader:
        images, labels = self.digits.test
        images = images if change is None else change(images)
        return loader_of(images, labels, seed=None, drop_last=False)

    def untrained(self, make: Callable[[], nn.Module]) -> nn.Module:
        """An untrained model."""
        with seeded(self.seed):
            return make()

    def train_new(
        self, make: Callable[[], nn.Module], batch: int = 64, **how: Any
    ) -> tuple[nn.Module, int]:
        """A model trained for this occasion, and its number of steps."""
        model = self.untrained(make).train()
        return model, self.train(model, batch, **how)

    def train(self, model: nn.Module, batch: int = 64, **how: Any) -> int:
        with seeded(self.seed):
            return train(model, self.train_loader(batch), **how)

    def trained(self, name: str, make: Callable[[], nn.Module], **how: Any) -> Trained:
        """A copy of a reference model, which is trained once."""
        if name not in self._trained:
            model = self.untrained(make).train()
            states = [_state(model)]
            steps = self.train(model, after=lambda _: states.append(_state(model)), **how)
            self._trained[name] = model.eval(), steps, states
        model, steps, states = self._trained[name]
        return copy.deepcopy(model), steps, states

    def case(self, model: nn.Module, steps: int | None = None, **more: Any) -> Case:
        """With the data that everybody has; the model in eval mode."""
        given = {
            "loader": self.test_loader(),
            "train_loader": self.train_loader(),
            "steps": steps,
        }
        return Case(model.eval(), {**given, **more})

    def cnn(self, norm: Norm = nn.BatchNorm2d) -> Trained:
        """The convolutional network that most diseases are injected into."""
        name = getattr(norm, "__name__", type(norm).__name__)
        return self.trained(f"cnn-{name}", lambda: Cnn(norm))

    def residual(self) -> Trained:
        return self.trained("resnet-bn", lambda: ResNet(nn.BatchNorm2d))

    def mlp(self) -> Trained:
        return self.trained("mlp-bn", lambda: Mlp(nn.BatchNorm1d))


def _state(model: nn.Module) -> State:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def norms_of(model: nn.Module) -> list[Any]:
    """Its norms with running statistics, in order."""
    return [m for m in model.modules() if isinstance(getattr(m, "running_mean", None), Tensor)]


@torch.no_grad()
def refresh(model: nn.Module, loader: Loader, epochs: int = 5) -> int:
    """Let running statistics follow weights that were changed; returns how many batches it took."""
    model.train()
    for _ in range(epochs):
        for images, _labels in loader:
            model(images)
    model.eval()
    return epochs * len(loader)


def set_statistics(model: nn.Module, state: State) -> None:
    """Running means and variances of another state, with all else as it is."""
    for name, buffer in model.named_buffers():
        if "running_" in name:
            with torch.no_grad():
                buffer.copy_(state[name])
