"""fuse(save="inputs"): outputs of norms are made again, and nothing else changes."""

import copy
import gc
import pickle
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import normkit as nk
from normkit.conversion.fuse.saving import IndexFreeMaxPool2d, SavesInputs
from normkit.engine import remaking
from normkit.errors import OptionError


class Block(nn.Module):
    def __init__(self, channels: int, act: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nk.BN(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nk.BN(channels)
        self.act = act()

    def forward(self, x):
        y = self.act(self.norm1(self.conv1(x)))
        return self.act(self.norm2(self.conv2(y)) + x)


def network(act: type[nn.Module] = nn.ReLU, blocks: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 8, 3, padding=1), nk.BN(8), act(), nn.MaxPool2d(3, 2, 1)
    body = [Block(8, act) for _ in range(blocks)]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


def fused(model: nn.Module) -> nn.Module:
    """Fused, with sums and activations by the norm's own pass also on a CPU: the same numbers."""
    nk.fuse(model, example=images())
    for module in model.modules():
        module.__dict__.pop("apart_on_cpu", None)
    return model


def images(n: int = 2) -> torch.Tensor:
    return torch.randn(n, 3, 16, 16, generator=torch.Generator().manual_seed(1))


class Count:
    """Bytes that a forward keeps in each storage, parameters apart."""

    def __init__(self, model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
        self.own = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.kept: dict[int, torch.Tensor] = {}
        first = remaking._Kept.__init__

        def init(slot, tensor):
            first(slot, tensor)
            self.keep(tensor)

        monkeypatch.setattr(remaking._Kept, "__init__", init)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in self.own:
            self.kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    def bytes(self) -> int:
        total = sum(t.untyped_storage().nbytes() for t in self.kept.values())
        self.kept.clear()
        return total


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters())]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_memory_falls_and_gradients_are_equal_to_the_last_bit(monkeypatch):
    plain, saving = fused(network()), nk.fuse(network(), save="inputs")
    count = Count(saving, monkeypatch)
    with nk.use_backend("torch"):  # hooks for saved tensors get no steps in C++
        found = step(saving, images())
        little = count.bytes()
        count.own = {p.untyped_storage().data_ptr() for p in plain.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(count.keep, lambda t: t):
            expected = step(plain, images())
    everything = count.bytes()
    assert equal(found, expected)
    # kept of each norm: x, and no y; of the stem's pooling no indices, which are twice as large
    assert little < 0.55 * everything


@pytest.mark.parametrize("name", ["bn", "gn", "bcn", "ubn", "sn", "rbn", "pn", "bnet", "ibn"])
def test_every_kind_of_layer(name):
    torch.manual_seed(0)
    options = {"groups": 4} if name in ("gn", "bcn") else {}
    plain = fused(nk.convert(network(blocks=1), name, **options))
    saving = nk.fuse(copy.deepcopy(plain), save="inputs")
    assert equal(step(saving, images()), step(plain, images()))


@pytest.mark.parametrize("act", [nn.SiLU, nn.GELU, nn.Hardswish, nn.ELU])
def test_activations(act):
    plain, saving = fused(network(act)), nk.fuse(network(act), save="inputs")
    assert equal(step(saving, images()), step(plain, images()))


def test_outputs_are_made_once_for_all_that_wait(monkeypatch):
    saving = nk.fuse(network(), save="inputs")
    made = []
    first = remaking._Node.made
    monkeypatch.setattr(remaking._Node, "made", lambda node: made.append(node) or first(node))
    step(saving, images())
    # at most one for each of the seven norms, although block outputs have two consumers
    assert 0 < len(made) <= 7
    assert len({id(node) for node in made}) == len(made)


def test_a_graph_that_is_kept_is_gone_through_twice():
    saving, plain = nk.fuse(network(), save="inputs"), fused(network())
    for model in (saving, plain):
        loss = model(images()).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for a, b in zip(saving.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_nothing_stays_after_backward(monkeypatch):
    saving = nk.fuse(network(), save="inputs")
    step(saving, images())
    gc.collect()
    alive = [o for o in gc.get_objects() if isinstance(o, remaking._Node | remaking._Slot)]
    assert not alive
    assert not remaking._active.offers


def test_an_output_that_was_changed_in_place_is_kept():
    class Changes(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = nk.BN(3), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.conv(self.norm(x).mul_(2.0))

    torch.manual_seed(0)
    plain = Changes()
    saving = nk.fuse(copy.deepcopy(plain), save="inputs")
    assert equal(step(saving, images()), step(plain, images()))


def test_a_change_in_place_of_what_is_saved_is_still_an_error():
    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nk.BN(3)

        def forward(self, x):
            x = self.conv(x)
            y = self.norm(x)
            x.add_(1.0)
            return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(nk.fuse(Breaks(), save="inputs"), images())


def test_views_of_an_output():
    class Flat(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nk.BN(3), nn.Linear(256, 4)

        def forward(self, x):
            return self.linear(self.norm(x, None, "relu").flatten(2))

    torch.manual_seed(0)
    plain = Flat()
    saving = nk.fuse(copy.deepcopy(plain), save="inputs")
    assert equal(step(saving, images()), step(plain, images()))


def test_a_chain_deeper_than_the_stack():
    torch.manual_seed(0)
    x, y = torch.randn(1, 3, 2, 2), torch.randn(1, 3, 2, 2, requires_grad=True)
    norm = nk.BN(3).eval()
    results = []
    for block in (nullcontext(), remaking.Remaking()):
        with block:
            out = y
            for _ in range(1200):  # each output is added to the next
                out = norm(x, out, "relu")
            loss = out.square().sum()
        results += torch.autograd.grad(loss, y)
    assert torch.equal(*results)


def test_with_activation_checkpointing():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block = nn.Conv2d(3, 8, 1), Block(8)

        def forward(self, x):
            return checkpoint(self.block, self.stem(x), use_reentrant=False)

    torch.manual_seed(0)
    plain = fused(Checkpointed())
    saving = nk.fuse(copy.deepcopy(plain), save="inputs", example=images())
    assert equal(step(saving, images()), step(plain, images()))


def test_autocast_and_eval():
    saving, plain = nk.fuse(network(), save="inputs"), fused(network())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert equal(step(saving, images()), step(plain, images()))
    saving.eval(), plain.eval()
    assert equal(step(saving, images()), step(plain, images()))
    with torch.no_grad():
        assert torch.equal(saving(images()), plain(images()))


def test_taken_back_and_copied():
    model = nk.fuse(network(), save="inputs")
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert equal(step(again, images()), step(model, images()))
    assert type(model[3]) is IndexFreeMaxPool2d
    nk.fuse(nk.fuse(model, save="inputs"), save="all")
    assert type(model[3]) is nn.MaxPool2d
    assert type(model) is nn.Sequential


def test_an_error_in_the_forward_ends_the_block():
    model = nk.fuse(network(), save="inputs")
    with pytest.raises(RuntimeError):
        model(torch.randn(2, 4, 16, 16))
    assert not remaking.active()
    step(model, images())


def test_an_unknown_option():
    for save in ("input", None, True):
        with pytest.raises(OptionError, match="inputs"):
            nk.fuse(network(), save=save)


def test_a_checkpointed_part_is_as_ever():
    """It was recomputed without what it had been computed with: another number of tensors."""

    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.block, self.last = nn.Conv2d(3, 8, 1), Block(8), Block(8)

        def forward(self, x):
            return self.last(checkpoint(self.block, self.stem(x), use_reentrant=False))

    torch.manual_seed(0)
    plain = nk.fuse(Part(), example=images())
    saving = nk.fuse(copy.deepcopy(plain), save="inputs", example=images())
    for a, b in zip(step(saving, images()), step(plain, images()), strict=True):
        torch.testing.assert_close(a, b)


def test_hooks_around_the_model_see_what_is_saved():
    model, seen = nk.fuse(network(), save="inputs"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        model(images()).sum().backward()
    assert len(seen) > 20
    checkpoint(model, images().requires_grad_(), use_reentrant=False).sum().backward()


def test_an_interruption_ends_the_block():
    class Stops(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.last = nk.BN(3), nn.Identity()

        def forward(self, x):
            return self.last(self.norm(x))

    def interrupt(*given):
        raise KeyboardInterrupt

    model = nk.fuse(Stops(), save="inputs", example=images())
    model.last.register_forward_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(images())
    assert remaking._active.depth == 0
    assert not remaking.others_watch()


def test_transforms_and_tracers():
    model = nk.fuse(network(), save="inputs").eval()
    plain = nk.fuse(copy.deepcopy(model), save="all")
    parameters = dict(model.named_parameters())

    def loss(own, net):
        return torch.func.functional_call(net, own, images()).square().sum()

    mine, theirs = (torch.func.grad(loss)(parameters, net) for net in (model, plain))
    for name, grad in mine.items():
        torch.testing.assert_close(grad, theirs[name])
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(images()), plain(images()))


def test_a_part_that_saves_is_taken_back_with_the_whole():
    model = network()
    nk.fuse(model[4], save="inputs", example=torch.randn(2, 8, 8, 8))
    nk.fuse(nk.fuse(model, save="inputs"), save="all")
    assert not any(isinstance(m, SavesInputs | IndexFreeMaxPool2d) for m in model.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("act", [nn.ReLU, nn.ReLU6])
def test_what_is_not_a_number_lets_gradients_through_as_in_torch(act, bad):
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), act()).eval()
    ours = nk.fuse(nk.convert(copy.deepcopy(body), "bn"), save="inputs")
    found = []
    for model in (body, ours):
        x = images()
        x[0, 0, 0, 0] = bad
        x.requires_grad_()
        model(x).nan_to_num().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)
