"""Coefficients of layers in no family, written down once and gone through by a loop in C++."""

from __future__ import annotations

import copy
import random
import shutil

import numpy as np
import pytest
import torch
from torch import nn

import normkit as nk
from normkit.core.moments import Coefficients
from normkit.core.statistics import MapResult
from normkit.engine.coefficients import Untraceable
from normkit.engine.cpu import tape
from normkit.engine.cpu.recorder import Recorder, Unread
from normkit.engine.replay.build import extension_on_cpu
from normkit.errors import NonFiniteWarning
from normkit.layers.base import Normalizer
from normkit.layers.batch import BatchNormalizer

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")

# of a table (6, 8), one of (8,) and one of indices (6, 8) below 8
OPERATIONS = {
    "arithmetic": lambda a, b, i: (a + b) * (a - b) / (1 + b.square()) - 2 * a + (3 - b),
    "alpha": lambda a, b, i: torch.add(a, b, alpha=2) + torch.sub(a, b, alpha=0.5),
    "powers": lambda a, b, i: a**2 + a**3 + b.abs() ** 0.5 + (b.abs() + 1) ** -0.5 + a.abs() ** b,
    "roots": lambda a, b, i: a.abs().sqrt() + (a.square() + 1).rsqrt() + (2 + b.abs()).reciprocal(),
    "functions": lambda a, b, i: (
        a.exp()
        + (1 + a.abs()).log()
        + a.expm1()
        + b.abs().log1p()
        + a.floor()
        + a.tanh()
        + b.sigmoid()
        + b.sign()
    ),
    "softplus": lambda a, b, i: nn.functional.softplus(a) + nn.functional.hardtanh(b),
    "relu": lambda a, b, i: a.relu() + nn.functional.leaky_relu(a, 0.1) + nn.functional.silu(b),
    "comparisons": lambda a, b, i: torch.where((a > b) & ~(a >= 1) | (b <= -1), a, b).lt(0.1) * a,
    "equal": lambda a, b, i: (a == b) * 1.0 + (a != 0) * b + (a < b).to(a.dtype),
    "clamp": lambda a, b, i: a.clamp(-0.5, 0.5) + b.clamp(min=0) + torch.clamp_max(a, 0.2),
    "extremes": lambda a, b, i: torch.maximum(a, b) - torch.minimum(a, b) + a.amax(1, True),
    "fused": lambda a, b, i: torch.addcmul(a, b, b) + torch.lerp(a, b, 0.3) + torch.lerp(a, b, b),
    "addcdiv": lambda a, b, i: torch.addcdiv(a, b, 1 + b.square(), value=0.5),
    "sums": lambda a, b, i: a.sum(0) * b + a.sum() + a.sum(1, keepdim=True) + a.mean((0, 1)),
    "mean": lambda a, b, i: a.mean(0) + a.view(6, 4, 2).mean((0, 2)).repeat_interleave(2),
    "var": lambda a, b, i: a.var(1, keepdim=True) + a.var(0, correction=0) + a.std() + b.var(),
    "norms": lambda a, b, i: a.norm(dim=1, keepdim=True) + b.norm() + a.softmax(1),
    "log_softmax": lambda a, b, i: a.log_softmax(0) + a.logsumexp(1, keepdim=True),
    "logic": lambda a, b, i: ((a > 0).any(1, keepdim=True) | (b > 0).all()) * a + a.isfinite(),
    "views": lambda a, b, i: a.T.reshape(6, 8) + a.view(8, 6).mT + a[:, 2:3] + a[1] + b.flip(0),
    "flips": lambda a, b, i: a.flip(0, 1) + a.flip(1),
    "parts": lambda a, b, i: torch.cat([a[::2], a[1::2]]) + torch.stack([b, b * 2]).sum(0),
    "unflatten": lambda a, b, i: a.unflatten(1, (2, 4)).mean(2).repeat_interleave(4, 1),
    "split": lambda a, b, i: torch.cat([p * k for k, p in enumerate(a.split(3, 1))], 1),
    "literals": lambda a, b, i: (
        a * torch.tensor([1.0, -2.0] * 4) + torch.arange(8) + torch.eye(8)[2]
    ),
    "zeros": lambda a, b, i: torch.zeros_like(a) + torch.full((8,), 2.5) + a.new_ones(6, 1),
    "in place": lambda a, b, i: a.clone().mul_(2).add_(b).clamp_(min=-1).sub_(1).neg_(),
    "fill": lambda a, b, i: a.clone().zero_() + b.clone().fill_(3) + a.masked_fill(a > 0, 7),
    "written to": lambda a, b, i: _with_part(a, b),
    "narrow": lambda a, b, i: a.float().double() * 3 + (10 * b).long() + (a > 0).int(),
    "rounded": lambda a, b, i: 3 * a.bfloat16().double() + b.bfloat16().float(),
    "cumsum": lambda a, b, i: a.cumsum(1) + a.cumsum(0) + b.cumsum(0),
    "sort": lambda a, b, i: a.sort(1).values + a.sort(0, descending=True).indices,
    "gather": lambda a, b, i: a.gather(1, i) + b.gather(0, i[0]) + a.index_select(1, i[1]),
    "index": lambda a, b, i: a[:, i[2]] + b[i[3]],
    "scatter": lambda a, b, i: a.scatter(1, i[:, :1], b[:6, None]) + a.scatter(1, i[:, :1], 4.0),
    "scatter_add": lambda a, b, i: a.scatter_add(1, i, a) + b.index_add(0, i[0], b),
    "largest": lambda a, b, i: a.max(1, keepdim=True).values + a.max() - a.min() + a.max(0).indices,
    "argmax": lambda a, b, i: a.argmax(1, keepdim=True) + a.argmax(0),
    "matrices": lambda a, b, i: (a @ a.T) @ a,
    "nothing": lambda a, b, i: (
        a * (1 + a[:, :0].sum(1, keepdim=True) + a[:, 8:].sum() + a[:0].sum(0))
        + a[:0].amax(1).sum()
        + a.scatter(0, i[:, :0], b[:0].expand(6, 0)).cumsum(1)
        + torch.cat([a[:, :0].cumsum(0), a], 1)
    ),
    "nan_to_num": lambda a, b, i: (
        (a + a.detach().log()).nan_to_num(0.5, 9.0, -8.0)
        + (b + a.detach() / (b > 0)).nan_to_num(posinf=3.0, neginf=-2.0)
    ),
    "of a scalar": lambda a, b, i: a * b.sum() + a.square().sum().sqrt() + a.mean(),
}


