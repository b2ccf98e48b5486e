"""The operators themselves: what torch.library asks of them, and that they compute the passes."""

from __future__ import annotations

import copy

import pytest
import torch

import normkit as nk
from cases import inputs
from normkit.core.fusion import Channel, Gate, Memory, Mix, Pool, Ramps, Traced
from normkit.core.layout import Batch, Channels
from normkit.engine import dispatch, plain
from normkit.engine.compile import records
from normkit.errors import OptionError

pytest.importorskip("triton", reason="Triton is not installed")
from normkit.engine.families import fused
from normkit.engine.triton import forms as triton_forms
from normkit.engine.triton import passes as triton_passes
from normkit.engine.triton import stages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPS = torch.ops.normkit
CHANNELS, GROUPS, SAMPLES = 6, 2, 3
BOTH = pytest.mark.parametrize("memory", ["contiguous", "channels_last"])


def parameter(size=CHANNELS):
    return (torch.rand(size, device=DEVICE) + 0.5).requires_grad_()


def statistic():
    return torch.rand(CHANNELS, device=DEVICE) + 0.5


def count(dtype=torch.int64, value=0):
    return torch.full((), value, dtype=dtype, device=DEVICE)


def kept():
    return Memory(statistic(), statistic(), count(), count(), count(torch.int32), 0.2, 1.0)


def ramps():
    return Ramps(3.0, 0.0, 8.0, 5.0, 1.0, 9.0, statistic(), statistic(), count(value=3))


def own(kind):
    """Weight, bias, and what the kind has beside them."""
    further = {
        "pool": [],
        "gate": [CHANNELS] * 3,
        "group": [GROUPS] * 2,
        "channel": [CHANNELS] * 2,
        "mix": [3, 3],
    }
    return [parameter(size) for size in (CHANNELS, CHANNELS, *further[kind])]


# made in the test, so that its seed decides what is in them
DESCRIPTIONS = {
    "pool-sample": lambda: Pool("sample", 1e-3, GROUPS, *own("pool")),
    "pool-sample-plain": lambda: Pool("sample", 1e-3, CHANNELS, None, None),
    "pool-batch": lambda: Pool("batch", 1e-3, CHANNELS, *own("pool")),
    "pool-batch-groups": lambda: Pool("batch", 1e-3, GROUPS, *own("pool")),
    "pool-batch-plain": lambda: Pool("batch", 1e-3, CHANNELS, None, None),
    "gate": lambda: Gate(1e-3, "normalized", *own("gate")),
    "gate-input": lambda: Gate(1e-3, "input", *own("gate")[:4], None),
    "gate-nothing": lambda: Gate(1e-3, "nothing", None, None, None, parameter(), None),
    "gate-given": lambda: Gate(1e-3, "normalized", *own("gate"), (statistic(), statistic())),
    "channel": lambda: Channel(1e-3, GROUPS, *own("group")),
    "channel-own": lambda: Channel(1e-3, GROUPS, *own("channel")),
    "channel-plain": lambda: Channel(1e-3, GROUPS, None, None, None, None),
    "channel-given": lambda: Channel(1e-3, GROUPS, *own("group"), (statistic(), statistic())),
    "mix": lambda: Mix(1e-3, 12 / 11, *own("mix")),
    "mix-two": lambda: Mix(1e-3, 1.0, *own("mix")[:2], parameter(2), parameter(2)),
    "mix-given": lambda: Mix(1e-3, 1.0, None, None, *own("mix")[2:], (statistic(), statistic())),
}  # fmt: skip


@pytest.fixture(params=DESCRIPTIONS.values(), ids=DESCRIPTIONS.keys())
def fusion(request):
    return request.param()


def tensor(memory):
    return inputs(SAMPLES, (4, 3), memory, torch.float32, CHANNELS).to(DEVICE)


def arguments(fusion, memory):
    """x and the operator's slots; a cell is a whole channel where the layers choose so."""
    x = tensor(memory)
    whole = memory == "channels_last" and isinstance(fusion, Pool) and fusion.kind == "batch"
    parameters, given, *kind = records.spread(fusion, whole)
    return x, parameters, given, kind, Batch(x) if whole else Channels(x)


