"""Layers on a CPU, computed by loops in C++: as by torch, and for whoever looks into them."""

from __future__ import annotations

import copy
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import normkit as nk
from cases import FORMATS
from normkit.engine.cpu import passes as cpp_passes
from normkit.engine.replay import build
from normkit.engine.replay.record import PLANS
from normkit.errors import DeviceError, NonFiniteWarning

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
LAYERS = {
    "bn": {},
    "gn": {"groups": 4},
    "ln": {},
    "in": {},
    "bgn": {"groups": 4},
    "rbn": {},
    "iebn": {},
    "bcn": {"groups": 4},
    "micro": {"groups": 4, "micro": True, "update_rate": 0.1},
    "sn": {},
    "dyt": {},
    "batch_renorm": {"r_ramp": None, "d_ramp": None},
    "bnet": {"init": "dirac"},
    "ubn": {"affine_init": "dirac"},
    "pn": {},
    "rms": {},  # from here on by their own coefficients, written down
    "dn": {"start": "gn", "groups": 4},
    "gbgn": {"groups": 4},
    "ghost_bn": {"virtual_batch": 2},
    "ibn": {},
    "shifted_bn": {},
    "ssn": {},
}
FOLLOWED = [("none", False), ("relu", True), ("relu", False), ("none", True), ("gelu", False)]


def make(name, **options):
    layer = nk.make("bcn" if name == "micro" else name, 16, **LAYERS[name], **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return layer


def batch(memory="contiguous", n=3, size=(5, 7), dtype=torch.float32):
    x = (3 + 2 * torch.randn(n, 16, *size)).to(dtype)
    return x if memory == "contiguous" else x.to(memory_format=torch.channels_last)


def step(layer, x, grad, residual=None, activation="none"):
    """All that a step gives, and the name of autograd's node."""
    x = x.clone().requires_grad_()
    residual = None if residual is None else residual.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x, residual, activation)
    y.backward(grad)
    made = [y.detach(), x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]
    return [*made, *([] if residual is None else [residual.grad])], y.grad_fn.name()


def both(layer, *given):
    """A step in C++, and by torch."""
    other = copy.deepcopy(layer)
    found = step(layer, *given)
    with nk.use_backend("torch"):
        return found, step(other, *given)[0]


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("name", LAYERS)
def test_as_by_torch(name, memory):
    for activation, with_residual in FOLLOWED:
        layer = make(name)
        for _ in range(2):  # the second step has a plan
            residual = batch(memory) if with_residual else None
            grad = torch.randn_like(batch(memory))
            (found, node), expected = both(layer, batch(memory), grad, residual, activation)
            for got, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
            if activation in cpp_passes.ACTIVATIONS:
                assert "NormalizerStep" in node


@pytest.mark.parametrize("name", [*LAYERS, "frozen_bn", "shifted_bn"])
def test_eval_mode_as_by_torch(name):
    layer = nk.make(name, 16) if name not in LAYERS else make(name)
    layer(batch())
    layer.eval()
    for given in (batch(), batch("channels_last"), batch(n=1)):
        (found, _), expected = both(layer, given, torch.randn_like(given))
        with torch.no_grad():
            torch.testing.assert_close(layer(given), found[0], rtol=2e-5, atol=2e-5)
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("size", [(), (1,), (3, 1), (97, 101), (2, 3, 2)], ids=str)
@pytest.mark.parametrize("name", ["bn", "gn", "rbn", "bcn", "dyt"])
def test_any_size(name, size):
    """One position, rests of lanes, several blocks of sums, volumes."""
    layer, x = make(name), batch(size=size, n=2)
    for given in (x, x.movedim(1, -1).contiguous().movedim(-1, 1)):
        (found, _), expected = both(layer, given, torch.randn_like(given))
        largest = [float(t.abs().max()) if t.numel() else 0.0 for t in expected]
        for got, wanted, most in zip(found, expected, largest, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5 * max(most, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["gn", "dyt"])
def test_types(name, dtype, parameters):
    """Statistics and sums are wide, whatever goes in and out."""
    layer = make(name).to(parameters)
    x, grad = batch(dtype=dtype), batch(dtype=dtype)
    (found, node), _ = both(layer, x, grad)
    truth, _ = step(copy.deepcopy(layer).double(), x.double(), grad.double())
    assert "NormalizerStep" in node
    for got, wanted in zip(found, truth, strict=True):
        assert got.dtype in (dtype, parameters)
        rough = 2.0**-8 if torch.bfloat16 == got.dtype else 1e-6 if got.dtype != dtype else 1e-12
        torch.testing.assert_close(got.double(), wanted, rtol=rough, atol=rough * 4)


@pytest.mark.parametrize("memory", FORMATS)
def test_threads_change_nothing_but_roundings(memory):
    """Also where a row of the table has to be cut for them."""
    before = torch.get_num_threads()
    for name, n in (("bn", 40), ("gn", 2)):
        layer, x = make(name), batch(memory, n=n, size=(48, 48))
        grad = torch.randn_like(x)
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            try:
                found.append(step(copy.deepcopy(layer), x, grad)[0])
            finally:
                torch.set_num_threads(before)
        for got, wanted in zip(*found, strict=True):
            most = float(wanted.abs().max())
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 * most)