def _with_part(a, b):
    whole = a.clone()
    whole[:, 2:5] = 1
    whole[3] = b
    whole[:, 0] += 2
    return whole


def by_tape(function, *tables):
    """What a tape of the function gives for these; it is written down on others."""
    recorder = Recorder()
    stand_ins = [t.detach().clone() for t in tables]
    for base, stand_in in enumerate(stand_ins):
        recorder.given(stand_in, base)
    with Unread(), recorder:
        results = function(*stand_ins)
    for base, result in enumerate(results, len(tables)):
        recorder.leaves(base, [result])
    made = [torch.full(r.shape, torch.nan, dtype=torch.float64) for r in results]
    nk.build_extension()
    extension_on_cpu().call("tape_map", [*tables, *made], tape.assembled(recorder))
    return made


def drawn():
    index = torch.randint(8, (6, 8))
    return torch.randn(6, 8).double(), torch.randn(8).double(), index


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_are_torchs(name):
    """Values, and gradients: what torch's autograd does is on the tape as well."""

    def both(a, b, index):
        a, b = (t.detach().requires_grad_() for t in (a, b))
        with torch.enable_grad():
            y = OPERATIONS[name](a, b, index).expand(6, 8)
            if y.grad_fn is None:
                return (y.double(),)
            grads = torch.autograd.grad(
                (y * (1 + y.detach().tanh())).sum(), (a, b), allow_unused=True
            )
        return (y.detach().double(), *(g for g in grads if g is not None))

    for _ in range(3):
        given = drawn()
        made = by_tape(both, *given)
        for got, wanted in zip(made, both(*given), strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def small(table):
    return 0.3 + 0 * table.float()


# where torch and a loop that is written without thinking of it do not agree
RARE = {
    "of no axes": lambda a, b, i: (a > 0).any(()).double() + (b > 0).all(()) + a.any(()),
    "lerp of what is far apart": lambda a, b, i: torch.lerp(1e30 * a, b, 1.0) + a.lerp(b, 0.75),
    "lerp of what is infinite": lambda a, b, i: torch.lerp(a, b / 0, 0.75).isnan().double(),
    "filled": lambda a, b, i: (i * 0).fill_(b.data.amax() + 1.5) + (a > 0).fill_(b.data[0]),
    "from the end": lambda a, b, i: a[:, i[2] - 4] + b[i[3] - 8],
    "numbers as floats": lambda a, b, i: (
        a * (small(a) > 0.3) + b * (small(b) == 0.3) + torch.where(small(b) <= 0.3, a, b)
    ),
    "numbers as bfloat16": lambda a, b, i: a * (small(a).bfloat16() < 0.3),
    "into what is given": lambda a, b, i: torch.add(a.data, b.data, out=torch.empty_like(a)),
}


@pytest.mark.parametrize("name", RARE)
def test_rare_operations_are_torchs(name, monkeypatch):
    monkeypatch.setitem(OPERATIONS, name, RARE[name])
    test_operations_are_torchs(name)


def test_a_float_that_is_compared_with_a_number():
    """A parameter of 0.3 was more than 0.3 on a tape, where both are doubles, but not in torch."""
    numbers = torch.tensor([0.1, 0.3, 0.7, 0.9])
    for number in numbers.tolist():
        number = round(number, 1)

        def compared(table, number=number):
            flags = table < number, table <= number, table == number, table > number
            return [torch.stack(flags).double()]

        (found,) = by_tape(compared, numbers)
        torch.testing.assert_close(found, compared(numbers)[0])


def test_a_tensor_from_elsewhere_is_not_changed_on_a_tape():
    """What was written to it was lost, for a tape has no place for it."""
    other = torch.ones(8, dtype=torch.float64)
    for change in (other.zero_, lambda: other.copy_(torch.zeros(8)), lambda: other.fill_(3)):
        with pytest.raises(Untraceable, match="neither parameter nor statistic"):
            by_tape(lambda a, b, i, change=change: [a + change()], *drawn())


class Cosine(Normalizer):
    """A layer of somebody else, with an operation that torch takes apart."""

    card = nk.RMS.card

    def coefficients(self, moments):
        share = nn.functional.softplus(moments.mean).softmax(1)
        square = (share * (moments.var + moments.mean.square())).sum(1, keepdim=True)
        map = Coefficients((square + self.eps).rsqrt().expand_as(share), None, moments.mean * 0.5)
        return map.then(self.weight, self.bias)


class Looking(Normalizer):
    card = nk.RMS.card

    def coefficients(self, moments):
        scale = 2.0 if self.look(moments.var) else 1.0
        return Coefficients(torch.full_like(moments.mean, scale))


LOOKS = {
    "item": lambda table: table.sum().item() > 0,
    "if": lambda table: bool((table > 0).all()),
    "numpy": lambda table: table.numpy().sum() > 0,
    "list": lambda table: table.tolist()[0][0] > 0,
    "unknown": lambda table: torch.fft.fft(table).abs() is None,
    "random": lambda table: torch.rand(3) is None,
    "list of tables": lambda table: torch.tensor([table[0, 0], table[0, 1]]).sum() is None,
    "printed": lambda table: f"{table}" == str(table.mean(0)) == repr(table),
    "dlpack": lambda table: torch.from_dlpack(table.detach()) is None,
    "integers": lambda table: torch.div(table.argsort(1), 2, rounding_mode="trunc") is None,
    "rounded": lambda table: table.half() is None,
    "list of flags": lambda table: torch.Tensor([table[0, 0] > 2, table[0, 1] > 2]).sum() is None,
    "new": lambda table: table.new_tensor([table[0, 0], table[0, 1]]).sum() is None,
    "each by python": lambda table: table.detach().clone().apply_(lambda value: 1.0) is None,
    "parts by values": lambda table: table.tensor_split(torch.tensor([1])) is None,
    "bits": lambda table: table.view(torch.int32).sum() is None,
    "negative": lambda table: (torch._neg_view(table) + 1) is None,
    "complex": lambda table: torch.view_as_complex(table.view(-1, 2)).abs() is None,
    "bytes": lambda table: (table > 0).byte() - 2 is None,
    "powers of integers": lambda table: 2 ** table.long() is None,
    "sums of integers": lambda table: table.sum(1, dtype=torch.long) is None,
    "without bounds": lambda table: table.nan_to_num() is None,
    "sums of flags": lambda table: (table > 0).sum(1, dtype=torch.bool) is None,
    "gradient": lambda table: table.requires_grad and False,
    "drawn": lambda table: random.random() < 0,
    "drawn by numpy": lambda table: np.random.rand() < 0,
}
REASONS = {
    **dict.fromkeys(("numpy", "list", "list of tables", "printed", "dlpack"), "looks at a value"),
    **dict.fromkeys(
        ("list of flags", "new", "each by python", "parts by values"), "looks at a value"
    ),
    **dict.fromkeys(("bits", "negative"), "takes the bits of a table for other numbers"),
    "complex": "takes the bits of a table for other numbers",
    "rounded": "no loop computes in torch.float16",
    "without bounds": "nan_to_num without bounds",
    "bytes": "no loop computes in torch.uint8",
    "gradient": "asks what gets a gradient",
    **dict.fromkeys(("drawn", "drawn by numpy"), "draws random numbers"),
}


@pytest.mark.parametrize("of", ["moments", "parameters"])
def test_numbers_of_python_that_were_a_tables(of):
    """The oldest constructor of tensors reads those in a list past all that listens: the numbers of
    the first batch would have stayed."""

    class Told(Normalizer):
        card = nk.RMS.card

        def coefficients(self, moments):
            table = moments.var[0] if of == "moments" else self.weight.detach()
            return Coefficients(torch.Tensor([table[0], table[1]]).mean() * (1 + 0 * moments.mean))

    nk.build_extension()
    layer, x = Told(8), torch.randn(3, 8, 4, 4)
    layer(x)
    x, layer.weight.data = 3 * x, torch.arange(8.0)
    with nk.use_backend("torch"):
        expected = layer(x)
    torch.testing.assert_close(layer(x), expected)
    assert "looks at a value" in nk.why(layer, x)


class Counting(BatchNormalizer):
    """Keeps a maximum of means and a number of its own, and divides by what it had before."""

    card = nk.BN.card

    def __init__(self, channels, **options):
        super().__init__(channels, **options)
        self.register_buffer("highest", torch.zeros(channels))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.long))

    def map_reads_state(self):
        return True

    def coefficients(self, moments, state):
        statistics, update = self.statistics(moments, state)
        before = state["highest"] + state["steps"]
        map = statistics.standardizing(self.eps).then(1 / (1 + before))
        if update is not None:
            highest = torch.maximum(state["highest"], moments.mean.amax(0).detach())
            update = update.with_values({"highest": highest, "steps": state["steps"] + 1})
        return MapResult(map.then(self.weight, self.bias), update)


