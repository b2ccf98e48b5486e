"""A layer is a good torch module: state, copies, compilation, functional use."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import normkit as nk
from cases import FORMATS, build, every, inputs, label, same_buffers, within
from normkit import catalog
from normkit.errors import TransformError


def run(layer, x):
    y = layer(x)
    y.square().sum().backward()
    return y


def assert_same_state(a, b, rtol=0.0):
    one, two = a.state_dict(), b.state_dict()
    assert one.keys() == two.keys()
    for key, value in one.items():
        torch.testing.assert_close(value, two[key], rtol=rtol, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", every(), ids=label)
def test_state_dict_round_trip(case):
    """A saved layer continues as if it had not been saved, score and counters included."""
    layer, other = build(case), build(case)
    for _ in range(3):
        layer(inputs())
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert_same_state(layer, other)
    x = inputs()
    torch.testing.assert_close(layer(x), other(x), rtol=0, atol=0)
    assert_same_state(layer, other)


@pytest.mark.parametrize("case", every(), ids=label)
@within(how=("deepcopy", "pickle"))
def test_copies_are_independent(case, how):
    layer = build(case)
    layer(inputs())
    twin = copy.deepcopy(layer) if how == "deepcopy" else pickle.loads(pickle.dumps(layer))
    before = copy.deepcopy(layer.state_dict())
    x = inputs()
    y = twin(x)
    for key, value in layer.state_dict().items():
        assert torch.equal(value, before[key]) or key == "rate"
    torch.testing.assert_close(layer(x), y, rtol=0, atol=0)
    assert repr(twin) == repr(layer)


@pytest.mark.parametrize("case", every(), ids=label)
def test_input_is_not_changed(case):
    """rbn's reference code centres in place and corrupts whatever else uses the tensor."""
    layer, x = build(case), inputs()
    kept = x.clone()
    layer(x)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("case", every(), ids=label)
def test_eval_changes_nothing(case):
    layer = build(case).eval()
    before = copy.deepcopy(layer.state_dict())
    layer(inputs())
    for key, value in layer.state_dict().items():
        score = key == "score" and case[1].get("preset") == "authors"  # updates in eval, literally
        assert torch.equal(value, before[key]) or score or key == "rate"


@pytest.mark.parametrize("case", every(), ids=label)
@within(reentrant=(False, True))
def test_checkpointing_counts_once(case, reentrant):
    """Activation checkpointing runs forward twice; statistics and gradients must not notice."""
    layer = build(case)
    twin = copy.deepcopy(layer)
    for _ in range(2):
        x = inputs().requires_grad_()
        z = x.detach().clone().requires_grad_()
        checkpoint(layer, x, use_reentrant=reentrant).square().sum().backward()
        run(twin, z)
        torch.testing.assert_close(x.grad, z.grad)
    for mine, other in zip(layer.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)
    # torch computes what is in a checkpoint, loops may compute the rest: sums in another order
    assert_same_state(layer, twin, rtol=1e-12)


@pytest.mark.parametrize("case", every(), ids=label)
def test_two_forwards_then_backward(case):
    """Two forwards before one backward, as GANs do: no buffer that autograd saved has changed."""
    layer = build(case)
    (layer(inputs().requires_grad_()) + layer(inputs().requires_grad_())).sum().backward()
    for key, parameter in layer.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, key


@pytest.mark.parametrize("case", every(), ids=label)
def test_vmap_over_models(case):
    """torch.func sees an ordinary expression: per-sample gradients by vmap equal a loop."""
    layer = build(case).eval()
    x = inputs()

    def loss(sample):
        return layer(sample[None]).square().sum()

    if case[1].get("preset") == "authors":  # literally: eval mode updates the score
        with pytest.raises(TransformError, match="functional_call"):
            torch.func.grad(loss)(x[0])
        return
    mapped = torch.func.vmap(torch.func.grad(loss))(x)
    loop = torch.stack([torch.func.grad(loss)(sample) for sample in x])
    torch.testing.assert_close(mapped, loop)


@pytest.mark.parametrize("case", every(), ids=label)
def test_vmap_over_inputs_with_gaps(case):
    """Mapped over its last axis a tensor has gaps: torch cannot say whether it is channels_last."""
    layer = build(case).eval()
    xs = torch.stack([inputs(2) for _ in range(3)], -1)
    if case[1].get("preset") == "authors":
        with pytest.raises(TransformError, match="functional_call"):
            torch.func.vmap(layer, in_dims=-1)(xs)
        return
    mapped = torch.func.vmap(layer, in_dims=-1)(xs)
    torch.testing.assert_close(mapped, torch.stack([layer(xs[..., i]) for i in range(3)]))


