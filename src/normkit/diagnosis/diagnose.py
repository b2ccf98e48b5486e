"""One call that says what is wrong with the norms of a model."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import torch
from torch import nn

from normkit.core.messages import counted
from normkit.diagnosis.attribution import METHODS, GapAttribution, attribute_gap
from normkit.diagnosis.diagnosis import Diagnosis, LayerNumbers
from normkit.diagnosis.findings import examine, gather
from normkit.diagnosis.findings.data import BATCHES as COMPARABLE
from normkit.diagnosis.findings.evidence import Evidence, State
from normkit.diagnosis.findings.finding import Undecided
from normkit.diagnosis.findings.norm import NormEvidence
from normkit.diagnosis.observe.passes import Loss
from normkit.errors import NothingToDo, OptionError, nearest
from normkit.inspection.batches import Forward, tensors_in
from normkit.layers.domain_in_use import layers_with_domains

BATCHES = 16


def diagnose(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    loss: Loss | None = None,
    train_loader: Iterable[Any] | None = None,
    steps: int | None = None,
    ranks: Sequence[State | nn.Module] = (),
    ema_of: State | nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    attribution: str | None = "output_error",
    max_batches: int = BATCHES,
    forward: Forward | None = None,
) -> Diagnosis:
    """What is wrong with the norms of a model, why it matters, and what to do. Changes nothing.

    ``loader`` gives batches to evaluate on: tensors, pairs (inputs, target) or mappings of keyword
    arguments. The first ``max_batches`` are kept in memory, mixed, so that sorted data do no harm,
    and run twice, on running statistics and on those of the batch. Detectors get lists of images;
    for batches of another form ``forward(model, batch)`` says what the model gets, such as
    model(batch["image"]). Of layers with statistics of several domains those of the domain in use
    are examined: ``with nk.use_domain(model, 1): nk.diagnose(model, its_loader)``.

    What more is given decides more:
        loss          loss(output, target) of a batch; cross-entropy is tried without
        train_loader  the loader of the training: tells old statistics from shifted data, and
                      whether batches are too small, sorted, or end with a single sample
        steps         training batches the model has seen: whether each was counted once
        ranks         state_dicts, one a process: whether their statistics agree
        ema_of        the live model if ``model`` is a moving average of it, or its state_dict
        optimizer     whether it has all parameters of the norms
        attribution   where the gap between both modes comes from: "output_error" or "esm" (by
                      running statistics), "swap" (exact, a pass for each norm) or None

    ``print`` the result, or take ``.findings``, ``.to_json(path)``, ``.to_html(path)``.

    >>> import torch, normkit as nk
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8))
    >>> model[1].running_var[0] = float("inf")
    >>> diagnosis = nk.diagnose(model, [torch.randn(8, 3, 9, 9)])
    >>> first = diagnosis.findings[0]
    >>> first.kind, first.path, first.remedy
    ('poisoned-statistics', '1', 'nk.calibrate(model, loader)')
    """
    if attribution is not None and attribution not in METHODS:
        raise OptionError(f"Unknown attribution {attribution!r}. {nearest(attribution, METHODS)}")
    evidence = gather(
        model,
        loader,
        loss=loss,
        train_loader=train_loader,
        steps=steps,
        ranks=ranks,
        ema_of=ema_of,
        optimizer=optimizer,
        max_batches=max_batches,
        forward=forward,
    )
    gap = None if attribution is None else _gap(evidence, loss, attribution)
    return Diagnosis(
        model=evidence.survey.title,
        findings=examine(evidence),
        undecided=_undecided(evidence),
        layers=tuple(_numbers(layer, evidence) for layer in evidence.layers),
        cosines=_cosines(evidence),
        gap=gap,
        facts=_facts(evidence),
    )


def _gap(evidence: Evidence, loss: Loss | None, method: str) -> GapAttribution | None:
    """Where the gap comes from; None if there is no loss, or nothing that could differ."""
    if evidence.gap is None:
        return None
    batches = [batch.as_given() for batch in evidence.batches]
    try:
        return attribute_gap(evidence.model, batches, loss, method=method)
    except NothingToDo:
        return None


def _undecided(evidence: Evidence) -> tuple[Undecided, ...]:
    questions = []
    pooling = any(x.pools and not x.frozen for x in evidence.layers)
    if not evidence.running() and not pooling:
        return ()
    if evidence.train_data is None and pooling:
        questions.append(
            Undecided(
                "Whether training batches are too small, sorted or end with a single sample, and "
                "whether statistics that do not fit are old or the data have shifted.",
                "train_loader=",
                ("tiny-batch", "unshuffled-batches", "last-batch-of-one", "input-shift"),
            )
        )
    elif pooling:
        questions += _uncompared(evidence)
    if evidence.gap is None:
        questions.append(_without_gap(evidence))
    if evidence.steps is None and pooling:
        questions.append(
            Undecided(
                "Whether every training batch was counted once.",
                "steps=",
                ("double-update", "extra-updates", "missed-updates"),
            )
        )
    return tuple(questions)


def _uncompared(evidence: Evidence) -> list[Undecided]:
    """What a training loader of too few batches leaves open."""
    data = evidence.train_data
    assert data is not None
    judged = evidence.trained is not None and any(
        len(x.trained.of_batches) >= COMPARABLE for x in evidence.layers if x.trained is not None
    )
    open_ = [] if judged else [("too small", "tiny-batch")]
    open_ += [("sorted", "unshuffled-batches")] if data.compared < COMPARABLE else []
    if not open_:
        return []
    came = min(data.compared, len(data.sizes))
    return [
        Undecided(
            f"Whether training batches are {' or '.join(word for word, _ in open_)}: of the "
            f"{counted(len(data.sizes), 'batch')} read from train_loader {came} can be compared "
            f"(of equal size and two samples or more), and {COMPARABLE} are needed.",
            f"a train_loader= of at least {COMPARABLE} batches, and max_batches= no less",
            tuple(kind for _, kind in open_),
        )
    ]


def _without_gap(evidence: Evidence) -> Undecided:
    """Why losses are not compared, and what would help."""
    question = "How much worse the model is on running statistics, and whether it was trained in "
    if evidence.no_loss:
        question += f"eval mode: {evidence.no_loss.rstrip('.')}."
        give = "batches (x, y), or loss="
    else:
        question += "eval mode: batch statistics cannot be had from every batch."
        give = "a loader= of batches with more samples"
    return Undecided(question, give, ("train-eval-gap", "eval-trained"))


def _numbers(layer: NormEvidence, evidence: Evidence) -> LayerNumbers:
    """The table of measures, and the numbers that findings are made of."""
    numbers = {} if evidence.measured is None else evidence.measured.by_measure(layer.path)
    numbers.pop("output_error", None)  # as a square, and in eval mode; here as its root, twice
    more = {
        "error": layer.error,
        "error_in_eval": layer.error_in_eval,
        "error_on_training": layer.error_on_training,
    }
    if layer.trained is not None and len(layer.trained.of_batches) > 1:
        more["independent_values"] = layer.values(layer.trained)
    if layer.scale is not None:
        more["largest_scale"] = float(layer.scale.abs().max())
    numbers.update({name: value for name, value in more.items() if not math.isnan(value)})
    site = layer.site
    return LayerNumbers(site.path, site.kind, site.where, site.channels, numbers)


def _cosines(evidence: Evidence) -> dict[str, list[list[float]]]:
    if evidence.measured is None or not evidence.measured.matrices:
        return {}
    matrices = evidence.measured.matrices
    scores = evidence.measured.by_layer("condensation")
    first = next(iter(matrices))
    chosen = dict.fromkeys([first, max(matrices, key=lambda path: scores.get(path, -1.0))])
    rounded = {path: matrices[path].double().round(decimals=4) for path in chosen}
    return {path: matrix.tolist() for path, matrix in rounded.items()}


def _domain(model: nn.Module) -> str | None:
    """Whose statistics were looked at, of layers that keep several sets."""
    layers = layers_with_domains(model)
    chosen = sorted({f"{layer.domain} of 0 to {(layer.domains or 0) - 1}" for layer in layers})
    return ", ".join(chosen) or None


def _facts(evidence: Evidence) -> dict[str, Any]:
    gap, model = evidence.gap, evidence.model
    first = next(tensors_in(evidence.batches[0].inputs), None)
    devices = sorted({str(t.device) for t in (*model.parameters(), *model.buffers())})
    return {
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "model": f"{type(model).__module__}.{type(model).__qualname__}",
        "parameters": sum(p.numel() for p in model.parameters()),
        "device": ", ".join(devices),
        "input": None
        if first is None
        else f"{tuple(first.shape)} {str(first.dtype).removeprefix('torch.')}",
        "data": evidence.data.source,
        "training_data": None if evidence.train_data is None else evidence.train_data.source,
        "samples": sum(evidence.data.sizes),
        "batches": len(evidence.data.sizes),
        "training_samples": None if evidence.train_data is None else sum(evidence.train_data.sizes),
        "loss_eval": None if gap is None else gap.eval,
        "loss_batch": None if gap is None else gap.batch,
        "kinds": evidence.survey.kinds,
        "domain": _domain(model),
        "normkit": sys.modules["normkit"].__version__,  # nothing here may import the package itself
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