def test_a_backend_that_is_asked_for_is_used():
    """A plan that was written is not for those who asked for torch."""
    layer, x = make("bn"), batch()
    step(layer, x, x)
    with nk.use_backend("torch"):
        assert "NormalizerStep" not in step(layer, x, x)[1]
    assert "NormalizerStep" in step(layer, x, x)[1]


@pytest.mark.parametrize("name", ["bn", "rbn", "bcn", "micro", "sn", "dyt", "batch_renorm", "ubn"])
def test_its_gradient_can_be_differentiated(name):
    layer, given, found = make(name), batch(), []
    for backend in ("auto", "torch"):
        own, x = copy.deepcopy(layer), given.clone().requires_grad_()
        with nk.use_backend(backend):
            y = own(x)
            assert backend == "torch" or "NormalizerStep" in y.grad_fn.name()
            (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(dx.square().sum(), [x, *own.parameters()]))
    largest = max(float(d.abs().max()) for d in found[1])  # sums of such, which nearly cancel
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("layer", [make("gn"), nk.make("frozen_bn", 16)], ids=["gn", "frozen_bn"])
def test_many_gradients_at_once(layer):
    x = batch().requires_grad_()
    y, g = layer(x), torch.randn(3, 16, 5, 7)
    (one,) = torch.autograd.grad(y, x, g, retain_graph=True)
    (many,) = torch.autograd.grad(y, x, torch.stack([g, 2 * g]), is_grads_batched=True)
    torch.testing.assert_close(many, torch.stack([one, 2 * one]), rtol=1e-5, atol=1e-5)


def test_parameters_of_functional_call_and_frozen_ones():
    layer, x = make("bn"), batch().requires_grad_()
    step(layer, x.detach(), x.detach())
    layer.zero_grad()
    layer.bias.requires_grad_(False)
    weight = torch.full((16,), 3.0, requires_grad=True)
    y = functional_call(layer, {"weight": weight}, (x,))
    assert "NormalizerStep" in y.grad_fn.name()
    y.square().sum().backward()
    assert weight.grad.abs().sum() > 0
    assert layer.weight.grad is None
    assert layer.bias.grad is None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["bn", "batch_renorm", "ubn"])
