"""Old and new network in step: at each norm all runs meet, and the new one is fitted there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normkit.conversion.edits import ReplaceModule, copies, tensors
from normkit.conversion.fit.data import UNTOUCHED, Fit, ImageRun
from normkit.conversion.fit.linear import LinearSite
from normkit.conversion.fit.solve import Activation, solve, unexplained
from normkit.conversion.fit.weights import StandardizedSite, standardized
from normkit.conversion.sources import norm_of
from normkit.core.moments import Moments, standardization_error
from normkit.core.precision import widest
from normkit.engine.epilogue import epilogue
from normkit.errors import NormkitError, OptionError
from normkit.inspection import Site
from normkit.inspection.batches import run_batch
from normkit.inspection.run import replaced_forward
from normkit.inspection.side_by_side import RunGroup, current_run
from normkit.inspection.statistics import MergedMoments, NormStatistics, pooled_statistics_of
from normkit.layers.base import Normalizer
from normkit.layers.measured import Refusal
from normkit.layers.norm_act import NormAct

VALUES = 1 << 11  # of a channel that enter a fit of two numbers, at most
AT_ONCE = 1 << 22  # and of all channels together: 32 MB in float64
ABSURD = 1e12  # an error of running statistics: pixels up to 255 in place of 1 make one of 1e5
PARTED = (
    "Old and new network, or the images, took different ways through the model, so they cannot be "
    "fitted in step: its forward depends on the values of its input. Fit a part of it, such as "
    f"the backbone, with images for that part. {UNTOUCHED}"
)


@dataclass(eq=False)
class Candidate:
    """A norm that may take the place of an old one."""

    edit: ReplaceModule
    empty: bool = False
    """Whether its running statistics are to be measured on the images."""
    scale: Tensor | None = None
    shift: Tensor | None = None
    prepared: tuple[str, ...] = ()
    """Tensors of its own that were set for the fit."""

    @property
    def norm(self) -> nn.Module:
        return norm_of(self.edit.new)

    def values(self) -> dict[str, Tensor]:
        """The values of the new module's tensors, by their paths in it."""
        if self.scale is None or self.shift is None:
            return {}
        values = output_map_of(self.norm, self.scale, self.shift)
        assert not isinstance(values, Refusal)
        prefix = "" if self.norm is self.edit.new else "norm."
        return {prefix + name: value for name, value in values.items()}


@dataclass(eq=False)
class FitSite:
    """An old norm, what may take its place, and what is known of the fit."""

    site: Site
    candidates: list[Candidate]
    activation: Activation | None = None
    chosen: Candidate | None = None
    r2: float = float("nan")
    plain_r2: float = float("nan")
    tried: dict[int, float] = field(default_factory=dict)
    """R² of each candidate, by its number."""
    calls: int = 1
    """How often a forward calls it."""
    note: str = ""
    drift: float | None = None
    """How wrong the old norm's running statistics are for its inputs."""
    turn: int = 0
    """Its place in the order of the forward: a number that grows."""

    @property
    def current(self) -> Candidate:
        """The one that is chosen, or would be."""
        return self.chosen or self.candidates[0]

    def snapshot(self) -> Callable[[], None]:
        """What brings the state of now back: of this object and of the new norms."""
        held = [(c, dict(vars(c)), copies(c.edit.new)) for c in self.candidates]
        own = {**vars(self), "tried": dict(self.tried)}

        @torch.no_grad()
        def restore() -> None:
            vars(self).update(own, tried=dict(own["tried"]))
            for candidate, values, numbers in held:
                vars(candidate).update(values)
                for name, tensor in tensors(candidate.edit.new).items():
                    tensor.copy_(numbers[name])

        return restore

    def keep_carried(self) -> None:
        """Forget what was fitted."""
        for candidate in self.candidates:
            candidate.scale = candidate.shift = None
        self.r2 = self.plain_r2


def output_map_of(norm: nn.Module, scale: Tensor, shift: Tensor) -> dict[str, Tensor] | Refusal:
    """The tensors of a norm, ours or torch's, that would give scale · y + shift instead of y."""
    if isinstance(norm, Normalizer):
        return norm.with_output_map(scale, shift)
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if weight is None or bias is None:
        return Refusal("it has no scale and shift of its own: try affine=True")
    wide = scale.dtype
    return {
        "weight": weight.detach().to(wide) * scale,
        "bias": torch.addcmul(shift, bias.detach().to(wide), scale),
    }


