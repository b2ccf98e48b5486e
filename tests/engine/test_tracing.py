"""Coefficients of layers without a family: traced, they are the layer's own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit.core.moments import Coefficients, Moments
from normkit.engine import tracing
from normkit.engine.tracing import TracedPlan, interpreted
from normkit.layers.base import Normalizer

pytest.importorskip("normkit.engine.triton.passes")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# layers that no family makes, with options that take other ways through their coefficients
LAYERS: list[tuple[str, dict[str, Any]]] = [
    ("gbgn", {"groups": 4, "examples_per_group": 4}),
    ("ghost_bn", {"virtual_batch": 4, "momentum": None, "running_var_correction": 0}),
    ("ibn", {"ratio": 0.25}),
    ("dn", {"batch": 2, "start": "bn"}),
    ("shifted_bn", {"mean_spread": 1.0, "std_spread": 0.3}),
]
IDS = [f"{name}-{'-'.join(map(str, options))}" for name, options in LAYERS]


def made(name: str, options: dict[str, Any], dtype: torch.dtype = torch.float64) -> Normalizer:
    """A layer with parameters and statistics off their start, where many terms are 0 or 1."""
    device = "cpu" if dtype == torch.float64 else DEVICE
    layer: Normalizer = nk.make(name, 8, **options, dtype=dtype, device=device)
    with torch.no_grad():
        for p in layer.parameters():
            p.add_(0.2 * torch.randn_like(p))
        for kept in ("running_mean", "running_var"):
            if getattr(layer, kept, None) is not None:
                getattr(layer, kept).add_(0.3 * torch.rand_like(getattr(layer, kept)))
    return layer


@pytest.fixture
def traced_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TracedPlan]]:
    """Plans are made for tensors of the CPU as well, their operations by torch."""
    plans: list[TracedPlan] = []
    usual = TracedPlan.__init__

    def remembered(self: TracedPlan, *args: Any) -> None:
        usual(self, *args)
        plans.append(self)

    monkeypatch.setattr(tracing, "DEVICES", ["cpu", "cuda"])
    monkeypatch.setattr(tracing, "inductor", interpreted)
    monkeypatch.delenv(tracing.SWITCH, raising=False)
    monkeypatch.setattr(tracing, "_plans", {})
    monkeypatch.setattr(tracing, "_made", {})
    monkeypatch.setattr(TracedPlan, "__init__", remembered)
    with nk.use_backend("triton"):
        yield plans


def plan_of(layer: Normalizer, x: Tensor, compiler: Any = interpreted) -> TracedPlan:
    return TracedPlan(layer, layer.cells(x), layer.state(), x.device, torch.float64, compiler)


def stepped(layer: Normalizer, x: Tensor, plan: TracedPlan) -> tuple[list[Tensor], Tensor]:
    """Output and gradients of Σ y·w by a plan, and by hand what the passes do around it."""
    layout = layer.cells(x)
    w = torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view(x.shape)
    rows, columns = plan.functions.size
    cells = x.transpose(0, 1).reshape(1, columns, -1) if rows == 1 else x.flatten(2)
    weight = w.transpose(0, 1).reshape(1, columns, -1) if rows == 1 else w.flatten(2)
    mean = cells.mean(2)
    var = (cells - mean[..., None]).square().mean(2)
    own = [p.detach() for p in layer._parameters.values() if p is not None]
    kept = [b for b in layer.state().statistics.values() if b is not None]
    moments = torch.cat([mean.flatten(), var.flatten()])
    tables = plan.forward(moments, layout.count, own, kept)
    scale, shift, center = tables[: 3 * plan.period].view(3, rows, columns, 1)
    apart = cells - center
    y = scale * apart + shift
    sums = torch.cat([(weight * apart).sum(2).flatten(), weight.sum(2).flatten()])
    back = plan.backward(sums, tables, layout.count, own)
    constant, slope = back[: 2 * plan.period].view(2, rows, columns, 1)
    dx = scale * weight + constant + slope * apart
    if rows == 1:
        y, dx = (t.view(columns, x.shape[0], -1).transpose(0, 1) for t in (y, dx))
    return [y.reshape(x.shape), dx.reshape(x.shape), back[2 * plan.period :]], w


@pytest.mark.parametrize(("name", "options"), LAYERS, ids=IDS)
def test_a_traced_step_is_the_layers_own(name: str, options: dict[str, Any]) -> None:
    layer = made(name, options)
    other = copy.deepcopy(layer)
    x = torch.randn(8, 8, 5, 3, dtype=torch.float64) + 1
    plan = plan_of(layer, x)
    for step in range(2):  # the second starts from the statistics that the first has written
        grown = x[..., : 3 - step].contiguous() * (1 + step)  # and maps of any size share a plan
        (y, dx, found), w = stepped(layer, grown, plan)
        leaf = grown.clone().requires_grad_()
        own = list(other.parameters())
        expected = other(leaf)
        dleaf, *grads = torch.autograd.grad((expected * w).sum(), [leaf, *own], allow_unused=True)
        torch.testing.assert_close(y, expected.detach())
        torch.testing.assert_close(dx, dleaf)
        flat = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, own, strict=True)]
        torch.testing.assert_close(found, torch.cat([g.flatten() for g in flat]))
        for (kept, mine), theirs in zip(layer.named_buffers(), other.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs, msg=kept)


@pytest.mark.parametrize("size", [(3, 3), (1, 1)])
@pytest.mark.parametrize(("name", "options"), [("gbgn", {"groups": 4}), ("rms", {})])
def test_inductors_code_is_the_layers_own(
    name: str, options: dict[str, Any], size: tuple[int, int]
) -> None:
    """The same with code by Inductor, for a CPU here. Maps of one position were torch's, on a GPU
    too: their count, which is no symbol, was not found."""
    layer = made(name, options, torch.float32).cpu()
    x = torch.randn(4, 8, *size)
    other = copy.deepcopy(layer)
    plan = TracedPlan(layer, layer.cells(x), layer.state(), x.device, compiler=tracing.inductor)
    (y, dx, found), w = stepped(layer, x, plan)
    assert not plan.obstacle
    leaf = x.clone().requires_grad_()
    with nk.use_backend("torch"):
        expected = other(leaf)
    dleaf, *grads = torch.autograd.grad((expected * w).sum(), [leaf, *other.parameters()])
    torch.testing.assert_close(y, expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dx, dleaf, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, torch.cat([g.flatten() for g in grads]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))


def test_layers_of_one_kind_share_a_plan(traced_here: list[TracedPlan]) -> None:
    layers = [made("gbgn", {"groups": 2}, torch.float32) for _ in range(2)]
    for size, format in ((3, torch.contiguous_format), (2, torch.channels_last)):
        for layer in layers:
            other = copy.deepcopy(layer)
            x = torch.randn(4, 8, size, 3, device=DEVICE).to(memory_format=format).requires_grad_()
            residual = torch.randn_like(x)
            assert "fused, by its own coefficients, compiled." in nk.why(layer, x)
            y = layer(x, residual, "relu")
            dx, dweight = torch.autograd.grad(y.square().sum(), [x, layer.weight])
            with nk.use_backend("torch"):
                expected = other(x, residual, "relu")
            found = torch.autograd.grad(expected.square().sum(), [x, other.weight])
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(dx, found[0], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(dweight, found[1], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))
    assert len(traced_here) == 1


def test_changed_options_and_modes_are_other_plans(traced_here: list[TracedPlan]) -> None:
    """A plan holds numbers that were attributes: an eps or a momentum set later must count."""
    layer = made("ibn", {}, torch.float32)
    x = torch.randn(4, 8, 3, 3, device=DEVICE)
    with nk.use_backend("torch"):
        layer(x)
    assert not traced_here
    layer(x)
    layer.eps, layer.momentum = 0.5, 0.7
    other = copy.deepcopy(layer)
    y = layer(x)
    with nk.use_backend("torch"):
        torch.testing.assert_close(y, other(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(layer.running_mean, other.running_mean)
        expected = other.eval()(x)
    with torch.inference_mode():  # must not keep the plan from being made
        torch.testing.assert_close(layer.eval()(x), expected, rtol=1e-4, atol=1e-5)
    layer(x[:2])
    assert len(traced_here) == tracing.MOST_PLANS
    for step in range(3):
        layer.train().momentum = step / 3  # each step another one: not worth compiling for
        layer(x)
    assert len(traced_here) == tracing.MOST_PLANS
    assert "sets of options" in nk.why(layer, x)


class Learned(Normalizer):
    """What a user might write: mean and variance of all channels, and a bent deviation."""

    card = nk.GN.card

    def coefficients(self, moments: Moments) -> Coefficients:
        whole = moments.pooled(channels=None)
        bent = torch.tanh(whole.var).add(self.eps).pow(-0.3)
        return Coefficients(bent, None, whole.mean).then(self.weight, self.bias)


class Looking(Learned):
    """One that asks what a tensor holds, which nobody can write down."""

    def coefficients(self, moments: Moments) -> Coefficients:
        if float(moments.var.detach().mean()) < 0:
            raise ValueError
        return super().coefficients(moments)


def test_a_layer_of_the_users_own(traced_here: list[TracedPlan]) -> None:
    x = torch.randn(4, 8, 3, 3, device=DEVICE, requires_grad=True)
    for kind, plans in ((Learned, 1), (Looking, 1)):
        layer = kind(8, device=DEVICE)
        y = layer(x)
        with nk.use_backend("torch"):
            torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)
        assert len(traced_here) == plans
    assert "could not be compiled" in nk.why(layer, x)


def test_a_backward_of_a_backward_sees_the_statistics_of_its_forward(
    traced_here: list[TracedPlan],
) -> None:
    layer = made("ssn", {"anneal_steps": 3}, torch.float32)
    other = copy.deepcopy(layer)
    x = torch.randn(4, 8, 3, 3, device=DEVICE)

    def twice(layer: nn.Module) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        layer(leaf * 3)  # the radius has grown before the backward
        once = torch.autograd.grad(y.pow(3).sum(), [leaf, *layer.parameters()], retain_graph=True)
        (dx,) = torch.autograd.grad(y.pow(3).sum(), leaf, create_graph=True)
        return [*once, *torch.autograd.grad(dx.square().sum(), leaf)]

    found = twice(layer)
    with nk.use_backend("torch"):
        torch.testing.assert_close(found, twice(other), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))


def test_kernels_that_do_not_run_give_way_to_torch(
    traced_here: list[TracedPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel may need more of a GPU than it has, which shows when it is started."""

    def broken(graph: Any, mode: Any) -> Any:
        def run(arguments: list[Any]) -> Any:
            arguments[-1].add_(1)  # something has been written before it stops
            raise RuntimeError("out of resources\nmore")

        return run

    monkeypatch.setattr(tracing, "inductor", broken)
    layer = made("ibn", {}, torch.float32)
    other = copy.deepcopy(layer)
    x = torch.randn(4, 8, 3, 3, device=DEVICE, requires_grad=True)
    found = torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])
    with nk.use_backend("torch"):
        expected = torch.autograd.grad(other(x).square().sum(), [x, other.weight])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))
    assert nk.why(layer, x).endswith("its kernels do not run (out of resources).")