def test_checkpointing_repeats_what_was_seen(name, reentrant):
    layer, x = make(name), batch()
    other = copy.deepcopy(layer)
    expected, _ = step(other, x, x)
    given = x.clone().requires_grad_()
    checkpoint(layer, given, use_reentrant=reentrant).backward(x)
    torch.testing.assert_close(given.grad, expected[1], rtol=1e-5, atol=1e-5)
    for got, wanted in zip(layer.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert int(layer.num_batches_tracked) == 1


def test_a_batch_that_is_not_finite_is_left_out_and_told():
    layer, x = make("bn"), batch()
    step(layer, x, x)
    kept = layer.running_mean.clone()
    with pytest.warns(NonFiniteWarning, match="left it out"):
        layer((x * torch.nan).requires_grad_())
    assert torch.equal(layer.running_mean, kept)
    assert (int(layer.nonfinite_batches), int(layer.num_batches_tracked)) == (1, 1)


def test_without_it_torch_computes(monkeypatch, tmp_path):
    """What is built beside a training is for the next process: its sums are rounded in another
    order, and a run would not come to the same numbers again."""
    monkeypatch.setattr(build, "_extension", build._Extension())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    layer, x = make("bn"), batch()
    assert "AffineBackward" in step(layer, x, x)[1]
    assert nk.why(layer, x).startswith("bn runs on torch, because the tensor is on cpu, and")
    monkeypatch.undo()
    late = build._Extension()
    late.module, late.started, late.asked = build._extension.module, True, 1
    monkeypatch.setattr(build, "_extension", late)
    assert build.extension() is not None
    assert "AffineBackward" in step(layer, x, x)[1]
    assert "built after the first step" in nk.why(layer, x)


def test_another_thread_may_bring_a_new_size():
    """Plans moved in memory while a loop of one of them ran: a segmentation fault."""
    layer, large = make("gn").eval(), batch(n=4, size=(96, 96))
    wanted = layer(large)
    found = []
    thread = threading.Thread(target=lambda: found.extend(layer(large) for _ in range(30)))
    thread.start()
    for i in range(40):
        layer(batch(n=1, size=(2 + i, 3)))
    thread.join()
    assert len(found) == 30
    assert all(torch.equal(y, wanted) for y in found)


def test_tensors_of_other_sizes_are_not_read_by_loops():
    x = batch()
    given = {"weight": torch.ones(3), "bias": torch.zeros(3)}
    layer = make("bn")
    layer(x)
    with pytest.raises(RuntimeError, match="must match the size"):
        functional_call(layer, given, (x,))
    layer.weight.data = torch.ones(2)
    with pytest.raises(RuntimeError, match="must match the size"):
        layer(x)
    other = make("bn")
    other.running_mean = torch.zeros(2)
    with pytest.raises(RuntimeError, match="invalid for input of size 16"):
        other(x)


def test_one_parameter_under_two_names():
    x, layer = batch(), make("bn")
    layer.bias = layer.weight
    found, wanted = both(layer, x, torch.randn_like(x))
    for got, expected in zip(found[0], wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_coefficients_of_a_subclass_are_its_own():
    class Halved(nk.BN):
        def coefficients(self, moments, state):
            result = super().coefficients(moments, state)
            return result._replace(map=result.map.then(torch.full((16,), 0.5), None))

    x = batch()
    torch.testing.assert_close(Halved(16)(x), 0.5 * nk.BN(16)(x), rtol=1e-5, atol=1e-5)


def test_what_is_registered_later_counts():
    layer, x = nk.BN(16, affine=False), batch()
    plain = layer(x)
    layer.register_parameter("weight", torch.nn.Parameter(torch.full((16,), 3.0)))
    torch.testing.assert_close(layer(x), 3 * plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [("bn", "eps", 1.0), ("bn", "virtual_batch", 2), ("gn", "groups", 8), ("gbgn", "groups", 8)],
)
def test_a_gradient_is_differentiated_with_the_options_of_its_forward(name, option, value):
    """Those of the backward gave other gradients; and it was an error where the layer was gone."""
    found, given = [], batch(n=4, dtype=torch.float64)
    for changes in (False, True):
        torch.manual_seed(0)
        layer, x = make(name).double(), given.clone().requires_grad_()
        power = layer(x).pow(3).sum()
        parameters = list(layer.parameters())
        if changes:
            setattr(layer, option, value)
            del layer
        first = torch.autograd.grad(power, x, create_graph=True)[0]
        found.append([first, *torch.autograd.grad(first.square().sum(), [x, *parameters])])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


def test_more_sizes_than_plans_and_attributes_that_change():
    layer = make("bn")
    for i in range(PLANS + 2):
        layer.momentum = 0.1 / (i + 1)
        y = layer(batch(size=(2 + i, 3)).requires_grad_())
        assert "NormalizerStep" in y.grad_fn.name()
    for i in range(PLANS + 2):
        y = layer(batch(size=(3, 2 + i)).requires_grad_())
        assert "NormalizerStep" in y.grad_fn.name()


def test_a_cache_that_cannot_be_looked_into(monkeypatch):
    def library():
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(build, "_extension", build._Extension())
    monkeypatch.setattr(build, "library", library)
    layer, x = make("bn"), batch()
    assert "AffineBackward" in step(layer, x, x)[1]
    assert "its cache cannot be looked into" in nk.why(layer, x)
    with pytest.raises(DeviceError, match="Permission denied"):
        nk.build_extension()


def test_one_process_builds_at_a_time(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setattr(build, "_extension", build._Extension())
    target = build.library()
    target.parent.mkdir(parents=True)
    target.with_name("begun").touch()
    build._build_aside()
    assert "another process builds it now" in build.reason()
    with pytest.raises(DeviceError, match="the compiler said: nothing, exit status 1"):
        nk.build_extension()
    assert list(target.parent.iterdir()) == []


def wait_until(true):
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


SLOW = """#!/bin/sh
while [ $# -gt 1 ]; do [ "$1" = -o ] && made=$2; shift; done
mkdir "{counted}/$$"; ls "{counted}" | wc -l >> "{said}"
sleep 0.2
rmdir "{counted}/$$"; echo > "$made"
"""


def test_a_build_that_is_interrupted_is_ended_and_does_not_ask_for_much(monkeypatch, tmp_path):
    """Ctrl-C ended the shell as well: its folder stayed, and for 15 minutes nobody built. There was
    a compiler for each source at once: beside them a step of training took many times as long."""
    counted, said, compiler = tmp_path / "counted", tmp_path / "said", tmp_path / "compiler"
    counted.mkdir()
    compiler.write_text(SLOW.format(counted=counted, said=said))
    compiler.chmod(0o755)
    cache = tmp_path / "a 'cache' of $HOME"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("CXX", f"{shlex.quote(str(compiler))} -m64")
    target = build.library()
    target.parent.mkdir(parents=True)
    left = [target.with_name(name) for name in ("1-2.parts", "1-2.so")]
    left[0].mkdir()
    left[1].touch()
    for each in left:
        os.utime(each, (0, 0))
    begin = "from normkit.engine.replay import build; build._build(build.library(), True)"
    asked = [sys.executable, "-c", begin]
    process = subprocess.Popen(asked, stderr=subprocess.DEVNULL, start_new_session=True)
    wait_until(said.exists)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait()
    wait_until(target.exists)
    wait_until(lambda: list(target.parent.iterdir()) == [target])
    assert max(map(int, said.read_text().split())) <= 3


@pytest.mark.parametrize("compiler", ["'no end", " "])
def test_a_compiler_that_cannot_be_read(monkeypatch, tmp_path, compiler):
    """Its error went to the thread that builds aside, and to who asked for a build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", str(tmp_path))  # there is no g++ either
    monkeypatch.setattr(build, "_extension", build._Extension())
    with pytest.raises(DeviceError, match=r"No closing quotation|there is no compiler"):
        nk.build_extension()


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "micro"])
def test_a_gradient_that_is_differentiated_ends_at_the_layers_inputs(name):
    """With create_graph=True a residual that x was made of as well had a gradient of up to a third
    more, because x's went on to it inside of the layer."""
    layer = make(name)
    r = batch(n=2, dtype=torch.float64).requires_grad_()
    layer.double()
    for make_y in (lambda own: own(2 * r + 1, r, "relu"), lambda own: own(r, r, "sigmoid")):
        found = []
        for further in (False, True):
            own = copy.deepcopy(layer)
            square = make_y(own).square().sum()
            found += torch.autograd.grad(square, r, create_graph=further)
        torch.testing.assert_close(found[1].detach(), found[0], rtol=1e-7, atol=1e-9)


def test_many_gradients_at_once_of_a_residual_block():
    layer, r = make("bn"), batch(n=2).requires_grad_()
    many = torch.randn(3, *r.shape)
    (found,) = torch.autograd.grad(layer(2 * r, r, "relu"), r, many, is_grads_batched=True)
    for mine, one in zip(found, many, strict=True):
        (expected,) = torch.autograd.grad(layer(2 * r, r, "relu"), r, one)
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def frozen(name):
    layer = nk.make(name, 16)
    layer.running_mean.normal_()
    layer.running_var.uniform_(0.5, 2)
    layer.weight.data.normal_()
    return layer.eval().requires_grad_(False)


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("name", ["frozen_bn", "bn"])
def test_a_map_of_which_nothing_is_learned(name, memory):
    layer = frozen(name)
    for activation, with_residual in FOLLOWED:
        residual = batch(memory) if with_residual else None
        given = batch(memory), torch.randn_like(batch(memory)), residual, activation
        (found, node), expected = both(layer, *given)
        for got, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
        assert "NormalizerStep" in node or activation not in cpp_passes.ACTIVATIONS


def test_a_frozen_map_keeps_no_input_that_its_gradient_does_not_need():
    layer, x = frozen("frozen_bn"), batch().requires_grad_()
    given = 2 * x
    y = layer(given)
    wanted = 2 * layer.weight / torch.sqrt(layer.running_var + layer.eps)
    layer.running_var.fill_(7)  # the gradient is of the map that there was
    with torch.no_grad():
        given.zero_()  # an error in backward, if that kept it
    y.sum().backward()
    assert "NormalizerStep" in y.grad_fn.name()
    torch.testing.assert_close(x.grad, wanted.view(1, -1, 1, 1).expand_as(x))


def test_a_frozen_layer_learns_again():
    layer, x = frozen("bn"), batch()
    step(layer, x, x)
    layer.requires_grad_(True)
    found, node = step(layer, x, x)
    with nk.use_backend("torch"):
        expected, _ = step(copy.deepcopy(layer), x, x)
    assert "NormalizerStep" in node
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
    layer.running_mean.requires_grad_()  # to which no loop has a gradient
    layer(x).square().sum().backward()
    assert layer.running_mean.grad.abs().sum() > 0


@pytest.mark.parametrize("activation", ["none", "relu"])
def test_the_gradient_of_a_frozen_map_can_be_differentiated(activation):
    layer, found = frozen("frozen_bn").double(), []
    given = batch(dtype=torch.float64)
    for backend in ("auto", "torch"):
        x, r = given.clone().requires_grad_(), (given + 1).requires_grad_()
        with nk.use_backend(backend):
            power = (layer(x, r, activation) ** 3).sum()
            first = torch.autograd.grad(power, [x, r], create_graph=True)
            second = torch.autograd.grad(sum(d.square().sum() for d in first), [x, r])
            found.append([*first, *second])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in nk.names("activation")),
        ("sn", {"use_bn": False}),
        ("iebn", {"minus": True}),
        ("rbn", {"minus": True}),
    ],
)
def test_what_is_no_number_stays_in_its_sample(name, options):
    """Sums over samples times zero were no numbers either: every sample's gradient was lost."""
    layer = nk.make(name, 16, **options).train(name == "sn" and bool(options))
    x = batch(n=4)
    x[1, 3, 2, 2] = torch.nan
    (found, _), expected = both(layer, x, torch.ones_like(x))
    for got, wanted in zip(found[:2], expected, strict=False):
        assert bool((got.isfinite() >= (wanted.isfinite() & ~x.isnan())).all())  # but for itself
        assert bool(got[[0, 2, 3]].isfinite().all())