@within(training=(True, False))
@pytest.mark.parametrize("case", every(), ids=label)
def test_many_gradients_at_once(case, training):
    """The passes of backward write into given tensors, which torch cannot do for many at once."""
    layer, x = build(case).train(training), inputs(2, (2, 1))

    def call(x):
        with same_buffers(layer):
            return layer(x, torch.ones_like(x), "silu")

    together = torch.autograd.functional.jacobian(call, x, vectorize=True)
    torch.testing.assert_close(together, torch.autograd.functional.jacobian(call, x))


@pytest.mark.parametrize("case", every(), ids=label)
def test_vmap_over_models_in_training(case):
    """Several models at once, each with parameters and statistics of its own."""
    layer = build(case)
    models = [copy.deepcopy(layer) for _ in range(3)]
    with torch.no_grad():
        for i, model in enumerate(models):
            for key, parameter in model.named_parameters():
                if "gates" not in key:
                    parameter.add_(0.1 * i)
    xs = torch.stack([inputs(4) + i for i in range(3)])
    parameters, buffers = torch.func.stack_module_state(models)

    def call(parameters, buffers, x):
        return torch.func.functional_call(layer, (parameters, buffers), (x,)), buffers

    mapped, after = torch.func.vmap(call)(parameters, buffers, xs)
    for i, model in enumerate(models):
        torch.testing.assert_close(mapped[i], model(xs[i]))
        for key, buffer in model.named_buffers():
            torch.testing.assert_close(after[key][i], buffer, equal_nan=True, msg=key)
    if any(not torch.equal(b, models[0].get_buffer(key)) for key, b in layer.named_buffers()):
        with pytest.raises(TransformError, match="running statistics"):
            torch.func.vmap(layer)(xs)  # whose buffers would be changed by three models


@pytest.mark.parametrize("name", catalog.names("activation"))
def test_jacobians_with_functional_statistics(name):
    """In training, jacrev and grad of parameters and the new statistics as an output; the layer's
    own stay."""
    layer, x = build((name, {})), inputs(4, (2, 2))
    parameters = {key: p.detach() for key, p in layer.named_parameters() if p.requires_grad}
    before = copy.deepcopy(layer.state_dict())

    def call(given):
        buffers = {key: buffer.clone() for key, buffer in layer.named_buffers()}
        y = torch.func.functional_call(layer, (given, buffers), (x,))
        return y.square().sum((1, 2, 3)), buffers

    if not parameters:
        pytest.skip("it has no parameters")
    rows, after = torch.func.jacrev(call, has_aux=True)(parameters)
    total = torch.func.grad(lambda given: call(given)[0].sum())(parameters)
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())
    run(layer, x)
    for key, parameter in layer.named_parameters():
        if key in rows:
            torch.testing.assert_close(rows[key].sum(0), parameter.grad, msg=key)
            torch.testing.assert_close(total[key], parameter.grad, msg=key)
    for key, buffer in layer.named_buffers():
        torch.testing.assert_close(after[key], buffer, equal_nan=True, msg=key)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("affine", [True, False])
def test_bn_checkpoints_are_torch_checkpoints(dims, affine):
    """state_dict of bn and nn.BatchNorm load into each other, strictly, both ways."""
    theirs = getattr(torch.nn, f"BatchNorm{dims}d")(8, affine=affine)
    ours = nk.BN(8, affine=affine)
    x = inputs(6, (4,) * dims, dtype=torch.float32)
    theirs(x), theirs(x)
    ours.load_state_dict(theirs.state_dict())
    assert ours.num_batches_tracked == 2
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))
    ours.train()(x)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_bn_loads_checkpoints_without_a_counter():
    state = torch.nn.BatchNorm2d(8).state_dict()
    del state["num_batches_tracked"]
    plain = dict(state)
    layer = nk.BN(8)
    layer.load_state_dict(plain)
    assert layer.num_batches_tracked == 0


@pytest.mark.parametrize("case", every(), ids=label)
def test_meta_device(case):
    """A model can be planned without memory: every layer builds and runs on meta."""
    name, options = case
    layer = nk.make(name, 8, device="meta", **options)
    y = layer(torch.empty(6, 8, 4, 4, device="meta"))
    assert y.shape == (6, 8, 4, 4)
    assert y.device.type == "meta"


@within(memory=FORMATS)
@within(training=(True, False))
@pytest.mark.parametrize("case", every(), ids=label)
def test_in_place_activation_afterwards(case, training, memory):
    """nn.ReLU(inplace=True) follows nearly every norm in torchvision and timm.

    Our output was once a view made inside a custom function, which autograd lets nobody change.
    """
    layer = build(case).train(training)
    twin = copy.deepcopy(layer)
    x = inputs(memory=memory)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = torch.nn.functional.relu_(layer(a))
    z = torch.relu(twin(b))
    torch.testing.assert_close(y, z, rtol=0, atol=0)
    y.square().sum().backward()
    z.square().sum().backward()
    torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0)