def test_a_checkpoint_repeats_the_same_kernels(traced_here: list[TracedPlan]) -> None:
    layer = made("shifted_bn", {}, torch.float32)
    other = copy.deepcopy(layer)
    x = torch.randn(4, 8, 3, 3, device=DEVICE, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=False)
    (found,) = torch.autograd.grad(y.square().sum(), x)
    with nk.use_backend("torch"):
        (expected,) = torch.autograd.grad(other(x).square().sum(), x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))
    assert len(traced_here) == 2


@pytest.mark.gpu
def test_inductors_kernels_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(tracing.SWITCH, raising=False)
    layer = made("ssn", {"anneal_steps": 3}, torch.float32)
    other = copy.deepcopy(layer)
    x = torch.randn(4, 8, 5, 5, device=DEVICE, requires_grad=True)
    assert "compiled" in nk.why(layer, x)
    for _ in range(2):
        found = torch.autograd.grad(layer(x).pow(3).sum(), [x, *layer.parameters()])
        with nk.use_backend("torch"):
            expected = torch.autograd.grad(other(x).pow(3).sum(), [x, *other.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))


@pytest.mark.gpu
@pytest.mark.parametrize("samples", [16, 128])
@pytest.mark.parametrize("name", ["rms", "gbgn", "ghost_bn", "ibn", "ssn", "shifted_bn"])
def test_inductors_kernels_are_replayed_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, samples: int
) -> None:
    """With 128 samples Inductor compiles other kernels, which another launcher starts."""
    monkeypatch.delenv(tracing.SWITCH, raising=False)
    nk.build_extension()
    options = {"virtual_batch": 4} if name == "ghost_bn" else {}
    layer = nk.make(name, 64, **options, device=DEVICE)
    for _ in range(3):
        x = torch.randn(samples, 64, 5, 5, device=DEVICE, requires_grad=True)
        y = layer(x)
        y.sum().backward()
    assert "NormalizerStep" in y.grad_fn.name(), nk.why(layer, x)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rms", "gbgn", "ghost_bn", "ibn", "ssn", "shifted_bn"])
