"""The path that is decided is the path that runs, and nk.why tells it: eager and in graphs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import normkit as nk
from cases import CHANNELS, build, every, inputs, label
from normkit.engine import plain
from normkit.engine.cpu import passes as cpp_passes
from normkit.engine.torch import passes as torch_passes
from normkit.errors import DtypeError, OptionError
from normkit.layers.replayed import Replayed

pytest.importorskip("triton", reason="Triton is not installed")
from normkit.engine.families import depthwise, filters, fused, pixel, pointwise
from normkit.engine.triton import passes as triton_passes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SAID = {
    "torch": "runs on torch",
    "cpp": "runs in C++, coefficients by torch",
    "loops": "runs in C++",
    "triton": "runs on triton, coefficients by torch",
    "fused": "runs on triton, fused",
    "expression": "is an expression",
    "moments": "is expressions, its moments an operator",
    "split": "is an expression, its coefficients an operator",
    "whole": "is one operator",
}
OPERATORS = {"fused": "whole", "coefficients": "split", "moments": "moments"}
WHITENED = "there is no kernel for whitening"


@pytest.fixture
def ran(monkeypatch):
    """The paths that have run, in their order."""
    seen = []

    def counting(module, function, path):
        real = getattr(module, function)

        def call(*args, **kwargs):
            seen.append(path)
            result = real(*args, **kwargs)
            if result is None:  # no step like this one was recorded
                seen.pop()
            return result

        monkeypatch.setattr(module, function, call)

    counting(torch_passes, "affine", "torch")
    counting(cpp_passes, "affine", "cpp")
    # a recorded step is loops on a CPU, and on a GPU the launches of the fused kernels
    counting(Replayed, "_replayed", "fused" if DEVICE == "cuda" else "loops")
    counting(triton_passes, "affine", "triton")
    counting(plain, "affine", "expression")
    counting(plain, "pixels", "expression")
    for function in (
        *(fused._Fused, depthwise._FusedDepthwise, pixel._Fused),
        *(filters._Filters, filters._Together, pointwise._Pointwise),
    ):
        counting(function, "apply", "fused")
    return seen


def agrees(layer, x, seen):
    said = nk.why(layer, x).replace(" (forced)", "")
    layer(x)
    if layer.card.name == "gw":
        assert WHITENED in said
        return None
    path = seen[0]
    assert said.startswith(f"{layer.card.name} {SAID[path]}"), (said, path)
    assert path == layer.path(x).name
    return path


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", every(), ids=label)
def test_what_is_said_runs(case, training, ran):
    layer = build(case, torch.float32).to(DEVICE).train(training)
    for size, memory in (((4, 4), "contiguous"), ((3, 3), "channels_last")):
        x = inputs(4, size, memory, torch.float32).to(DEVICE)
        for backend in ("auto", "torch", "triton"):
            ran.clear()
            with nk.use_backend(backend):
                if "runs on no backend: Triton is asked for" in nk.why(layer, x):
                    assert case[0] == "bgn"
                    assert backend == "triton"
                    with pytest.raises(OptionError, match="cut channels unevenly"):
                        layer(x)
                    continue
                path = agrees(layer, x, ran)
            if backend == "torch":
                assert path in ("torch", None)


@pytest.mark.parametrize("given", [None, "x", [1.0]])
def test_what_is_no_tensor(given):
    """It was a bare AttributeError."""
    with pytest.raises(DtypeError, match="why expects the tensor"):
        nk.why(nk.BN(CHANNELS), given)


def test_gaps_in_parameters(ran):
    layer = nk.BN(CHANNELS).to(DEVICE)
    layer.weight = nn.Parameter(torch.ones(2 * CHANNELS, device=DEVICE)[::2])
    with nk.use_backend("triton"):
        assert agrees(layer, torch.randn(4, CHANNELS, 3, 3, device=DEVICE), ran) == "triton"
        assert "gaps in memory" in nk.why(layer, torch.randn(4, CHANNELS, device=DEVICE))


def test_convolutions_that_no_kernel_does(ran):
    for layer in (nk.BNET(CHANNELS, kernel_size=5), nk.UBN(CHANNELS, kernel_size=5)):
        layer, x = layer.to(DEVICE), torch.randn(4, CHANNELS, 5, 5, device=DEVICE)
        ran.clear()
        with nk.use_backend("triton"):
            assert agrees(layer, x, ran) == "fused"
            assert "its convolution by torch, because" in nk.why(layer, x)


@pytest.mark.parametrize("backend", ["auto", "torch", "triton"])
@pytest.mark.parametrize("layer", [nk.WS(4), nk.WS(4, scale=False), nk.CWN(4)], ids=repr)
def test_weights(layer, backend, ran):
    layer, weight = layer.to(DEVICE), torch.randn(4, 3, 3, 3, device=DEVICE)
    with nk.use_backend(backend):
        said = nk.why(layer, weight)
        layer(weight)
    kernel = ran == ["fused"]
    assert ran in ([], ["fused"])
    assert ("runs on triton" in said) == kernel
    assert "is an expression" in nk.why(layer, weight, compiled=True)


def test_a_transform_looks_into_it(ran):
    layer = nk.GN(CHANNELS)
    said = []

    def inside(x):
        said.append(nk.why(layer, x))
        return layer(x)

    x = torch.randn(2, CHANNELS, 3, 3)
    torch.func.jvp(inside, (x,), (x,))
    assert ran == ["expression"]
    assert said == [
        "gn is an expression, because a transform or a tracer looks into the arithmetic."
    ]


def graphs():
    """The activation may change which operator it is: both of them for the first layer of which the
    same is said, and one in turn for the others. "auto" without a GPU is an expression for every
    layer: some will do there."""
    both, seen = ("none", "relu"), set()
    for i, name in enumerate(nk.names("activation")):
        layer, x = nk.make(name, CHANNELS), torch.zeros(4, CHANNELS, 4, 4)
        with nk.use_backend("triton"):
            said = tuple(nk.why(nk.NormAct(layer, act), x, compiled=True) for act in both)
        said = tuple(text.removeprefix(name) for text in said)
        acts = (both[i % 2],) if said in seen and DEVICE == "cpu" else both
        seen.add(said)
        yield pytest.param(name, "triton", acts, id=f"{name}-triton")
        if DEVICE != "cpu" or i % 6 == 0:
            yield pytest.param(name, "auto", acts, id=f"{name}-auto")


@pytest.mark.parametrize(("name", "backend", "acts"), graphs())
def test_graphs(name, backend, acts):
    """torch.compile gets the operators that why() names, and no others."""
    layer = build((name, {}), torch.float32).to(DEVICE)
    x = inputs(4, (4, 4), "contiguous", torch.float32).to(DEVICE)
    graphs = []

    def capture(module, example):
        graphs.append(module.graph)
        return module.forward

    torch._dynamo.reset()
    for act in acts:
        graphs.clear()
        whole = nk.NormAct(layer, act)
        with nk.use_backend(backend):
            said = nk.why(whole, x, compiled=True)
            torch.compile(whole, backend=capture, fullgraph=True)(x)
        targets = {str(node.target) for graph in graphs for node in graph.nodes}
        ours = {t.split(".")[1] for t in targets if t.startswith("normkit.")} & OPERATORS.keys()
        path = OPERATORS[ours.pop()] if ours else "expression"
        assert not ours
        assert said.startswith(f"{name} {SAID[path]}"), (said, path)
