"""Channels, scales and groups: what is dead, explodes, is erased or swallowed by eps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from normkit.core.messages import counted
from normkit.diagnosis.findings.bounds import (
    DEAD,
    FITS,
    HUGE_SCALE,
    LARGE_SCALE,
    MOSTLY,
    NEARLY_ALL,
    OFF,
    WRONG,
)
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import EarlierFindings, Finding, Kind, conversion, named
from normkit.diagnosis.findings.norm import NormEvidence

MISFITS = ("stale-statistics", "estimation-shift", "train-eval-gap", "input-shift")
"""What weights that were changed bring about further on: statistics that do not fit."""

DEAD_CHANNELS = Kind(
    "dead-channels",
    "Channels are dead",
    "A channel that the activation never lets pass, or whose scale is 0, carries nothing and gets "
    "no gradient: the network works with fewer channels, an elimination singularity.",
    "Qiao et al. 2019 (ws-bcn), section 3.2",
    brings=(*MISFITS, "eps-dominates"),
)
EXPLODING = Kind(
    "exploding-scale",
    "The scale γ of a norm has exploded",
    "Gradients below are multiplied by γ / √(variance + eps) on their way down, and a few channels "
    "decide what follows; in half precision they overflow.",
    "Davis & Frank 2021 (revisiting-bn), eq. 20; brevitas#388",
    brings=MISFITS,
)
SWALLOWED = Kind(
    "eps-dominates",
    "Variances are below eps",
    "The variance after a norm is var / (var + eps): where eps is larger than var less than half "
    "is left, and the layer does not normalize.",
    "Davis & Frank 2021 (revisiting-bn), eq. 24: eps is taken to be negligible",
    brings=(*MISFITS, "dead-channels"),
)
SATURATED = Kind(
    "saturated-gates",
    "Gates are saturated",
    "A gate near 0 or 1 has a fifth of its largest slope or less: it no longer learns, and near 0 "
    "it switches its channel off.",
    "Gao et al. 2021 (rbn), Liang et al. 2019 (iebn), Wang et al. 2024 (ubn)",
    brings=(*MISFITS, "eps-dominates", "dead-channels"),
)
ERASING = Kind(
    "tiny-groups",
    "A norm erases what it is given",
    "A single value minus its mean is 0: a group of one element gives the bias, whatever comes in. "
    "Of two elements only the sign of their difference is left, of m none is above √(m − 1).",
    "Wu & He 2018 (gn); opacus#567",
    brings=(*MISFITS, "eps-dominates", "dead-channels"),
)
SHARED = Kind(
    "shared-statistics",
    "One norm serves several places with different statistics",
    "Its running statistics are a mixture and fit none of the places, while in training each batch "
    "is normalized by its own.",
    "Huang et al. 2022 (estimation-shift), section 4; CycleBatchNormList of detectron2",
)


LARGE_EPS = 2e-3
"""Libraries have 1e-3 (TensorFlow) and less; more is a choice, or a mistake if it does not fit."""
NOTICED = 20.0
"""Variance over eps below which eps takes 2.5 % or more of the output's size."""


