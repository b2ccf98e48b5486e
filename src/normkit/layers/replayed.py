"""Steps of a layer that are started again as they were recorded: see engine/replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from normkit.core.fusion import Fusion
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState
from normkit.engine import remaking
from normkit.engine.dispatch import Path
from normkit.engine.epilogue import check as check_epilogue
from normkit.engine.epilogue import followed, followed_by
from normkit.engine.replay.record import RecordedStep, current_stream, may_replay, step_record


class Replayed:
    """What a normalizer knows of its own recorded steps."""

    _replays: Any = None  # a callable of C++, once there is one
    listeners: tuple[Callable[[Moments], None], ...]
    training: bool

    def tracks(self, state: LayerState) -> bool:
        """Whether a batch enters statistics that the layer keeps."""
        return False

    def maps_epilogue(self, activation: str) -> bool:
        """Whether a residual and this activation are part of the pass that writes the output."""
        return True

    def replay(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor | None:
        """The output by a step like this one that was recorded; None if there is none, or if
        someone looks into it."""
        if followed(residual, activation) and not self.maps_epilogue(activation):
            check_epilogue(x, residual, activation)
            bare = self.replay(x, None, "none")
            return None if bare is None else followed_by(bare, residual, activation)
        if not may_replay(x):
            return None
        own = self.__dict__  # past nn.Module's own way to attributes
        remade = remaking.active()
        found = self._replays(
            x,
            residual,
            activation,
            self.training,
            own["_parameters"],
            own["_buffers"],
            current_stream(x),
            remade,
        )
        if found is None or not remade:
            return found
        y: Tensor = found[0]
        remaking.offer(y, x, residual, found[1])
        return y

    def recorded(
        self, path: Path, x: Tensor, state: LayerState, fusion: Fusion, activation: str
    ) -> RecordedStep | None:
        """To record a step, if all that it does will be launches of kernels."""
        plain = path.name == "fused" and not self.listeners and not state.again
        if not plain or (fusion.memory is None and self.tracks(state)):
            return None
        return step_record(self, x, activation)

    def __setattr__(self, name: str, value: Any) -> None:
        # recorded steps hold numbers that were attributes; one that changes at each step, such as a
        # momentum with a schedule, is not worth recording for
        if name != "training" and self.__dict__.get("_replays") is not None:
            self.__dict__["_replays"] = None
            self.__dict__["_unrecorded"] = self.__dict__.get("_unrecorded", 0) + 1
        if name != "training":
            self.__dict__.pop("_traced", None)  # plans are of the options that there were
        super().__setattr__(name, value)