def test_steps_of_a_network_are_replayed_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """As people train: autocast, channels_last, maps of 16 positions to one, an optimizer."""
    monkeypatch.delenv(tracing.SWITCH, raising=False)
    nk.build_extension()
    parts: list[nn.Module] = []
    for inside, outside in ((3, 64), (64, 64), (64, 128), (128, 256), (256, 512)):
        stride = 1 if inside == outside else 2
        parts += [nn.Conv2d(inside, outside, 3, stride, 1), nk.make(name, outside), nn.ReLU(True)]
    model = nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 8))
    model.to(DEVICE).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, foreach=True)
    said: list[str] = []
    size = 32 if name == "ibn" else 8  # whose instance part refuses maps of one position

    def look(layer: nn.Module, given: Any, y: Tensor) -> None:
        if "NormalizerStep" not in y.grad_fn.name():
            said.append(nk.why(layer, given[0].detach()))

    for step in range(5):
        if step == 4:
            for layer in model.modules():
                if isinstance(layer, nk.Normalizer):
                    layer.register_forward_hook(look)
        x = torch.randn(128, 3, size, size, device=DEVICE).to(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert not said


def test_nothing_is_compiled_on_a_cpu() -> None:
    layer, x = made("gbgn", {"groups": 2}), torch.randn(4, 8, 3, 3, dtype=torch.float64)
    layer(x)
    plans = layer.__dict__.get("_traced", {}).values()
    assert not any(isinstance(plan, tracing.TracedPlan) for plan in plans)


class StandIn:
    """What Inductor would make of a list of operations: two kernels, whose launcher is one of
    Inductor's. The first does it all, the second copies what came of it."""

    by_triton = False  # started by Triton's launcher, and not by torch's
    leaves = False  # an operation to torch
    hides = False  # what fills a table
    source = ""  # of a first kernel that changes its table in place

    class Kernel:
        """As torch's launcher has it: its type is that of its arguments, 'O' for tensors."""

        function, num_warps, shared = 0, 4, 0
        full_constexprs: tuple[int, ...] = ()

        def __init__(self, names: list[str], kinds: str, run: Any) -> None:
            self.arg_names, self.arg_tys, self.body = names, kinds, run

        def run(self, x: int, y: int, z: int, stream: int, *given: Any) -> None:
            with _disable_current_modes():
                self.body(*given)

    def __init__(self, graph: Any, mode: Any) -> None:
        _, *tensors = (node for node in graph.graph.nodes if node.op == "placeholder")
        self.graph, self.names = graph, [f"in_ptr{place}" for place in range(len(tensors))]

    def launcher(self, names: list[str], kinds: str, run: Any) -> Any:
        scope: dict[str, Any] = {"runner": self.Kernel(names, kinds, run).run}
        call = "runner(1, 1, 1, stream, *given)"
        if self.by_triton:  # which is given constants, too
            own = scope["runner"]
            whole = 10 + len(names)  # with function, four for hooks, and a constant
            scope["runner"] = lambda *given: own(
                *given[:4], *(given[9:-1] if len(given) == whole else given[4:])
            )
            words = {"O": "*fp32", "l": "i64"}
            signature = {n: words[kind] for n, kind in zip(names, kinds, strict=True)}
            scope["bin"] = SimpleNamespace(
                function=0,
                metadata=SimpleNamespace(num_warps=4, shared=0),
                src=SimpleNamespace(signature={**signature, "XBLOCK": "constexpr"}),
            )
            call = "runner(1, 1, 1, stream, bin.function, None, None, None, None, *given, 64)"
        exec(f"def launcher(*given, stream):\n    {call}", scope)
        tuner = object.__new__(CachingAutotuner)
        tuner.launchers, tuner.fn = [scope["launcher"]], SimpleNamespace(src=self.source)
        return tuner

    def __call__(self, given: list[Any]) -> list[Tensor]:
        count, *tensors = given

        def all_of_it(*arguments: Any) -> None:
            *tensors, made, count = arguments
            made.copy_(self.graph(count, *tensors)[0])

        with _disable_current_modes():
            size = self.graph(count, *(t.clone() for t in tensors))[0].shape
        between, out = torch.empty(size), torch.empty(size)
        if self.hides:
            with _disable_current_modes():
                all_of_it(*tensors, between, count)
        else:
            names = [*self.names, "in_out_ptr0" if self.source else "out_ptr0", "ks0"]
            kinds = "O" * (len(tensors) + 1) + "l"
            self.launcher(names, kinds, all_of_it).run(*tensors, between, count, stream=0)
        if self.leaves:
            between.mul_(1)
        copy = self.launcher(["in_ptr0", "out_ptr0"], "OO", lambda a, b: b.copy_(a))
        half = size[0] // 2  # parts of a table, one after the other, as for torch.cat
        for part in (slice(half, None), slice(half)):
            copy.run(between[part], out[part], stream=0)
        return [out.view(-1)]


@pytest.fixture
def by_stand_ins(traced_here: list[TracedPlan], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def run(self: Any, *given: Any, stream: int) -> Any:
        return self.launchers[0](*given, stream=stream)

    nk.build_extension()
    monkeypatch.setattr(CachingAutotuner, "run", run)
    monkeypatch.setattr(tracing, "inductor", StandIn)
    yield
    assert CachingAutotuner.run is run


def steps_of(layer: Normalizer, other: Normalizer, size: tuple[int, int] = (5, 3)) -> list[str]:
    """The kinds of four steps, all of which give what torch gives."""
    kinds = []
    for step in range(4):
        x = torch.randn(8, 8, *size).requires_grad_()
        residual = torch.randn(8, 8, *size)
        y = layer(x, residual, "relu")
        found = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        with nk.use_backend("torch"):
            expected = other(x, residual, "relu")
            own = [x, *other.parameters()]
            wanted = torch.autograd.grad(expected.square().sum(), own)
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5, msg=f"step {step}")
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))
        kinds.append(y.grad_fn.name())
    return kinds


