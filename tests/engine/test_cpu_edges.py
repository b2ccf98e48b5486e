"""What loops of C++ must not read, forget or write over: sizes, types, threads."""

from __future__ import annotations

import copy
import gc
import random
import shutil
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import normkit as nk
from normkit.engine import remaking
from normkit.engine.replay import build
from normkit.engine.replay.record import PLANS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
EPS = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-9}
OPTIONS = [
    ("bn", {}),
    ("bn", {"affine": False}),
    ("bn", {"track_running_stats": False}),
    ("bn", {"momentum": None}),
    ("gn", {"groups": 0}),
    ("ln", {"affine": False}),
    ("bgn", {"groups": 0}),
    ("rbn", {}),
    ("rbn", {"centering": False, "affine": False}),
    ("iebn", {"minus": True}),
    ("bcn", {"groups": 0}),
    ("bcn", {"groups": 0, "affine_per": "channel"}),
    ("bcn", {"groups": 0, "micro": True, "update_rate": 0.1}),
    ("sn", {}),
    ("sn", {"use_bn": False}),
    ("batch_renorm", {"r_ramp": (0, 3), "d_ramp": (1, 4)}),
    ("ubn", {"affine_conv": False}),
]
SIZES = [(), (1,), (1, 1), (15,), (16,), (33,), (5, 7), (2, 3, 2), (4097,)]


def x_of(*shape):
    return torch.randn(*shape) if shape else torch.randn(4, 16, 5, 5)


def node(y):
    return y.grad_fn.name()


def step(layer, x, grad, residual, activation):
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    given = x if residual == "x" else None
    if isinstance(residual, torch.Tensor):
        given = residual.clone(memory_format=torch.preserve_format).requires_grad_()
    layer.zero_grad()
    y = layer(x, given, activation)
    y.backward(grad)
    gradients = {name: p.grad for name, p in layer.named_parameters()}
    made = {"y": y.detach(), "dx": x.grad, **gradients, **dict(layer.named_buffers())}
    return made if given is None or given is x else {**made, "dr": given.grad}


def drawn(draw, dtype):
    """A layer of a random family, option and width, an input and what follows."""
    channels = draw.choice([1, 2, 3, 8, 17, 130])
    name, options = draw.choice(OPTIONS)
    widths = [g for g in range(1, channels + 1) if channels % g == 0]
    given = {
        key: value if key != "groups" else draw.choice(widths) for key, value in options.items()
    }
    layer = nk.make(name, channels, **given).to(draw.choice([torch.float32, dtype]))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    shape = draw.choice([2, 3, 9]), channels, *draw.choice(SIZES)
    last = draw.random() < 0.5
    mean, std = draw.choice([(0, 1), (3, 2), (1000, 1), (-50, 0.01)])

    def tensor(mean=0.0, std=1.0):
        made = (mean + std * torch.randn(shape)).to(dtype)
        return made.movedim(1, -1).contiguous().movedim(-1, 1) if last else made

    residual = draw.choice([None, "x", tensor(), torch.randn(shape).to(dtype)])
    return layer, tensor(mean, std), tensor(), residual, draw.choice(["none", "relu"])


