"""Layers under torch.compile on Triton: one graph for all sizes, equal to the eager layer."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from cases import inputs
from normkit.engine import dispatch

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FUSED = {
    "bn": nk.BN(8),
    "bn-cumulative": nk.BN(8, momentum=None),
    "gn": nk.GN(8, groups=4),
    "bgn": nk.BGN(8, groups=2),
    "rbn": nk.RBN(8),
    "rbn-eval": nk.RBN(8).eval(),
    "bcn": nk.BCN(8, groups=2),
    "bcn-eval": nk.BCN(8, groups=2).eval(),
}
GENERIC = {
    "bcn-micro": nk.BCN(8, groups=2, micro=True, update_rate=0.3),
    "batch_renorm": nk.BatchRenorm(8, r_ramp=(0, 4), d_ramp=(1, 9)),
    "bgn-strips": nk.BGN(8, groups=16),
}
SIZES = ((6, (4, 10)), (5, (6, 7)))


class Recorder:
    """Traces and differentiates without generating code, and keeps the graphs."""

    def __init__(self):
        torch.compiler.reset()
        self.graphs = []
        self.stats = torch._dynamo.utils.counters["stats"]
        self.stats.clear()

    def __call__(self, graph, example):
        self.graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, example)

    def count(self):
        """How many graphs were made; one that dynamo began anew counts once."""
        return self.stats["unique_graphs"]

    def operators(self):
        """The names of ours in the last graph, but for the question whether a batch counts."""
        targets = {str(node.target) for node in self.graphs[-1].graph.nodes}
        ours = {name.split(".")[1] for name in targets if name.startswith("normkit.")}
        return ours - {"first_time"}


@pytest.fixture(autouse=True)
def _on_triton():
    with nk.use_backend("triton"):
        yield


@pytest.fixture
def goes(monkeypatch):
    """Sends every family one way."""

    def choose(way):
        for family in dispatch.COMPILED:
            monkeypatch.setitem(dispatch.COMPILED, family, (way, way))

    return choose


def draw(layer):
    layer = copy.deepcopy(layer).to(DEVICE)
    with torch.no_grad():
        for key, parameter in layer.named_parameters():
            if "gates" not in key:  # dn's are signs
                parameter.uniform_(0.5, 1.5)
    return layer


def data(n, size, memory="contiguous", dtype=torch.float32):
    return inputs(n, size, memory, dtype).to(DEVICE)


def step(layer, x, residual, activation, grad):
    x, residual = (t.clone().requires_grad_() for t in (x, residual))
    y = layer(x, residual, activation)
    y.backward(grad)
    return y, x.grad, residual.grad


def assert_same_step(compiled, twin, layer, x, activation="silu"):
    residual, grad = torch.randn_like(x), torch.randn_like(x)
    mine = step(compiled, x, residual, activation, grad)
    theirs = step(layer, x, residual, activation, grad)
    assert mine[0].stride() == x.stride()
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    for (key, p), q in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4, msg=key)
    for (key, p), q in zip(layer.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6, equal_nan=True, msg=key)


# every family both ways, in each memory, and where it has one in eval mode. Other layers of a
# family (ln and in of gn's, iebn of rbn's) give the same operators other numbers; what else these
# may be given, and sizes that are symbols, tests of the operators try without a graph around it.
LAST = ("bn", "gn", "rbn", "bcn")  # whose cells change with the memory
GRID = [
    *((name, "split", "channels_last" if name in LAST else "contiguous") for name in FUSED),
    *((name, "whole", "contiguous") for name in ("bn", "gn")),
    *((name, "whole", "channels_last") for name in ("bgn", "rbn", "rbn-eval", "bcn", "bcn-eval")),
]

ANY_SIZE = {("bn", "split"), ("rbn", "whole"), ("gn", "whole")}  # it takes four times as long


@pytest.mark.parametrize(("name", "way", "memory"), GRID)
def test_one_graph_for_all_sizes(name, way, memory, goes):
    """Output, gradients and buffers of steps of different sizes; traced once."""
    dynamic = (name, way) in ANY_SIZE
    goes(way)
    layer, recorder = draw(FUSED[name]), Recorder()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, dynamic=dynamic, backend=recorder)
    for n, size in SIZES if dynamic else SIZES[:1] * 2:
        assert_same_step(compiled, twin, layer, data(n, size, memory))
    assert recorder.count() == 1
    used = {"coefficients" if way == "split" else "fused"}
    remembers = layer.training and getattr(layer, "running_mean", None) is not None
    if remembers and layer.momentum is not None:
        used.add("remember")
    assert recorder.operators() == used


@pytest.mark.parametrize("name", GENERIC)
def test_layers_of_no_family_take_their_moments_from_an_operator(name):
    layer, recorder = draw(GENERIC[name]), Recorder()
    twin = copy.deepcopy(layer)
    dynamic = name == "batch_renorm"
    compiled = torch.compile(twin, fullgraph=True, dynamic=dynamic, backend=recorder)
    for n, size in SIZES if dynamic else SIZES[:1] * 2:
        assert_same_step(compiled, twin, layer, data(n, size, "channels_last"))
    assert recorder.count() == 1
    reads_state = {"as_first_seen"} if layer.map_reads_state() else set()
    assert recorder.operators() == {"moments"} | reads_state


def test_a_marked_axis_is_enough():
    layer, recorder = draw(FUSED["bcn"]), Recorder()
    compiled = torch.compile(copy.deepcopy(layer), fullgraph=True, backend=recorder)
    for n in (6, 5, 9):
        x = data(n, (4, 10))
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
    assert recorder.count() == 1


def test_sizes_that_change_unannounced_cost_one_more_graph():
    layer, recorder = draw(FUSED["rbn"]), Recorder()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend=recorder)
    for n, size in (*SIZES, (11, (5, 9))):
        assert_same_step(compiled, twin, layer, data(n, size))
    assert recorder.count() == 2


@pytest.mark.parametrize("way", ["split", "whole"])
def test_training_and_evaluation(way, goes):
    """A graph for each mode, and back again."""
    goes(way)
    layer, recorder = draw(FUSED["rbn"]), Recorder()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(twin, fullgraph=True, backend=recorder)
    for training in (True, False, True, False):
        layer.train(training)
        twin.train(training)
        assert_same_step(compiled, twin, layer, data(6, (4, 3)))
    assert recorder.count() == 2


@pytest.mark.parametrize("name", ["bn", "bcn"])
def test_a_bad_batch_never_enters_a_buffer(name):
    layer, recorder = draw(FUSED[name]), Recorder()
    compiled = torch.compile(layer, fullgraph=True, backend=recorder)
    x = data(6, (4, 3))
    compiled(x)
    before = copy.deepcopy(layer.state_dict())
    x[0, 3, 0, 0] = torch.inf
    compiled(x)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert layer.nonfinite_batches == 1
    assert "remember" in recorder.operators()


@pytest.mark.parametrize("way", ["split", "whole"])
def test_checkpointing_counts_once(way, goes):
    goes(way)
    layer, recorder = draw(FUSED["bn"]), Recorder()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(
        lambda x: checkpoint(twin, x, use_reentrant=False), fullgraph=True, backend=recorder
    )
    x = data(6, (4, 3))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    compiled(a).square().sum().backward()
    layer(b).square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(twin.buffers(), layer.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("name", "way"), [("bn", "split"), ("gn", "whole"), ("bcn", "whole")])
def test_gradients_have_the_types_of_their_tensors(name, way, goes):
    """Statistics are float32; what is learned, and what comes in, may be narrower."""
    goes(way)
    layer = draw(FUSED[name]).bfloat16()
    compiled = torch.compile(layer, fullgraph=True, backend=Recorder())
    x = data(6, (4, 3), dtype=torch.bfloat16).requires_grad_()
    residual = torch.randn_like(x, dtype=torch.float32).requires_grad_()
    y = compiled(x, residual, "silu")
    y.backward(torch.randn_like(y))
    assert {y.dtype, x.grad.dtype, *(p.grad.dtype for p in layer.parameters())} == {torch.bfloat16}
    assert residual.grad.dtype == torch.float32


@pytest.mark.parametrize("way", ["split", "whole"])
def test_frozen_and_first_layers(way, goes):
    """Nothing is computed for tensors that need no gradient, and the others get theirs."""
    goes(way)
    layer = draw(FUSED["gn"])
    layer.weight.requires_grad_(False)
    compiled = torch.compile(layer, fullgraph=True, backend=Recorder())
    x = data(6, (4, 3))
    compiled(x).square().sum().backward()
    found = layer.bias.grad.clone()
    layer.bias.grad = None
    layer(x).square().sum().backward()
    torch.testing.assert_close(found, layer.bias.grad, rtol=1e-4, atol=1e-4)
    assert layer.weight.grad is None


def test_memory_that_skips(goes):
    """A tensor that is neither contiguous nor channels_last is copied, as in eager mode."""
    goes("whole")
    layer = draw(FUSED["gn"])
    compiled = torch.compile(layer, fullgraph=True, backend=Recorder())
    x = data(6, (4, 10))[:, :, :, ::2]
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-5, atol=1e-5)


def test_neighbours_fuse():
    """Compiled to code, between convolutions, under autocast: the strides of the graph hold."""
    torch.compiler.reset()
    net = nn.Sequential(nn.Conv2d(3, 8, 3), draw(FUSED["bn"]).cpu(), nn.ReLU(), nn.Conv2d(8, 4, 1))
    net = net.to(DEVICE, memory_format=torch.channels_last)
    twin = copy.deepcopy(net)
    compiled = torch.compile(twin, fullgraph=True)
    x = torch.randn(4, 3, 9, 9, device=DEVICE).to(memory_format=torch.channels_last)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of inductor about its own future
        for _ in range(2):
            net.zero_grad()
            twin.zero_grad()
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-5)
            compiled(x).square().sum().backward()
            net(x).square().sum().backward()
    for p, q in zip(net.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-3, atol=1e-4)
    for p, q in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-5, atol=1e-6)


class TestExpressions:
    """Where no operator belongs."""

    def test_if_the_family_is_sent_that_way(self, goes):
        goes("expression")
        layer, recorder = draw(FUSED["bn"]), Recorder()
        torch.compile(layer, fullgraph=True, backend=recorder)(data(6, (4, 3)))
        assert recorder.operators() == set()

    def test_if_torch_is_in_force(self):
        layer, recorder = draw(FUSED["bn"]), Recorder()
        compiled = torch.compile(layer, fullgraph=True, backend=recorder)
        compiled(data(6, (4, 3)))
        assert recorder.operators() == {"coefficients", "remember"}
        with nk.use_backend("torch"):  # a graph that was made before must not be used
            compiled(data(6, (4, 3)))
        assert recorder.operators() == set()

    def test_in_float64(self):
        layer, recorder = draw(FUSED["gn"]).double(), Recorder()
        x = data(6, (4, 3), dtype=torch.float64)
        torch.compile(layer, fullgraph=True, backend=recorder)(x)
        assert recorder.operators() == set()

    def test_in_pixels(self):
        """Compilers are good at cells that lie side by side."""
        layer, recorder = nk.PN(8).to(DEVICE), Recorder()
        torch.compile(layer, fullgraph=True, backend=recorder)(data(6, (4, 3)))
        assert recorder.operators() == set()

    def test_in_exported_programs(self):
        program = torch.export.export(draw(FUSED["gn"]), (data(6, (4, 3)),))
        assert not [n for n in program.graph.nodes if "normkit" in str(n.target)]

    def test_under_transforms(self):
        layer, recorder = draw(FUSED["gn"]), Recorder()
        x = data(6, (4, 3))
        compiled = torch.compile(
            torch.func.vmap(lambda one: layer(one[None])[0]), fullgraph=True, backend=recorder
        )
        torch.testing.assert_close(compiled(x), layer(x), rtol=1e-4, atol=1e-5)
        assert recorder.operators() == set()
