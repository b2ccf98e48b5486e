"""Averaged weights (SWA, EMA) and the running statistics beside them: three policies, compared.

Statistics that were estimated with one set of weights are not those of the average of many sets.
What to do about it is left to the user by most tools, or done in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from normkit.calibration.apply import chosen_norms
from normkit.calibration.calibrate import Metric, calibrate, measure, score
from normkit.calibration.result import BufferSnapshot
from normkit.calibration.staging import keeps_statistics
from normkit.core.messages import aligned
from normkit.core.moments import standardization_error
from normkit.errors import NormkitError, NothingToDo, OptionError, nearest
from normkit.inspection.batches import Forward

POLICIES = ("average", "copy", "reestimate")


def averaged_statistics(
    averaged: nn.Module,
    batches: Any = None,
    *,
    policy: str = "reestimate",
    model: nn.Module | None = None,
    forward: Forward | None = None,
    images: int | None = None,
    together: bool = False,
) -> None:
    """Give a model of averaged weights its running statistics, by one of three policies.

        "average"      those that were averaged with the weights: of an AveragedModel made with
                       use_buffers=True. Another one holds a copy, and is refused.
        "copy"         those of ``model``, the one that was trained, as they are now.
        "reestimate"   those of its own inputs on ``batches`` of training data, as ``calibrate``
                       measures them: every norm of normkit, torch.nn and timm, whatever its buffers
                       are called. Where torch has ``update_bn``, which knows its own norms alone.

    ``averaged`` is an AveragedModel of torch.optim.swa_utils, or any copy whose weights follow
    those of another model. ``compare_averaging`` tells which policy is best.

    >>> import torch, normkit as nk
    >>> from torch.optim.swa_utils import AveragedModel
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), nk.BN(4))
    >>> averaged = AveragedModel(model)
    >>> averaged.update_parameters(model)
    >>> x = torch.randn(64, 2)
    >>> nk.averaged_statistics(averaged, [x])
    >>> torch.allclose(averaged.module[1].running_mean, model[0](x).mean(0), atol=1e-6)
    True
    """
    if policy not in POLICIES:
        near = nearest(str(policy), POLICIES)
        raise OptionError(f"averaged_statistics got policy={policy!r}. {near}")
    inner = _unwrapped(averaged)
    if policy == "average":
        if isinstance(averaged, AveragedModel) and not averaged.use_buffers:
            raise OptionError(
                "This AveragedModel has not averaged its statistics: it holds those of the model "
                "at its last update. Try AveragedModel(model, use_buffers=True), or another policy."
            )
    elif policy == "copy":
        if model is None:
            raise OptionError("policy='copy' needs the model that was trained: try model=.")
        _copy(_unwrapped(model), inner)
    else:
        if batches is None:
            raise OptionError("policy='reestimate' needs batches of training data: try batches=.")
        calibrate(inner, batches, forward=forward, images=images, together=together)


@dataclass(frozen=True)
class AveragingComparison:
    """What each policy comes to: ``print`` it. ``best`` is the name of the best one."""

    metric: dict[str, float]
    """By policy; empty without a metric."""
    shift: dict[str, float]
    """By policy: how far statistics are from those of the norms' own inputs, averaged over norms;
    the mean square of what they add to the standardized output."""
    refused: dict[str, str]
    """Policies that could not be tried, and why."""
    higher_is_better: bool = True

    @property
    def best(self) -> str:
        if not self.metric:
            return min(self.shift, key=self.shift.__getitem__)
        sign = 1 if self.higher_is_better else -1
        found = {policy: value for policy, value in self.metric.items() if value == value}
        return max(found or self.metric, key=lambda policy: sign * self.metric[policy])

    def __str__(self) -> str:
        rows = [("policy", "metric", "statistics off by", "")]
        for policy in POLICIES:
            if policy in self.shift:
                value = f"{self.metric[policy]:.6g}" if policy in self.metric else "–"
                note = "best" if policy == self.best else ""
                rows.append((policy, value, f"{self.shift[policy]:.3g}", note))
            elif policy in self.refused:
                rows.append((policy, "–", "–", self.refused[policy]))
        return "\n".join(aligned(rows, right=(1, 2)))


def compare_averaging(
    averaged: nn.Module,
    model: nn.Module,
    batches: Any,
    metric: Metric | None = None,
    *,
    higher_is_better: bool = True,
    policies: Sequence[str] = POLICIES,
    forward: Forward | None = None,
    images: int | None = None,
    together: bool = False,
) -> AveragingComparison:
    """Try the policies of ``averaged_statistics`` on a model of averaged weights.

    ``batches`` are training data to estimate and measure statistics with, and are gone through
    several times; ``metric(model)`` gives a number, such as the accuracy on held-out data, and is
    called once a policy. Without one the policies are compared by how far their statistics are from
    those of the norms' own inputs. Nothing is changed: take the best by ``averaged_statistics``.

    >>> import torch, normkit as nk
    >>> from torch.optim.swa_utils import AveragedModel
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 4), nk.BN(4))
    >>> averaged = AveragedModel(model, use_buffers=True)
    >>> averaged.update_parameters(model)
    >>> nk.compare_averaging(averaged, model, [torch.randn(64, 2)]).best
    'reestimate'
    """
    if unknown := [policy for policy in policies if policy not in POLICIES]:
        raise OptionError(
            f"compare_averaging got the policy {unknown[0]!r}. {nearest(str(unknown[0]), POLICIES)}"
        )
    # an iterator is gone through once: it is kept in memory
    several = list(batches) if isinstance(batches, Iterator) else batches
    inner = _unwrapped(averaged)
    norms = {norm.path: norm for norm in chosen_norms(inner, None, frozen=True)[0]}
    before = BufferSnapshot(m for m in inner.modules() if keeps_statistics(m))
    numbers: dict[str, float] = {}
    shifts: dict[str, float] = {}
    refused: dict[str, str] = {}
    try:
        for policy in policies:
            try:
                averaged_statistics(
                    averaged,
                    several,
                    policy=policy,
                    model=model,
                    forward=forward,
                    images=images,
                    together=together,
                )
            except NormkitError as error:
                refused[policy] = str(error)
                continue
            own = measure(inner, several, forward=forward, images=images, frozen=True)
            errors = []
            for path, merged in own.items():
                norm = norms[path]
                true = norm.stored(merged.to(norm.device).table())
                errors.append(standardization_error(norm.read(), true, norm.eps).mean().cpu())
            shifts[policy] = float(torch.stack(errors).mean())
            if metric is not None:
                numbers[policy] = score(inner, metric)
            before.restore()
    finally:
        before.restore()
    if not shifts:
        raise NothingToDo("No policy could be tried: " + " ".join(refused.values()))
    return AveragingComparison(numbers, shifts, refused, higher_is_better)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The network inside of an AveragedModel, or of a wrapper such as DistributedDataParallel."""
    inner = model._modules.get("module")
    return inner if isinstance(inner, nn.Module) else model


@torch.no_grad()
def _copy(source: nn.Module, target: nn.Module) -> None:
    """The buffers of norms, from one model into another of the same architecture."""
    given = dict(source.named_modules())
    pairs = []
    for path, norm in target.named_modules():
        if not keeps_statistics(norm):
            continue
        of = given.get(path)
        theirs = {} if of is None else {k: b for k, b in of._buffers.items() if b is not None}
        mine = {k: b for k, b in norm._buffers.items() if b is not None}
        same = theirs.keys() == mine.keys() and all(
            theirs[k].shape == b.shape for k, b in mine.items()
        )
        if not same:
            raise OptionError(
                f"{path or 'The model'} keeps other statistics in the averaged model than in the "
                "trained one. Convert the model before it is averaged, or average it anew."
            )
        pairs += [(b, theirs[k]) for k, b in mine.items()]
    if not pairs:
        raise NothingToDo("The averaged model has no norm with running statistics.")
    for mine_, its in pairs:
        mine_.copy_(its)