@pytest.mark.parametrize("dtype", EPS, ids=str)
def test_as_near_to_the_truth_as_torch(dtype):
    """Errors against torch's passes in float64: at most four times those of torch's in the same
    type, or some roundings of the largest value (sums of up to 37 thousand in another order)."""
    draw, served = random.Random(str(dtype)), 0
    for turn in range(40):
        layer, x, grad, residual, activation = drawn(draw, dtype)
        threads = draw.choice([1, 2, 5])
        in_double = residual.double() if isinstance(residual, torch.Tensor) else residual
        given = x.double(), grad.double(), in_double
        exact = copy.deepcopy(layer).double()
        try:
            with nk.use_backend("torch"):
                bare = step(copy.deepcopy(exact), *given, "none")["y"]
                # where a ReLU bends, a rounding decides on the gradient
                grad = torch.where(bare.abs() > 64 * EPS[dtype] * bare.abs().max(), grad, 0)
                truth = step(exact, x.double(), grad.double(), in_double, activation)
                by_torch = step(copy.deepcopy(layer), x, grad, residual, activation)
        except nk.errors.ShapeError:
            continue
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            found = step(layer, x, grad, residual, activation)
        finally:
            torch.set_num_threads(before)
        served += 1
        assert found.keys() == truth.keys()
        for name, wanted in truth.items():
            if wanted is None:
                assert found[name] is None
                continue
            assert found[name].dtype == by_torch[name].dtype
            error, usual = ((t[name].double() - wanted).abs().max() for t in (found, by_torch))
            rounding = EPS.get(found[name].dtype, 0.0) * float(wanted.abs().max())
            if name not in ("y", "dx", "dr"):  # sums, of so much
                rounding += 2.0**-24 * float(grad.double().abs().sum()) / layer.channels
            if dtype == torch.float64:  # the truth has roundings too, of x, and divides by √eps
                largest = float(torch.maximum(wanted.abs().max(), torch.ones(())))
                rounding = 2.0**-53 * largest * float(x.abs().max()) / 1e-5**0.5
            assert error <= 4 * usual + 64 * rounding, (turn, name, layer, x.shape)
    assert served > 25


