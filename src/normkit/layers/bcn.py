"""bcn: batch-channel normalization, for large and for micro batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from normkit.core.card import Card
from normkit.core.fusion import Channel, Fusion
from normkit.core.groups import GroupPolicy, resolve_groups
from normkit.core.messages import title
from normkit.core.moments import Moments
from normkit.core.statistics import LayerState, MapResult, StateUpdate, all_finite
from normkit.core.trained import SCALES, ParameterRole, TrainedBN
from normkit.errors import NothingToDo, OptionError
from normkit.layers.batch import BatchNormalizer
from normkit.layers.gn import group_standardizing
from normkit.layers.measured import OWN_STATISTICS, Refusal

NOT_MICRO = {
    "momentum",
    "virtual_batch",
    "running_var_correction",
    "on_single",
    "track_running_stats",
}


class BCN(BatchNormalizer):
    """Batch-channel normalization: a batch norm, then a group norm of its output.

    Formula:
        z = weight · (x − mean) / √(var + eps) + bias
        y = group_weight · (z − mean_g) / √(var_g + eps) + group_bias
        micro: mean ← mean + rate · (batch mean − mean)
               var ← var + rate · (mean of (x − old mean)² − var), then z as above

    Statistics: mean and var per channel as bn; mean_g and var_g per sample and group of z, in
    both modes. With ``micro=True`` mean and var are running estimates, updated before use and
    constants for the gradient, so one image a batch is enough; eval mode only stops the updates.

    Shapes: (N, C, *spatial) to the same; group_weight and group_bias are (groups,).

    Use when: together with weight standardization; micro=True for one or two images a worker. Warm
    the learning rate up: from the first step at 0.1 eight of ten runs of a ResNet-18 collapsed, and
    with an epoch of warm-up none of ten; the first steps, without micro, are nearly the same in
    plain torch (docs/evidence.md, (l)). In a ResNet-20 none did, with warm-up or without.
    Avoid when: group_weight is expected per channel, as gn has it: affine_per="channel".

    Paper: Qiao et al. 2019 (ws-bcn), section 5 and algorithm 1. The rate follows the learning
    rate: ``normkit.follow_learning_rate(model, optimizer)`` does that in one line;
    ``update_rate`` fixes it. The released class never sets it, so its estimates never move.
    ``update_every="step"`` collects micro-batches and updates once an optimizer step, where
    the paper is silent. eps is the code's; algorithm 1 has none.

    from_batch_norm carries the batch part exactly; the group norm after it starts neutral but
    changes the function.

    >>> import torch, normkit as nk
    >>> layer = nk.BCN(8, groups=2, micro=True, update_rate=0.1)
    >>> layer(torch.randn(1, 8, 5, 5)).shape
    torch.Size([1, 8, 5, 5])
    """

    card = Card(
        name="bcn",
        title="Batch-Channel Normalization",
        paper="Qiao et al. 2019 (ws-bcn)",
        pools_samples=True,
    )
    beyond_batch_norm = ("group norm after it",)
    shared_buffers = BatchNormalizer.shared_buffers | {"rate"}
    rate: Tensor
    pending_mean: Tensor
    pending_square: Tensor
    pending_count: Tensor
    group_weight: Tensor | None
    group_bias: Tensor | None

    def __init__(
        self,
        channels: int,
        *,
        groups: int | None = None,
        group_policy: GroupPolicy = "error",
        micro: bool = False,
        affine_per: str = "group",
        update_rate: float | None = None,
        update_every: str = "forward",
        **options: Any,
    ) -> None:
        super().__init__(channels, **options)
        self.group_policy, self.micro, self.update_rate = group_policy, micro, update_rate
        self.groups = resolve_groups(channels, groups, group_policy, owner="BCN")
        self.affine_per = self._choice("affine_per", affine_per, ("group", "channel"))
        self.update_every = self._choice("update_every", update_every, ("forward", "step"))
        if not micro and (update_rate is not None or update_every != "forward"):
            raise OptionError("BCN expects update_rate and update_every with micro=True only.")
        if micro and options.keys() & NOT_MICRO:
            raise OptionError(
                "BCN(micro=True) is made of running estimates that move at update_rate: it has no "
                f"{', '.join(sorted(options.keys() & NOT_MICRO))}."
            )
        size = self.groups if affine_per == "group" else channels
        self.register_parameter("group_weight", self._new(1.0, size) if self.affine else None)
        self.register_parameter("group_bias", self._new(0.0, size) if self.affine else None)
        if micro:
            self.register_buffer("rate", self._statistic(math.nan, 1))
            for name, size in (("mean", channels), ("square", channels), ("count", 1)):
                self.register_buffer(
                    f"pending_{name}", self._statistic(0.0, size), persistent=False
                )
            self._rate_known = update_rate is not None
            if update_rate is not None:
                self.set_update_rate(update_rate)

    @property
    def running_correction(self) -> int:  # type: ignore[override]
        return 0 if self.micro else super().running_correction

    def uses_moments(self) -> bool:
        return True  # the group norm has no other statistics

    def map_reads_state(self) -> bool:
        return self.micro or super().map_reads_state()

    def coefficients(self, moments: Moments | None, state: LayerState) -> MapResult:
        assert moments is not None
        source = self.estimates if self.micro else self.statistics
        statistics, update = source(moments, state)
        first = statistics.standardizing(self.eps).then(self.weight, self.bias)
        second = group_standardizing(moments.after(first), self.groups, self.eps)
        wide = self.channels // self.groups if self.affine_per == "group" else 1
        own = self.group_weight, self.group_bias
        second = second.then(*(None if t is None else t.repeat_interleave(wide) for t in own))
        return MapResult(first.then(*second), update)

    def fusion(self, x: Tensor, state: LayerState) -> Fusion | None:
        own = self.weight, self.bias, self.group_weight, self.group_bias
        memory = self.memory(x.numel() // self.channels, state)
        if not self.micro and self.uses_batch():
            return Channel(self.eps, self.groups, *own, None, memory) if self.pools_all(x) else None
        if self.micro and self.training:
            if self.update_every == "step" or not self._rate_known:
                return None
            memory = self.memory(1, state, scratch=True)
            if memory is None:
                return None
            return Channel(self.eps, self.groups, *own, None, memory, self.rate)
        mean, var = (self.kept()[name] for name in ("running_mean", "running_var"))
        assert mean is not None and var is not None
        return Channel(self.eps, self.groups, *own, (mean, var))

    # ---------------------------------------------------------------- micro batches

    @property
    def needs_update_rate(self) -> bool:
        return self.micro and self.update_rate is None

    def set_worker_batch(self, samples: int) -> None:
        if not self.micro:  # workers share the running estimates
            super().set_worker_batch(samples)

    @torch.no_grad()
    def scale_by(self, scale: Tensor) -> None:
        if self.group_weight is not None and not scale.any():
            self.group_weight.zero_()  # a zero before the group norm would be divided by eps
        else:
            super().scale_by(scale)

    def set_update_rate(self, rate: float) -> None:
        """The weight of the new batch in the estimates; clipped to 0 … 1."""
        if not self.micro:
            raise OptionError("BCN has an update rate with micro=True only.")
        if not math.isfinite(rate):
            raise OptionError(f"BCN expects a finite update rate, got {rate!r}.")
        self.rate.fill_(min(max(float(rate), 0.0), 1.0))
        if not self._rate_known:  # an attribute that is set forgets recorded steps
            self._rate_known = True

    def blend_weight(self, state: LayerState, counts: Tensor) -> float | Tensor:
        return state["rate"] if self.micro else super().blend_weight(state, counts)

    def estimates(self, moments: Moments, state: LayerState) -> tuple[Moments, StateUpdate | None]:
        """The running estimates, after this batch has entered them; no gradient."""
        if not state.training:
            return self.running(state), None
        if not self._rate_known:
            raise OptionError(
                f"{title(self)} has no update rate yet. Try "
                "normkit.follow_learning_rate(model, optimizer), or update_rate=0.01."
            )
        with torch.no_grad():
            batch = self.shared(moments.pooled(samples=None), state)
            mean = batch.mean[0]
            square = batch.var[0] + (mean - state["running_mean"]).square()  # about the old mean
            if self.update_every == "step":
                return self.running(state), self._collected(mean, square, state, batch.enough(1))
            some = batch.enough(1)
            update = self.blended(state, counted=some, running_mean=mean, running_var=square)
        new = update.values
        return Moments(new["running_mean"][None], new["running_var"][None], 1), update

    def _collected(
        self, mean: Tensor, square: Tensor, state: LayerState, some: Tensor | None
    ) -> StateUpdate:
        """The batches since the last optimizer step, with this one if it is finite."""
        finite = all_finite((mean, square))
        counts = finite if some is None else finite & some
        values = {"mean": mean, "square": square, "count": torch.ones_like(state["pending_count"])}
        pending = {
            f"pending_{name}": state[f"pending_{name}"] + torch.where(counts, value, 0)
            for name, value in values.items()
        }
        return StateUpdate(pending, finite, torch.zeros_like(finite), state.domain)

    @torch.no_grad()
    def commit(self) -> None:
        """Let the batches collected since the last optimizer step enter the estimates."""
        if not (self.micro and self.update_every == "step"):
            return
        for state in self.states_of_domains():
            self._commit(state)

    def _commit(self, state: LayerState) -> None:
        count, some = state["pending_count"].clamp(min=1), state["pending_count"] > 0
        mean, var = (
            torch.where(some, state[f"pending_{name}"] / count, state[f"running_{kept}"])
            for name, kept in (("mean", "mean"), ("square", "var"))
        )
        update = self.blended(state, counted=some, running_mean=mean, running_var=var)
        empty = {
            name: torch.zeros_like(state[name])
            for name in ("pending_mean", "pending_square", "pending_count")
        }
        self.write(update.with_values(empty))

    @classmethod
    def options_from(cls, bn: TrainedBN, asked: dict[str, Any]) -> dict[str, Any]:
        found = super().options_from(bn, asked)
        return {k: v for k, v in found.items() if not (asked.get("micro") and k in NOT_MICRO)}

    @property
    def channels_sharing_a_scale(self) -> int:
        return self.channels // self.groups if self.affine_per == "group" else 1

    def with_output_map(self, scale: Tensor, shift: Tensor) -> dict[str, Tensor] | Refusal:
        """By the second scale and shift: the batch norm before them stays as it is."""
        weight, bias = self.group_weight, self.group_bias
        if weight is None or bias is None:
            return super().with_output_map(scale, shift)
        first = slice(None, None, self.channels_sharing_a_scale)
        p, q, wide = scale[first], shift[first], scale.dtype
        return {
            "group_weight": weight.detach().to(wide) * p,
            "group_bias": torch.addcmul(q, bias.detach().to(wide), p),
        }

    def parameter_role(self, name: str) -> ParameterRole:
        if name == "group_weight":  # the second scale
            return ParameterRole(SCALES)
        return super().parameter_role(name)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.micro and not self._rate_known and self.rate.device.type != "meta":
            self._rate_known = bool(torch.isfinite(self.rate).all())

    # ---------------------------------------------------------------- for diagnosis

    def followed_rate(self) -> float | None:
        return float(self.rate) if self.micro else None

    def pools_samples(self) -> bool:
        return not self.micro

    def channel_groups(self, moments: Moments) -> tuple[Moments, int] | Refusal:
        if self.groups == self.channels:
            return OWN_STATISTICS
        first = self.running().standardizing(self.eps).then(self.weight, self.bias)
        return moments.after(first), self.groups  # of what its batch norm gives

    def divided_by(self, moments: Moments) -> Tensor | Refusal:
        return Refusal("it is two norms, which divide one after the other")

    def group_size(self, shape: torch.Size) -> int:
        return math.prod(shape[1:]) // self.groups


class Following:
    """Writes an optimizer's learning rate into the micro-batch layers of a model.

    A forward pre-hook of the model, so that a scheduler's change counts from the next forward
    on. ``remove()`` ends it. A pickled copy forgets the optimizer and does nothing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, group: int) -> None:
        self.optimizer: torch.optim.Optimizer | None = optimizer
        self.group = group
        self.handles: list[Any] = []

    def __call__(self, model: nn.Module, *_: Any) -> None:
        if self.optimizer is not None and model.training:
            rate = float(self.optimizer.param_groups[self.group]["lr"])
            for layer in _micro_layers(model):
                layer.set_update_rate(rate)

    def remove(self) -> None:
        """Stop following; the layers keep the last rate."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.optimizer = None

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizer": None, "group": self.group, "handles": []}


def follow_learning_rate(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, group: int = 0
) -> Following:
    """Let every BCN(micro=True) of the model update at the optimizer's current learning rate.

    ``group`` is the parameter group whose rate is followed. One call after both exist; works
    with any scheduler. Layers with update_every="step" are updated after each optimizer step.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(nk.BCN(8, micro=True))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> handle = nk.follow_learning_rate(model, optimizer)
    >>> _ = model(torch.randn(1, 8, 5, 5))
    >>> round(model[0].rate.item(), 3)
    0.1
    """
    layers = _micro_layers(model)
    if not layers:
        raise NothingToDo("The model has no BCN(micro=True) layer. Try nk.BCN(..., micro=True).")
    if not 0 <= group < len(optimizer.param_groups):
        raise OptionError(
            f"The optimizer has {len(optimizer.param_groups)} parameter group(s), "
            f"got group={group}."
        )
    following = Following(optimizer, group)

    def commit(*_: Any) -> None:
        for layer in layers:
            layer.commit()

    following(model)
    following.handles = [
        model.register_forward_pre_hook(following),
        optimizer.register_step_post_hook(commit),
    ]
    return following


def _micro_layers(model: nn.Module) -> list[BCN]:
    return [m for m in model.modules() if isinstance(m, BCN) and m.micro]
