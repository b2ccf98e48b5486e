"""What a model makes of wrong statistics, where no layer stands out; and models that are broken."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from normkit.diagnosis.diagnose import diagnose
from normkit.diagnosis.findings.outcome import LESS_LIKELY


class Known(nn.Module):
    """Two classes, with a probability of the first that is p in eval mode and q on batches."""

    def __init__(self, p: float, q: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.p, self.q = p, q

    def forward(self, x: Tensor) -> Tensor:
        self.norm(x)
        p = self.q if self.norm.training else self.p
        spread = 0.01 * x[:, :1].sign()
        return torch.cat([torch.zeros_like(spread) + math.log(p / (1 - p)) + spread, 0 * spread], 1)


def severity(p: float, q: float) -> str | None:
    model = Known(p, q)
    data = [(torch.randn(32, 2), torch.zeros(32, dtype=torch.long)) for _ in range(4)]
    for x, _ in data * 30:
        model.norm(x)
    with torch.no_grad():
        model.norm.weight.copy_(torch.tensor([0.9, 1.1]))
    found = {f.kind: f.severity for f in diagnose(model.eval(), data).findings}
    return found.get("train-eval-gap")


def test_a_right_class_that_loses_a_fifth_of_its_probability_is_a_warning() -> None:
    """Near the loss of guessing, where it cannot double: 2.28 against 1.90 was but a note."""
    assert math.exp(-LESS_LIKELY) == pytest.approx(0.8)
    assert severity(0.5, 0.65) == "warning"  # 0.69 against 0.43
    assert severity(0.5, 0.55) == "note"
    assert severity(0.55, 0.5) is None


@pytest.mark.parametrize("where", ["0.weight", "1.weight"])
def test_a_model_that_has_diverged_is_named(where: str) -> None:
    """A γ that is NaN was an exploding scale, to be clamped, and only a warning."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    data = [torch.randn(16, 3) for _ in range(4)]
    for x in data * 20:
        model(x)
    with torch.no_grad():
        model.get_parameter(where)[0] = math.nan
    (first, *more) = diagnose(model.eval(), data).findings
    assert (first.kind, first.severity) == ("weights-not-finite", "serious")
    assert where in first.said
    assert "exploding-scale" not in {finding.kind for finding in more}
