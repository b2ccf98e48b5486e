"""ubn: unified batch normalization with the feature condensation threshold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normkit.core.card import Card
from normkit.core.fusion import Condensation, Depthwise, Fusion, Gate
from normkit.core.masks import blank
from normkit.core.messages import title
from normkit.core.moments import Coefficients, Moments
from normkit.core.statistics import LayerState, MapResult, StateUpdate
from normkit.core.trained import ParameterRole, TrainedBN
from normkit.engine.activations import BY_RESULT
from normkit.engine.epilogue import check as check_epilogue
from normkit.engine.epilogue import epilogue
from normkit.engine.normalize import normalize
from normkit.engine.torch.operations import condensation_score, depthwise, shared_condensation
from normkit.errors import OptionError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.bnet import (
    KERNEL_STARTS,
    around_centre,
    centre,
    check_dims,
    is_drawn,
    odd,
    start_kernel,
    with_convolution,
)
from normkit.layers.gated import centered, centered_by
from normkit.layers.gated import gate as gate_of
from normkit.layers.measured import Refusal

# Where the paper and the authors' code differ. The literal starts belong together: score 0 and
# variance 0 with the pair average would take running statistics at once and multiply activations by
# 1/√eps = 316.
READINGS: dict[str, dict[str, Any]] = {
    "recommended": {
        "score_norm": "pairs",
        "max_samples": 16,
        "score_init": 1.0,
        "var_init": 1.0,
        "update_in_eval": False,
        "train_stats": "batch",
        "stats_from": "calibrated",
        "gate": "after",
    },
    "paper": {
        "score_norm": "batch",
        "max_samples": None,
        "score_init": 0.0,
        "var_init": 0.0,
        "update_in_eval": False,
        "train_stats": "ema",
        "stats_from": "raw",
        "gate": "before",
    },
}
READINGS["authors"] = {**READINGS["recommended"], "update_in_eval": True}

CHOICES: dict[str, tuple[Any, ...]] = {
    "score_norm": ("pairs", "batch"),
    "train_stats": ("batch", "ema"),
    "stats_from": ("calibrated", "raw"),
    "gate": ("after", "before"),
    "update_in_eval": (False, True),
}

BY_PRESET: Any = "preset"
"""The default of every option above: whatever the preset says."""


class UBN(BatchNormalizer):
    """Unified batch normalization: statistics, centering, scaling and affine map, each rectified.

    Formula, with m the mean over positions of each sample and channel:
        score ← score_decay · score + (1 − score_decay) · mean cosine between samples
        x' = x + center_weight · m
        x̂ = (x' − mean') / √(var' + eps)
        s = sigmoid(gate_weight · m(x̂) + gate_bias)
        y = s · (x̂ ∗ weight + bias), ∗ the depthwise convolution

    Statistics: mean' and var' per channel over the batch while score > tau (features are
    condensed), and running ones, left unchanged, while it is not. Eval mode uses running ones.
    The score is a buffer, compared on the device.

    Shapes: (N, C, *spatial) with ``dims`` spatial axes to the same; (N, C) is a map of 1×1.

    Use when: a gain over bn (2 to 3 points in docs/evidence.md, g) is worth a convolution a norm.
    Avoid when: nobody watches ``layer.score``: a layer of low similarity freezes its running
    statistics after about 20 batches, while they still hold a tenth of their start.

    Paper: Wang et al. 2024, with the differences between paper and authors' code as options:
    preset "authors", or "paper" for the literal reading. ``score_norm`` averages over pairs or
    divides by the batch; ``max_samples`` of the batch enter the score; ``train_stats="ema"``
    normalizes with the updated running values; ``stats_from="raw"`` takes statistics before
    centering; ``gate="before"`` leaves the bias out of the gate. Each part can be switched off:
    ``fct``, ``centering``, ``scaling``, ``affine_conv``; without all four this is bn. With
    virtual_batch the first run's samples make the score.

    >>> import torch, normkit as nk
    >>> layer = nk.UBN(8, tau=0.15)
    >>> y = layer(torch.randn(16, 8, 5, 5))
    >>> round(layer.score.item(), 1)  # unrelated samples: from 1 towards 0
    0.9
    """

    card = Card(
        name="ubn",
        title="Unified Batch Normalization",
        paper="Wang et al. 2024 (ubn)",
        family=False,
        pools_samples=True,
        exact_from_bn=True,
        cures=("condensed-features",),
    )
    reads_each_sample = True
    counts_what_it_blends = False  # a batch that meets a frozen layer is counted as well
    plain_statistics = False  # those of the centered input
    score: Tensor
    center_weight: Tensor | None
    gate_weight: Tensor | None
    gate_bias: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        tau: float = 0.15,
        kernel_size: int = 3,
        dims: int = 2,
        fct: bool = True,
        centering: bool = True,
        scaling: bool = True,
        affine_conv: bool = True,
        affine_init: str = "torch",
        score_decay: float = 0.9,
        sync_score: bool = False,
        preset: str = "recommended",
        score_norm: str = BY_PRESET,
        max_samples: int | None = BY_PRESET,
        score_init: float = BY_PRESET,
        var_init: float = BY_PRESET,
        update_in_eval: bool = BY_PRESET,
        train_stats: str = BY_PRESET,
        stats_from: str = BY_PRESET,
        gate: str = BY_PRESET,
        **options: Any,
    ) -> None:
        asked = {
            "score_norm": score_norm,
            "max_samples": max_samples,
            "score_init": score_init,
            "var_init": var_init,
            "update_in_eval": update_in_eval,
            "train_stats": train_stats,
            "stats_from": stats_from,
            "gate": gate,
        }
        reading = resolve(preset, asked)
        self.second_start = reading["var_init"]
        super().__init__(channels, **options)
        self._choice("preset", preset, tuple(READINGS))
        for option, known in CHOICES.items():
            self._choice(option, reading[option], known)
        if reading["max_samples"] is not None:
            self._positive("max_samples", reading["max_samples"])
        if fct and not self.track_running_stats:
            raise OptionError("UBN needs running statistics for fct. Try fct=False.")
        if not 0 <= score_decay <= 1:
            raise OptionError(f"UBN expects score_decay between 0 and 1, got {score_decay!r}.")
        self.preset, self.reading = preset, reading
        self.tau, self.fct = self._number("tau", tau), fct
        self.score_decay, self.sync_score = score_decay, sync_score
        self.centering, self.scaling, self.affine_conv = centering, scaling, affine_conv
        self.kernel_size, self.dims = (
            odd(self._positive("kernel_size", kernel_size), self),
            self._choice("dims", dims, (1, 2, 3)),
        )
        self.affine_init = self._choice("affine_init", affine_init, KERNEL_STARTS)
        self.register_buffer("score", self._statistic(reading["score_init"], 1))
        self.register_parameter("center_weight", self._new(0.0) if centering else None)
        self.register_parameter("gate_weight", self._new(0.0) if scaling else None)
        self.register_parameter("gate_bias", self._new(1.0) if scaling else None)
        if self.affine and affine_conv:
            kernel = self._new(0.0, channels, 1, *(kernel_size,) * dims)
            self.weight, self.bias = kernel, self._new(0.0)
            start_kernel(kernel, self.bias, affine_init, self.scale_init)

    def extra_repr(self) -> str:
        usual = READINGS[self.preset]
        said = [f"{k}={v!r}" for k, v in self.reading.items() if v != usual[k]]
        return ", ".join([super().extra_repr(), *said])

    def uses_moments(self) -> bool:
        return True  # eval mode has a gate too

    def check_size(self, x: Tensor) -> None:
        if self._convolves:
            check_dims(x, self.dims, self)
            if self.bias is None:
                raise OptionError(f"{title(self)} has a kernel but no bias. Try one of zeros.")

    def maps_epilogue(self, activation: str) -> bool:
        return not self._convolves or activation in BY_RESULT

    def map_reads_state(self) -> bool:
        return self.fct or self.reading["train_stats"] == "ema" or super().map_reads_state()

    @property
    def _convolves(self) -> bool:
        return self.affine_conv and self.weight is not None

    @property
    def condensed(self) -> Tensor:
        """Whether batch statistics are in use: a boolean (1,) on the layer's device."""
        return self._score > self.tau

    @property
    def _score(self) -> Tensor:
        score = self.kept()["score"]
        assert score is not None
        return score

    def not_in_onnx(self, any_size: bool) -> str:
        moving = self.fct and self.reading["update_in_eval"]
        return "its score moves in eval mode, too: try update_in_eval=False" if moving else ""

    # ---------------------------------------------------------------- stage 1: the statistics

    def observe(self, x: Tensor, moments: Moments | None, state: LayerState) -> LayerState:
        """The state, with how alike the samples of this batch are if that enters the score."""
        assert moments is not None
        if not (self.fct and (state.training or self.reading["update_in_eval"])):
            return state
        limit = min(self._limits(), default=None)  # without the size: that may be a symbol
        table = moments.rows(slice(limit))
        with torch.no_grad():
            first = x[:limit]
            if state.processes is None:
                new, samples, old = condensation_score(first, table), table.filled_rows(), None
            else:
                score = state["score"]
                new, samples, old = shared_condensation(first, table, limit, score, state.processes)
            new = new.to(self.score.dtype)
            if self.reading["score_norm"] == "batch":
                new = new * (samples - 1)
            if self.sync_score and old is None and torch.distributed.is_initialized():
                torch.distributed.all_reduce(new)
                new = new / torch.distributed.get_world_size()
        return state.seeing(similarity=new, score=old)

    def observed_samples(self) -> int | None:
        return self.reading["max_samples"]

    def scored(self, x: Tensor) -> int:
        """How many samples the score looks at."""
        return min([x.shape[0], *self._limits()])

    def _limits(self) -> list[int]:
        return [n for n in (self.reading["max_samples"], self.virtual_batch) if n is not None]

    def new_score(self, state: LayerState) -> Tensor:
        """The score after this batch."""
        new = state.observed.get("similarity")
        if new is None:
            return state["score"]
        old = state.observed.get("score")
        old = state["score"] if old is None else old
        mixed = self.score_decay * old + (1 - self.score_decay) * new
        # a NaN here would compare as "not condensed" for ever
        return torch.where(torch.isfinite(mixed), mixed, old)

    def rectified_statistics(
        self, moments: Moments, state: LayerState
    ) -> tuple[Moments, StateUpdate | None]:
        """Of the batch while features are condensed, else running ones: chosen on the device."""
        score = self.new_score(state)
        scored = {"score": score} if "similarity" in state.observed else {}
        if not self.uses_batch(state) or self.single(moments, state):
            return self.running(state), StateUpdate(scored, domain=state.domain)
        pooled = self.pooled(moments, state)
        condensed = score > self.tau if self.fct else None
        batch = self.each_sample(self.or_running(pooled, state), moments)
        update = StateUpdate({}, domain=state.domain)
        if state.training and self.track_running_stats:
            unbiased = pooled.unbiased(self.running_var_correction)
            mean, var, counted = self.over_runs(pooled, state, pooled.mean, unbiased)
            update = self.blended(
                state, only=condensed, counted=counted, running_mean=mean, running_var=var
            )
            if self.reading["train_stats"] == "ema":
                # the updated buffers in value, with the gradient of the part that is new
                assert update.finite is not None
                weight, new = self.blend_weight(state, update.finite), update.values
                batch = Moments(
                    new["running_mean"] + weight * (mean - mean.detach())[None],
                    new["running_var"] + weight * (var - var.detach())[None],
                    pooled.count,
                )
        if condensed is not None:
            before = self.running(state)
            batch = Moments(
                torch.where(condensed, batch.mean, before.mean),
                torch.where(condensed, batch.var, before.var),
                pooled.count,
            )
        return batch, update.with_values(scored)

    def sample_statistics(self, moments: Moments, x: Tensor) -> Moments:
        raw = self.reading["stats_from"] == "raw"
        return moments if raw else centered_by(moments, self.center_weight)

    # ---------------------------------------------------------------- stage 2: normalization

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        """The map to s · x̂ (and the plain affine map, if there is no kernel), and the gate s."""
        assert moments is not None
        calibrated, added = centered(moments, self.center_weight)
        raw = self.reading["stats_from"] == "raw"
        statistics, update = self.rectified_statistics(moments if raw else calibrated, state)
        standardized = statistics.standardizing(self.eps)
        map, s = standardized.after_adding(added), None
        if self.gate_bias is not None:
            s = gate_of(standardized.of(calibrated.mean), self.gate_weight, self.gate_bias)
            map = map.then(s, None)
        if self._convolves:
            return MapResult(map, update, s)
        shift = self.bias
        if s is not None and shift is not None and self.reading["gate"] == "after":
            shift = s * shift
        return MapResult(map.then(self.weight, shift), update, s)

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        """Of what comes before the kernel, in the readings a kernel knows."""
        usual = (
            self.reading["train_stats"] == "batch" and self.reading["stats_from"] == "calibrated"
        )
        batch = self.uses_batch()
        if not (usual and self._convolves) or self.gate_bias is None or self.sync_score:
            return None
        if (batch and not self.pools_all(x)) or (self.reading["update_in_eval"] and not batch):
            return None
        memory = self.memory(x.numel() // self.channels, state)
        if memory is None and self.tracks(state):
            return None
        # a kernel reads and writes at one address: the buffers, but for a forward that is repeated
        kept = state.statistics if state.again else self.kept(domain=state.domain)
        given = None
        if self.fct or not batch:
            mean, var = kept["running_mean"], kept["running_var"]
            assert mean is not None and var is not None
            given = mean, var
        condensation = score = None
        if self.fct and batch:
            score = kept["score"]
            assert score is not None
            if state.again:
                score = score.clone()  # a kernel lets the batch enter it once more
            n = self.scored(x)
            factor = float(n - 1) if self.reading["score_norm"] == "batch" else 1.0
            if self.training:
                condensation = Condensation(n, self.score_decay, factor, self.arrivals)
        return Gate(
            self.eps,
            "normalized",
            None,
            None,
            self.gate_weight,
            self.gate_bias,
            self.center_weight,
            given,
            score,
            self.tau,
            memory,
            self.reading["gate"] == "after",
            condensation,
        )

    def normalize(self, x: Tensor, residual: Tensor | None, activation: str) -> Tensor:
        check_epilogue(x, residual, activation)
        if not self._convolves:
            y, result = self.mapped(x, self.state(), residual, activation)
            self.write(result.update)
            return y
        y, s, whole = with_convolution(self, x, residual, activation)
        return y if whole else self._convolved(y, s, residual, activation)

    def _convolved(
        self, standardized: Tensor, s: Tensor | None, residual: Tensor | None, activation: str
    ) -> Tensor:
        assert self.weight is not None and self.bias is not None
        if s is None or self.reading["gate"] == "before":
            return epilogue(depthwise(standardized, self.weight, self.bias), residual, activation)
        # s is one number a sample and channel, so it passes through the kernel: only the bias
        # needs it afterwards
        shift = s * self.bias
        return normalize(
            depthwise(standardized, self.weight, None),
            lambda _: Coefficients(torch.ones_like(shift), shift),
            use_moments=False,
            residual=residual,
            activation=activation,
        )

    def normalize_masked(
        self, x: Tensor, valid: Tensor, residual: Tensor | None, activation: str
    ) -> Tensor:
        if not self._convolves:
            return super().normalize_masked(x, valid, residual, activation)
        # the kernel sees zeros beyond the valid part, as beyond the border
        y, result = self.mapped_masked(x, valid)
        return self._convolved(blank(y, valid), result.gate, residual, activation)

    def description(self, x: Tensor, state: LayerState) -> Any:
        norm = super().description(x, state)
        if norm is None or not self._convolves:
            return None
        assert self.weight is not None
        return Depthwise(norm, self.weight, self.bias)

    # ---------------------------------------------------------------- from a trained batch norm

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        return {**super().options_from(bn, asked), "affine": True, "affine_init": "dirac"}

    def affine_from(self, bn: TrainedBN) -> tuple[Tensor, Tensor]:
        assert self.weight is not None
        s = 1.0 if self.gate_bias is None else torch.sigmoid(self.gate_bias)
        weight = bn.weight / s
        bias = bn.bias / s if self.reading["gate"] == "after" else bn.bias
        return around_centre(weight, self.weight) if self._convolves else weight, bias

    def with_output_map(self, scale: Tensor, shift: Tensor) -> dict[str, Tensor] | Refusal:
        if self.gate_bias is not None and self.reading["gate"] == "after":  # which scales the bias
            if self.gate_weight is not None and bool((self.gate_weight != 0).any()):
                return Refusal("its gate scales the shift, for each sample by another factor")
            shift = shift / torch.sigmoid(self.gate_bias.detach().to(shift.dtype))
        return super().with_output_map(scale, shift)

    @property
    def compensates(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self._convolves else ("weight", "bias")  # a kernel is part of the method

    def as_batch_norm(self, like: Tensor | None = None) -> TrainedBN:
        bn = super().as_batch_norm(like).losing("score")
        weight, bias, lost = bn.weight, bn.bias, []
        if self._convolves:
            weight = centre(weight)
            lost.append("kernel but for its centre")
        if self.gate_bias is not None and bn.affine:
            s = torch.sigmoid(self.gate_bias.detach())
            weight, bias = weight * s, bias * s if self.reading["gate"] == "after" else bias
            lost.append("gate")
        if self.center_weight is not None:
            lost.append("centering")
        return replace(bn, weight=weight, bias=bias).losing(*lost)

    def parameter_role(self, name: str) -> ParameterRole:
        return super().parameter_role(name)._replace(of_batch_norm=False)  # the gate scales both

    # ---------------------------------------------------------------- for diagnosis

    def standardizing(self, table: Moments, *, batch: bool) -> Coefficients | Refusal:
        calibrated, added = centered(table, self.center_weight)
        seen = table if self.reading["stats_from"] == "raw" else calibrated
        statistics, _ = self.rectified_statistics(seen, self.state_for(batch))
        return statistics.standardizing(self.eps).after_adding(added)

    def gates(self, table: Moments) -> Tensor | Refusal:
        gate = self.compute(table, self.state().alone()).gate
        return Refusal("its gate is switched off") if gate is None else gate

    def threshold(self) -> tuple[Tensor, Tensor] | Refusal:
        return (~self.condensed, self._score) if self.fct else Refusal("its threshold is off")

    def affine_at_start(self) -> bool:
        drawn = self._convolves and self.affine_init == "torch"
        return is_drawn(self.weight, self.bias) if drawn else super().affine_at_start()


def resolve(preset: str, asked: dict[str, Any]) -> dict[str, Any]:
    """The reading of a preset, with what was asked for explicitly laid over it."""
    explicit = {option: value for option, value in asked.items() if value != BY_PRESET}
    return {**READINGS.get(preset, READINGS["recommended"]), **explicit}
