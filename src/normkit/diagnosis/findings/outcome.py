"""The model as a whole: its weights, its output, and the gap between its modes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from normkit.core.messages import counted
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import (
    EarlierFindings,
    Finding,
    Kind,
    conversion,
    named,
    places,
)
from normkit.diagnosis.findings.norm import finite
from normkit.diagnosis.findings.shift import ADAPTING
from normkit.inspection.batches import run_batch
from normkit.inspection.flow import OUTPUT, record_flow
from normkit.inspection.kinds import is_weighted, kind_of, layer_of

BROKEN = Kind(
    "weights-not-finite",
    "Parameters of the model are infinite or NaN",
    "Training has diverged, or gradients have overflowed: whatever is computed with them is NaN, "
    "in both modes, and no statistics can repair it.",
    "pytorch#88474",
    spoils=True,
)
BARE = Kind(
    "standardized-without-norm",
    "Weights are standardized, but nothing normalizes what they give",
    "Standardized weights have a fixed size: the output is about √fan-in times larger than usual, "
    "and the layer cannot learn its scale. Of a classifier the logits are fixed in scale.",
    "Qiao et al. 2019 (ws-bcn), section 4.1; WeightStandardization#1",
)
ORPHANED = Kind(
    "untrained-parameters",
    "Parameters of norms are not in the optimizer",
    "They require gradients and get them, but no step changes them: most often the norms were "
    "replaced after the optimizer was made.",
    "lightning#18802, opacus#580",
)
NOT_FINITE = Kind(
    "output-not-finite",
    "The output of the model is not finite",
    "No loss and no gradient can be computed from it. Weights and running statistics are finite, "
    "so the data are to blame, or an overflow in between.",
    "pytorch#88474",
)
GAP = Kind(
    "train-eval-gap",
    "The loss is higher with running statistics than with those of batches",
    "All else is equal, so the statistics make the difference, even if no layer stands out. It "
    "grows from norm to norm.",
    "Huang et al. 2022 (estimation-shift), section 4; pytorch#4741",
)
CONDENSED = Kind(
    "condensed-features",
    "Features of different samples look alike",
    "Where samples are nearly parallel, batch norm centres most of each away and magnifies the "
    "rest; learning slows down at the start. In a trained model it is no harm in itself.",
    "Wang et al. 2024 (ubn), section 3.2",
)
LESS_LIKELY = math.log(1.25)
"""Rise of a cross-entropy at which the right class has lost a fifth of its probability, in the
geometric mean. A loss near that of guessing cannot double, however much is lost."""
ALIKE = 0.3
"""Mean cosine above which ubn calls features condensed."""


def nonfinite_weights(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    named_parameters = evidence.model.named_parameters()
    bad = [name for name, parameter in named_parameters if not finite(parameter.detach())]
    if bad:
        yield BROKEN.finding(
            "serious",
            evidence.layers,
            f"{counted(len(bad), 'parameter')} of the model {'is' if len(bad) == 1 else 'are'} not "
            f"finite, first {bad[0]}.",
            worst="",
            remedy="[m.reset_parameters() for m in model.modules() if hasattr(m, "
            "'reset_parameters') and not all(p.isfinite().all() for p in m.parameters(False))]"
            "  # these start anew; better, load the last good checkpoint, and train on with a "
            "smaller learning rate or gradients clipped",
            parameters=len(bad),
        )


def standardized_without_norm(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    standardized = {
        weight.path: weight.module
        for weight in evidence.survey.weights
        if getattr(layer_of(weight.kind), "standardizes", False)
    }
    met = _follow(evidence, standardized) if standardized else {}
    if not met:
        return
    paths = [path for path in standardized if path in met]
    ends = [path for path in paths if met[path] == "the output"]
    first = (ends or paths)[0]
    layer: Any = standardized[first]
    remedy = (
        "torch.nn.utils.parametrize.remove_parametrizations("
        f"model.get_submodule({first!r}), 'weight')"
        if is_parametrized(layer, "weight")
        else f"nk.fold_weights(model)  # and make {first} a plain layer"
    )
    yield BARE.finding(
        "serious" if ends else "warning",
        paths,
        f"The output of {places(paths)} reaches {met[first]} without a norm in between.",
        worst=first,
        remedy=remedy,
        fan_in=layer.weight[0].numel(),
        reaches=met[first],
        layers=len(paths),
    )


def _follow(evidence: Evidence, standardized: dict[str, nn.Module]) -> dict[str, str]:
    """By path of a standardized layer: the first layer or end that its output reaches bare."""
    modules = dict(evidence.model.named_modules())
    norms = {path: m for path, m in modules.items() if kind_of(m) is not None}
    layers = {
        path: m
        for path, m in modules.items()
        if path not in norms
        and (path in standardized or (is_weighted(m) and not list(m.children())))
    }
    flow = record_flow(
        evidence.model,
        lambda: run_batch(evidence.model, evidence.batches[0], 1),
        standardized,
        {**norms, **layers},
        through=lambda name: True,
    )
    ends: dict[str, str] = {}
    for use in flow.uses:
        if use.user in layers or use.user == OUTPUT:
            ends.setdefault(use.source, "the output" if use.user == OUTPUT else use.user)
    return ends


def untrained_parameters(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    if evidence.optimizer is None:
        return
    ours = {id(p) for group in evidence.optimizer.param_groups for p in group["params"]}
    missing = {
        layer: sum(p.requires_grad and id(p) not in ours for p in layer.site.module.parameters())
        for layer in evidence.layers
    }
    layers = [layer for layer, count in missing.items() if count]
    if layers:
        total = sum(missing.values())
        yield ORPHANED.finding(
            "warning",
            layers,
            f"{counted(total, 'parameter')} of {places(layers)} in no group of the optimizer.",
            remedy="optimizer.add_param_group({'params': [p for p in model.parameters() if "
            "p.requires_grad and all(p is not q for g in optimizer.param_groups "
            "for q in g['params'])]})",
            parameters=total,
            layers=len(layers),
        )


def nonfinite_output(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    if evidence.eval.finite or (earlier.alarm and not evidence.data.not_finite):
        return
    broken = evidence.data.not_finite
    if broken:
        inputs = isinstance(evidence.batches[0].inputs, Tensor)
        pairs = inputs and isinstance(evidence.batches[0].target, Tensor)
        yield NOT_FINITE.finding(
            "serious",
            [],
            f"The data hold infinite values or NaN: the inputs of batch {broken[0]}"
            + (f" and of {len(broken) - 1} more." if len(broken) > 1 else "."),
            remedy="loader = [(x, y) for x, y in loader if x.isfinite().all()]  # and look for "
            "where they come from"
            if pairs
            else "next(b for b in loader if not b.isfinite().all())  # look where it comes from",
            first_batch=broken[0],
            batches=len(broken),
        )
        return
    yield NOT_FINITE.finding(
        "serious",
        [],
        "The model's output holds infinite values or NaN in eval mode.",
        remedy="torch.autograd.set_detect_anomaly(True)  # and run a training step",
    )


def train_eval_gap(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    gap = evidence.gap
    if gap is None or earlier.alarm or not gap.sure or not gap.difference > 0:
        return
    ratio = gap.eval / gap.batch if gap.batch > 0 else math.inf
    measured = [x for x in evidence.running() if not math.isnan(x.error_in_eval)]
    worst = max(measured, key=lambda layer: layer.error_in_eval, default=None)
    likely = gap.difference if evidence.cross_entropy else 0.0
    yield GAP.finding(
        "warning" if ratio >= 2 or likely >= LESS_LIKELY else "note",
        [] if worst is None else [worst],
        f"The loss is {gap.eval:.3g} in eval mode and {gap.batch:.3g} with the statistics of "
        f"batches, on the same samples (standard error of the difference {gap.error:.2g}).",
        remedy=ADAPTING if _other_data(evidence) else evidence.calibrating,
        loss_eval=gap.eval,
        loss_batch=gap.batch,
        standard_error=gap.error,
        samples=gap.pairs,
    )


def _other_data(evidence: Evidence) -> bool:
    """Whether the statistics fit the training data and not these: then it is not for want of them.

    Judged where they fit worst; a bound is not needed, since the loss has shown that it matters.
    """
    layers = [x for x in evidence.running() if not math.isnan(x.error_on_training)]
    worst = max(layers, key=lambda x: 0.0 if math.isnan(x.error) else x.error, default=None)
    return worst is not None and worst.error_on_training < worst.error / 2


def condensed_features(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    scores = {} if evidence.measured is None else evidence.measured.by_layer("condensation")
    if not scores or evidence.batches[0].size < 2:
        return
    first = next(iter(scores))
    if scores[first] > ALIKE:
        yield CONDENSED.finding(
            "note",
            [first],
            f"The mean cosine between samples at {named(first)}, the first norm, is "
            f"{scores[first]:.2f}; above {ALIKE} features are called condensed.",
            remedy=f"{conversion(CONDENSED)}  # if training is slow at its start",
            score=scores[first],
        )
