"""Parameters and statistics that do not lie in memory as a kernel would read them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import normkit as nk
from cases import CHANNELS, build, inputs

pytest.importorskip("triton", reason="Triton is not installed")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def with_gaps(tensors):
    """Every tensor as a slice of a larger one, with other numbers in between."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dim():
            part = torch.stack([tensor.detach(), torch.full_like(tensor, 77)], -1)[..., 0]
            trained = isinstance(tensor, nn.Parameter)
            tensors[name] = nn.Parameter(part, tensor.requires_grad) if trained else part


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("which", ["_parameters", "_buffers"])
@pytest.mark.parametrize("name", nk.names("activation"))
def test_slices_of_larger_tensors(name, which, training):
    """The kernels took what lay beside each value for the next one."""
    layer = build((name, {}), torch.float32).to(DEVICE).train(training)
    twin, x = copy.deepcopy(layer), inputs(4, (3, 3), dtype=torch.float32).to(DEVICE)
    with_gaps(getattr(layer, which))
    found, wanted = [], []
    for subject, backend, results in ((layer, "triton", found), (twin, "torch", wanted)):
        given = x.clone().requires_grad_()
        with nk.use_backend(backend):
            y = subject(given)
            leaves = [given, *(p for p in subject.parameters() if p.requires_grad)]
            results += [y, *torch.autograd.grad(y.square().sum(), leaves), *subject.buffers()]
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3, equal_nan=True)


class Shared(nn.Module):
    """One number for all channels."""

    def forward(self, weight):
        return weight[:1].expand_as(weight)


@pytest.mark.parametrize("name", ["bn", "gn", "pn"])
def test_one_value_expanded(name):
    layer = nk.make(name, CHANNELS).to(DEVICE)
    parametrize.register_parametrization(layer, "weight", Shared())
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(torch.arange(2.0, 2.0 + CHANNELS))
    x = torch.randn(4, CHANNELS, 3, 3, device=DEVICE)
    with nk.use_backend("triton"):
        y = layer(x)
    torch.testing.assert_close(y, 2 * nk.make(name, CHANNELS).to(DEVICE)(x), rtol=1e-4, atol=1e-5)
