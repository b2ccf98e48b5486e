"""Steps that were recorded and are started again from C++, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import copy
import shutil
import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit.engine import remaking
from normkit.engine.replay import build
from normkit.errors import DeviceError

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYERS = {
    "bn": {},
    "gn": {"groups": 4},
    "ln": {},
    "in": {},
    "bgn": {"groups": 4},
    "rbn": {},
    "iebn": {},
    "bcn": {"groups": 4},
    "sn": {},
    "batch_renorm": {},
    "pn": {},
    "bnet": {"init": "dirac"},
    "ubn": {"affine_init": "dirac"},
}
WITH_KERNEL = ("bnet", "ubn")  # residual and activation stand apart


@pytest.fixture(scope="module", autouse=True)
def extension():
    nk.build_extension()


@pytest.fixture(autouse=True)
def triton():
    with nk.use_backend("triton"):
        yield


def batch(seed: int, n: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 16, 5, 5, generator=generator)
    return x.to(DEVICE, memory_format=torch.channels_last)


def make(name: str, **options):
    return nk.make(name, 16, **LAYERS.get(name, {}), **options).to(DEVICE)


def step(layer, x, residual=None, activation="none"):
    """Everything a step gives, and what autograd's node of the layer is."""
    x = x.clone().requires_grad_()
    if residual is not None:
        residual = residual.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x, residual, activation)
    (y * batch(9, len(x))).sum().backward()
    made = [y.detach(), x.grad, *(p.grad for p in layer.parameters()), *layer.buffers()]
    if residual is not None:
        made.append(residual.grad)
    nodes = [y.grad_fn]
    while nodes[-1].name() in ("ReluBackward0", "AddBackward0"):
        nodes.append(nodes[-1].next_functions[0][0])
    return [t.clone() for t in made], nodes[-1].name()


def recorded(name: str = "bn", activation: str = "none", **options):
    layer = make(name, **options)
    step(layer, batch(1), activation=activation)
    return layer


def replays(made) -> bool:
    return "NormalizerStep" in made[1]


