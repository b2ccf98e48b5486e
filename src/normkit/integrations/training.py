"""What callbacks of training libraries share: watch the norms, tell them the rate, calibrate."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

from torch import nn

from normkit import follow_learning_rate
from normkit.calibration import Calibration, calibrate
from normkit.diagnosis import Observer, observe
from normkit.errors import OptionError
from normkit.inspection import select, survey
from normkit.inspection.batches import Forward
from normkit.layers.base import Normalizer

NEVER_CALLED = (nn.ModuleList, nn.ModuleDict)


class NormMonitor:
    """The norms of a model from the first step of a training to its end.

        every       measure the norms in every so-many-th step, as ``observe``; None for never
        measures    which, as in ``observe``
        where       which norms are watched and calibrated, as in ``select``
        calibrate   True: when training has ended, statistics from the batches it trained with;
                    or batches to take instead
        images      of how many images, for calibration; all, if None. With several processes,
                    each has its part of them, and all get the statistics of all
        forward     ``forward(model, batch)`` for calibration, if a batch is no input of the model

    Layers that follow the learning rate are told it before every forward. A library's callback
    calls ``start``, ``before_forward``, ``scalars`` and ``finish``.
    """

    def __init__(
        self,
        *,
        every: int | None = 100,
        measures: Iterable[str] | None = None,
        where: Any = None,
        calibrate: Any = False,
        images: int | None = None,
        forward: Forward | None = None,
    ) -> None:
        if calibrate is None:
            raise OptionError("Expected calibrate to be False, True or batches, got None.")
        self.every, self.measures, self.where = every, measures, where
        self.calibrate, self.images, self.forward = calibrate, images, forward
        self.observer: Observer | None = None
        self.calibration: Calibration | None = None
        self.model: nn.Module | None = None
        self._following: Any = None
        self._path = ""
        self._sent = self._first_step = 0
        self._batches = 1

    def start(
        self, model: nn.Module, optimizer: Any, first_step: int = 0, batches_a_step: int = 1
    ) -> None:
        """Before the first step, when model and optimizer exist; a resumed training begins later,
        and one that accumulates gradients has several batches a step."""
        self.stop()
        self.model, self.calibration, self._sent = model, None, 0
        self._first_step, self._batches = first_step, batches_a_step
        if self.every is not None:
            sites = select(survey(model), self.where)
            norms = {id(site.module) for site in sites}
            self._path = _around(model, [site.path for site in sites])
            self.observer = observe(
                model.get_submodule(self._path),
                self.every,
                measures=self.measures,
                where=lambda site: id(site.module) in norms,
            )
            self.observer.__enter__()
        layers = [m for m in model.modules() if isinstance(m, Normalizer)]
        if optimizer is not None and any(layer.needs_update_rate for layer in layers):
            # wrappers of optimizers hold the one whose steps count
            inner = getattr(optimizer, "optimizer", optimizer)
            self._following = follow_learning_rate(model, inner)

    def before_forward(self) -> None:
        """Before each batch: the rate of the next step, whichever part of the model is called."""
        if self._following is not None and self.model is not None:
            self._following(self.model)

    def scalars(self) -> dict[int, dict[str, float]]:
        """What was measured since the last call: by step, values by names like norms/dead/bn1."""
        if self.observer is None:
            return {}
        records = self.observer.records[self._sent :]
        self._sent += len(records)
        found: dict[int, dict[str, float]] = {}
        for forward, path, measure, value in records:
            step = self._first_step + forward // self._batches
            full = ".".join(filter(None, (self._path, path)))
            found.setdefault(step, {})[f"norms/{measure}/{full}".rstrip("/")] = value
        return found

    def finish(self, batches: Any = None) -> Calibration | None:
        """After the last step; ``batches`` are those of the training."""
        self.stop()
        if self.calibrate is False or self.model is None:
            return None
        given = batches if self.calibrate is True else self.calibrate
        if given is None:
            raise OptionError("There are no batches to calibrate with. Try calibrate=loader.")
        self.calibration = calibrate(
            self.model,
            given,
            where=self.where,
            images=self.images,
            forward=self.forward,
            all_processes=True,
        )
        return self.calibration

    def stop(self) -> None:
        """Leave nothing on the model; what was measured stays."""
        if self._following is not None:
            self._following.remove()
            self._following = None
        if self.observer is not None and self.observer.running:
            self.observer.__exit__(None)


def _around(model: nn.Module, paths: list[str]) -> str:
    """The path of the smallest part that is called and holds all these norms.

    A training module is often not called itself: its ``training_step`` calls the network in it.
    """
    above = [path.split(".")[:-1] for path in paths]
    same = takewhile(lambda names: len(set(names)) == 1, zip(*above, strict=False))
    shared = [names[0] for names in same]
    while shared and isinstance(model.get_submodule(".".join(shared)), NEVER_CALLED):
        shared = shared[:-1]
    return ".".join(shared)
