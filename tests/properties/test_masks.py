"""Padding changes nothing: a layer gives of a padded batch what it gives without the padding."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from cases import VARIANTS, build, every, inputs, noted
from normkit.errors import DeviceError, DtypeError, OptionError, ShapeError

LAYERS = sorted({name for name, _ in every()})
PADDED = (5, 6)  # for maps of 4 × 4, with room below and to the right


def cases(name: str) -> list[tuple[str, dict[str, object]]]:
    """A layer with those of its options that take masks."""
    found = [(name, options) for options in ({}, *VARIANTS.get(name, []))]
    return [case for case in found if not build(case).masks_refused()]


def padded(x: Tensor, fill: float) -> Tensor:
    full = x.new_full((*x.shape[:2], *PADDED), fill)
    full[:, :, : x.shape[2], : x.shape[3]] = x
    return full if x.is_contiguous() else full.contiguous(memory_format=torch.channels_last)


def rectangle(n: int, height: int = 4, width: int = 4) -> Tensor:
    mask = torch.zeros(n, *PADDED, dtype=torch.bool)
    mask[:, :height, :width] = True
    return mask


@pytest.mark.parametrize("name", LAYERS)
def test_padding_of_equal_images_changes_nothing(name: str) -> None:
    """Outputs, gradients and statistics, in both modes; what stands in the padding does not
    matter, even if it is no number."""
    for number, case in enumerate(cases(name)):
        some = [("train", "contiguous"), ("train", "channels_last"), ("eval", "contiguous")]
        for mode, memory in some if number == 0 else some[:1]:
            with noted(case, mode, memory):
                layer, other = build(case), build(case)
                other.load_state_dict(layer.state_dict())
                check(layer.train(mode == "train"), other.train(mode == "train"), memory)


def check(layer: nn.Module, other: nn.Module, memory: str) -> None:
    x, rest = inputs(memory=memory), inputs(memory=memory)
    plain, full = x.clone().requires_grad_(), padded(x, torch.nan).requires_grad_()
    want = layer(plain, rest, "relu")
    got = other(full, padded(rest, torch.nan), "relu", mask=rectangle(len(x)))
    outside = ~rectangle(len(x))[:, None].expand_as(got)
    assert not got[outside].any()
    torch.testing.assert_close(got[:, :, :4, :4], want, rtol=1e-9, atol=1e-10)
    g = torch.randn_like(want)
    want.backward(g)
    got.backward(padded(g, torch.inf))
    assert full.grad is not None
    assert not full.grad[outside].any()
    torch.testing.assert_close(full.grad[:, :, :4, :4], plain.grad, rtol=1e-8, atol=1e-9)
    for (key, p), q in zip(layer.named_parameters(), other.parameters(), strict=True):
        with noted(key):
            torch.testing.assert_close(q.grad, p.grad, rtol=1e-8, atol=1e-9)
    for (key, a), b in zip(layer.named_buffers(), other.buffers(), strict=True):
        with noted(key):
            torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10)


def test_gradients_are_those_of_the_function() -> None:
    """By finite differences, for images of several sizes and one of which nothing counts."""
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)

    def function(x: Tensor, layer: nn.Module, kept: dict[str, Tensor]) -> Tensor:
        for key, buffer in layer.named_buffers():
            buffer.detach().copy_(kept[key])
        return layer(x, mask=mask)[:, :2]

    for name in LAYERS:
        line = "dims" in nk.catalog.find(name).options()
        case = (name, {"dims": 1}) if line else cases(name)[0]
        layer, x = build(case), inputs(4, (3,)).requires_grad_()
        kept = {key: b.clone() for key, b in layer.named_buffers()}
        with noted(case):
            assert torch.autograd.gradcheck(
                partial(function, layer=layer, kept=kept), (x,), fast_mode=True
            )


@pytest.mark.parametrize("name", LAYERS)
def test_a_sample_of_which_nothing_counts_is_not_there(name: str) -> None:
    """Neither for the others nor for the statistics, and its output is zero; two such samples, for
    layers that link pairs. A batch of nothing but padding leaves the statistics alone."""
    case = cases(name)[0]
    layer, other = build(case), build(case)
    other.load_state_dict(layer.state_dict())
    x = inputs(8)
    mask = torch.ones(8, 4, 4, dtype=torch.bool)
    mask[6:] = False
    got = layer(x, mask=mask)
    torch.testing.assert_close(got[:6], other(x[:6]), rtol=1e-9, atol=1e-10)
    assert not got[6:].any()
    kept = {key: b.clone() for key, b in layer.named_buffers()}
    for key, b in other.named_buffers():
        torch.testing.assert_close(kept[key], b, rtol=1e-9, atol=1e-10, msg=key)
    assert not layer(x, mask=torch.zeros_like(mask)).any()
    for key, b in layer.named_buffers():
        if key not in ("score", "radius"):  # how alike samples are, and what counts forwards
            torch.testing.assert_close(b, kept[key], msg=key)


def test_a_single_valid_value() -> None:
    """It has no variance. How many values there are is known on the device only, so it is no
    error: nothing is learned of it, and on_single says what it is normalized by."""
    x, mask = torch.randn(2, 8, 4, 4), torch.zeros(2, 4, 4, dtype=torch.bool)
    mask[0, 1, 1] = True
    plain, by_running = nk.BN(8), nk.BN(8, on_single="running")
    nn.init.constant_(plain.bias, 3.0)
    assert torch.equal(plain(x, mask=mask)[0, :, 1, 1], torch.full((8,), 3.0))
    want = nk.BN(8).eval()(x)[0, :, 1, 1]
    torch.testing.assert_close(by_running(x, mask=mask)[0, :, 1, 1], want)
    for layer in (plain, by_running):
        assert not layer.running_mean.any()
        assert int(layer.num_batches_tracked) == int(layer.nonfinite_batches) == 0


def test_masks_of_any_form() -> None:
    layer = nk.GN(8, groups=2)
    x, mask = torch.randn(2, 8, 5, 6), rectangle(2)
    want = layer(x, mask=mask)
    for form in (mask[:, None], mask.int(), mask.double(), mask[:, None].to(torch.uint8)):
        assert torch.equal(layer(x, mask=form), want)
    line = layer(x[:, :, 0], mask=mask[:, 0])  # (N, T)
    torch.testing.assert_close(line[:, :, :4], layer(x[:, :, 0, :4]))
    table = nk.BN(8)(x[:, :, 0, 0], mask=torch.tensor([True, False]))  # (N,)
    assert not table.any()  # one sample, which is its mean


def test_wrong_masks_are_told() -> None:
    layer, x = nk.BN(8), torch.randn(2, 8, 5, 6)
    with pytest.raises(ShapeError, match=r"\(2, 5, 6\) or \(2, 1, 5, 6\).*\(2, 6, 5\)"):
        layer(x, mask=torch.ones(2, 6, 5, dtype=torch.bool))
    with pytest.raises(ShapeError, match=r"one mask: try mask\[:, :1\]"):
        layer(x, mask=torch.ones_like(x))
    with pytest.raises(DtypeError, match=r"0 and 1.*other values"):
        layer(x, mask=torch.full((2, 5, 6), -torch.inf))
    with pytest.raises(DtypeError, match="tensor of booleans, got list"):
        layer(x, mask=[True, False])
    with pytest.raises(DeviceError, match="mask on meta"):
        layer(x, mask=torch.ones(2, 5, 6, dtype=torch.bool, device="meta"))
    with pytest.raises(OptionError, match="takes no mask: its 16 groups cut 8 channels"):
        nk.BGN(8, groups=16)(x, mask=rectangle(2))
    with (
        pytest.raises(ShapeError, match=r"\(2, 8, 5, 6\).*a mask \(3, 5, 6\)"),
        nk.masked(rectangle(3)),
    ):
        layer(x)
    with pytest.raises(OptionError, match="resize"):
        nk.masked(rectangle(2), resize="bilinear")
    assert int(layer.num_batches_tracked) == 0  # nothing was half done


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nk.NormAct(nk.BN(8)),
        nn.Conv2d(8, 8, 3, stride=2, padding=1),
        nk.GN(8, groups=2),
        nn.ReLU(),
        nn.Conv2d(8, 4, 3, padding=1),
        nk.IN(4),
    ).double()


@pytest.mark.parametrize("resize", ["any", "nearest"])
def test_a_network_sees_images_without_their_padding(resize: str) -> None:
    """Each layer gets the mask in the size of its map, and zeros outside are what a convolution
    adds at a border: two images give in one padded batch what each gives alone."""
    model = network().eval()
    images = [torch.randn(1, 3, 8, 6).double(), torch.randn(1, 3, 4, 8).double()]
    batch, mask = torch.full((2, 3, 8, 8), 9.0).double(), torch.zeros(2, 8, 8, dtype=torch.bool)
    for n, image in enumerate(images):
        height, width = image.shape[2:]
        mask[n, :height, :width] = True
        batch[n, :, :height, :width] = image[0]
    batch = batch * mask[:, None]  # the first layer is a convolution, which knows no mask
    with nk.masked(mask, resize=resize):
        together = model(batch)
    for n, image in enumerate(images):
        alone = model(image)[0]
        torch.testing.assert_close(together[n, :, : alone.shape[1], : alone.shape[2]], alone)
        assert not together[n, :, alone.shape[1] :].any()


def test_a_block_of_masks_and_checkpointing() -> None:
    """The forward that a checkpoint repeats runs in the backward, after the block, and would see
    the padding: other gradients, in silence."""
    x, mask = torch.randn(2, 3, 8, 8).double(), torch.ones(2, 8, 8, dtype=torch.bool)
    mask[1, 4:] = False
    found = []
    for reentrant in (None, False, True):
        torch.manual_seed(3)
        model = network()
        given = x.clone().requires_grad_()
        with nk.masked(mask):
            y = (
                model(given)
                if reentrant is None
                else checkpoint(model, given, use_reentrant=reentrant)
            )
        y.square().sum().backward()
        found.append([p.grad for p in model.parameters()] + list(model.buffers()))
    for plain, *repeated in zip(*found, strict=True):
        for one in repeated:
            torch.testing.assert_close(one, plain)


def test_the_block_ends() -> None:
    layer, x = nk.GN(8, groups=2), torch.randn(2, 8, 5, 6)
    plain = layer(x)
    with nk.masked(rectangle(2)):
        inside = layer(x)
        with nk.masked(None):
            assert torch.equal(layer(x), plain)
        assert torch.equal(layer(x), inside)
    assert torch.equal(layer(x), plain)
    assert not torch.equal(inside, plain)
    with pytest.warns(UserWarning, match="No layer of normkit ran"), nk.masked(rectangle(2)):
        nn.BatchNorm2d(8)(x)


def test_why_names_the_mask() -> None:
    layer, x = nk.BN(8), torch.randn(2, 8, 5, 6)
    assert "a mask is given, and no kernel takes one" in nk.why(layer, x, mask=rectangle(2))
    with nk.masked(rectangle(2)):
        assert "mask" in nk.why(layer, x)
        layer(x)
    assert "mask" not in nk.why(layer, x)


def test_one_graph_for_all_masks() -> None:
    """Compiled without a break, and not once more for each block."""
    model, x = nn.Sequential(nk.BN(3), nk.GN(3, groups=1)), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    for height in (4, 6, 2):
        mask = torch.ones(2, 8, 8, dtype=torch.bool)
        mask[1, height:] = False
        with nk.masked(mask):
            want = model(x)
            with torch.compiler.set_stance("default" if height == 4 else "fail_on_recompile"):
                torch.testing.assert_close(compiled(x), want)


def test_means_far_from_zero_keep_their_digits() -> None:
    """A padded zero beside values of 10⁴ would be most of a variance that is taken about zero."""
    x, mask = torch.randn(4, 8, 6, 6) + 1e4, torch.rand(4, 6, 6) > 0.5
    got = nk.BN(8)(x, mask=mask).detach().double()
    want = nk.BN(8).double()(x.double(), mask=mask)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-3)  # a value is rounded to 5e-4