def rules(memory):
    """All of them once; in the other memory those about what comes out, which it may change."""
    fast = ("test_schema", "test_autograd_registration", "test_faketensor")
    return fast if memory == "channels_last" else (*fast, "test_aot_dispatch_dynamic")


@BOTH
def test_whole_meets_the_rules_of_torch(fusion, memory):
    x, parameters, constants, kind, _ = arguments(fusion, memory)
    residual = torch.randn_like(x).requires_grad_()
    given = x.requires_grad_(), residual, *parameters, *constants, *kind, "silu"
    torch.library.opcheck(OPS.fused, given, test_utils=rules(memory), rtol=1e-4, atol=1e-5)


@BOTH
def test_split_meets_the_rules_of_torch(fusion, memory, request):
    """A graph around it once a family: what may be given is the same as to the whole operator."""
    x, parameters, constants, kind, _ = arguments(fusion, memory)
    given = x.requires_grad_(), *parameters, *constants, *kind
    families = ("pool-sample", "pool-batch", "gate", "channel", "mix")
    once = request.node.callspec.id in [f"{name}-contiguous" for name in families]
    tests = rules("contiguous" if once else "channels_last")
    torch.library.opcheck(OPS.coefficients, given, test_utils=tests, rtol=1e-4, atol=1e-5)


@BOTH
def test_backwards_meet_the_rules_of_torch(fusion, memory):
    x, parameters, constants, kind, _ = arguments(fusion, memory)
    parameters = [None if p is None else p.detach() for p in parameters]
    _, tables = OPS.fused(x, None, *parameters, *constants, *kind, "none")
    tests = ("test_schema", "test_faketensor")  # no gradient of a gradient
    given = torch.randn_like(x), x, None, tables, *parameters, *kind, "silu", True, True
    torch.library.opcheck(OPS.fused_backward, given, test_utils=tests)
    given = torch.randn_like(tables), x, tables, *parameters, *kind
    torch.library.opcheck(OPS.coefficients_backward, given, test_utils=tests)


@BOTH
def test_whole_computes_what_eager_does(fusion, memory):
    """Bit for bit: the same launches."""
    x, parameters, constants, kind, layout = arguments(fusion, memory)
    x.requires_grad_()
    y, tables = OPS.fused(x, None, *parameters, *constants, *kind, "relu")
    expected, made, begin, _ = fused.fused(x, fusion, None, "relu", layout)
    assert torch.equal(y, expected)
    assert y.stride() == x.stride()
    assert begin == records.sizes(x, *kind[:2]).begin
    if kind[0] != "mix" or parameters[2].shape[0] == 3:  # otherwise there are no statistics
        size = 2 * (kind[1][1] if kind[0].startswith("pool") else CHANNELS)
        assert torch.equal(tables[begin : begin + size], made[begin : begin + size])
    grad = torch.randn_like(y)
    wanted = [x, *(p for p in parameters if p is not None)]
    mine, theirs = (torch.autograd.grad(out, wanted, grad) for out in (y, expected))
    for one, two in zip(mine, theirs, strict=True):
        assert torch.equal(one, two)
        assert one.dtype == two.dtype


@BOTH
def test_nothing_is_changed(fusion, memory):
    """An operator with a gradient must leave every tensor it gets as it was."""
    x, parameters, constants, kind, _ = arguments(fusion, memory)
    given = [x, *parameters, *constants]
    before = [None if t is None else t.detach().clone() for t in given]
    OPS.coefficients(*given, *kind)
    for now, then in zip(given, before, strict=True):
        assert now is then is None or torch.equal(now, then)


def test_maps_that_follow_what_the_batch_changes_have_no_record():
    """Computed again for a backward, they would see what has been changed."""
    for fusion in (
        Pool("batch", 1e-3, CHANNELS, *own("pool"), kept(), ramps()),
        Channel(1e-3, GROUPS, *own("group"), None, kept(), statistic()[:1]),
        Gate(1e-3, "normalized", *own("gate"), (statistic(), statistic()), statistic()[:1]),
    ):
        assert records.spread(fusion, False) is None