@pytest.mark.parametrize(
    ("name", "activation", "with_residual"),
    [
        *((name, *followed) for name in LAYERS for followed in (("none", False), ("relu", True))),
        *((name, "none", True) for name in ("bn", "bcn", "ubn")),
    ],
)
def test_a_replayed_step_gives_what_the_layer_gives(name, activation, with_residual):
    layer = make(name)
    other = copy.deepcopy(layer)
    for seed in range(3):
        residual = batch(seed + 5) if with_residual else None
        made = step(layer, batch(seed), residual, activation)
        with nk.use_backend("torch"):
            expected, _ = step(other, batch(seed), residual, activation)
        assert replays(made) == (seed > 0)
        for got, wanted in zip(made[0], expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_convolution_by_torch_is_no_part_of_a_recorded_step():
    """The norm in front of a kernel of 5 × 5 was recorded as if it were the whole layer, and from
    the second step on the convolution was left out."""
    layer = nk.BNET(16, kernel_size=5, init="torch").to(DEVICE)
    other = copy.deepcopy(layer)
    for seed in range(3):
        made, _ = step(layer, batch(seed))
        with nk.use_backend("torch"):
            expected, _ = step(other, batch(seed))
        for got, wanted in zip(made, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_other_shapes_types_and_modes_are_other_steps():
    layer = recorded()
    assert not replays(step(layer, batch(1, n=4)))
    assert replays(step(layer, batch(2, n=4)))
    assert not replays(step(layer, batch(1).contiguous()))
    assert not replays(step(layer.bfloat16(), batch(1).bfloat16().float()))
    layer = recorded()
    layer.eval()
    assert not replays(step(layer, batch(1)))


@pytest.mark.parametrize(("name", "value"), [("eps", 0.5), ("momentum", 0.9), ("virtual_batch", 1)])
def test_a_changed_option_counts_from_the_next_step_on(name, value):
    layer = recorded()
    other = copy.deepcopy(layer)
    setattr(layer, name, value)
    setattr(other, name, value)
    got, _ = step(layer, batch(2))
    with nk.use_backend("torch"):
        expected, _ = step(other, batch(2))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_an_option_that_changes_at_every_step_ends_the_recording():
    layer = recorded()
    for number in range(40):
        layer.momentum = 0.1 + number / 1000
        step(layer, batch(1))
    assert layer._replays is None
    other = recorded(momentum=layer.momentum)
    assert other._replays is not None


def test_parameters_given_by_functional_call_are_used_and_get_gradients():
    layer = recorded()
    layer.zero_grad()
    weight = torch.full((16,), 3.0, device=DEVICE, requires_grad=True)
    x = batch(2).requires_grad_()
    y = functional_call(layer, {"weight": weight}, (x,))
    assert "NormalizerStep" in y.grad_fn.name()
    torch.testing.assert_close(y, 3 * layer(x))
    y.square().sum().backward()
    assert weight.grad.abs().sum() > 0
    assert layer.weight.grad is None


@pytest.mark.parametrize("name", ["bn", "rbn", "bcn", "bnet", "ubn"])
def test_its_gradient_can_be_differentiated(name):
    layer = recorded(name)
    other = copy.deepcopy(layer)
    found = []
    for one, backend in ((layer, "triton"), (other, "torch")):
        with nk.use_backend(backend):
            x = batch(3).requires_grad_()
            y = one(x)
            (dx,) = torch.autograd.grad((y**3).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(dx.square().sum(), [x, *one.parameters()]))
    largest = max(float(d.abs().max()) for d in found[1])  # sums of such, which nearly cancel
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6 * largest)


def test_gradients_in_another_layout_many_at_once_and_twice():
    layer = recorded()
    x = batch(4).requires_grad_()
    y = layer(x)
    assert "NormalizerStep" in y.grad_fn.name()
    g = torch.randn(3, 16, 5, 5, device=DEVICE)
    (one,) = torch.autograd.grad(y, x, g, retain_graph=True)
    (again,) = torch.autograd.grad(y, x, g, retain_graph=True)
    (many,) = torch.autograd.grad(y, x, torch.stack([g, 2 * g]), is_grads_batched=True)
    torch.testing.assert_close(one, again)
    torch.testing.assert_close(many, torch.stack([one, 2 * one]), rtol=1e-5, atol=1e-6)


def test_an_input_that_was_changed_in_place_is_an_error():
    layer = recorded()
    x = batch(4).requires_grad_() * 1
    y = layer(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_counts_once(reentrant):
    layer = recorded()
    before = int(layer.num_batches_tracked)
    x = batch(5).requires_grad_()
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert int(layer.num_batches_tracked) == before + 1


def test_batches_that_are_not_finite_do_no_harm():
    layer = recorded()
    kept = layer.running_mean.clone()
    layer((batch(1) * torch.nan).requires_grad_())
    assert torch.equal(layer.running_mean, kept)
    assert int(layer.nonfinite_batches) == 1
    assert int(layer.num_batches_tracked) == 1


def test_copies_and_those_who_listen_get_steps_of_their_own():
    layer = recorded()
    assert copy.deepcopy(layer)._replays is None
    heard = []
    layer.listeners = (heard.append,)
    layer(batch(2))
    assert len(heard) == 1


def test_frozen_parameters_get_no_gradient():
    layer = recorded()
    layer.bias.requires_grad_(False)
    layer.zero_grad()
    y = layer(batch(2).requires_grad_())
    y.square().sum().backward()
    assert "NormalizerStep" in y.grad_fn.name()
    assert layer.bias.grad is None
    assert layer.weight.grad is not None


def test_without_a_compiler_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "_extension", build._Extension())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(DeviceError, match="no compiler \\(no-such-compiler\\)"):
        nk.build_extension()
    assert build.extension() is None
    assert "no compiler" in build.reason()
    layer = make("bn")
    step(layer, batch(1))
    assert not replays(step(layer, batch(1)))


def test_what_is_built_beside_training_is_loaded_by_who_asks(monkeypatch, tmp_path):
    """The thread that built it loaded it, too: a script that ended meanwhile was aborted, for
    Python ends threads in a way that C++ does not allow."""
    monkeypatch.setattr(build, "_extension", build._Extension())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    builders, loaders = [], []

    def load():
        loaders.append(threading.current_thread())
        build._extension.module = "there"

    monkeypatch.setattr(build, "_build", lambda *_: builders.append(threading.current_thread()))
    monkeypatch.setattr(build, "_load", load)
    assert build.extension() is None or loaders  # the thread may have been quick
    while not builders:
        time.sleep(0.01)
    builders[0].join()
    assert build.extension() == "there"
    assert build.extension() == "there"
    assert loaders == [threading.current_thread()]
    assert builders != loaders


def test_it_can_be_switched_off(monkeypatch):
    monkeypatch.setattr(build, "_extension", build._Extension())
    monkeypatch.setenv("NORMKIT_CPP", "0")
    assert build.extension() is None
    assert "NORMKIT_CPP=0" in build.reason()


@pytest.mark.parametrize("name", [n for n in LAYERS if n not in ("ln", "in", "iebn", "pn")])
def test_outputs_that_are_made_again(name):
    """fuse(save="inputs") has replayed steps: its hooks for saved tensors are known."""
    layer, conv = make(name), torch.nn.Conv2d(16, 2, 1).to(DEVICE)
    follows = {} if name in WITH_KERNEL else {"residual": batch(3), "activation": "relu"}
    results, seen = [], []
    for block in (nullcontext, remaking.Remaking):
        own, after = copy.deepcopy(layer), copy.deepcopy(conv)
        for number in range(3):
            x = batch(number).requires_grad_()
            after.zero_grad()
            with block():
                y = own(x, **follows)
                kind = y.grad_fn.name()
                loss = after(y).square().sum()
            del y
            loss.backward()
        seen.append(kind)
        results.append([x.grad, *(p.grad for p in [*own.parameters(), *after.parameters()])])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)
    if name not in WITH_KERNEL:
        assert all("NormalizerStep" in kind for kind in seen)


