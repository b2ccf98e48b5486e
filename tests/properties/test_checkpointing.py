"""Activation checkpointing repeats forwards in the backward: nobody must notice.

Layers whose map depends on what batches change were wrong once: the same layer called twice before
one backward saw, when its first call was repeated, what the second had changed. Gradients of micro
bcn were off by 2 %, those of ubn by 15 % when its score crossed the threshold in between.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import normkit as nk
from cases import build, every, inputs, label, within

# those whose training map reads what batches change, set so that it changes from call to call
CHANGING = [
    ("bcn", {"groups": 2, "micro": True, "update_rate": 0.3}),
    ("batch_renorm", {"r_ramp": None, "d_ramp": None, "momentum": 0.3}),
    ("batch_renorm", {"r_ramp": (0, 3), "d_ramp": (0, 2)}),
    ("ssn", {"anneal_steps": 4}),
    ("ubn", {"tau": 0.92}),
    ("ubn", {"preset": "paper"}),
    ("bn", {"on_single": "running"}),
]
KINDS = {"saved_hooks": False, "reentrant": True}


def changing(case):
    layer = build(case)
    if case[0] == "ubn":
        layer.score.fill_(0.95)  # above the threshold; two batches bring it below
    return layer


def batches(count, size=6):
    return [(i + 1.0) * inputs(size) + i for i in range(count)]


def gradients(call, layer, xs, backward=lambda losses: sum(losses).backward()):
    """Of the inputs and parameters, for a loss that tells the calls apart."""
    given = [x.clone().requires_grad_() for x in xs]
    weights = [torch.linspace(-1, i + 2, x.numel()).to(x).sin() for i, x in enumerate(xs)]
    backward([(call(x).flatten() @ w) for x, w in zip(given, weights, strict=True)])
    wanted = [p.grad for p in layer.parameters() if p.requires_grad]
    return [x.grad for x in given] + wanted


def assert_all_equal(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CHANGING, ids=label)
def test_two_calls_before_one_backward(case, kind):
    layer = changing(case)
    twin = copy.deepcopy(layer)
    xs = batches(3, 1 if "on_single" in case[1] else 6)
    xs = [x[..., :1, :1] for x in xs] if "on_single" in case[1] else xs
    found = gradients(lambda x: checkpoint(layer, x, use_reentrant=KINDS[kind]), layer, xs)
    assert_all_equal(found, gradients(twin, twin, xs))
    for mine, other in zip(layer.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-9, equal_nan=True)


@within(kind=tuple(KINDS))
@pytest.mark.parametrize("case", every(), ids=label)
def test_two_calls_inside_one_checkpoint(case, kind):
    """The n-th call of a layer is repeated from what the n-th saw."""
    layer = build(case)
    twin = copy.deepcopy(layer)
    xs = batches(2)
    found = gradients(
        lambda x: checkpoint(lambda x: layer(layer(x) + 1), x, use_reentrant=KINDS[kind]), layer, xs
    )
    assert_all_equal(found, gradients(lambda x: twin(twin(x) + 1), twin, xs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CHANGING[:-1], ids=label)
def test_checkpoints_inside_each_other(case, kind):
    layer = changing(case)
    twin = copy.deepcopy(layer)
    reentrant = KINDS[kind]

    def outer(x):
        return checkpoint(layer, layer(x) + 1, use_reentrant=reentrant)

    xs = batches(2)
    found = gradients(lambda x: checkpoint(outer, x, use_reentrant=reentrant), layer, xs)
    assert_all_equal(found, gradients(lambda x: twin(twin(x) + 1), twin, xs))


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["first", "last"])
@pytest.mark.parametrize("case", CHANGING[:-1], ids=label)
def test_backwards_in_any_order_and_again(case, order):
    """With retain_graph a forward is repeated for each backward."""

    def backward(losses):
        for i in (*order, *order):
            losses[i].backward(retain_graph=True)

    layer = changing(case)
    twin = copy.deepcopy(layer)
    xs = batches(2)
    found = gradients(lambda x: checkpoint(layer, x, use_reentrant=False), layer, xs, backward)
    assert_all_equal(found, gradients(twin, twin, xs, backward))


@pytest.mark.parametrize("kind", KINDS)
def test_equal_batches_are_told_apart(kind):
    """Nothing of the batch itself says which of two calls it was."""
    layer = changing(CHANGING[0])
    twin = copy.deepcopy(layer)
    xs = [inputs()] * 3
    found = gradients(lambda x: checkpoint(layer, x, use_reentrant=KINDS[kind]), layer, xs)
    assert_all_equal(found, gradients(twin, twin, xs))


class Own(torch.autograd.Function):
    """Checkpointing as other libraries write it: forward without a graph, again in backward."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.run(x)
        torch.autograd.backward(y, grad)
        return None, x.grad