@pytest.mark.parametrize(("name", "options"), [LAYERS[0], ("rms", {})])
@pytest.mark.skipif(DEVICE == "cuda", reason="Triton's interpreter runs where there is no GPU")
def test_steps_of_maps_of_one_position_are_replayed(
    by_stand_ins: None, name: str, options: dict[str, Any]
) -> None:
    """With torch 2.11 their count, which is no symbol, is a placeholder without a value."""
    layer = made(name, options, torch.float32)
    kinds = steps_of(layer, copy.deepcopy(layer), (1, 1))
    assert ["NormalizerStep" in kind for kind in kinds] == [False, True, True, True]


@pytest.mark.parametrize("by_triton", [False, True])
@pytest.mark.parametrize(("name", "options"), LAYERS, ids=IDS)
@pytest.mark.skipif(DEVICE == "cuda", reason="Triton's interpreter runs where there is no GPU")
def test_steps_with_inductors_kernels_are_replayed(
    by_stand_ins: None,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: dict[str, Any],
    by_triton: bool,
) -> None:
    """A step of gbgn took six times as long as one of bn where the host is what one waits for."""
    monkeypatch.setattr(StandIn, "by_triton", by_triton)
    layer = made(name, options, torch.float32)
    kinds = steps_of(layer, copy.deepcopy(layer))
    assert ["NormalizerStep" in kind for kind in kinds] == [False, True, True, True]


