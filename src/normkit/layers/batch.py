"""What the normalizers that pool over samples share: running statistics."""

from __future__ import annotations

import warnings
from dataclasses import replace
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor

from normkit.core.fusion import Fusion, Memory
from normkit.core.layout import Batch, Channels, Layout
from normkit.core.messages import title
from normkit.core.moments import Coefficients, Moments, spread
from normkit.core.recomputation import as_first_seen, in_graph, is_recomputation
from normkit.core.statistics import (
    LayerState,
    MapResult,
    StateUpdate,
    all_finite,
    blended,
)
from normkit.core.trained import STATISTICS, TrainedBN
from normkit.errors import NonFiniteWarning, OptionError, ShapeError, TransformError
from normkit.layers.domains import OfDomains
from normkit.layers.measured import Refusal
from normkit.layers.synchronised import Synchronised, empty_moments


class BatchNormalizer(Synchronised, OfDomains):
    """A normalizer with statistics of the batch in training and running ones in eval mode.

    Common options beside those of every layer:
        momentum: the weight of the new value; None averages all batches equally.
        track_running_stats: without them, eval mode uses the batch too.
        virtual_batch: statistics of each run of k samples alone, as k images a worker would see.
        running_var_correction: 1 stores the unbiased variance as torch.nn does, 0 the biased one.
        on_single: "error", or "running" to fall back to the running statistics when a channel
            has a single value, as in a last batch of one.
        domains: keep so many sets of statistics, and pool samples of one domain alone:
            ``use_domain`` says which one a batch, or each sample, is of; 0 until it is called.
            Weight and bias are shared.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    nonfinite_batches: Tensor
    arrivals: Tensor  # for kernels: see core/fusion.py

    not_staged = frozenset({"nonfinite_batches", "arrivals"})  # a count to look at; for kernels
    plain_statistics = True
    own_write = False  # kernels do the same
    shares_batch = True
    shares_map = False  # whether all samples of a batch get the same map
    second_buffer = "running_var"  # what is kept beside the mean
    second_start = 1.0

    def __init__(
        self,
        channels: int,
        *,
        momentum: float | None = 0.1,
        track_running_stats: bool = True,
        virtual_batch: int | None = None,
        running_var_correction: int = 1,
        on_single: str = "error",
        domains: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        self.start_domains(domains)
        self._withhold(
            running_var_correction=(running_var_correction, 1), on_single=(on_single, "error")
        )
        known = momentum is None or (isinstance(momentum, Real) and 0 <= momentum <= 1)
        if not known:
            raise OptionError(
                f"{self._title} expects momentum between 0 and 1 (the weight of the new value) "
                f"or None, got {momentum!r}."
            )
        self.momentum = momentum
        self.track_running_stats = track_running_stats
        self.virtual_batch = (
            None if virtual_batch is None else self._positive("virtual_batch", virtual_batch)
        )
        self.running_var_correction = self._choice(
            "running_var_correction", running_var_correction, (1, 0)
        )
        self.on_single = self._choice("on_single", on_single, ("error", "running"))
        size = self.statistics_size()
        track = track_running_stats
        # first those that are always there: torch.export miscounts after a buffer that is None
        count = torch.zeros((), dtype=torch.long, device=self._factory["device"])  # type: ignore[arg-type]
        self.register_buffer("nonfinite_batches", count.clone(), persistent=False)
        self.register_buffer("arrivals", count.to(torch.int32), persistent=False)
        self.register_buffer("running_mean", self._statistic(0.0, size) if track else None)
        second = self._statistic(self.second_start, size) if track else None
        self.register_buffer(self.second_buffer, second)
        self.register_buffer("num_batches_tracked", count if track else None)
        self._warned = False

    # ---------------------------------------------------------------- what a subclass writes

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        """The map and the new statistics, from the moments and the statistics so far.

        Pure: it reads parameters and options from self, whatever a batch changes from ``state``.
        """
        raise NotImplementedError

    def map_reads_state(self) -> bool:
        """Whether the map of a training batch depends on statistics that batches change."""
        return self.on_single == "running"

    def state(self) -> LayerState:
        statistics = dict(self._buffers)
        if self.training and self.map_reads_state():
            statistics = self._as_first_seen() or statistics
        if self.domains is None:
            again = is_recomputation()
            return LayerState(self.training, statistics, again, processes=self.sharing())
        return self.state_of_domain(statistics)

    def _as_first_seen(self) -> dict[str, Tensor | None] | None:
        if in_graph():
            kept = {name: b for name, b in self._buffers.items() if b is not None}
            return dict(zip(kept, torch.ops.normkit.as_first_seen([*kept.values()]), strict=True))
        if torch.compiler.is_compiling():
            return None
        return as_first_seen(id(self), self._copies)

    @torch.no_grad()
    def _copies(self) -> dict[str, Tensor | None]:
        return {name: b if b is None else b.clone() for name, b in self._buffers.items()}

    def cells(self, x: Tensor) -> Layout:
        # one table row for the whole batch where no sample needs its own
        whole = self.shares_map and self.exchange is None and not self.splits_batch
        if whole and self.virtual_batch is not None and self.uses_batch():
            whole = self.virtual_batch >= x.shape[0]
        return Batch.of(x) if whole and Batch.fits(x) else Channels.of(x)

    def set_worker_batch(self, samples: int) -> None:
        super().set_worker_batch(samples)
        if "virtual_batch" not in self.withheld:  # shorter runs of its own stay
            self.virtual_batch = min(samples, self.virtual_batch or samples)

    def statistics_size(self) -> int:
        """How many running means there are."""
        return self.channels

    @property
    def running_correction(self) -> int:  # type: ignore[override]
        return self.running_var_correction

    def running_buffers(self) -> dict[str, Tensor]:
        """Those of the domain in use: rows of its buffers, to read or to write."""
        self.check_single_domain()
        names, kept = ("running_mean", self.second_buffer), self.kept()
        return {name: b for name in names if (b := kept[name]) is not None}

    def batch_counter(self) -> Tensor | None:
        return self.kept()["num_batches_tracked"]

    def uses_batch(self, state: LayerState | None = None) -> bool:
        """Whether the statistics come from the batch: in training, or where none are kept."""
        training = self.training if state is None else state.training
        return training or self.running_mean is None

    def uses_moments(self) -> bool:
        return self.uses_batch()

    def pools_all(self, x: Tensor) -> bool:
        """Whether the statistics are those of the whole batch, and of more than one value."""
        if not self.uses_batch():  # first, so that exported eval modes have no guard on the size
            return False
        if self.splits_batch:
            return False
        return (self.virtual_batch or x.shape[0]) >= x.shape[0] and x.numel() > self.channels

    # ---------------------------------------------------------------- the statistics of a batch

    def statistics(
        self, moments: Moments | None, state: LayerState
    ) -> tuple[Moments, StateUpdate | None]:
        """Mean and variance per channel, tables (1, C) or (N, C): of the batch, or running ones."""
        if moments is None or not self.uses_batch(state) or self.single(moments, state):
            return self.running(state), None
        pooled = self.pooled(moments, state)
        return self.each_sample(self.or_running(pooled, state), moments), self.tracked(
            pooled, state
        )

    def or_running(self, pooled: Moments, state: LayerState) -> Moments:
        """Those of the batch, or running ones where a single value is left and on_single says so:
        chosen on the device, which alone knows of masks and of other processes."""
        if self.on_single == "error" or not isinstance(pooled.count, Tensor):
            return pooled
        many, running = pooled.count > 1, self.running(state)
        mean = torch.where(many, pooled.mean, running.mean)
        return Moments(mean, torch.where(many, pooled.var, running.var), pooled.count)

    def pooled(self, moments: Moments, state: LayerState, channels: int = 1) -> Moments:
        """The statistics of each run of samples, tables (R, G); of all of them, also of those that
        other processes have."""
        pooled = moments.pooled(samples=self.virtual_batch, channels=channels)
        return pooled if self.virtual_batch is not None else self.shared(pooled, state)

    def each_sample(self, pooled: Moments, moments: Moments) -> Moments:
        """Statistics of runs, repeated for each sample of the run."""
        samples = moments.mean.shape[0]
        k = self.virtual_batch or samples
        mean, var = (spread(t, samples=samples, runs_of=k) for t in (pooled.mean, pooled.var))
        return Moments(mean, var, pooled.count)

    def running(self, state: LayerState | None = None) -> Moments:
        """The running statistics, tables (1, C), as they were or as they are now."""
        state = self.state() if state is None else state
        if not (state.knows("running_mean") and state.knows("running_var")):
            raise OptionError(
                f"{title(self)} keeps no running statistics. Try track_running_stats=True."
            )
        return Moments(state["running_mean"][None], state["running_var"][None], count=1)

    def single(self, moments: Moments, state: LayerState) -> bool:
        """Whether a channel has one value only, so that it has no variance; an error by default."""
        samples = moments.mean.shape[0]
        if state.processes is not None and (self.virtual_batch is None or samples == 0):
            return False  # how many values the others have is known on the device only
        k = min(self.virtual_batch or samples, samples)
        least = samples % k or k  # the last run may be shorter
        if isinstance(moments.count, Tensor) and moments.count.dim() == 2:
            return False  # of a mask: decided on the device, see ``statistics``
        if moments.count * least > 1:
            return False
        if self.on_single == "error" or self.running_mean is None:
            raise ShapeError(
                f"{title(self)} expects more than one value per channel in training, got "
                f"{least} sample(s) with {moments.count} position(s). Try a larger batch, "
                'drop_last=True, on_single="running", or a layer without batch statistics '
                "such as gn."
            )
        return True

    @torch.no_grad()
    def tracked(self, pooled: Moments, state: LayerState) -> StateUpdate | None:
        """The running statistics after a training batch with these, tables (R, C)."""
        if not self.tracks(state):
            return None
        unbiased = pooled.unbiased(self.running_var_correction)
        mean, var, counted = self.over_runs(pooled, state, pooled.mean, unbiased)
        return self.blended(state, counted=counted, running_mean=mean, running_var=var)

    def tracks(self, state: LayerState) -> bool:
        """Whether a batch enters the running statistics."""
        return state.training and not state.again and state.knows("running_mean")

    @torch.no_grad()
    def blended(
        self,
        state: LayerState,
        *,
        only: Tensor | None = None,
        counted: Tensor | None = None,
        **new: Tensor,
    ) -> StateUpdate:
        """The buffers of these names once new values have entered them, in a way that cannot harm.

        A batch with a value that is not finite is left out, whole, and so is one with a value that
        would not be in the type of its buffer. ``only`` and ``counted`` are conditions on the
        device: whether to blend, and whether there was a batch at all.
        """
        new = {name: value.detach().to(state[name].dtype) for name, value in new.items()}
        finite = all_finite(new.values())
        counts = finite if counted is None else finite & counted
        weight = self.blend_weight(state, counts)
        where = counts if only is None else counts & only
        values = {name: blended(state[name], value, weight, where) for name, value in new.items()}
        return StateUpdate(values, finite, counted, state.domain)

    def blend_weight(self, state: LayerState, counts: Tensor) -> float | Tensor:
        """The weight of the new value, of a batch that counts or not."""
        if self.momentum is not None:
            return self.momentum
        batches = state["num_batches_tracked"] + counts.squeeze()
        return 1 / batches.clamp(min=1).to(state["running_mean"].dtype)

    # ---------------------------------------------------------------- the one writer

    def write(self, update: StateUpdate | None) -> None:
        """Write new statistics into the buffers and count the batch.

        The only place that changes them, beside a kernel that makes the map and does the same on
        its way (``memory``). A forward that activation checkpointing repeats changes nothing.
        """
        if update is None or is_recomputation():
            return
        if not update.values and update.finite is None:
            return  # a block without gradients and with nothing in it is no program to save
        try:
            self._write(update)
        except RuntimeError as error:
            if not torch._C._are_functorch_transforms_active():
                raise
            raise TransformError(
                f"{title(self)} would change its running statistics inside a transform of "
                "torch.func, which does not have them. Try torch.func.functional_call(layer, "
                "(parameters, buffers), x) with one set of buffers for each model, layer.eval(), "
                "or track_running_stats=False."
            ) from error
        finite = update.finite
        if finite is None or torch.compiler.is_compiling():
            return
        # a fake tensor has no value, and that of an accelerator's one would have to be waited for
        hidden = type(finite) is not Tensor or finite.device.type != "cpu"
        if not (hidden or torch._C._are_functorch_transforms_active() or finite.all()):
            self.report()

    @torch.no_grad()
    def _write(self, update: StateUpdate) -> None:
        rows = update.domain is not None
        kept, first = self.kept(domain=update.domain) if rows else self._buffers, None
        if in_graph():  # it may run again, and knows only then
            first = torch.ops.normkit.first_time(self.nonfinite_batches.device)
        for name, value in update.values.items():
            buffer = kept[name]
            assert buffer is not None
            buffer.copy_(value if first is None else torch.where(first, value, buffer))
        finite = update.finite
        if finite is None:
            return
        bad, batches = kept["nonfinite_batches"], kept["num_batches_tracked"]
        assert bad is not None and batches is not None
        counts = finite if update.counted is None else (finite & update.counted).squeeze()
        wrong = (~finite).sum() if finite.dim() else ~finite  # one for each domain
        bad.add_(wrong if first is None else first * wrong)
        batches.add_(counts if first is None else first & counts)

    def memory(self, count: int, state: LayerState, scratch: bool = False) -> Memory | None:
        """The running statistics for a kernel to update; None if there is nothing to update, or
        not in a way a kernel knows.

        For a map that is made of the updated statistics, a forward that is repeated gets copies of
        the old ones: ``scratch``.
        """
        # not by attribute, which takes nn.Module long to find, every step
        kept = self._buffers if state.domain is None else self.kept(domain=state.domain)
        if state.again:
            if not scratch:
                return None
            kept = {name: b if b is None else b.clone() for name, b in state.statistics.items()}
        mean, second = kept["running_mean"], kept[self.second_buffer]
        if not self.training or mean is None:
            return None
        if self.momentum is None or mean.dtype != torch.float32:
            return None
        batches = kept["num_batches_tracked"]
        bad, arrivals = kept["nonfinite_batches"], kept["arrivals"]
        assert second is not None and batches is not None
        assert bad is not None and arrivals is not None
        return Memory(
            mean,
            second,
            batches,
            bad,
            arrivals,
            self.momentum,
            count / max(count - self.running_var_correction, 1),
        )

    def description(self, x: Tensor, state: LayerState) -> Any:
        # between the moments and the map stands an all-reduce: not in one kernel
        return None if state.processes is not None else super().description(x, state)

    def after_fusion(
        self, fusion: Fusion, state: LayerState, tables: Tensor, begin: int, x: Tensor
    ) -> None:
        size = self.statistics_size()
        if self.listeners and fusion.leaves_moments(self.channels):
            mean, var = tables[begin : begin + 2 * size].detach().view(2, 1, size).clone()
            for listener in self.listeners:
                listener(Moments(mean, var, x.numel() // size))
        if fusion.memory is None:
            if self.tracks(state):
                mean, var = tables[begin : begin + 2 * size].view(2, 1, size)
                self.write(self.tracked(Moments(mean, var, x.numel() // size), state))
            return
        # a graph has no value to look at, and that of an accelerator would have to be waited for
        seen = not torch.compiler.is_compiling() and tables.device.type == "cpu"
        if seen and int(self.nonfinite_batches):
            self.report()

    def report(self) -> None:
        """Warn, once a layer, that batches were left out of the running statistics."""
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"{title(self)} met a batch whose statistics are not finite and left it out of the "
            "running statistics. Look for overflow or a learning rate that is too high; "
            "layer.nonfinite_batches counts such batches.",
            NonFiniteWarning,
            stacklevel=2,
        )

    def _empty(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        y = super()._empty(x, residual, activation)
        state = self.state()
        if state.processes is None:
            return y
        # the others wait for this process, forward and backward
        moments = empty_moments(x, self.cells(x))
        result = self.compute(moments, self.observe(x, moments, state))
        self.write(result.update)
        tables = [t.sum() for t in result.map if t is not None]
        return y + (torch.stack(tables).sum() * 0).to(y.dtype)

    def train(self, mode: bool = True) -> Self:
        # on an accelerator the count is only read here, so that no step waits for the host
        count = self.nonfinite_batches
        waiting = type(count) is Tensor and count.device.type not in ("cpu", "meta")
        if waiting and not self._warned and int(count):
            self.report()
        return super().train(mode)

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        own = batch or self.running_mean is None
        return (table.pooled(samples=None) if own else self.running()).standardizing(self.eps)

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return moments.var[0]

    def reset_running_stats(self) -> None:
        """Forget all batches."""
        if self.running_mean is not None and self.num_batches_tracked is not None:
            self.running_mean.zero_()
            getattr(self, self.second_buffer).fill_(self.second_start)
            self.num_batches_tracked.zero_()
            self._seen = frozenset()

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        options = super().options_from(bn, asked)
        if "momentum" not in bn.missing:  # or the layer's own, which some want slower
            options["momentum"] = bn.momentum
        if bn.pools_samples and not bn.tracked:  # or eval mode would use statistics of nothing
            options["track_running_stats"] = False
        if bn.each_domain and not cls.no_domains:
            options["domains"] = len(bn.each_domain)
        return options

    def statistics_from(self, bn: TrainedBN) -> tuple[Tensor, Tensor]:
        """The running statistics of a trained batch norm, in the form this layer keeps."""
        mean, second = self.encode_statistics(bn.mean, bn.var).values()
        return mean, second

    def start_from(self, bn: TrainedBN) -> dict[str, str]:
        taken = super().start_from(bn)
        names = ("running_mean", self.second_buffer, "num_batches_tracked")
        for one, buffers in self.starts_of_domains(bn):
            for name, value in zip(names, (*self.statistics_from(one), one.batches), strict=True):
                buffer = buffers[name]
                if buffer is not None:
                    buffer.copy_(value)
                    taken[name] = STATISTICS
        return taken

    def channel_statistics(self) -> tuple[Tensor, Tensor] | None:
        """Mean and variance of each channel, from what the layer keeps; None if it keeps none."""
        buffers = self.running_buffers()
        return self.decode_statistics(buffers) if buffers else None

    def as_batch_norm(self, like: Tensor | None = None) -> TrainedBN:
        bn = replace(super().as_batch_norm(like), pools_samples=True)
        statistics = self.channel_statistics()
        if statistics is None:
            return bn
        mean, var = (table.detach() for table in statistics)
        batches = self.batch_counter()
        assert batches is not None
        bn = bn.having(mean=mean, var=var, batches=batches)
        return self.with_domains(bn)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *args: Any
    ) -> None:
        # checkpoints of other tools often lack the counter; torch.nn fills it in as well
        key = prefix + "num_batches_tracked"
        if self.num_batches_tracked is not None and key not in state_dict:
            state_dict[key] = torch.zeros_like(self.num_batches_tracked)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)