@pytest.mark.parametrize("name", [*LAYERS, "frozen_bn", "dyt"])
@pytest.mark.parametrize("learns", [True, False])
def test_a_tensor_in_two_places_is_not_taken_for_one_in_others(name, learns):
    """x as its own residual, or as the gradient, and then others: by a step of its own."""
    layer = make(name)
    layer = layer if learns else layer.eval()
    exact = copy.deepcopy(layer)

    def everything(layer, same):
        x, residual, grad = (batch(seed) for seed in (1, 2, 3))
        x.requires_grad_(learns)
        if same == "residual":
            residual = x
        if same == "grad":
            grad = x.detach()
        if same == "both":
            grad = residual
        if not learns:
            with torch.no_grad():
                return [layer(x, residual, "relu")]
        y = layer(x, residual, "relu")
        return [y, *torch.autograd.grad(y, x, x if same == "grad" else grad)]

    for same in ("residual", "grad", "both", "none", "none"):
        found = everything(layer, same)
        with nk.use_backend("torch"):
            truth = everything(exact, same)
        for mine, theirs in zip(found, truth, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "frozen"])
@pytest.mark.parametrize("name", [*LAYERS, "dyt", "frozen_bn"])
def test_forwards_without_gradients_are_replayed(name, how, training, monkeypatch):
    """Only maps of given statistics were: in inference gn and bcn were slower than torch."""
    layer = make(name).train(training)
    # in eval mode torch computes a part: bnet's convolution, 1/deviation of batch_renorm; what a
    # checkpoint repeats is not replayed where the map reads what the first forward has changed
    launches = not layer.map_reads_state() if training else name not in ("bnet", "batch_renorm")
    other = copy.deepcopy(layer)
    if how == "frozen":
        layer.requires_grad_(False)
    mode = nullcontext() if how == "frozen" else getattr(torch, how)()
    with mode:
        for seed in range(3):
            x, residual = batch(seed), batch(seed + 5)
            if seed == 2 and launches:  # by now nothing is to be decided
                refuse = lambda *given: pytest.fail("the forward was not replayed")  # noqa: E731
                monkeypatch.setattr(type(layer), "normalize", refuse)
            y = layer(x, residual, "relu")
            monkeypatch.undo()
            with nk.use_backend("torch"):
                torch.testing.assert_close(y, other(x, residual, "relu"), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(dict(layer.named_buffers()), dict(other.named_buffers()))
    if how != "frozen":  # and a step of training afterwards is a step of training
        made = step(layer, batch(4), batch(3), "relu")
        with nk.use_backend("torch"):
            expected, _ = step(other, batch(4), batch(3), "relu")
        torch.testing.assert_close(made[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["bn", "gn", "pn", "frozen_bn", "bcn", "ubn"])
def test_an_option_set_between_forward_and_backward_counts_from_the_next_step_on(name):
    """The plan of that step went into the list that setting the option had just emptied."""
    layer = make(name)
    y = layer(batch(1).requires_grad_())
    layer.eps = 0.5
    y.sum().backward()
    other = copy.deepcopy(layer)
    for seed in (2, 3):
        made, _ = step(layer, batch(seed))
        with nk.use_backend("torch"):
            expected, _ = step(other, batch(seed))
        for got, wanted in zip(made, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


TWICE = [n for n in LAYERS if n != "batch_renorm"]  # r and d are constants that the first step sets


@pytest.mark.parametrize("replayed", [False, True])
@pytest.mark.parametrize("name", [*TWICE, "dyt", "frozen_bn"])
def test_a_gradient_that_is_differentiated_ends_at_the_layers_inputs(name, replayed):
    """It went on through what x was made of: to the residual that x was made of as well, to the
    same layer in front, and twice to an x that was its own residual. An error of a third."""
    layer = make(name)
    other = copy.deepcopy(layer)
    if replayed:
        for own in (layer, other):
            for again in range(2):
                step(own, batch(again), batch(again), "relu")
                step(own, batch(again), None, "none")

    def everything(layer):
        r = batch(3).requires_grad_()
        own = [p for p in layer.parameters() if p.requires_grad]
        results = []
        for make_y in (
            lambda: layer(2 * r + 1, r, "relu"),
            lambda: layer(layer(r) * batch(4)),
            lambda: layer(r, r, "relu"),
        ):
            found = torch.autograd.grad(
                make_y().pow(3).sum(), [r, *own], create_graph=True, allow_unused=True
            )
            second = torch.autograd.grad(found[0].square().sum(), r, retain_graph=True)
            results += [*(d for d in found if d is not None), *second]
        return [t.detach() for t in results]

    found = everything(layer)
    with nk.use_backend("torch"):
        expected = everything(other)
    for got, wanted in zip(found, expected, strict=True):
        assert (got - wanted).norm() <= 1e-3 * wanted.norm() + 1e-4


@pytest.mark.parametrize("name", ["pn", "bn", "frozen_bn", "dyt", "bnet", "bcn"])
def test_only_the_residual_gets_a_gradient(name):
    layer = make(name).requires_grad_(False)
    r = batch(2).requires_grad_()
    for _ in range(3):
        y = layer(batch(1), r)
        (dr,) = torch.autograd.grad(y.square().sum(), r, create_graph=True)
        torch.testing.assert_close(dr, 2 * y)


def test_many_gradients_at_once_of_pixels():
    layer, x = make("pn"), batch(1).requires_grad_()
    many = torch.stack([batch(2), batch(3)])
    for _ in range(2):
        (found,) = torch.autograd.grad(layer(x), x, many, is_grads_batched=True)
        for mine, one in zip(found, many, strict=True):
            torch.testing.assert_close(
                mine, torch.autograd.grad(layer(x), x, one)[0], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("name", ["bn", "pn", "dyt", "bnet"])
def test_a_graph_that_is_kept_is_recorded_once(name):
    """Each of its backwards added a plan, until there was no room for other shapes."""
    layer, x = make(name), batch(1).requires_grad_()
    y = layer(x)
    for _ in range(4):
        torch.autograd.grad(y[0, 0, 0, 0], x, retain_graph=True)
    assert len(layer._replays) == 1


def test_loading_weights_does_not_end_the_recording():
    """Averaged weights are swapped in at each evaluation: that set an attribute, and after sixteen
    times nothing was recorded any more."""
    layer = make("bn")
    kept = copy.deepcopy(layer.state_dict())
    for _ in range(20):
        layer.load_state_dict(kept)
        step(layer, batch(1))
    assert replays(step(layer, batch(2)))


def test_outputs_that_cannot_be_made_again_take_no_room():
    layer, after = make("pn"), torch.nn.Conv2d(16, 2, 1).to(DEVICE)
    for seed in range(4):
        with remaking.Remaking():
            loss = after(layer(batch(seed).requires_grad_())).square().sum()
        loss.backward()
    assert not layer._replays
    step(layer, batch(5))
    assert replays(step(layer, batch(6)))


def test_pixels_without_parameters_are_replayed():
    layer = make("pn", affine=False)
    step(layer, batch(1))
    assert replays(step(layer, batch(2)))
    assert "not replayed" not in nk.why(layer, batch(1))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("batch_renorm", {"r_max": 3.0, "d_max": 5.0, "r_ramp": None, "d_ramp": None}),
        ("bcn", {"groups": 4, "micro": True, "update_rate": 0.1}),
    ],
)
def test_a_checkpoint_that_runs_without_gradients_first_sees_the_same_statistics(name, options):
    """Its first forward was replayed, and left nothing for the second one to start from."""

    def gradients(backend):
        torch.manual_seed(0)
        layer = nk.make(name, 16, **options).to(DEVICE)
        with nk.use_backend(backend):
            xs = [batch(i) * (i + 1) + i for i in range(2)]
            with torch.no_grad():
                layer(xs[0])
            xs = [x.requires_grad_() for x in xs]
            ys = [checkpoint(lambda x: layer(x * 1), x, use_reentrant=True) for x in xs]
            sum((y**3).sum() for y in ys).backward()
        return [*(x.grad for x in xs), *(p.grad for p in layer.parameters())]

    for mine, theirs in zip(gradients("triton"), gradients("torch"), strict=True):
        assert (mine - theirs).norm() <= 1e-3 * theirs.norm()
