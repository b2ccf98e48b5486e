"""Where distilling is: in memory, and in a file from which it goes on after an interruption."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normkit.conversion.fit.data import UNTOUCHED, Fit
from normkit.core.atomic_write import atomic_write
from normkit.errors import OptionError

SAME = 1e-3  # how near the old network's outputs must be, relative: runs on a GPU differ a little
KEPT = ("step", "best", "error", "best_step", "waited")


class Course:
    """The steps that were done, the best values so far, and the optimizer's state."""

    def __init__(
        self,
        trained: dict[str, Tensor],
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LRScheduler,
        fit: Fit,
        targets: list[Tensor],
    ) -> None:
        self.trained, self.optimizer, self.schedule = trained, optimizer, schedule
        self.path = None if fit.checkpoint is None else Path(os.fspath(fit.checkpoint))
        self.step = self.best_step = self.waited = 0
        self.best, self.error = self._copies(), math.inf
        self.resumed = False
        self.task: dict[str, Any] = {
            "steps": fit.distill,
            "tensors": {name: list(value.shape) for name, value in trained.items()},
            "outputs": math.sqrt(sum(float(t.double().square().sum()) for t in targets)),
        }
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def record(self, error: float) -> None:
        """The error of the outputs at this step, on what is held out."""
        if error < self.error:
            self.best, self.error, self.best_step, self.waited = (
                self._copies(), error, self.step, 0,
            )  # fmt: skip
        else:
            self.waited += 1
        if self.path is not None:
            state = {
                "task": self.task,
                "now": self._copies(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                **{name: getattr(self, name) for name in KEPT},
            }
            atomic_write(self.path, lambda name: torch.save(state, name))

    def take_best(self) -> None:
        self._write(self.best)

    def _copies(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.trained.items()}

    def _write(self, values: dict[str, Tensor]) -> None:
        for name, tensor in self.trained.items():
            tensor.data.copy_(values[name])

    def _read(self, path: Path) -> None:
        device = next(iter(self.trained.values())).device
        try:
            state = torch.load(path, map_location=device, weights_only=True)
            task, now, own = state["task"], state["now"], [state[name] for name in KEPT]
        except Exception as error:
            raise OptionError(
                f"checkpoint={str(path)!r} holds no state of distilling: {error}. Delete it to "
                f"start anew, or name another file. {UNTOUCHED}"
            ) from error
        different = [name for name in ("steps", "tensors") if task[name] != self.task[name]]
        if not math.isclose(task["outputs"], self.task["outputs"], rel_tol=SAME):
            different.append("outputs of the old network")
        if different:
            raise OptionError(
                f"checkpoint={str(path)!r} is of another run: its {', '.join(different)} differ. "
                f"Delete it to start anew, or name another file. {UNTOUCHED}"
            )
        self._write(now)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for name, value in zip(KEPT, own, strict=True):
            setattr(self, name, value)
        self.resumed = True