# -------------------------------------------------------------------- both networks in step


class Lockstep:
    """One pass of both networks over the images, the old one's runs first in each list."""

    def __init__(
        self,
        model: nn.Module,
        places: Sequence[FitSite],
        runs: Sequence[ImageRun],
        fit: Fit,
        linear: Sequence[LinearSite] = (),
        settled: bool = False,
        weights: Sequence[StandardizedSite] = (),
    ) -> None:
        self.model, self.places, self.runs, self.fit = model, places, runs, fit
        self.linear, self.weights = linear, weights
        self.settled = settled  # norms that are called several times keep what they have
        self.counts: dict[tuple[int, int], int] = {}
        self.tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # of such norms

    def run(self) -> list[Any]:
        """The outputs, of the old network for each run, then of the new one."""
        jobs = [partial(run_batch, self.model, run.batch, run.number) for run in self.runs] * 2
        with ExitStack() as stack:
            for place in self.places:
                module = place.site.module
                assert "forward" not in vars(module)
                stand_in = self._stand_in(place, module.forward)
                stack.enter_context(replaced_forward(module, stand_in))
            for layer in self.linear:
                stand_in = self._linear(layer, layer.module.forward)
                stack.enter_context(replaced_forward(layer.module, stand_in))
            stack.enter_context(standardized(self.weights, self._in_new))
            seeds = list(range(len(self.runs))) * 2
            return RunGroup(jobs, seeds, PARTED).run()

    def _in_new(self) -> bool:
        run = current_run()
        return run is not None and run.index >= len(self.runs)

    def _stand_in(self, place: FitSite, original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            run = current_run()
            if run is None:
                return original(*args, **kwargs)
            is_new = run.index >= len(self.runs)
            call = self.counts.get((run.index, id(place)), 0)
            self.counts[run.index, id(place)] = call + 1
            x, finish = _opened(place.site, args, kwargs)
            key = (place.site.path, call)
            combine = partial(self._meeting, place, call)
            if is_new:
                return finish(run.meet(key, x, combine))
            output = _bare_output(place.site, original, x)
            run.meet(key, (x, output), combine)
            return finish(output)

        return forward

    def _linear(
        self, layer: LinearSite, original: Callable[[Tensor], Tensor]
    ) -> Callable[[Tensor], Tensor]:
        count = len(self.runs)

        def combine(parts: list[Any]) -> list[Any]:
            olds, inputs = parts[:count], parts[count:]
            pairs = [(x, old) for x, (old, _) in zip(inputs, olds, strict=True)]
            alike = all(x.shape == old.shape for x, old in pairs)
            if alike and not all(torch.equal(x, old) for x, old in pairs):
                layer.fit(inputs, [output for _, output in olds], self.runs)
            return [None] * len(parts)

        def forward(x: Tensor) -> Tensor:
            run = current_run()
            if run is None:
                return original(x)
            if run.index >= count:
                run.meet(layer.path, x, combine)
                return layer(x)
            output = original(x)
            run.meet(layer.path, (x, output), combine)
            return output

        return forward

    # ---------------------------------------------------------------- at a norm

    def _meeting(self, place: FitSite, call: int, parts: list[Any]) -> list[Any]:
        """From what the old norm got and gave, and what the new one gets: what it gives."""
        count = len(self.runs)
        olds, inputs = parts[:count], parts[count:]
        if call == 0 and place.drift is None:
            if not all(bool(torch.isfinite(x.sum())) for x, _ in olds):
                self._refuse_own_numbers()
            place.drift = _drift(place.site, [x for x, _ in olds])
            place.turn = len(self.counts)  # it grows with every norm that is met
        targets = [t for _, t in olds]
        alike = all(x.shape == t.shape for x, t in zip(inputs, targets, strict=True))
        carried: list[Tensor] | None = None
        if place.chosen is None or not (self.settled and place.calls > 1):
            if alike:
                place.chosen, carried = self._fit(place, call, inputs, targets)
            else:
                place.chosen = place.candidates[0]
                place.note = "old and new network give it maps of different sizes, so it is carried"
        chosen = place.chosen
        if carried is None:
            carried = [self._carried(place, chosen, x) for x in inputs]
        return [None] * count + [_mapped(u, chosen.scale, chosen.shift) for u in carried]

    def _refuse_own_numbers(self) -> None:
        """The images are finite: if a tensor of the model is not, it is to blame."""
        for name, tensor in tensors(self.model).items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                raise OptionError(
                    f"{name} of the model is not finite (NaN or infinity), so nothing can be "
                    f"fitted to what the model gives. {UNTOUCHED}"
                )

    def _carried(self, place: FitSite, candidate: Candidate, x: Tensor) -> Tensor:
        try:
            y: Tensor = candidate.norm.forward(x)  # without hooks
        except NormkitError as error:
            path = place.site.path
            raise OptionError(
                f'{path}: {error} {UNTOUCHED} Leave it out: where="!{path}".'
            ) from error
        return y

    def _fit(
        self, place: FitSite, call: int, inputs: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[Candidate, list[Tensor]]:
        """Fit every candidate; the one that explains most of what is held out, and what it gives
        as carried."""
        pick = _Positions(targets)
        wanted = [pick(t, i) for i, t in enumerate(targets)]
        best: tuple[float, Candidate, list[Tensor]] | None = None
        for number, candidate in enumerate(place.candidates):
            if candidate.empty and call == 0:
                _measure_statistics(place.site, candidate, inputs, self.runs)
            if call == 0 and isinstance(candidate.norm, Normalizer):
                taken = [pick(x, i) for i, x in enumerate(inputs)]
                parts = self._split(taken, wanted, held_out=False)
                candidate.prepared = candidate.norm.prepare_fit(*parts)
            carried = [self._carried(place, candidate, x) for x in inputs]
            given = [pick(u, i) for i, u in enumerate(carried)]
            u, t = self._split(given, wanted, held_out=False)
            if place.calls > 1:  # all calls together
                before = self.tables.get((id(place), number), (u[:0], t[:0]))
                u, t = (torch.cat([a, b]) for a, b in zip(before, (u, t), strict=True))
                self.tables[id(place), number] = u, t
            sharing = getattr(candidate.norm, "channels_sharing_a_scale", 1)
            solving = partial(
                solve, u, t, sharing=sharing, rounds=self.fit.rounds, shrink=self.fit.shrink
            )
            try:
                scale, shift = solving(place.activation)
            except (RuntimeError, TypeError, ValueError):  # an activation that takes maps only
                place.activation = None
                scale, shift = solving()
            if not bool(torch.isfinite(scale).all() and torch.isfinite(shift).all()):
                raise OptionError(
                    f"The maps at {place.site.path} are not finite, so nothing can be fitted to "
                    f"them. {UNTOUCHED}"
                )
            u, t = self._split(given, wanted, held_out=True)
            r2 = _r2(torch.addcmul(shift, u, scale), t, place.activation)
            candidate.scale, candidate.shift = scale, shift
            place.tried[number] = r2
            if best is None or r2 > best[0]:
                best = r2, candidate, carried
                place.r2, place.plain_r2 = r2, _r2(u, t, place.activation)
        assert best is not None
        return best[1:]

    def _split(
        self, given: Sequence[Tensor], wanted: Sequence[Tensor], held_out: bool
    ) -> tuple[Tensor, Tensor]:
        """Tables (values, C) of what is fitted, or of what is held out."""
        sides = []
        for side in (given, wanted):
            rows = [
                run.part(part, held_out).flatten(0, 1)
                for run, part in zip(self.runs, side, strict=True)
            ]
            sides.append(torch.cat(rows))
        return sides[0], sides[1]


class _Positions:
    """Some positions of each map, the same ones of what is given and what is wanted."""

    def __init__(self, maps: Sequence[Tensor]) -> None:
        channels = max(maps[0].shape[1], 1)
        samples = max(sum(len(m) for m in maps), 1)
        self.each = max(1, min(VALUES, AT_ONCE // channels) // samples)

    def __call__(self, x: Tensor, number: int) -> Tensor:
        """(N, positions, C), wide."""
        flat = x.detach().flatten(2) if x.dim() > 2 else x.detach().unsqueeze(2)
        if flat.shape[2] > self.each:
            generator = torch.Generator().manual_seed(number)
            chosen = torch.randperm(flat.shape[2], generator=generator)[: self.each]
            flat = flat[:, :, chosen.to(flat.device)]
        return flat.transpose(1, 2).to(widest(x.device))


def _r2(output: Tensor, target: Tensor, activation: Activation | None) -> float:
    if not len(target):
        return float("nan")
    if activation is not None:
        output, target = activation(output), activation(target)
    missing, spread = unexplained(output, target)
    return 1 - missing / spread if spread > 0 else float("nan")


def _mapped(y: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    if scale is None or shift is None:
        return y
    shape = (-1, *(1,) * (y.dim() - 2))
    wide = torch.promote_types(y.dtype, torch.float32)
    p, q = (t.to(wide).reshape(shape) for t in (scale, shift))
    return torch.addcmul(q, y.to(wide), p).to(y.dtype)


def _measure_statistics(
    site: Site, candidate: Candidate, inputs: Sequence[Tensor], runs: Sequence[ImageRun]
) -> None:
    """Let a new norm that has no running statistics have those of its inputs."""
    statistics = pooled_statistics_of(candidate.norm)
    if statistics is None:
        return
    merged: MergedMoments | None = None
    for run, x in zip(runs, inputs, strict=True):
        part = run.part(x, held_out=False)
        if len(part):
            one = MergedMoments.of(statistics.table(part))
            merged = one if merged is None else merged.merged(one)
    if merged is not None:
        NormStatistics(site.path, candidate.norm, statistics.kind).write(merged, len(runs))


def _drift(site: Site, inputs: Sequence[Tensor]) -> float | None:
    """How wrong the running statistics of an old norm are for its inputs; the median channel."""
    kept = pooled_statistics_of(site.norm) if site.tracked else None
    if kept is None or not kept.source.running_buffers():
        return None
    held, pick = kept.read(), _Positions(inputs)
    if any(x.shape[1] != held.mean.shape[1] for x in inputs):
        return None
    values = torch.cat([pick(x, i).flatten(0, 1) for i, x in enumerate(inputs)])
    now = Moments(values.mean(0)[None], values.var(0, correction=0)[None], 1)
    error = float(standardization_error(held, now, kept.eps).median())
    if not error < ABSURD:
        raise OptionError(
            f"The inputs of {site.path} are out of all proportion to those it was trained on: "
            f"{error:.1e} times their power. Check the scale of the images. {UNTOUCHED}"
        )
    return error


# -------------------------------------------------------------------- what a norm is called with


def _opened(
    site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The input of a norm, and what makes its module's output of the bare norm's."""
    module = site.module
    if isinstance(module, NormAct):
        x, residual = _bound(("x", "residual"), args, kwargs)

        def finish(y: Tensor) -> Tensor:
            y = module.drop(y)
            output: Tensor = module.act(y if residual is None else y + residual)
            return output

        return x, finish
    if isinstance(module, Normalizer):
        x, residual, activation = _bound(("x", "residual", "activation"), args, kwargs)
        return x, lambda y: epilogue(y, residual, activation or "none")
    x, *_ = args or kwargs.values()

    def after(y: Tensor) -> Tensor:
        for part in (site.drop, site.act):
            y = y if part is None else part(y)
        return y

    return x, after


def _bound(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return [given.get(name) for name in names]


def _bare_output(site: Site, original: Callable[..., Any], x: Tensor) -> Tensor:
    """What the old norm gives without the activation and drop layer in its module."""
    module = site.module
    if isinstance(module, NormAct):
        y: Tensor = module.norm(x)
        return y
    held = {
        name: child
        for name, child in module._modules.items()
        if child is not None and child in (site.act, site.drop)
    }
    try:
        module._modules.update(dict.fromkeys(held, nn.Identity()))
        output: Tensor = original(x)
    finally:
        module._modules.update(held)
    return output
