"""Who looks at norms of padded batches sees what the norms see: valid positions alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normkit as nk


class Padded(nn.Module):
    """Zeros are padding; masks come by a block, or with each call."""

    def __init__(self, block: bool) -> None:
        super().__init__()
        self.block = block
        self.first, self.conv = nk.BN(3), nn.Conv2d(3, 4, 1)
        self.second, self.third = nk.NormAct(nk.BN(4)), nk.RBN(4)

    def forward(self, x: Tensor) -> Tensor:
        mask = (x != 0).any(1)
        if self.block:
            with nk.masked(mask):
                return self.third(self.second(self.conv(self.first(x)))).sum((2, 3))
        y = self.second(self.conv(self.first(x, mask=mask)), mask=mask)
        return self.third(y, mask=mask).sum((2, 3))


def images() -> Tensor:
    x = torch.randn(8, 3, 6, 6, dtype=torch.float64)
    x[:3, :, 4:] = 0
    x[3, :, :, 2:] = 0
    return x


@pytest.mark.parametrize("block", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_calibration_leaves_out_the_padding(block: bool, together: bool) -> None:
    """It looks at the inputs of norms by itself, and took the zeros for values."""
    model, x = Padded(block).double(), images()
    nk.calibrate(model, [x[:5], x[5:]], together=together)
    values = x.movedim(1, 0)[:, (x != 0).any(1)]  # (C, values)
    torch.testing.assert_close(model.first.running_mean, values.mean(1))
    torch.testing.assert_close(model.first.running_var, values.var(1))
    model.eval()
    with torch.no_grad():
        later = model.conv(model.first(x)).movedim(1, 0)[:, (x != 0).any(1)]
    torch.testing.assert_close(model.second.norm.running_mean, later.mean(1))
    torch.testing.assert_close(model.second.norm.running_var, later.var(1))


def test_the_doctor_sees_a_padded_model_as_calibrated() -> None:
    model, x = Padded(True), images().float()
    nk.calibrate(model, [x])
    for one in nk.diagnose(model, [x]).findings:
        assert "shift" not in one.kind


def test_micro_batches_of_padded_images_are_exact() -> None:
    torch.manual_seed(2)
    whole, x = Padded(True).double(), images()
    parts = Padded(True).double()
    parts.load_state_dict(whole.state_dict())
    whole(x).square().mean().backward()
    with nk.accumulate(parts) as step:
        step(list(x.split(3)), lambda model, part: model(part).square().mean())
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)
    for a, b in zip(whole.buffers(), parts.buffers(), strict=True):
        torch.testing.assert_close(b, a)
