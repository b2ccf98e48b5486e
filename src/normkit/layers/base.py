"""What all normalizers share: checks, parameters, the call into the engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from normkit.core.card import Card
from normkit.core.fusion import Fusion, Traced
from normkit.core.layout import Channels, Layout, dense
from normkit.core.messages import channel_hint, title
from normkit.core.moments import Coefficients, Moments, per_channel
from normkit.core.options import Configured
from normkit.core.precision import statistics_dtype
from normkit.core.statistics import LayerState, MapResult, Repetition, StateUpdate
from normkit.core.tracing import node_of
from normkit.core.trained import FixedMap, TrainedBN
from normkit.engine import tracing
from normkit.engine.coefficients import as_it_was
from normkit.engine.cpu.passes import ACTIVATIONS as IN_LOOPS
from normkit.engine.dispatch import KERNELS, Path, decide
from normkit.engine.epilogue import check as check_epilogue
from normkit.engine.epilogue import epilogue, followed, followed_by
from normkit.engine.normalize import fused, normalize
from normkit.errors import DeviceError, DtypeError, OptionError, ShapeError
from normkit.layers.converted import Converted
from normkit.layers.from_training import FromTraining
from normkit.layers.masking import Masking, mask_in_force
from normkit.layers.overriding import Overriding
from normkit.layers.replayed import PLANS_OF, Replayed

NO_PLANS = dict.fromkeys(PLANS_OF)


class Normalizer(Overriding, Replayed, Masking, FromTraining, Configured, Converted):
    """A layer y = a·x + b whose tables come from ``coefficients(moments)``.

    A subclass owns its parameters and writes that one method: a pure function on small tables,
    which never touches x, and of nothing that changes but these, parameters and attributes of the
    layer: what it does is written down once, and repeated. There are three more ways:

        statistics kept between batches   subclass BatchNormalizer, whose ``coefficients(moments,
                                          state)`` also returns the new statistics
        cells other than channels         override ``cells``
        no affine map of moments          override ``normalize``: compute y from x, by torch or by
                                          functions of the engine, and end with ``self.finish``,
                                          which does weight, bias, residual and activation in one
                                          pass

    For example, without any statistics:

        class DyT(Normalizer):
            def normalize(self, x, residual, activation):
                return self.finish(torch.tanh(self.alpha * x), residual, activation)
    """

    card: ClassVar[Card]
    has_eps: ClassVar[bool] = True  # whether it divides by a deviation
    own_write: ClassVar[bool] = False  # a subclass writes statistics itself: no kernel does it
    apart_on_cpu = False  # set by fuse: speed matters more than memory, see engine.dispatch.Path
    weight: Tensor | None
    bias: Tensor | None
    rate: Tensor  # of a layer that needs_update_rate

    def __init__(
        self,
        channels: int,
        *,
        eps: float = 1e-5,
        affine: bool = True,
        scale_init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = self._positive("channels", channels)
        self.eps = self._number("eps", eps, 0)
        self.affine = affine
        self.scale_init = self._number("scale_init", scale_init)
        self._factory = {"device": device, "dtype": dtype}
        self.register_parameter("weight", self._new(scale_init) if affine else None)
        self.register_parameter("bias", self._new(0.0) if affine else None)
        self.listeners: tuple[Callable[[Moments], None], ...] = ()
        """Called with the moments of every batch that a pass has computed."""
        self.exchange: Callable[[Tensor, Moments, LayerState], MapResult] | None = None
        """Called instead of ``compute``, and no kernel makes the map: for batches in parts."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "write" in cls.__dict__ and "own_write" not in cls.__dict__:
            cls.own_write = True

    # ---------------------------------------------------------------- what a subclass writes

    def coefficients(self, *args: Any, **kwargs: Any) -> Any:
        """``coefficients(moments) -> Coefficients``; BatchNormalizer's has the state too: Any."""
        raise NotImplementedError

    def cells(self, x: Tensor) -> Layout:
        """What the moments are taken over: channels, unless a layer needs something finer."""
        return Channels.of(x)

    def uses_moments(self) -> bool:
        """Whether ``coefficients`` needs the moments now; if not, the engine skips their pass."""
        return True

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        """What the coefficients are, for backends that can make them in one kernel."""
        return None

    def normalize(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        """activation(norm(x) + residual) of an input that has been checked and is not empty.

        An affine map of moments, unless a layer overrides this.
        """
        state = self.state()
        x = dense(x)
        fusion = self.description(x, state)
        path = decide(
            x,
            self.cells(x),
            fusion,
            fixed=not self.uses_moments(),
            followed=followed(residual, activation),
        )
        apart = path.apart and not (path.name == "loops" and activation in IN_LOOPS)
        if self.apart_on_cpu and apart and torch.is_grad_enabled():
            check_epilogue(x, residual, activation)
            return followed_by(self.run(path, x, state, fusion)[0], residual, activation)
        return self.run(path, x, state, fusion, residual, activation)[0]

    def check_size(self, x: Tensor) -> None:
        """Refuse sizes for which the statistics do not exist."""

    # ---------------------------------------------------------------- as one map

    def varies(self) -> str:
        """Why the map is not the same for every input; empty if it is."""
        if self.training and not self.card.same_in_eval:
            return "it is in training mode: try model.eval()"
        return "its map depends on the input" if self.uses_moments() else ""

    def fixed_map(self, axes: int | None = None) -> FixedMap | str:
        """All that the layer does, if that is the same for every input; else why there is none.

        ``axes`` is the number of axes of the input, None if not known.
        """
        if reason := self.varies():
            return reason
        has_table = type(self).coefficients is not Normalizer.coefficients
        if not (self.card.family and has_table):
            return "it has no scale and shift that would be all it does"
        return FixedMap(*self._fixed_tables())

    @torch.no_grad()
    def _fixed_tables(self) -> tuple[Tensor, Tensor]:
        layer = copy.deepcopy(self)
        mine = self._anchor()
        if mine is None or mine.device.type != "mps":  # which has no float64
            layer = layer.double()
        scale, shift = layer.compute(None, layer.state()).map.flat()
        return scale[0], shift[0]

    def pools_samples(self) -> bool:
        return self.card.pools_samples

    # ---------------------------------------------------------------- what a user calls

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None = None,
        activation: str = "none",
        *,
        mask: Tensor | None = None,
    ) -> Tensor:
        """activation(norm(x) + residual), the activation by a name such as "none" or "relu".

        With a mask (N, *spatial), true where positions count, statistics are those of valid
        positions alone and the output is zero at the others.
        """
        if not isinstance(x, Tensor):
            traced: Tensor = node_of(self, x, residual, activation, mask=mask)
            return traced
        given: Any = mask_in_force(self) if mask is None else mask
        if given is None and self._replays is not None and not torch.compiler.is_compiling():
            replayed = self.replay(x, residual, activation)
            if replayed is not None:
                return replayed
        self.check(x)
        valid = None if given is None else self.valid(x, given)
        if x.numel() == 0:
            return self._empty(x, residual, activation)
        self.check_size(x)
        if valid is not None:
            return self.without_padding(x, valid, residual, activation)
        return self.normalize(x, residual, activation)

    @classmethod
    def from_batch_norm(cls, source: nn.Module, **options: Any) -> Self:
        """A layer that starts from a trained batch norm: same device, type and mode.

        Exactly equal in eval mode if the card says ``exact_from_bn``; otherwise γ, β and the
        running statistics are carried where they have a meaning, as the class documents.
        """
        bn = source.as_batch_norm() if isinstance(source, Normalizer) else TrainedBN.read(source)
        if not bn.tracked:
            raise OptionError(
                f"from_batch_norm expects a batch norm with running_mean and running_var, "
                f"got {type(source).__name__} without them. "
                "Try a module built with track_running_stats=True."
            )
        bn.warn_of_damage(f"{cls.__name__}.from_batch_norm: of {type(source).__name__}")
        return cls.from_trained(bn, **options)[0]

    @classmethod
    def from_trained(cls, bn: TrainedBN, **options: Any) -> tuple[Self, dict[str, str]]:
        """The layer, and what it has taken over: see ``start_from``."""
        layer = cls(
            bn.channels,
            **{**cls.options_from(bn, options), **options},
            device=bn.mean.device,
            dtype=bn.weight.dtype,
        )
        with torch.no_grad():
            taken = layer.start_from(bn)
        if "affine" not in options:
            for name in ("bias",) if bn.affine else layer.compensates:
                table = layer._parameters.get(name)
                if name in bn.missing and table is not None:
                    table.requires_grad_(False)
        if not bn.trainable:
            layer.requires_grad_(False)
        return layer.train(bn.training), taken

    def as_batch_norm(self, like: Tensor | None = None) -> TrainedBN:
        """The batch norm that this layer is or comes closest to, and what that leaves out.

        ``like`` tells type and device for a layer without tensors.
        """
        bn = TrainedBN.read(self, self.channels, like).losing(*self.beyond_batch_norm)
        return replace(bn, pools_samples=self.pools_samples())

    # ---------------------------------------------------------------- shared machinery

    def check(self, x: Tensor) -> None:
        if x.layout is not torch.strided:
            kind = str(x.layout).removeprefix("torch.")
            raise ShapeError(f"{title(self)} expects dense input, got {kind}. Try x.to_dense().")
        if x.dim() < 2 or x.shape[1] != self.channels:
            raise ShapeError(
                f"{title(self)} expects input (N, {self.channels}, *spatial), "
                f"got {tuple(x.shape)}." + channel_hint(x.shape, self.channels)
            )
        if not x.is_floating_point():
            raise DtypeError(
                f"{title(self)} expects a floating-point input, got {x.dtype}. Try x.float()."
            )
        mine = self._anchor()
        if mine is not None and mine.device != x.device:
            raise DeviceError(
                f"{title(self)} is on {mine.device}, its input on {x.device}. "
                f"Try layer.to({str(x.device)!r})."
            )

    def _anchor(self) -> Tensor | None:
        """Any tensor of the layer, to know its device by."""
        for tensors in (self._parameters, self._buffers):
            for tensor in tensors.values():
                if tensor is not None:
                    return tensor
        return None

    def finish(self, y: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        """activation(weight · y + bias + residual) in one pass: the end of ``normalize``."""
        weight, bias = self.weight, self.bias
        if weight is None and bias is None:
            check_epilogue(y, residual, activation)
            return epilogue(y, residual, activation)
        return normalize(
            y,
            lambda _: per_channel(weight, bias, y),
            use_moments=False,
            residual=residual,
            activation=activation,
        )

    # ---------------------------------------------------------------- from moments to the map

    def description(self, x: Tensor, state: LayerState) -> Any:
        """What there is to compute, in words that kernels know; None if they do not."""
        # parametrized parameters are other tensors at each look: nobody could tell them again
        if self.exchange is not None or self.own_write or "parametrizations" in self._modules:
            return None
        if self.has_own_passes():
            return None
        fusion = None if self.overridden() else self.fusion(x, state)
        if fusion is None and self.uses_moments():
            fusion = tracing.describe(self, x, state)
        return fusion

    def path(self, x: Tensor, *, compiled: bool | None = None, followed: bool = False) -> Path:
        """Which code computes an input: what ``normalize`` decides, for ``nk.why`` to tell."""
        x, state = dense(x), self.state()
        description = self.description(x, state)
        fixed = not self.uses_moments()
        path = decide(
            x, self.cells(x), description, fixed=fixed, followed=followed, compiled=compiled
        )
        if path.name in ("triton", "cpp") and description is None and not fixed:
            own = "" if self.has_own_passes() else tracing.obstacle(self, x, state)
            path = path._replace(reason=own or self.what_is_its_own() or path.reason)
        return self.with_loops(path, state, description)

    def run(
        self,
        path: Path,
        x: Tensor,
        state: LayerState,
        fusion: Fusion | None,
        residual: Tensor | None = None,
        activation: str = "none",
    ) -> tuple[Tensor, Tensor | None]:
        """The norm on the path that was decided, and its gates if it has any: new statistics are
        written."""
        if fusion is not None and path.name in KERNELS:
            y, tables, begin, gates = fused(
                *(path, x, fusion, self.repetition(state)),
                cells=self.cells,
                residual=residual,
                activation=activation,
                record=self.recorded(path, x, state, fusion, activation),
            )
            if not isinstance(fusion, Traced):  # whose kernels have written all statistics
                self.after_fusion(fusion, state, tables, begin, x)
            return y, gates
        if fusion is not None and self.with_loops(path, state, fusion).name == "loops":
            made = self.in_loops(path, x, state, fusion, residual, activation)
            if made is not None:
                return made if isinstance(made, tuple) else (made, None)
        y, result = self.mapped(x, state, residual, activation, path)
        self.write(result.update)
        return y, result.gate

    def repetition(self, state: LayerState) -> Repetition:
        """How a kernel's map is made once more where it has to be differentiated twice."""
        then = self if torch.compiler.is_compiling() else as_it_was(self)  # graphs ask no layer
        return Repetition(then, state, dict(self._parameters))

    def state(self) -> LayerState:
        """What a forward starts from."""
        return LayerState(self.training, self._buffers)

    def compute(self, moments: Moments | None, state: LayerState) -> MapResult:
        """The map, and the new statistics of a layer that keeps any: nothing is changed."""
        return MapResult(self.coefficients(moments))

    def observe(self, x: Tensor, moments: Moments | None, state: LayerState) -> LayerState:
        """The state, with what the layer has to know of its input beside the moments."""
        return state

    def observed_samples(self) -> int | None:
        """How many samples of an input ``observe`` looks at; None for all. One tells its size."""
        return 1

    def write(self, update: StateUpdate | None) -> None:
        """Let new statistics enter the buffers: once a forward, after the map."""

    def mapped(
        self,
        x: Tensor,
        state: LayerState,
        residual: Tensor | None = None,
        activation: str = "none",
        path: Path | None = None,
        cells: Callable[[Tensor], Layout] | None = None,
    ) -> tuple[Tensor, MapResult]:
        """activation(a·x + b + residual), and what came of the moments and the state."""
        results: list[MapResult] = []

        def coefficients(moments: Moments | None) -> Coefficients:
            results.append(self._heard(x, moments, state))
            return results[0].map

        uses = self.uses_moments()
        options = {"residual": residual, "activation": activation, "path": path}
        if cells is None:  # not `or`: torch 2.11's graphs ask no function whether it is true
            cells = self.cells
        y = normalize(x, coefficients, cells=cells, use_moments=uses, **options)  # type: ignore[arg-type]
        return y, results[0]

    def _heard(self, x: Tensor, moments: Moments | None, state: LayerState) -> MapResult:
        if moments is not None:
            for listener in self.listeners:
                listener(Moments(moments.mean.detach(), moments.var.detach(), moments.count))
            if self.exchange is not None:
                return self.exchange(x, moments, state)
        return self.compute(moments, self.observe(x, moments, state))

    def after_fusion(
        self, fusion: Fusion, state: LayerState, tables: Tensor, begin: int, x: Tensor
    ) -> None:
        """What is left to do when a kernel has made the map: the statistics of the batch begin at
        ``begin``."""

    def _empty(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        """An empty batch: nothing to normalize, but every parameter gets a gradient of zero."""
        check_epilogue(x, residual, activation)
        nothing = sum((p.sum() * 0 for p in self.parameters()), x.new_zeros(()))
        return epilogue(x.clone() + nothing.to(x.dtype), residual, activation)

    def _new(self, value: float, *shape: int) -> nn.Parameter:
        """A parameter filled with a value; one entry a channel unless a shape is given."""
        return nn.Parameter(torch.full(shape or (self.channels,), value, **self._factory))  # type: ignore[arg-type]

    def _statistic(self, value: float, *shape: int) -> Tensor:
        """A table for a buffer: float32 or wider, whatever the type of the parameters."""
        dtype = statistics_dtype(self._factory["dtype"] or torch.get_default_dtype())  # type: ignore[arg-type]
        size = shape or (self.channels,)
        return torch.full(size, value, device=self._factory["device"], dtype=dtype)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        # copies and files are of the layer, not of those who watch it
        return {**self.__dict__, "listeners": (), "exchange": None, **NO_PLANS, "_traced": {}}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # half() and bfloat16() must not narrow statistics: they would stop moving
        tables = {k: b for k, b in self._buffers.items() if b is not None and b.is_floating_point()}
        super()._apply(fn, recurse)
        self.__dict__["_traced"] = {}
        self.__dict__["_options_set"] = self.__dict__.get("_options_set", 0) + 1
        for name, table in tables.items():
            moved = self._buffers[name]
            assert moved is not None
            wide = statistics_dtype(moved.dtype)
            if moved.dtype != wide:
                self._buffers[name] = table.to(device=moved.device, dtype=wide)
        return self