def test_a_tanh_is_that_of_doubles():
    """At every size of values, to two roundings; beyond 9 it is one; what is no number stays so."""
    size = torch.logspace(-12, 2, 20_001, dtype=torch.float64).float()
    x = torch.cat([size, -size, torch.tensor([0.0, -0.0, torch.inf, -torch.inf])])
    layer = nk.DyT(1, alpha_init=1.0)
    y = layer(x.view(-1, 1)).detach().view(-1)
    assert "C++" in str(nk.why(layer, x.view(-1, 1)))
    expected = torch.tanh(x.double())
    unit = torch.exp2(torch.floor(torch.log2(expected.abs().clamp(min=1e-30)))) * 2.0**-23
    assert float(((y.double() - expected).abs() / unit).max()) <= 2
    assert torch.equal(y[-2:], torch.tensor([1.0, -1.0]))
    assert bool(layer(torch.full((2, 1), torch.nan)).isnan().all())


@pytest.mark.parametrize("memory", FORMATS)
@pytest.mark.parametrize("without", ["weight", "bias", "weight bias"])
def test_a_tanh_without_its_parameters(without, memory):
    layer = make("dyt")
    for name in without.split():
        setattr(layer, name, None)
    x = batch(memory, size=(9, 3))
    (found, node), expected = both(layer, x, torch.randn_like(x), x + 1, "relu")
    assert "NormalizerStep" in node
    for got, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)


def test_threads_share_a_tanh():
    layer, x = make("dyt"), batch(n=8, size=(64, 65))
    threads = torch.get_num_threads()
    try:
        for given in (x, x.to(memory_format=torch.channels_last)):
            found = []
            for count in (1, 3):
                torch.set_num_threads(count)
                found.append(step(copy.deepcopy(layer), given, given)[0])
            for one, several in zip(*found, strict=True):
                torch.testing.assert_close(several, one, rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(threads)
