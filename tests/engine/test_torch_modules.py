"""torch's own data base of module inputs, run on the layers that replace torch.nn's.

torch.testing._internal.common_modules lists, for every torch.nn module, constructor arguments,
inputs of several ranks and a reference. Our layer must build from the same arguments, load the
module's state, and pass torch's generic checks beside it.
"""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_modules import module_db

import normkit as nk
from cases import noted, same_buffers


def as_bn(
    num_features, eps=1e-5, momentum=0.1, affine=True, track_running_stats=True, dtype=None, **_
):
    return nk.BN(
        num_features,
        eps=eps,
        momentum=momentum,
        affine=affine,
        track_running_stats=track_running_stats,
        dtype=dtype,
    )


def as_gn(num_groups, num_channels, eps=1e-5, affine=True, dtype=None, **_):
    return nk.GN(num_channels, groups=num_groups, eps=eps, affine=affine, dtype=dtype)


def as_ln(num_groups, num_channels, eps=1e-5, affine=True, dtype=None, **_):
    return nk.LN(num_channels, eps=eps, affine=affine, dtype=dtype) if num_groups == 1 else None


def as_in(
    num_features, eps=1e-5, momentum=0.1, affine=False, track_running_stats=False, dtype=None, **_
):
    # running statistics of instance norm are not offered: they mix what the layer keeps apart
    return None if track_running_stats else nk.IN(num_features, eps=eps, affine=affine, dtype=dtype)


REPLACES = {
    nn.BatchNorm1d: [as_bn],
    nn.BatchNorm2d: [as_bn],
    nn.BatchNorm3d: [as_bn],
    nn.GroupNorm: [as_gn, as_ln],
    nn.InstanceNorm1d: [as_in],
    nn.InstanceNorm2d: [as_in],
    nn.InstanceNorm3d: [as_in],
}


def pairs():
    """(torch's module, ours, input) for every entry that our layer can stand in for."""
    for info in module_db:
        for make in REPLACES.get(info.module_cls, []):
            for training in (True, False):
                found = info.module_inputs_func(
                    info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
                )
                for i, entry in enumerate(found):
                    args, kwargs = entry.constructor_input.args, entry.constructor_input.kwargs
                    if not kwargs.get("bias", True):
                        continue  # weight without bias is not offered
                    ours = make(*args, **kwargs, dtype=torch.float64)
                    (x,) = entry.forward_input.args
                    if ours is None or x.dim() < 2 or x.shape[1] != ours.channels:
                        continue  # unbatched input: torch.nn.InstanceNorm alone has that
                    theirs = info.module_cls(*args, **kwargs, dtype=torch.float64).train(training)
                    name = f"{info.module_cls.__name__}-{make.__name__}-{training}-{i}"
                    yield pytest.param(theirs, ours.train(training), x, id=name)


PAIRS = list(pairs())


def test_the_data_base_was_not_empty():
    """Every module that has a stand-in was met."""
    met = {type(theirs.values[0]) for theirs in PAIRS}
    assert met == set(REPLACES)


@pytest.fixture
def pair(request):
    theirs, ours, x = (copy.deepcopy(v) for v in request.param)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.uniform_(0.5, 1.5)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours, x.detach().requires_grad_()


def on_every_pair(test):
    params = [pytest.param(p.values, id=p.id) for p in PAIRS]
    return pytest.mark.parametrize("pair", params, indirect=True)(test)


@on_every_pair
def test_forward_and_backward(pair):
    theirs, ours, x = pair
    other = x.detach().clone().requires_grad_()
    y, z = ours(x), theirs(other)
    torch.testing.assert_close(y, z)
    grad = torch.randn_like(y)
    y.backward(grad)
    z.backward(grad)
    torch.testing.assert_close(x.grad, other.grad)
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, its.grad)
    for key, value in theirs.state_dict().items():
        if x.numel() or key != "num_batches_tracked":  # torch counts an empty batch, we do not
            torch.testing.assert_close(ours.state_dict()[key], value)


@on_every_pair
def test_grad_and_gradgrad(pair):
    _, ours, x = pair

    def call(x, *_):
        with same_buffers(ours):
            return ours(x)

    everything = (x, *ours.parameters())
    assert gradcheck(call, everything, fast_mode=True)
    assert gradgradcheck(call, everything, fast_mode=True)


SPREAD = {
    "gaps": lambda x: torch.stack([x, torch.zeros_like(x)], -1)[..., 0],
    "turned": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@on_every_pair
def test_non_contiguous(pair):
    """Inputs and gradients that do not lie densely, in all number types: the numbers of torch's
    module in float64 from the same rounded input, up to the rounding of the type."""
    for how in SPREAD:
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            with noted(how, dtype):
                check_non_contiguous(*copy.deepcopy(pair), how, dtype)


def check_non_contiguous(theirs, ours, x, how, dtype):
    x, dy = x.detach().to(dtype), torch.randn_like(x).to(dtype)
    ours = ours.to(dtype)
    with torch.no_grad():
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            its.copy_(mine)  # as rounded
    wide, grad = SPREAD[how](x).requires_grad_(), SPREAD[how](dy)
    assert not wide.is_contiguous() or x.numel() <= max(x.shape)  # one axis, or nothing
    exact = x.double().requires_grad_()
    y, z = ours(wide), theirs(exact)
    assert y.dtype == dtype
    # one rounding to the type, after sums of some hundred values in float32 or wider
    inner = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    near = dict.fromkeys(("rtol", "atol"), torch.finfo(dtype).eps + 64 * inner)
    torch.testing.assert_close(y.double(), z, **near)
    y.backward(grad)
    z.backward(dy.double())
    near["atol"] *= max(1.0, float(exact.grad.abs().max()) if x.numel() else 1.0)
    torch.testing.assert_close(wide.grad.double(), exact.grad, **near)
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        bound = near["atol"] * max(1.0, float(its.grad.abs().max()))
        torch.testing.assert_close(mine.grad.double(), its.grad, rtol=near["rtol"], atol=bound)


@on_every_pair
def test_pickle_repr_and_devices(pair):
    _, ours, x = pair
    twin = pickle.loads(pickle.dumps(ours))
    assert repr(twin) == repr(ours)
    torch.testing.assert_close(twin(x), ours(x), rtol=0, atol=0)
    meta = copy.deepcopy(ours).to("meta")
    assert all(t.device.type == "meta" for t in (*meta.parameters(), *meta.buffers()))
    back = meta.to_empty(device="cpu")
    back.load_state_dict(ours.state_dict())
    torch.testing.assert_close(back.eval()(x), ours.eval()(x), rtol=0, atol=0)


@on_every_pair
def test_train_and_eval_differ_as_torch_says(pair):
    theirs, ours, x = pair
    ours.train()(x), theirs.train()(x)
    same = torch.allclose(ours.train()(x), ours.eval()(x))
    assert same == torch.allclose(theirs.train()(x), theirs.eval()(x))
