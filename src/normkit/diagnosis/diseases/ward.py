"""Where patients come from: data, a seed, and reference models that are trained once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normkit.diagnosis.diseases.nets import Norm
from normkit.diagnosis.diseases.patient import Patient
from normkit.diagnosis.diseases.schooling import EPOCHS, Digits, Loader, loader_of, school, seeded

Made = Callable[[], nn.Module]
State = dict[str, Tensor]


class Ward:
    """Trains models on digits, and hands out copies with the arguments for their diagnosis."""

    def __init__(
        self, digits: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], seed: int = 0
    ) -> None:
        self.digits = Digits(*digits)
        self.seed = seed
        self._trained: dict[str, tuple[nn.Module, int, list[State]]] = {}

    # ---------------------------------------------------------------- data

    def train_loader(self, batch: int = 64, shift: int = 0) -> Loader:
        return loader_of(*self.digits.train, seed=self.seed + 1000 + shift, batch=batch)

    def test_loader(self, change: Callable[[Tensor], Tensor] | None = None) -> Loader:
        images, labels = self.digits.test
        images = images if change is None else change(images)
        return loader_of(images, labels, seed=None, drop_last=False)

    # ---------------------------------------------------------------- models

    def new(self, make: Made) -> nn.Module:
        """An untrained model."""
        with seeded(self.seed):
            return make()

    def taught(self, make: Made, batch: int = 64, **how: Any) -> tuple[nn.Module, int]:
        """A model trained for this occasion, and its number of steps."""
        model = self.new(make).train()
        return model, self.teach(model, batch, **how)

    def teach(self, model: nn.Module, batch: int = 64, **how: Any) -> int:
        with seeded(self.seed):
            return school(model, self.train_loader(batch), **how)

    def known(self, name: str, make: Made, **how: Any) -> tuple[nn.Module, int, list[State]]:
        """A copy of a reference model, which is trained once; its steps, its state after each
        epoch, and first at the start."""
        if name not in self._trained:
            model = self.new(make).train()
            states = [_state(model)]
            steps = self.teach(model, after=lambda _: states.append(_state(model)), **how)
            self._trained[name] = model.eval(), steps, states
        model, steps, states = self._trained[name]
        return copy.deepcopy(model), steps, states

    def patient(self, model: nn.Module, steps: int | None = None, **more: Any) -> Patient:
        """With the data that everybody has; the model in eval mode."""
        given = {
            "loader": self.test_loader(),
            "train_loader": self.train_loader(),
            "steps": steps,
        }
        return Patient(model.eval(), {**given, **more})

    # ---------------------------------------------------------------- the usual host

    def host(self, norm: Norm = nn.BatchNorm2d) -> tuple[nn.Module, int, list[State]]:
        """The convolutional network that most diseases are injected into."""
        from normkit.diagnosis.diseases.nets import Cnn

        return self.known(f"cnn-{_name(norm)}", lambda: Cnn(norm))

    def residual(self) -> tuple[nn.Module, int, list[State]]:
        from normkit.diagnosis.diseases.nets import ResNet

        return self.known("resnet-bn", lambda: ResNet(nn.BatchNorm2d))

    def mlp(self) -> tuple[nn.Module, int, list[State]]:
        from normkit.diagnosis.diseases.nets import Mlp

        return self.known("mlp-bn", lambda: Mlp(nn.BatchNorm1d))

    @property
    def epochs(self) -> int:
        return EPOCHS


def _name(norm: Any) -> str:
    return getattr(norm, "__name__", type(norm).__name__)


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
