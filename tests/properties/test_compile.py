"""torch.compile: one graph without a break, for batches and images of any size."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from cases import build, every, inputs, label, noted
from normkit import catalog

# no two alike, or torch takes them for one size; samples and positions can be halved
SIZES = ((6, (4, 5)), (12, (5, 8)), (10, (6, 9)))
PLAIN = [(name, {}) for name in catalog.names("activation")]
MODES = [
    pytest.param(case, mode, id=f"{case[0]}-{mode}")
    for case in PLAIN
    for mode in ("train", "eval")
    if mode == "train" or not catalog.find(case[0]).card.same_in_eval
]
STRIPS = ("bgn", {"groups": 16})  # are cut for the size of a map
MODES.append(pytest.param(STRIPS, "train", id=label(STRIPS)))
# options that are numbers to the code of another case, and those whose graphs test_checkpointing.py
# makes, with gradients and buffers
NUMBERS = {"kernel_size", "init", "tau", "minus", "ratio", "eval_weight"}
ELSEWHERE = ("bn-momentum=None", "bcn-groups=2-micro=True-update_rate=0.1", "ssn-anneal_steps=4")
ELSEWHERE += ("gn-groups=4", label(STRIPS))
OPTIONS = [
    case for case in every() if not case[1].keys() <= NUMBERS and label(case) not in ELSEWHERE
]


def run(layer, x):
    y = layer(x)
    y.square().sum().backward()
    return y


def assert_same_steps(layer, backend, sizes, dynamic=None):
    """Outputs, gradients and buffers of the layer, and of its twin in one graph."""
    torch.compiler.reset()
    counters.clear()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, dynamic=dynamic, backend=backend)
    for n, size in sizes:
        x = inputs(n, size)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        torch.testing.assert_close(run(layer, a), run(compiled, b))
        torch.testing.assert_close(a.grad, b.grad)
    assert counters["stats"]["unique_graphs"] == 1
    for (key, mine), other in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, msg=key)
    for (key, mine), other in zip(layer.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, other, msg=key, equal_nan=True)


@pytest.mark.parametrize(("case", "mode"), MODES)
def test_one_graph_for_all_sizes(case, mode):
    """Traced once, whatever the batch and the images; autograd differentiates what was traced."""
    assert_same_steps(build(case).train(mode == "train"), "eager", SIZES, dynamic=True)


@pytest.mark.parametrize("case", OPTIONS, ids=label)
def test_options_do_not_break_a_graph(case):
    """In training, where they do more; in eval mode test_export.py traces them."""
    assert_same_steps(build(case), "eager", SIZES[:1] * 2)


def test_a_score_that_moves_in_eval_mode():
    case = ("ubn", {"preset": "authors"})
    assert_same_steps(build(case).eval(), "eager", SIZES[:1] * 2)


# but for those of which test_checkpointing.py makes such a graph
DIFFERENTIATED = [c for c in PLAIN if c[0] not in ("bn", "bcn", "batch_renorm", "ssn", "ubn")]


class SideBySide(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(build(case) for case in DIFFERENTIATED)

    def forward(self, x):
        return [layer(x) for layer in self.layers]


def test_differentiated_by_the_compiler():
    """Layers in one graph, whose writing to buffers and whose backward the compiler works out
    itself."""
    torch.compiler.reset()
    net = SideBySide()
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = inputs()
        for model in (net, compiled):
            model.zero_grad()
        outputs = zip(DIFFERENTIATED, net(x), compiled(x), strict=True)
        weights = torch.randn_like(x)
        losses = [torch.zeros((), dtype=x.dtype)] * 2
        for case, y, z in outputs:
            with noted(case):
                torch.testing.assert_close(y, z)
            losses = [losses[0] + (y * weights).sum(), losses[1] + (z * weights).sum()]
        for loss in losses:
            loss.backward()
    for case, layer, other in zip(DIFFERENTIATED, net.layers, twin.layers, strict=True):
        with noted(case):
            for (key, mine), p in zip(layer.named_parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, p.grad, msg=key)
            for (key, mine), p in zip(layer.named_buffers(), other.buffers(), strict=True):
                torch.testing.assert_close(mine, p, msg=key, equal_nan=True)


@pytest.mark.parametrize("name", ["bn", "gn", "ubn"])
def test_compile_inductor(name):
    torch.compiler.reset()
    layer = build((name, {}), torch.float32)
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True)
    x = inputs(dtype=torch.float32)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    torch.testing.assert_close(run(layer, a), run(compiled, b), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-4)
