"""Weights that are not finite, standardized for nothing, or trained by nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from normkit.core.messages import counted
from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import EarlierFindings, Finding, Kind, places
from normkit.diagnosis.findings.norm import finite
from normkit.inspection.batches import run_batch
from normkit.inspection.flow import OUTPUT, record_flow
from normkit.inspection.kinds import is_weighted, kind_of

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


def nonfinite_weights(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    named_parameters = evidence.model.named_parameters()
    bad = [name for name, parameter in named_parameters if not finite(parameter.detach())]
    if bad:
        yield BROKEN.finding(
            "serious",
            [layer.path for layer in evidence.layers],
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
    """Only of kind "ws": wn, cwn and scaled_ws have a scale of their own."""
    standardized = {w.path: w.module for w in evidence.survey.weights if w.kind == "ws"}
    if not standardized:
        return
    met = _follow(evidence, standardized)
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
        layer.path: [n for n, p in layer.site.module.named_parameters() if _is_orphan(p, ours)]
        for layer in evidence.layers
    }
    missing = {path: names for path, names in missing.items() if names}
    if missing:
        total = sum(map(len, missing.values()))
        yield ORPHANED.finding(
            "warning",
            list(missing),
            f"{counted(total, 'parameter')} of {places(list(missing))} in no group of the "
            "optimizer.",
            remedy="optimizer.add_param_group({'params': [p for p in model.parameters() if "
            "p.requires_grad and all(p is not q for g in optimizer.param_groups "
            "for q in g['params'])]})",
            parameters=total,
            layers=len(missing),
        )


def _is_orphan(parameter: Tensor, ours: set[int]) -> bool:
    return parameter.requires_grad and id(parameter) not in ours