def test_every_bfloat16_is_rounded_as_by_torch():
    """All of them: to nearest, ties to even; NaN stays NaN. The products fit into a float, so that
    there is one rounding to it at most, and the one to bfloat16 must give the same bits."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16).reshape(1, 1, -1)
    layer = nk.make("frozen_bn", 1, eps=0.0)
    with torch.no_grad():
        for scale, shift in ((1.0, 0.0), (1.0 + 2.0**-8, 0.0), (0.75, 0.1)):
            layer.weight.fill_(scale)
            layer.bias.fill_(shift)
            wanted = (x.float() * scale + shift).to(torch.bfloat16)
            torch.testing.assert_close(layer(x), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:.*left it out")
def test_what_is_not_finite_goes_the_way_it_goes_by_torch():
    for bad in (torch.inf, -torch.inf, torch.nan):
        for name in ("bn", "gn", "rbn", "bcn", "sn"):
            layer, x = nk.make(name, 16), x_of(3, 16, 5, 7)
            x[1, 2, 3, 4] = bad
            other = copy.deepcopy(layer)
            found = step(layer, x, torch.ones_like(x), None, "relu")
            with nk.use_backend("torch"):
                wanted = step(other, x, torch.ones_like(x), None, "relu")
            for key in ("y", "running_mean", "num_batches_tracked", "nonfinite_batches"):
                if key in wanted:
                    assert torch.equal(found[key].isnan(), wanted[key].isnan()), (bad, name, key)
                    torch.testing.assert_close(found[key], wanted[key], equal_nan=True)


@pytest.mark.parametrize("kept", ["running_mean", "running_var", "num_batches_tracked"])
def test_statistics_of_types_that_loops_do_not_know(kept):
    """After load_state_dict(assign=True) of a file in half precision: an error."""
    for name in ("bn", "rbn", "bcn", "sn"):
        layer, x = nk.make(name, 16), x_of()
        old = getattr(layer, kept)
        setattr(layer, kept, old.half() if old.is_floating_point() else old.int())
        other = copy.deepcopy(layer)
        for mode in (True, False):
            found = layer.train(mode)(x)
            with nk.use_backend("torch"):
                wanted = other.train(mode)(x)  # by statistics that were rounded to half precision
            torch.testing.assert_close(found, wanted, rtol=2.0**-10, atol=2.0**-9)


def test_a_mixture_of_more_parts_is_not_read_by_loops():
    """They have place for three, and wrote a fourth beside it."""
    layer = nk.make("sn", 16)
    layer.mean_weight = torch.nn.Parameter(torch.ones(5))
    layer.var_weight = torch.nn.Parameter(torch.ones(5))
    assert "NormalizerStep" not in node(layer(x_of()))


def test_a_residual_whose_sign_is_yet_to_be_changed():
    """Its memory was read as it lay: the residual came in with the wrong sign."""
    layer, x, rest = nk.BN(16), x_of(), x_of()
    for _ in range(2):
        torch.testing.assert_close(layer(x, torch._neg_view(rest)), layer(x, -rest))


def test_a_residual_of_another_format_and_an_input_with_gaps():
    """After 16 such steps a layer had no plans any more; and each step wrote its plan anew."""
    layer, x = nk.BN(16), x_of().requires_grad_()
    rest = x_of().to(memory_format=torch.channels_last).requires_grad_()
    for _ in range(PLANS + 1):
        y = layer(x, rest)
        assert "NormalizerStep" in node(y)
    y.sum().backward()
    torch.testing.assert_close(rest.grad, torch.ones_like(rest))
    assert len(layer._replays) == 1
    wide = x_of(4, 16, 5, 9)[..., :5].requires_grad_()
    for _ in range(3):
        assert "NormalizerStep" in node(layer(wide))
    assert len(layer._replays) == 2


def test_forwards_that_no_plan_serves_leave_those_of_others():
    """Without gradients a map that reads its state has no plan: 16 such, and none had one."""
    layer = nk.make("bcn", 16, groups=4, micro=True, update_rate=0.1)
    with torch.no_grad():
        for _ in range(PLANS + 1):
            layer(x_of())
    assert layer._replays is None
    assert "NormalizerStep" in node(layer(x_of()))


KEPT = {"bn": torch.float32, "bnet": torch.float32} | dict.fromkeys(
    ("rms", "ssn", "pn", "dyt"), torch.float64
)


def served(name):
    """A layer, an input and a residual."""
    nk.build_extension()
    x, residual = torch.randn(2, 3, 64, 4, 4, dtype=KEPT[name])
    return nk.make(name, 64, dtype=KEPT[name]), x.requires_grad_(), residual.requires_grad_()


@pytest.mark.parametrize("name", KEPT)
def test_data_set_between_a_forward_and_its_backward_is_not_read_as_what_was_there(name):
    """Loops went through as many numbers as there had been, beyond the end of a smaller tensor."""
    for which in ("parameters", "input", "residual"):
        layer, x, residual = served(name)
        layer(x, residual, "relu").sum().backward()
        y = layer(x, residual, "relu")
        assert "NormalizerStep" in node(y)
        given = {"parameters": list(layer.parameters()), "input": [x], "residual": [residual]}
        if name == "bnet" and which == "residual":
            continue  # its backward has the output in place of it
        for tensor in given[which]:
            tensor.data = torch.ones(1, dtype=tensor.dtype)
        with pytest.raises(RuntimeError, match="after the backward"):
            y.sum().backward()


@pytest.mark.parametrize("name", KEPT)
def test_data_of_another_type_or_with_gaps_between_a_forward_and_its_backward(name):
    """The same numbers, where autograd takes what is there now, as it does with torch's layers."""
    layer, x, residual = served(name)
    other = torch.float32 if KEPT[name] == torch.float64 else torch.float64
    layer(x, residual, "relu").square().sum().backward()
    wanted = [p.grad for p in layer.parameters()]
    for change in (lambda t: t.to(other), lambda t: torch.stack([t, t + 1], -1)[..., 0]):
        layer.zero_grad()
        y = layer(x, residual, "relu")
        kept = [p.data for p in layer.parameters()]
        for parameter in layer.parameters():
            parameter.data = change(parameter.data)
        y.square().sum().backward()
        for parameter, data, grad in zip(layer.parameters(), kept, wanted, strict=True):
            torch.testing.assert_close(parameter.grad.double(), grad.double(), rtol=1e-5, atol=1e-5)
            parameter.grad, parameter.data = None, data