@pytest.mark.parametrize("what", ["leaves", "hides"])
@pytest.mark.skipif(DEVICE == "cuda", reason="Triton's interpreter runs where there is no GPU")
def test_what_inductor_does_beside_kernels_is_not_replayed(
    by_stand_ins: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(StandIn, what, True)
    layer = made("gbgn", {"groups": 4}, torch.float32)
    assert not any("NormalizerStep" in kind for kind in steps_of(layer, copy.deepcopy(layer)))
    obstacle = {"leaves": "Inductor leaves aten::mul_", "hides": "reads a table that no kernel has"}
    said = nk.why(layer, torch.randn(8, 8, 5, 3))
    assert "compiled. Its steps are not replayed: " in said
    assert obstacle[what] in said


STORE, LOAD = "    tl.store(in_out_ptr0 + (x0), tmp1)\n", "    tmp0 = tl.load(in_out_ptr0 + (x0))\n"


@pytest.mark.parametrize("source", [STORE, STORE + LOAD, LOAD + STORE])
@pytest.mark.skipif(DEVICE == "cuda", reason="Triton's interpreter runs where there is no GPU")
def test_a_table_that_a_kernel_fills_and_changes_is_replayed(
    by_stand_ins: None, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    """Inductor joins a kernel with the next one, which works in place: gbgn, ssn and shifted_bn."""
    monkeypatch.setattr(StandIn, "source", source)
    layer = made("gbgn", {"groups": 4}, torch.float32)
    kinds = steps_of(layer, copy.deepcopy(layer))
    replayed = "NormalizerStep" in kinds[-1]
    assert replayed == source.startswith(STORE), nk.why(layer, torch.randn(8, 8, 5, 3))


def test_copies_share_a_plan(traced_here: list[TracedPlan]) -> None:
    """A copy knows that it has no recorded steps, which was taken for an option."""
    layer = made("gbgn", {"groups": 2}, torch.float32)
    x = torch.randn(4, 8, 3, 3, device=DEVICE)
    layer(x)
    copy.deepcopy(layer)(x)
    assert len(traced_here) == 1
