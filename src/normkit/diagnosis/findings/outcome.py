"""What a model makes of it: its output, the gap between modes, features that look alike."""

from __future__ import annotations

import math
from collections.abc import Iterator

from normkit.diagnosis.findings.evidence import Evidence
from normkit.diagnosis.findings.finding import EarlierFindings, Finding, Kind, conversion, named
from normkit.diagnosis.findings.shift import ADAPTING

NOT_FINITE = Kind(
    "output-not-finite",
    "The output of the model is not finite",
    "Running statistics are finite, so weights, data or an overflow in between are to blame.",
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


def nonfinite_output(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    if evidence.eval.finite or earlier.alarm:
        return
    yield NOT_FINITE.finding(
        "serious",
        [],
        "The model's output holds infinite values or NaN in eval mode.",
        remedy="torch.autograd.set_detect_anomaly(True)  # and run a training step",
    )


def train_eval_gap(evidence: Evidence, earlier: EarlierFindings) -> Iterator[Finding]:
    found = evidence.gap
    if found is None or earlier.alarm or not found.sure or not found.difference > 0:
        return
    ratio = found.eval / found.batch if found.batch > 0 else math.inf
    errors = {
        x.path: x.error_in_eval for x in evidence.running() if x.error_in_eval == x.error_in_eval
    }
    worst = max(errors, key=lambda path: errors[path]) if errors else ""
    likely = found.difference if evidence.nats else 0.0
    yield GAP.finding(
        "warning" if ratio >= 2 or likely >= LESS_LIKELY else "note",
        [worst] if worst else [],
        f"The loss is {found.eval:.3g} in eval mode and {found.batch:.3g} with the statistics of "
        f"batches, on the same samples (standard error of the difference {found.error:.2g}).",
        remedy=ADAPTING if _other_data(evidence) else evidence.calibrating,
        loss_eval=found.eval,
        loss_batch=found.batch,
        standard_error=found.error,
        samples=found.pairs,
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