@pytest.mark.parametrize("strips", [1, 3])
@BOTH
def test_moments(memory, strips):
    x = tensor(memory).requires_grad_()
    torch.library.opcheck(OPS.moments, (x, False, strips), rtol=1e-4, atol=1e-5)
    expected = torch.stack(plain.moments(x, Channels(x, strips)))
    torch.testing.assert_close(OPS.moments(x, False, strips), expected, rtol=1e-5, atol=1e-6)


def test_moments_of_the_whole_batch():
    x = tensor("channels_last").requires_grad_()
    torch.library.opcheck(OPS.moments, (x, True, 1), rtol=1e-4, atol=1e-5)
    expected = torch.stack(plain.moments(x, Batch(x)))
    torch.testing.assert_close(OPS.moments(x, True, 1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [False, True], ids=["finite", "nonfinite"])
def test_remember(bad):
    """running ← running + weight·(new − running), whole or not at all."""
    memory = kept()
    tables = torch.rand(3 + 2 * CHANNELS + 1, device=DEVICE)
    if bad:
        tables[4] = torch.inf
    given = tables, *memory[:5], 3, 10, 1, memory.weight
    torch.library.opcheck(OPS.remember, copy.deepcopy(given))
    mean, second = memory.mean.clone(), memory.second.clone()
    OPS.remember(*given)
    if not bad:
        new = tables[3:-1].view(2, CHANNELS)
        mean = mean + memory.weight * (new[0] - mean)
        second = second + memory.weight * (new[1] * 10 / 9 - second)
    torch.testing.assert_close(memory.mean, mean)
    torch.testing.assert_close(memory.second, second)
    assert (int(memory.batches), int(memory.nonfinite)) == (int(not bad), int(bad))
    assert memory.arrivals == 0


@pytest.mark.skipif(DEVICE != "cpu", reason="there is a GPU, where the kernels run")
def test_without_a_gpu_and_interpreter_there_is_an_error(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    x = tensor("contiguous")
    with pytest.raises(OptionError, match=r"normkit::moments expects a tensor on cuda.* cpu"):
        OPS.moments(x, False, 1)


def test_a_machine_that_cuts_cells_into_parts(monkeypatch):
    """More parts than a coefficient kernel merges: sizes that the fakes promise must not move."""
    monkeypatch.setattr(triton_forms, "TILE", 32)
    monkeypatch.setattr(triton_forms, "UNROLL", 2)
    monkeypatch.setattr(stages, "ENTRIES", 16)
    monkeypatch.setattr(triton_passes, "_multiprocessors", lambda device: 4096)
    monkeypatch.setattr(triton_passes, "form_of", triton_passes.form_of.__wrapped__)
    x = inputs(2, (18, 4), "channels_last", torch.float32, CHANNELS).to(DEVICE)
    for make in DESCRIPTIONS.values():
        parameters, constants, *kind = records.spread(make(), False)
        given = x, None, *parameters, *constants, *kind, "none"
        torch.library.opcheck(OPS.fused, given, test_utils="test_faketensor")


def test_every_family_is_here():
    """A description that the operators do not know would be lost in a graph."""
    traced = {Traced}  # in a graph the compiler makes such coefficients itself
    assert {type(make()) for make in DESCRIPTIONS.values()} == set(fused.FAMILIES) - traced
    named = {records.spread(make(), False).family for make in DESCRIPTIONS.values()}
    assert named == set(records.FAMILIES) == dispatch.COMPILED.keys() - {"moments"}


@pytest.mark.parametrize("name", ["gn", "ln", "in"])
@pytest.mark.parametrize("activation", ["none", "relu"])
def test_gradients_of_parameters_for_a_single_sample(name, activation):
    """They stood behind constant and slope of dx, which a graph took for them."""
    layer = nk.make(name, 8).to(DEVICE)
    x = torch.randn(1, 8, 5, 4, device=DEVICE)
    found = []
    for compiled in (False, True):
        torch._dynamo.reset()
        own = copy.deepcopy(layer)
        run = lambda x, own=own: own(x, None, activation)  # noqa: E731
        with nk.use_backend("triton"):
            if compiled:
                run = torch.compile(run, backend="aot_eager", fullgraph=True)
            run(x).square().sum().backward()
        found.append([p.grad for p in own.parameters()])
    for eager, graph in zip(*found, strict=True):
        torch.testing.assert_close(graph, eager, rtol=1e-5, atol=1e-5)
