"""Accidents around a model: order of colours, resolution, domains, fusing, learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from normkit.core.moments import Moments
from normkit.diagnosis.findings.bounds import FITS, OFF
from normkit.diagnosis.findings.channels import MISFITS
from normkit.diagnosis.findings.data import BATCHES
from normkit.diagnosis.findings.evidence import Evidence, Gap, paired
from normkit.diagnosis.findings.finding import (
    EarlierFindings,
    Finding,
    Kind,
    conversion,
    named,
    places,
)
from normkit.diagnosis.findings.norm import NormEvidence
from normkit.diagnosis.findings.outcome import LESS_LIKELY
from normkit.diagnosis.findings.shift import ADAPTING
from normkit.diagnosis.findings.training import TINY
from normkit.diagnosis.observe.passes import run_pass
from normkit.inspection.batches import NO_TARGET, LoaderBatch
from normkit.inspection.kinds import is_weighted

REVERSED = Kind(
    "channel-order",
    "The colours of the images are in another order than in training",
    "Libraries disagree: OpenCV reads blue, green, red, others red, green, blue. Every filter of "
    "the first layer meets the wrong colours.",
    "OpenCV's manual: imread gives channels in B G R order",
    brings=(*MISFITS, "wrong-input-scaling"),
)
RESIZED = Kind(
    "other-resolution",
    "Images have another size than in training",
    "Edges are as many times wider as images are larger, so that statistics after convolutions "
    "change with the size, and those that were kept do not fit.",
    "Touvron et al. 2019, Fixing the train-test resolution discrepancy, section 3.2",
    brings=(*MISFITS, "wrong-input-scaling"),
)
DOMAINS = Kind(
    "mixed-domains",
    "Training batches come from two domains, which share their statistics",
    "In training each batch is normalized by its own domain; running statistics are a mixture that "
    "fits none of them, so that the model is worse on both in eval mode.",
    "Chang et al. 2019, Domain-specific batch normalization for unsupervised domain adaptation; "
    "Xie et al. 2020 (AdvProp)",
    brings=(*MISFITS, "tiny-batch", "unshuffled-batches"),
)
FUSED_TWICE = Kind(
    "fused-twice",
    "Norms are applied that the weights contain already",
    "What comes in has the scale γ that the norm would give it: the norm was fused into the "
    "weights before, and then kept, or loaded again. In eval mode it is applied twice.",
    "Jacob et al. 2018, Quantization and training of neural networks, section 3.2: folding",
    spoils=True,
)
TOO_FAST = Kind(
    "learning-rate-too-high",
    "Weights have grown as with a learning rate that is far too high",
    "A norm behind weights hides their size, so that nothing overflows: each step makes them "
    "larger and turns them at random. Channels die and scales explode on the way.",
    "van Laarhoven 2017, L2 regularization versus batch and weight normalization; "
    "Arora et al. 2019 (auto rate-tuning)",
    brings=(
        *MISFITS,
        "poisoned-statistics",
        "dead-channels",
        "exploding-scale",
        "eps-dominates",
        "saturated-gates",
    ),
)
BETTER = 0.1
"""Share of the loss that colours in the other order have to save."""
TWO_GROUPS = 0.8
"""Share of the variance between batches that two groups explain; of random batches, half."""
BY_SAMPLING = 0.15
"""Spread of log(σ/γ) over four fifths of the channels, where γ is in the weights; others differ by
0.5 and more."""
GROWN = 5.0
"""Weights over 1/√(inputs of a unit), for the middle layer; 1 to 2 where they start and after usual
training."""


def channel_order(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    """Tried: the model is run on the same images with their colours reversed."""
    batches = evidence.batches
    images = [b.inputs for b in batches if isinstance(b.inputs, Tensor)]
    if len(images) < len(batches) or any(x.dim() != 4 or x.shape[1] != 3 for x in images):
        return
    turned = [LoaderBatch(x.flip(1), b.target) for x, b in zip(images, batches, strict=True)]
    losses = not evidence.no_loss
    other = run_pass(evidence.model, evidence.survey, turned, loss=evidence.loss, losses=losses)
    given, reverse = evidence.eval.loss, other.loss
    running = [x for x in evidence.running() if not math.isnan(x.error_in_eval)]
    numbers: dict[str, Any] = {}
    if given is not None and reverse is not None:
        gap = paired(given, reverse)
        if not math.isfinite(gap.difference):
            return
        if not gap.sure or gap.difference < BETTER * gap.eval:
            return
        said = f"The loss is {gap.eval:.3g} as they are, and {gap.batch:.3g} with colours reversed."
        numbers = {"loss": gap.eval, "loss_reversed": gap.batch}
    else:
        first = running[0] if running else None
        after = math.nan if first is None else first.error_on(other.norms.get(first.path))
        if first is None or first.error_in_eval < 2 * FITS or not after < first.error_in_eval / 2:
            return
        said = (
            f"The statistics of {named(first.path)} are off by {first.error_in_eval:.2f}, and with "
            f"colours reversed by {after:.2f}."
        )
        numbers = {"output_error": first.error_in_eval, "output_error_reversed": after}
    yield REVERSED.finding(
        "serious",
        [],
        said,
        remedy="loader = [x.flip(1) for x in loader]"
        if batches[0].target is NO_TARGET
        else "loader = [(x.flip(1), y) for x, y in loader]",
        **numbers,
    )


def other_resolution(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    """Tried where there is a loss: the model is run on the same images in the size of training."""
    usual = None if evidence.train_data is None else evidence.train_data.image_size
    seen = evidence.data.image_size
    if usual is None or seen is None or usual == seen:
        return
    tried = _resized(evidence, usual)
    helps = tried is not None and _lowers(tried, evidence.cross_entropy)
    if earlier.alarm and not helps:
        return
    gap = evidence.gap
    off = [x for x in evidence.running() if x.learns and x.error_in_eval >= OFF]
    worse = gap is not None and _lowers(gap, evidence.cross_entropy)
    severity = evidence.severity(off) if off or worse or helps else "note"
    size = "×".join(map(str, usual))
    said = f"Images are {'×'.join(map(str, seen))} here, and {size} in training"
    said += f": the statistics of {places(off)} do not fit." if off else "."
    numbers: dict[str, Any] = {}
    if tried is not None and helps:
        severity = "serious" if tried.eval >= 2 * tried.batch else severity
        said += f" The loss is {tried.eval:.3g} as they are, and {tried.batch:.3g} at {size}."
        numbers = {"loss": tried.eval, "loss_resized": tried.batch}
    by_hand = (
        f"loader = [(torch.nn.functional.interpolate(x, {usual}, mode='bilinear'), y) "
        "for x, y in loader]"
    )
    plain = isinstance(evidence.batches[0].inputs, Tensor)
    yield RESIZED.finding(
        severity,
        off,
        said,
        worst="",
        remedy=by_hand if plain and evidence.batches[0].target is not NO_TARGET else ADAPTING,
        size="×".join(map(str, seen)),
        size_in_training=size,
        **numbers,
    )


def _lowers(gap: Gap, cross_entropy: bool) -> bool:
    """Whether the second of two losses is lower, for sure and by so much that it matters."""
    if not gap.sure or not gap.difference > 0:
        return False
    return gap.eval >= 2 * gap.batch or (cross_entropy and gap.difference >= LESS_LIKELY)


def _resized(evidence: Evidence, size: tuple[int, ...]) -> Gap | None:
    """The losses as images are, and in another size; None where that cannot be told."""
    given = evidence.eval.loss
    images = [b.inputs for b in evidence.batches]
    if given is None or not all(_is_images(x) for x in images):
        return None
    turned = [
        LoaderBatch(interpolate(x, size, mode="bilinear"), b.target)
        for x, b in zip(images, evidence.batches, strict=True)
    ]
    try:
        again = run_pass(evidence.model, evidence.survey, turned, loss=evidence.loss, losses=True)
    except Exception:  # such as targets that have the size of the images
        return None
    other = again.loss
    if other is None or len(other) != len(given):
        return None
    return paired(given, other)


def _is_images(x: object) -> bool:
    return isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()


def mixed_domains(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    layers = [x for x in evidence.running() if x.learns and x.pools and x.trained is not None]
    for layer in layers:
        groups = _two_groups(layer)
        if groups is None:
            continue
        share, error, sizes = groups
        if share >= TWO_GROUPS and error >= 2 * FITS:
            yield DOMAINS.finding(
                evidence.severity(layers),
                layers,
                f"What {named(layer.path)} is given falls into two groups of {sizes[0]} and "
                f"{sizes[1]} training batches, which explain {share:.0%} of how they differ: for "
                f"one of them the statistics of both are off by {error:.2f}.",
                worst="",
                remedy=f"{conversion(TINY)}  # and train on; or keep batch norm, with statistics "
                "for each domain: domains=2 and nk.use_domain, or nk.Profiles",
                explained=share,
                output_error=error,
            )
        return  # the first norm that batches can be compared at decides


def _two_groups(layer: NormEvidence) -> tuple[float, float, tuple[int, int]] | None:
    """How much of the variance between batches two groups explain, how far off the statistics of
    all are for one of them, and how large they are; None if there are too few batches."""
    record = layer.trained
    total = None if record is None else record.of_calls[0].total
    if record is None or total is None or len(record.of_batches) < BATCHES:
        return None
    mean = torch.cat([batch.mean for batch in record.of_batches])
    var = torch.cat([batch.var for batch in record.of_batches])
    scale = total.var.clamp(min=1e-30).sqrt()
    places_ = ((mean - total.mean) / scale).double()
    places_ = places_ - places_.mean(0)
    whole = float(places_.square().sum())
    if not whole > 0 or not math.isfinite(whole):
        return None
    direction = torch.linalg.svd(places_, full_matrices=False)[2][0]
    order = (places_ @ direction).argsort()
    best = (0.0, 0)
    for cut in range(2, len(order) - 1):
        within = sum(
            float((part - part.mean(0)).square().sum())
            for part in (places_[order[:cut]], places_[order[cut:]])
        )
        best = max(best, (1 - within / whole, cut))
    share, cut = best
    if not cut:
        return None
    errors = []
    for part in (order[:cut], order[cut:]):
        pooled = Moments(mean[part], var[part], 1).pooled(samples=None)
        errors.append(layer.distance(total, pooled))
    return share, max(errors), (cut, len(order) - cut)


def fused_twice(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    layers = [x for x in evidence.running() if x.learns and x.path not in earlier.spoiled]
    twice = [x for x in layers if _already_scaled(x)]
    if twice:
        worst = max(twice, key=lambda layer: layer.error)
        yield FUSED_TWICE.finding(
            evidence.severity(twice),
            twice,
            f"What {places(twice)} {'is' if len(twice) == 1 else 'are'} given deviates by γ in "
            f"every channel, not by what was kept: the statistics of {named(worst.path)} are off "
            f"by {worst.error:.2f}.",
            worst=worst,
            remedy=f"{evidence.calibrating}  # or load the weights from before the fusion",
            output_error=worst.error,
            layers=len(twice),
        )


def _already_scaled(layer: NormEvidence) -> bool:
    record = layer.trained or layer.own
    scale = layer.scale
    if record is None or record.expected.total is None or scale is None:
        return False
    if not layer.error_on(record) >= OFF:
        return False
    std = record.expected.total.var[0].double().sqrt()
    there = (std > 0) & (scale != 0).to(std.device) if std.shape == scale.shape else std < 0
    if int(there.sum()) < 4:
        return False
    logs = (std[there] / scale.abs().to(std)[there]).log()
    spread = float(logs.quantile(0.9) - logs.quantile(0.1))
    return abs(float(logs.median())) < BY_SAMPLING / 2 and spread < BY_SAMPLING


def learning_rate(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    if not earlier.alarm or earlier.paths("weights-not-finite"):
        return
    sizes = {}
    for path, module in evidence.model.named_modules():
        weight = getattr(module, "weight", None)
        if is_weighted(module) and isinstance(weight, Tensor) and weight.dim() > 1:
            inputs = weight[0].numel()
            size = float(weight.detach().double().square().mean().sqrt()) * math.sqrt(inputs)
            if inputs >= 8 and math.isfinite(size):  # of depthwise filters a few say nothing
                sizes[path] = size
    middle = sorted(sizes.values())[len(sizes) // 2] if sizes else 0.0
    if middle < GROWN:
        return
    largest = max(sizes, key=lambda path: sizes[path])
    yield TOO_FAST.finding(
        "serious",
        [],
        f"Half of the layers have weights {middle:.3g} times the size they start with or more, "
        f"{named(largest)} {sizes[largest]:.3g} times.",
        remedy="[m.reset_parameters() for m in model.modules() if hasattr(m, 'reset_parameters')]"
        "  # and train again, with a learning rate ten times smaller",
        middle=middle,
        largest=sizes[largest],
        layers=len(sizes),
    )