def test_an_output_that_is_made_again_lets_go_of_parameters():
    """A dynamic tanh with three of them wrote one behind the end of its list of tensors."""
    layer, conv = nk.make("dyt", 16), nn.Conv2d(16, 2, 1)
    x = x_of().requires_grad_()
    with remaking.Remaking():
        loss = conv(layer(x, None, "relu")).sum()
    loss.backward()
    alive = [weakref.ref(p) for p in layer.parameters()]
    del loss, layer
    gc.collect()
    assert [each() for each in alive] == [None] * 3


def test_autograd_knows_that_statistics_have_changed():
    """A graph that had kept the old ones went on with the new ones in silence."""
    layer, x = nk.BN(16), x_of().requires_grad_()
    layer(x)
    loss = (x.mean((0, 2, 3)) * layer.running_mean).sum()
    layer(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_threads_that_come_at_once_get_the_same(monkeypatch):
    """One loads the module; the other was sent to torch, for its first steps alone."""
    build.build_extension()
    module, found, fresh = build._extension.module, [], build._Extension()

    def load():
        time.sleep(0.2)
        fresh.module = module

    monkeypatch.setattr(build, "_extension", fresh)
    monkeypatch.setattr(build, "_load", load)
    both = [
        threading.Thread(target=lambda: found.append(build.extension_on_cpu())) for _ in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert found == [module, module]


def test_an_exception_in_a_thread_is_one_of_python():
    """OpenMP lets none through: the process ended. So many channels that no memory holds them."""
    build.build_extension()
    before, x = torch.get_num_threads(), torch.zeros(2)
    numbers = [2.0, 2.0**60, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="vector"):
            build._extension.module.call("map", [x, None, x, x, x, x], numbers)
    finally:
        torch.set_num_threads(before)


def test_many_threads_share_a_layer():
    layer, x, found = nk.make("bcn", 16, groups=4), x_of(8, 16, 24, 24), []
    wanted = layer(x)
    steps = [
        threading.Thread(target=lambda: found.extend(layer(x) for _ in range(10))) for _ in range(4)
    ]
    for thread in steps:
        thread.start()
    for thread in steps:
        thread.join()
    assert len(found) == 40
    assert all(torch.equal(y, wanted) for y in found)


class Normalized(Dataset):
    """Samples that a layer has gone over, in the processes of a loader."""

    def __init__(self):
        self.layer, self.x = nk.make("gn", 16, groups=4), x_of(4, 16, 64, 64)

    def __len__(self):
        return 4

    def __getitem__(self, i):
        with torch.no_grad():
            return self.layer(self.x[i : i + 1])[0]


def test_processes_of_a_loader_normalize_too():
    """They are forked after threads of OpenMP have run, which a fork does not take along."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        data = Normalized()
        wanted = data.layer(data.x)
        found = torch.cat(list(DataLoader(data, 2, num_workers=1, timeout=60)))
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_cache_knows_every_source(monkeypatch, tmp_path):
    """A change of any file, or of how it is compiled, is another library."""
    kept = {build.library()}
    for file in (*build.SOURCES, *build.HEADERS):
        changed = tmp_path / file.name
        changed.write_text(file.read_text() + "\n")
        for group in ("SOURCES", "HEADERS"):
            files = [changed if each == file else each for each in getattr(build, group)]
            monkeypatch.setattr(build, group, files)
        kept.add(build.library())
        monkeypatch.undo()
    monkeypatch.setattr(build, "FLAGS", ("-O0",))
    kept.add(build.library())
    assert len(kept) == len(build.SOURCES) + len(build.HEADERS) + 2
    loops = {file for file in build.LOOPS.iterdir() if file.suffix in (".h", ".cpp")}
    assert loops == {*build.SOURCES[1:], *build.HEADERS}


def test_a_cache_that_cannot_be_written(monkeypatch, tmp_path):
    (tmp_path / "normkit").write_text("a file where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_extension", build._Extension())
    with pytest.raises(nk.errors.DeviceError, match="Not a directory"):
        nk.build_extension()
    assert "NormalizerStep" not in node(nk.BN(16)(x_of()))
