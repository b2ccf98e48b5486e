"""Steps of a layer that are started again as they were recorded: see engine/replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from normkit.core.fusion import Depthwise, Fusion, Pixel, Squash, Traced
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState
from normkit.engine import remaking
from normkit.engine.cpu.passes import moments
from normkit.engine.cpu.stateless import written_pixels, written_squash
from normkit.engine.cpu.steps import written
from normkit.engine.dispatch import Path, forced
from normkit.engine.epilogue import check as check_epilogue
from normkit.engine.epilogue import followed, followed_by
from normkit.engine.replay.build import extension_on_cpu
from normkit.engine.replay.record import (
    PLANS,
    RecordedStep,
    current_stream,
    may_replay,
    step_record,
)

WRITERS: dict[type, Any] = {Pixel: written_pixels, Squash: written_squash}  # of steps on CPUs
PLANS_OF = "_replays", "_norm_replays", "_heard_replays"
NO_OPTIONS = ("training", "_seen", "_warned")  # attributes that change no step


class Replayed:
    """What a normalizer knows of its own recorded steps."""

    own_calls: bool  # see Overriding
    _replays: Any = None  # a callable of C++, once there is one
    _norm_replays: Any = None  # the same of a norm alone, where the convolution after it is torch's
    _heard_replays: Any = None  # the same of steps whose moments someone is told
    listeners: tuple[Callable[[Moments], None], ...]
    training: bool

    def tracks(self, state: LayerState) -> bool:
        """Whether a batch enters statistics that the layer keeps."""
        return False

    def maps_epilogue(self, activation: str) -> bool:
        """Whether a residual and this activation are part of the pass that writes the output."""
        return True

    def map_reads_state(self) -> bool:
        """Whether the map of a training batch depends on statistics that batches change."""
        return False

    def replay(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor | None:
        """The output by a step like this one that was recorded; None if there is none, or if
        someone looks into it."""
        if followed(residual, activation) and not self.maps_epilogue(activation):
            check_epilogue(x, residual, activation)
            bare = self.replay(x, None, "none")
            return None if bare is None else followed_by(bare, residual, activation)
        replays = self._replays  # which another thread may forget
        if replays is None or self.own_calls or not may_replay(x):
            return None
        if residual is not None and not isinstance(residual, Tensor):
            return None  # to be refused with words
        found: Tensor | None = self._replayed(replays, x, residual, activation)
        return found

    def _replayed(self, replays: Any, x: Tensor, residual: Tensor | None, activation: str) -> Any:
        own = self.__dict__  # past nn.Module's own way to attributes
        remade = remaking.active()
        found = replays(
            x,
            residual,
            activation,
            self.training,
            own["_parameters"],
            own["_buffers"],
            current_stream(x),
            x.is_cpu and forced() == "auto",
            remade,
        )
        if found is None or not remade:
            return found
        y, gates, make = found
        remaking.offer(y, x, residual, make)
        return y if gates is None else (y, gates)

    def recorded(
        self, path: Path, x: Tensor, state: LayerState, fusion: Fusion | Pixel, activation: str
    ) -> RecordedStep | None:
        """To record a step, if all that it does will be launches of kernels."""
        plain = path.name == "fused" and not self.listeners and not state.again
        plain = plain and not self.own_calls
        plain = plain and not path.part  # after which torch convolves
        # where kernels write all statistics there are
        written = isinstance(fusion, Traced | Pixel) or fusion.memory is not None
        if not plain or (self.tracks(state) and not written):
            return None
        return step_record(self, x, activation)

    def with_loops(self, path: Path, state: LayerState, fusion: Any) -> Path:
        """A path on a CPU, without the loops that do not do all of it."""
        if path.name != "loops":
            return path
        part = path.part
        if isinstance(fusion, Depthwise):
            fusion, part = fusion.norm, True
        if isinstance(fusion, Traced | Pixel):  # whose loops write all statistics there are
            return path
        if fusion.memory is None and self.tracks(state):
            reason = "torch updates its running statistics"
            return path._replace(name="cpp", reason=reason, part=part)
        return path

    def in_loops(
        self: Any,
        path: Path,
        x: Tensor,
        state: LayerState,
        fusion: Fusion | Pixel | Depthwise,
        residual: Tensor | None,
        activation: str,
    ) -> Any:
        """On a CPU: the step in C++, whose plan is kept for the next one of such a shape; with its
        gates, if they are wanted. None if someone looks into it, or if there is more to it."""
        if state.again or not may_replay(x):
            return None
        check_epilogue(x, residual, activation)
        # what is more than the step is not for ``replay``
        name = "_heard_replays" if self.listeners else "_replays"
        own, name = self.__dict__, "_norm_replays" if path.part else name
        replays = own.get(name) or extension_on_cpu().Replays()
        if residual is not None and (residual.stride() != x.stride() or residual.is_neg()):
            like = x.new_empty_strided(x.shape, x.stride(), dtype=residual.dtype)
            residual = like.copy_(residual)
        y = self._replayed(replays, x, residual, activation)  # x may be a dense copy of what came
        if y is None:
            write = WRITERS.get(type(fusion), written)
            plan = write(self, x, residual, activation, fusion, self.cells(x))
            if plan is not None:
                if len(replays) >= PLANS:  # sizes come and go: a plan costs less than a step
                    replays = extension_on_cpu().Replays()  # without one
                replays.add(x, plan)
                own[name] = replays
                y = self._replayed(replays, x, residual, activation)
        if y is not None and self.listeners and self.uses_moments():
            layout = self.cells(x)
            found = Moments(*moments(x.detach(), layout), layout.count)
            for listener in self.listeners:
                listener(found)
        return y

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in NO_OPTIONS:
            self._forget_steps()
        super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        self._forget_steps()
        super().register_parameter(name, param)  # type: ignore[misc]

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        self._forget_steps()
        super().register_buffer(name, tensor, persistent)  # type: ignore[misc]

    def _forget_steps(self) -> None:
        # recorded steps hold numbers that were attributes; one that changes at each step, such as a
        # momentum with a schedule, is not worth recording for
        own = self.__dict__
        own["_options_set"] = own.get("_options_set", 0) + 1  # steps that are being recorded
        if any(own.get(name) is not None for name in PLANS_OF):
            own.update(dict.fromkeys(PLANS_OF))
            own["_unrecorded"] = own.get("_unrecorded", 0) + 1
        own["_traced"] = {}  # plans are of the options that there were