@pytest.mark.parametrize("case", CHANGING[:-1], ids=label)
def test_checkpointing_by_other_libraries(case):
    layer = changing(case)
    twin = copy.deepcopy(layer)
    xs = batches(2)
    found = gradients(lambda x: Own.apply(layer, x), layer, xs)
    assert_all_equal(found, gradients(twin, twin, xs))


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_seen_is_forgotten_with_the_graph(kind):
    layer = changing(CHANGING[0])
    x = inputs().requires_grad_()
    kept = []
    copies = layer._copies
    vars(layer)["_copies"] = lambda: [kept.append(copies())] and kept[-1]
    y = checkpoint(layer, x, use_reentrant=KINDS[kind])
    assert len(kept) == 1
    alive = weakref.ref(kept.pop()["running_mean"])
    assert alive() is not None
    del y
    gc.collect()
    assert alive() is None


def test_nothing_is_kept_without_a_checkpoint():
    layer = changing(CHANGING[0])
    vars(layer)["_copies"] = lambda: pytest.fail("copied")
    layer(inputs().requires_grad_()).sum().backward()
    with torch.no_grad():
        layer(inputs())
    with torch.autograd.graph.save_on_cpu():
        layer(inputs().requires_grad_()).sum().backward()


def test_kernels_repeat_themselves_from_what_they_saw():
    """The fused kernels of these layers: they update statistics on their way."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # there they are interpreted
    for case in (CHANGING[0], CHANGING[1], CHANGING[4]):
        layer = changing(case).float().to(device)
        twin = copy.deepcopy(layer)
        xs = [x.float().to(device) for x in batches(2)]
        with nk.use_backend("triton"):
            found = gradients(lambda x: checkpoint(layer, x, use_reentrant=False), layer, xs)  # noqa: B023
            expected = gradients(twin, twin, xs)
        for a, b in zip((*found, *layer.buffers()), (*expected, *twin.buffers()), strict=True):
            assert torch.equal(a, b)


# each way to keep statistics; who asks what was seen first does not know what was seen
GRAPHS = [
    (("bn", {"momentum": None}), "outside"),
    *((CHANGING[i], "outside") for i in (0, 2, 3, 4)),
    *((case, "inside") for case in (("bn", {}), CHANGING[5])),
]


@pytest.mark.parametrize(("case", "where"), GRAPHS, ids=label)
def test_graphs_that_are_checkpointed(case, where):
    """checkpoint(torch.compile(layer)) counted every batch twice: a graph cannot see, when it is
    made, that it will be repeated. And a model that checkpoints inside could not be one graph."""
    torch.compiler.reset()
    counters.clear()
    layer = changing(case)
    twin = copy.deepcopy(layer)
    if where == "outside":
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)

        def call(x):
            return checkpoint(compiled, x, use_reentrant=False)

    else:
        model = Checkpointing(layer)
        call = torch.compile(model, backend="aot_eager", fullgraph=True)
    xs = batches(2)
    assert_all_equal(gradients(call, layer, xs), gradients(twin, twin, xs))
    assert counters["stats"]["unique_graphs"] == 1
    for (key, mine), other in zip(layer.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(mine, other, msg=key, equal_nan=True)


class Checkpointing(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


def test_generated_code_that_is_checkpointed():
    """The same through the inductor, which has ways of its own to keep what is written."""
    torch.compiler.reset()
    layer = changing(CHANGING[0]).float()
    twin = copy.deepcopy(layer)
    compiled = torch.compile(Checkpointing(layer), fullgraph=True)
    xs = [x.float() for x in batches(2)]
    expected = gradients(twin, twin, xs)
    for a, b in zip(gradients(compiled, layer, xs), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert layer.num_batches_tracked == 2
    torch.testing.assert_close(layer.running_mean, twin.running_mean)


def penalty(layer, x, *, checkpointed):
    """A loss whose backward runs the layer on another batch, in a hook of a tensor."""
    y = checkpoint(layer, x, use_reentrant=checkpointed) if checkpointed is not None else layer(x)
    y.register_hook(lambda grad: layer(-2 * x.detach()).sum() * 0 + grad)
    return y.square().sum()


@pytest.mark.parametrize("checkpointed", [None, False, True])
def test_a_forward_that_a_hook_starts_counts(checkpointed):
    """Whatever ran inside a backward was taken for repeated, so the batches of penalties that hooks
    compute never entered the statistics. What is repeated beside them still counts once."""
    layer, x = nk.BN(8, momentum=0.5), inputs(dtype=torch.float32).requires_grad_()
    twin = copy.deepcopy(layer)
    penalty(layer, x, checkpointed=checkpointed).backward()
    twin(x)
    twin(-2 * x)
    assert int(layer.num_batches_tracked) == 2
    torch.testing.assert_close(layer.running_mean, twin.running_mean)


def test_a_forward_that_a_hook_inside_of_a_checkpoint_starts_counts():
    """The hook runs in a backward that the checkpoint's own backward starts."""
    layer, x = nk.BN(8), inputs(dtype=torch.float32).requires_grad_()
    other = nk.BN(8)

    def inside(x):
        y = layer(x)
        if y.requires_grad:
            y.register_hook(lambda grad: other(grad) * 0 + grad)
        return y

    checkpoint(inside, x, use_reentrant=True).square().sum().backward()
    assert int(layer.num_batches_tracked) == 1
    assert int(other.num_batches_tracked) == 1