def steps(layer, dtype, memory, wide=None):
    """What comes of steps with and without a plan, statistics included, of the same numbers."""
    torch.manual_seed(1)
    made = []
    for _ in range(3):
        x, grad = (t.to(dtype).to(wide or dtype) for t in (2 + 3 * torch.randn(2, 6, 8, 5, 3)))
        x = x.to(memory_format=memory).requires_grad_()
        y = layer(x)
        layer.zero_grad()
        y.backward(grad)
        made += [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    return [*made, *layer.buffers()], y.grad_fn.name()


@pytest.mark.parametrize("kind", [Cosine, Counting])
def test_somebodys_own_layer(kind):
    """As near to the truth, the same in double, as torch is, or a few roundings from it."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for memory in (torch.contiguous_format, torch.channels_last):
            layer = kind(8).to(dtype)
            other, exact = copy.deepcopy(layer), copy.deepcopy(layer).double()
            found, node = steps(layer, dtype, memory)
            with nk.use_backend("torch"):
                usual, _ = steps(other, dtype, memory)
                truth, _ = steps(exact, dtype, memory, torch.float64)
            assert "NormalizerStep" in node
            for own, theirs, wanted in zip(found, usual, truth, strict=True):
                assert own.dtype == theirs.dtype
                error, as_usual = ((t.double() - wanted).abs().max() for t in (own, theirs))
                rounding = torch.finfo(own.dtype).eps if own.is_floating_point() else 0
                assert error <= 2 * as_usual + 8 * rounding * wanted.abs().max()


@pytest.mark.parametrize("name", LOOKS)
def test_what_cannot_be_written_down_is_torchs(name):
    nk.build_extension()
    layer, x = Looking(8), torch.randn(3, 8, 4, 4)
    layer.__dict__["look"] = LOOKS[name]  # an attribute that is a function is no plain value
    assert "look" in nk.why(layer, x)
    kind = type("Own", (Looking,), {"look": staticmethod(LOOKS[name])})
    layer = kind(8)
    y = layer(x)
    torch.testing.assert_close(y, 2 * x if name in ("item", "if", "numpy", "list") else x)
    said = nk.why(layer, x)
    assert "coefficients by torch" in said, said
    assert REASONS.get(name, "no loop does") in said, said


def test_what_does_not_fit_into_a_buffer_is_not_written():
    """Tables are double on the tape, where the variance of 1e25 is a number, but no float32 is."""
    nk.build_extension()
    layer = nk.make("gbgn", 8, groups=2)
    x = torch.randn(4, 8, 5, 5)
    layer(x)
    before = {name: b.clone() for name, b in layer.named_buffers()}
    with pytest.warns(NonFiniteWarning):
        layer(1e25 * x)
    after = dict(layer.named_buffers())
    assert after["nonfinite_batches"] == 1
    for name in ("running_mean", "running_second_moment", "num_batches_tracked"):
        assert torch.equal(after[name], before[name])


def test_layers_of_one_kind_share_tapes(monkeypatch):
    nk.build_extension()
    x = torch.randn(4, 8, 5, 5)
    one, two, three = nk.RMS(8), nk.RMS(8), nk.RMS(8, eps=1e-3)
    for layer in (one, two, three):
        layer(x)
    plans = [next(iter(layer.__dict__["_traced"].values())) for layer in (one, two, three)]
    assert plans[0] is plans[1]
    assert plans[0] is not plans[2]
    monkeypatch.setattr(tape, "MOST_TAPES", 0)
    layer = nk.RMS(8, eps=1e-2)
    torch.testing.assert_close(layer(x), nk.RMS(8, eps=1e-2).double()(x.double()).float())
    assert "sizes and options already" in nk.why(layer, x)


def test_an_option_set_later_counts():
    nk.build_extension()
    layer, x = nk.RMS(8), torch.randn(4, 8, 5, 5)
    layer(x)
    layer.eps = 3.0
    expected = nk.RMS(8, eps=3.0)(x)
    assert torch.equal(layer(x), expected)


def test_the_gradient_is_differentiated_by_torch():
    nk.build_extension()
    for layer in (nk.RMS(4), nk.make("ibn", 4), nk.make("ssn", 4)):
        layer = layer.double()
        x = torch.randn(3, 4, 3, 3, dtype=torch.float64, requires_grad=True)
        assert "NormalizerStep" in layer(x).grad_fn.name()
        torch.autograd.gradgradcheck(lambda x, own=layer: own(x), (x,))


def test_a_tensor_from_elsewhere_is_refused():
    other = torch.ones(8, dtype=torch.float64)
    with pytest.raises(Untraceable, match="neither parameter nor statistic"):
        by_tape(lambda a, b, i: [a * other], *drawn())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_the_map_does_not_need_gets_no_gradient(dtype):
    """One of zero would let an optimizer's decay and momentum move it, as torch does not."""
    nk.build_extension()
    layer = nk.make("dn", 8, start="bn", batch=2, dtype=dtype)
    layer(torch.randn(4, 8, 3, 3, dtype=dtype))
    layer.eval()
    y = layer(torch.randn(4, 8, 3, 3, dtype=dtype))
    assert "NormalizerStep" in y.grad_fn.name()
    y.sum().backward()
    assert layer.batch_gates.grad is None
    assert layer.weight.grad is not None


def test_what_a_layer_has_been_through_does_not_make_it_another_kind():
    """Whether it had warned, or seen domains, was taken for an option: a layer that was saved and
    loaded had no plan where its kind had enough of them, and other last digits."""
    nk.build_extension()
    layer, other = nk.make("ibn", 8), nk.make("ibn", 8)
    x = torch.randn(4, 8, 5, 5)
    layer(x)
    other.load_state_dict(layer.state_dict())
    other(x)
    plans = [next(iter(each.__dict__["_traced"].values())) for each in (layer, other)]
    assert plans[0] is plans[1]


class Scaled(Normalizer):
    """y = strength · x, and whatever else ``coefficients`` of a test does."""

    card = nk.RMS.card

    def __init__(self, channels, strength=1):
        super().__init__(channels, affine=False)
        self.strength = strength

    def scale(self, moments):
        return self.strength

    def coefficients(self, moments):
        return Coefficients(torch.full_like(moments.mean, self.scale(moments)))


def test_what_coefficients_set_on_their_layer_is_not_lost():
    class Numbered(Scaled):
        def scale(self, moments):
            self.calls = getattr(self, "calls", 0) + 1
            return self.calls

    layer, x = Numbered(8), torch.randn(2, 8, 3, 3)
    assert "it sets its attribute calls" in nk.why(layer, x)
    for _ in range(3):
        before = getattr(layer, "calls", 0)
        torch.testing.assert_close(layer(x), layer.calls * x)
        assert layer.calls > before


def test_options_that_are_equal_but_not_the_same():
    class Told(Scaled):
        def scale(self, moments):
            return {"1": 1, "True": 2, "1.0": 3, "-0.0": 4, "0.0": 5}[repr(self.strength)]

    x = torch.randn(2, 8, 3, 3)
    for strength, times in ((1, 1), (True, 2), (1.0, 3), (-0.0, 4), (0.0, 5)):
        torch.testing.assert_close(Told(8, strength)(x), times * x)


def test_an_option_of_lists_is_no_key():
    layer, x = Scaled(8, ([0.5, 0.9], "x")), torch.randn(2, 8, 3, 3)
    layer.scale = lambda moments: layer.strength[0][0]
    torch.testing.assert_close(layer(x), 0.5 * x)
    layer.strength[0][0] = 0.25
    torch.testing.assert_close(layer(x), 0.25 * x)


@pytest.mark.parametrize("name", ["rms", "gbgn"])
def test_another_default_device(name):
    """Recording made its tables there, and the passes those that C++ writes to."""
    layer, x = nk.make(name, 4), torch.randn(2, 4, 3, 3)
    expected = copy.deepcopy(layer)(x)
    tape._plans.clear()
    with torch.device("meta"):
        torch.testing.assert_close(layer(x), expected)
        with nk.use_backend("torch"):
            torch.testing.assert_close(copy.deepcopy(layer).eval()(x).shape, x.shape)


def test_a_subclass_that_writes_statistics_itself():
    for kind in (nk.BN, nk.GBGN):

        class Told(kind):
            writes = 0

            def write(self, update):
                super().write(update)
                self.writes += 1

        layer, x = Told(8), torch.randn(4, 8, 3, 3)
        for _ in range(2):
            layer(x)
        assert layer.writes == 2
        other = kind(8)
        for _ in range(2):
            other(x)
        torch.testing.assert_close(layer.running_mean, other.running_mean)


def test_who_watches_at_first_spoils_nothing():
    layer, x = nk.RMS(8, eps=0.123), torch.randn(2, 8, 3, 3)
    with torch.autograd.set_detect_anomaly(True):
        layer(x)
        assert "watches" in nk.why(layer, x)
    assert "runs in C++." in nk.why(layer, x)


def test_a_parameter_with_gaps_is_told():
    layer, x = nk.RMS(8), torch.randn(2, 8, 3, 3)
    expected = layer(x)
    layer.weight = nn.Parameter(torch.ones(8, 2)[:, 0])
    assert "gaps in memory" in nk.why(layer, x)
    torch.testing.assert_close(layer(x), expected)


def test_recording_draws_no_random_numbers():
    class Noisy(Scaled):
        def scale(self, moments):
            return torch.rand(()).item()

    torch.manual_seed(0)
    expected = torch.rand(2)
    layer, x = Noisy(8), torch.ones(2, 8, 3, 3)
    torch.manual_seed(0)
    nk.why(layer, x)
    found = torch.stack([layer(x).mean(), layer(x).mean()])
    torch.testing.assert_close(found, expected)


def test_options_that_change_at_each_step_end_tapes_for_one_layer_alone(monkeypatch):
    monkeypatch.setattr(tape, "MOST_TAPES", 3)
    layer, other, x = nk.RMS(8), nk.RMS(8, eps=0.77), torch.randn(2, 8, 3, 3)
    for i in range(5):
        layer.eps = 0.5 + 0.01 * i
        torch.testing.assert_close(layer(x), nk.RMS(8, eps=layer.eps).double()(x.double()).float())
    assert "sizes and options already" in nk.why(layer, x)
    assert "runs in C++." in nk.why(other, x)