def dead_channels(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    explained = earlier.paths(SATURATED.name, "tiny-groups", "untrained")
    share = {x: _dead(x) for x in evidence.layers if x.path not in explained}
    layers = [x for x in share if share[x] > DEAD]
    if layers:
        worst = max(layers, key=lambda layer: share[layer])
        yield DEAD_CHANNELS.finding(
            "serious" if share[worst] > MOSTLY else "warning",
            layers,
            f"{share[worst]:.0%} of the channels of {named(worst.path)} are dead on all samples.",
            worst=worst,
            remedy=f"torch.nn.init.ones_({worst.code}.weight); "
            f"torch.nn.init.zeros_({worst.code}.bias)  # and train on",
            share=share[worst],
            layers=len(layers),
        )


def _dead(layer: NormEvidence) -> float:
    """The share of channels that are dead with right statistics: whatever these are, γ and β
    remain."""
    highest = None if layer.own is None else layer.own.highest
    scale = layer.scale
    off = [] if highest is None else [highest <= 0]
    if scale is not None and (highest is None or scale.shape == highest.shape):
        off.append(scale == 0)
    return float(torch.stack(off).any(0).double().mean()) if off else 0.0


def exploding_scale(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    largest = {x: float(x.scale.abs().max()) for x in evidence.layers if x.scale is not None}
    start = {x: abs(float(getattr(x.norm, "scale_init", 1.0))) or 1.0 for x in largest}
    ratio = {x: largest[x] / max(start[x], 1.0) for x in largest}
    layers = [x for x, value in ratio.items() if value > LARGE_SCALE]
    if layers:
        worst = max(layers, key=lambda layer: ratio[layer])
        scale = worst.scale
        assert scale is not None
        middle = float(scale.abs().median())
        yield EXPLODING.finding(
            "serious" if ratio[worst] > HUGE_SCALE else "warning",
            layers,
            f"|γ| of {named(worst.path)} goes up to {largest[worst]:.3g}; it starts at "
            f"{start[worst]:g}, and half of the channels are below {middle:.2g}.",
            worst=worst,
            remedy=f"{worst.code}.weight.data.clamp_(-3, 3)  # and train on with a smaller "
            "learning rate for γ: nk.param_groups(model, lr=0.1, weight_decay=1e-4)",
            largest=largest[worst],
            median=middle,
            channels=int((scale.abs() > LARGE_SCALE * start[worst]).sum()),
            layers=len(layers),
        )


def eps_dominates(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    new = earlier.paths("untrained")  # weights as they are drawn are small in some recipes
    chosen = [x for x in evidence.layers if (x.pools or x.frozen) and x.path not in new]
    share = {x: _swallowed(x, x.site.eps or 0.0) for x in chosen}
    layers = [x for x, value in share.items() if value > MOSTLY]
    if not layers and _misfit(evidence):
        unusual = [x for x in chosen if (x.site.eps or 0.0) > LARGE_EPS]
        share = {x: _swallowed(x, NOTICED * (x.site.eps or 0.0)) for x in unusual}
        layers = [x for x, value in share.items() if value > MOSTLY]
    if layers:
        worst = max(layers, key=lambda layer: share[layer])
        var = _variance(worst)
        assert var is not None
        middle = float(var[var > 0].median())
        eps = worst.site.eps or 0.0
        below = "below" if middle < eps else f"below {NOTICED:g} times"
        yield SWALLOWED.finding(
            "warning",
            layers,
            f"In {share[worst]:.0%} of the channels of {named(worst.path)} the variance is {below} "
            f"its eps of {worst.site.eps:g}; half are below {middle:.2g}.",
            worst=worst,
            remedy=f"{worst.code}.eps = {middle / 100:.1g}; {evidence.calibrating}",
            share=share[worst],
            eps=worst.site.eps,
            median_variance=middle,
            layers=len(layers),
        )


def _variance(layer: NormEvidence) -> Tensor | None:
    total = None if layer.own is None else layer.own.channels.total
    return None if total is None else total.var[0]


def _swallowed(layer: NormEvidence, bound: float) -> float:
    """The share of channels that vary, but less than that; constant ones have nothing to lose."""
    var = _variance(layer)
    if var is None or not bool((var > 0).any()):
        return 0.0
    return float((var[var > 0] < bound).double().mean())


def _misfit(evidence: Evidence) -> bool:
    """Whether running statistics lose something, by the loss or by what norms are given."""
    gap = evidence.gap
    lost = gap is not None and gap.sure and gap.difference > 0
    return lost or any(not x.fits(2 * FITS) for x in evidence.running() if x.learns)


def saturated_gates(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    if evidence.measured is None:
        return
    share = evidence.measured.by_layer("gate_saturation")
    closed = {path: value for path, value in share.items() if value > MOSTLY}
    if closed:
        worst = max(closed, key=lambda path: closed[path])
        code = next(x.code for x in evidence.layers if x.path == worst)
        yield SATURATED.finding(
            "serious" if closed[worst] > NEARLY_ALL else "warning",
            list(closed),
            f"{closed[worst]:.0%} of the gates of {named(worst)} are below 0.05 or above 0.95.",
            worst=worst,
            remedy=f"torch.nn.init.zeros_({code}.gate_bias); "
            f"torch.nn.init.zeros_({code}.gate_weight)  # and train on",
            share=closed[worst],
            layers=len(closed),
        )


def tiny_groups(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    shapes = {x: x.eval.shape for x in evidence.layers if x.eval is not None and x.eval.shape}
    sizes = {x: x.measured.group_size(shape) for x, shape in shapes.items()}
    counts = {x: size for x, size in sizes.items() if size is not None and size <= 2}
    if counts:
        worst = min(counts, key=lambda layer: counts[layer])
        few, shape = counts[worst], ", ".join(["N", *map(str, shapes[worst][1:])])
        yield ERASING.finding(
            "serious" if few == 1 else "warning",
            list(counts),
            f"{named(worst.path)} takes statistics over groups of {counted(few, 'element')}: input "
            f"({shape}), {worst.site.groups or worst.site.channels} groups"
            + (": the output is constant." if few == 1 else ": the output is 1 or −1."),
            worst=worst,
            remedy=f"{conversion(ERASING, list(counts), ', groups=1')}  # and train on",
            elements=few,
            layers=len(counts),
        )


def shared_statistics(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    apart: dict[NormEvidence, float] = {}
    for layer in evidence.running():
        calls = layer.own.of_calls if layer.own is not None and not layer.frozen else []
        together = None if layer.own is None else layer.own.expected.total
        if len(calls) > 1 and together is not None:
            errors = [layer.distance(together, c.total) for c in calls if c.total is not None]
            apart[layer] = max(errors)
    far = [x for x, error in apart.items() if error >= OFF]
    if far:
        worst = max(far, key=lambda layer: apart[layer])
        assert worst.own is not None
        yield SHARED.finding(
            "serious" if apart[worst] >= WRONG else "warning",
            far,
            f"{named(worst.path)} is called {len(worst.own.of_calls)} times in a forward, and what "
            f"it is given differs: statistics of all calls are off by {apart[worst]:.2f} for one.",
            worst=worst,
            remedy=f"{conversion(SHARED, far)}  # and train on; for the levels of a pyramid also "
            "nk.pool_levels(model)",
            calls=len(worst.own.of_calls),
            output_error=apart[worst],
            layers=len(far),
        )
