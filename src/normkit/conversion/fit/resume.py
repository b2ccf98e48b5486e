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
        norms: dict[str, str],
    ) -> None:
        """``targets`` are the old network's outputs, ``norms`` the new norms with their options."""
        self.trained, self.optimizer, self.schedule = trained, optimizer, schedule
        self.path = None if fit.checkpoint is None else Path(os.fspath(fit.checkpoint))
        self.step = self.best_step = self.waited = 0
        self.start = self.best = self._copies()
        self.error = math.inf
        self.resumed = False
        self.task: dict[str, Any] = {
            "number of steps": fit.distill,
            "parameters": "all" if fit.everything else "norms",
            "standardize": fit.standardize,
            "augment": fit.augment,
            "new norms": norms,
            "trained tensors": {name: list(value.shape) for name, value in trained.items()},
            "outputs of the old network": [float(t.double().norm()) for t in targets],
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
                "start": self.start,
                "now": self._copies(),
                "optimizer": self.optimizer.state_dict(),
                "schedule": self.schedule.state_dict(),
                **{name: getattr(self, name) for name in KEPT},
            }
            atomic_write(self.path, lambda name: torch.save(state, name))

    def take_start(self) -> None:
        """Back to the fit."""
        self.best, self.best_step = self.start, 0
        self._write(self.start)

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
        different = self._differences(task, state.get("start", {}))
        if different:
            raise OptionError(
                f"checkpoint={str(path)!r} is of another run. What differs: "
                f"{'; '.join(different)}. Delete it to start anew, or name another file. "
                f"{UNTOUCHED}"
            )
        self._write(now)
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        for name, value in zip(KEPT, own, strict=True):
            setattr(self, name, value)
        self.resumed = True

    def _differences(self, task: dict[str, Any], start: dict[str, Tensor]) -> list[str]:
        """In what the run of a file is another than this one, in words; the first thing of each."""
        found = []
        for name, own in self.task.items():
            other = task.get(name)
            if isinstance(own, dict) and isinstance(other, dict):
                where = next((k for k in (*own, *other) if own.get(k) != other.get(k)), None)
                if where is not None:
                    was, now = (each.get(where, "nothing") for each in (other, own))
                    found.append(f"{name} ({where}: {was} there, {now} here)")
            elif isinstance(own, list) and isinstance(other, list):
                if len(own) != len(other) or not all(map(_near, own, other)):
                    found.append(name)
            elif own != other:
                found.append(f"{name} ({other} there, {own} here)")
        if not found and not (start.keys() == self.start.keys() and self._same_start(start)):
            found.append("the fit it went on from")
        return found

    def _same_start(self, start: dict[str, Tensor]) -> bool:
        return all(
            float((value - start[name]).norm()) <= SAME * float(value.norm())
            for name, value in self.start.items()
        )


def _near(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=SAME)
