"""accumulate: micro-batches that are exactly the full batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import cases
import normkit as nk
import subjects
from normkit.calibration import accumulate
from normkit.errors import OptionError
from normkit.layers.batch import BatchNormalizer

POOLING = [case for case in cases.every() if isinstance(cases.build(case), BatchNormalizer)]
C = cases.CHANNELS


class Block(nn.Module):
    """Two norms in a residual block, the second without an activation of its own."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(C, C, 3, padding=1, bias=False)
        self.norm1 = norm()
        self.conv2 = nn.Conv2d(C, C, 3, padding=1, bias=False)
        self.norm2 = norm()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm1(self.conv1(x)))
        return torch.tanh(self.norm2(self.conv2(y)) + x)


class Small(nn.Module):
    """A stem, two blocks and a norm at the end: six layers whose statistics depend on those below.

    tanh, so that no rounding decides on which side of a kink a value is.
    """

    def __init__(self, norm: Callable[[], nn.Module] = lambda: nn.BatchNorm2d(C)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, C, 3, padding=1)
        self.norm = norm()
        self.blocks = nn.Sequential(Block(norm), Block(norm))
        self.last = norm()
        self.head = nn.Linear(C, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks(torch.tanh(self.norm(self.stem(x))))
        return self.head(self.last(y).mean((2, 3)))


Pair = tuple[Tensor, Tensor]


def data(n: int = 12, dtype: torch.dtype = torch.float64) -> Pair:
    y = torch.arange(n) % 5
    x = torch.randn(n, 3, 4, 4, dtype=dtype)
    return x + y.view(-1, 1, 1, 1) * 0.5, y  # batches differ from each other


def parts(pair: Pair, sizes: int | list[int]) -> list[Pair]:
    return list(zip(*(t.split(sizes) for t in pair), strict=True))


def loss(model: nn.Module, pair: Pair) -> Tensor:
    return nn.functional.cross_entropy(model(pair[0]), pair[1])


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    """How far tensors are apart, all of them together, relative to their size."""
    pairs = list(zip(found, expected, strict=True))
    if not pairs:
        return 0.0
    off = sum((a.double() - b.double()).square().sum() for a, b in pairs)
    return (off / sum(b.double().square().sum() for _, b in pairs)).sqrt().item()  # type: ignore[union-attr]


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]


def statistics(model: nn.Module) -> list[Tensor]:
    return [b for b in model.buffers() if b.is_floating_point()]


def counters(model: nn.Module) -> list[int]:
    return [int(b) for k, b in model.named_buffers() if k.endswith("num_batches_tracked")]


def compare(
    model: nn.Module, pair: Pair, sizes: int | list[int], rel: float, recompute: Any = True
) -> None:
    """Output, gradients and buffers, after one step of each."""
    full, ours = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    expected = loss(full, pair)
    expected.backward()
    seen: dict[int, Tensor] = {}

    def watched(model: nn.Module, part: Pair) -> Tensor:
        y = model(part[0])
        seen[part[0].storage_offset()] = y.detach()
        return nn.functional.cross_entropy(y, part[1])

    with accumulate(ours, recompute=recompute) as step:
        found = step(parts(pair, sizes), watched)
    again = copy.deepcopy(model).train()(pair[0])
    outputs = [seen[place] for place in sorted(seen)]  # the order in which they run may differ
    assert distance([torch.cat(outputs)], [again]) < rel
    assert found.item() == pytest.approx(expected.item(), rel=rel)
    assert distance(gradients(ours), gradients(full)) < rel
    assert distance(statistics(ours), statistics(full)) < rel
    assert counters(ours) == counters(full)


# float64 leaves rounding of about 1e-13 in a network of this depth; 1e-9 is far from any mistake
EXACT = 1e-9


# both ways for every layer; its options in turn, for the ways differ in when a layer is asked
WAYS = [
    (case, recompute)
    for number, case in enumerate(POOLING)
    for recompute in ((False, True) if not case[1] else (number % 2 == 0,))
]


@pytest.mark.parametrize(("case", "recompute"), WAYS, ids=cases.label)
def test_every_layer_is_exact(case: tuple[str, dict[str, object]], recompute: bool) -> None:
    if case[0] == "dn" and case[1].get("batch") == 2:
        sizes: list[int] = [4, 2, 6]  # it links pairs of samples
    else:
        sizes = [5, 1, 6]  # unequal, and one sample alone
    model = Small(lambda: cases.build(case)).double()
    compare(model, data(), sizes, EXACT, recompute)


TORCH: dict[str, Callable[[], nn.Module]] = {
    "bn": lambda: nn.BatchNorm2d(C),
    "momentum_none": lambda: nn.BatchNorm2d(C, momentum=None),
    "no_affine": lambda: nn.BatchNorm2d(C, affine=False),
    "untracked": lambda: nn.BatchNorm2d(C, track_running_stats=False),
    "sync": lambda: nn.SyncBatchNorm(C),
    "timm_act": lambda: timm.layers.BatchNormAct2d(C, act_layer=nn.SiLU, inplace=True),
    "norm_act": lambda: nk.NormAct(nn.BatchNorm2d(C), nn.Tanh()),
    "norm_act_fused": lambda: nk.NormAct(nk.BN(C), "silu"),
    "gn": lambda: nn.GroupNorm(2, C),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", TORCH)
def test_norms_of_torch_and_timm_are_exact(name: str, recompute: bool) -> None:
    if name == "sync":  # torch's own refuses the CPU, so a bn stands in for the full batch
        model = Small(TORCH["bn"]).double()
        ours = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model))
        pair = data()
        loss(model, pair).backward()
        with accumulate(ours, recompute=recompute) as step:
            step(parts(pair, 5), loss)
        assert distance(gradients(ours), gradients(model)) < EXACT
        return
    if name in ("untracked", "gn"):
        model = Small(TORCH[name]).double()
        assert statistics(model) == []
        compare(model, data(), [5, 1, 6], EXACT, recompute)
        return
    compare(subjects.trained(Small(TORCH[name])).double(), data(), [5, 1, 6], EXACT, recompute)


@pytest.mark.parametrize("recompute", [False, True])
def test_float32_is_within_1e_5_of_the_full_batch(recompute: bool) -> None:
    """The target: outputs, gradients and running statistics to 1e-5."""
    compare(subjects.trained(Small()), data(32, torch.float32), 8, 1e-5, recompute)


def test_a_resnet_of_torchvision_in_float32() -> None:
    import torchvision

    model = torchvision.models.resnet18(num_classes=5)
    for module in model.modules():
        if hasattr(module, "relu"):  # a sign within rounding would decide more than the arithmetic
            module.relu = nn.SiLU()
    y = torch.arange(16) % 5
    x = torch.randn(16, 3, 32, 32) + y.view(-1, 1, 1, 1) * 0.5
    compare(model, (x, y), 4, 1e-5)


def test_plain_accumulation_and_fixed_statistics_are_not_this() -> None:
    """Why it takes more than a second pass: without the gradient through shared statistics the
    result is further off than that of plain accumulation."""
    torch.manual_seed(0)
    model, pair = Small().double().train(), data(20)
    full, plain, fixed = (copy.deepcopy(model) for _ in range(3))
    loss(full, pair).backward()
    for part in parts(pair, 4):
        (loss(plain, part) / 5).backward()
    for layer in fixed.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = 1.0
            layer.running_var.requires_grad_(False)
    with torch.no_grad():
        fixed(pair[0])  # statistics of the full batch …
    for part in parts(pair, 4):
        (loss(fixed.eval(), part) / 5).backward()  # … as constants
    assert distance(gradients(plain), gradients(full)) > 0.1
    assert distance(gradients(fixed), gradients(full)) > 0.1


def test_training_follows_that_of_full_batches_step_by_step() -> None:
    full = Small(lambda: nk.BN(C)).double().train()
    ours = copy.deepcopy(full)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (full, ours)]
    with accumulate(ours) as step:
        for _ in range(5):
            pair = data(16)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss(full, pair).backward()
            step(parts(pair, 3), loss)
            for optimizer in optimizers:
                optimizer.step()
    assert distance(list(ours.parameters()), list(full.parameters())) < 1e-9
    assert distance(statistics(ours), statistics(full)) < 1e-9


def test_gradients_are_added_to_those_that_are_there() -> None:
    model, pair = Small().double().train(), data()
    with accumulate(model) as step:
        step(parts(pair, 4), loss)
        once = [g.clone() for g in gradients(model)]
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.reset_running_stats()
        step(parts(pair, 4), loss)
    assert distance(gradients(model), [2 * g for g in once]) < 1e-12


@pytest.mark.parametrize("recompute", [False, True])
def test_the_gradient_of_the_input(recompute: bool) -> None:
    model, (x, y) = Small().double().train(), data()
    one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss(copy.deepcopy(model), (one, y)).backward()
    with accumulate(model, recompute=recompute) as step:
        step(parts((other, y), 5), loss)
    assert distance([other.grad], [one.grad]) < EXACT  # type: ignore[list-item]


def test_weights_and_sums() -> None:
    model, pair = Small().double().train(), data()
    full, ours = copy.deepcopy(model), copy.deepcopy(model)

    def total(model: nn.Module, part: Pair) -> Tensor:
        return nn.functional.cross_entropy(model(part[0]), part[1], reduction="sum")

    total(full, pair).backward()
    with accumulate(ours) as step:
        found = step(parts(pair, 5), total, weights=[1, 1, 1])
    assert found.item() == pytest.approx(total(model, pair).item(), rel=1e-12)
    assert distance(gradients(ours), gradients(full)) < EXACT


def test_scaled_losses_and_autocast() -> None:
    model, pair = subjects.trained(Small()), data(12, torch.float32)
    full, ours = copy.deepcopy(model).train(), copy.deepcopy(model).train()
    with torch.autocast("cpu", torch.bfloat16):
        (1024 * loss(full, pair)).backward()
        with accumulate(ours) as step:
            found = step(parts(pair, 5), loss, scale=lambda total: total * 1024)
    # bfloat16 has 8 bits; without autocast in the threads this would be exact, and fail below
    assert distance(gradients(ours), gradients(full)) < 0.05
    exact = copy.deepcopy(model).train()
    (1024 * loss(exact, pair)).backward()
    assert distance(gradients(ours), gradients(exact)) > 1e-4
    assert found.item() == pytest.approx(loss(exact, pair).item(), rel=0.02)


def test_dropout_is_repeated_exactly_when_a_block_is() -> None:
    """The same seed gives the same masks, kept or computed again."""

    class Dropping(Block):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.dropout(super().forward(x), 0.5, self.training)

    model = Small().double().train()
    model.blocks[1] = Dropping(lambda: nn.BatchNorm2d(C)).double()
    found, pair = [], data()
    for recompute, seed in ((True, 4), (False, 4), (False, 5)):
        one = copy.deepcopy(model)
        torch.manual_seed(seed)
        with accumulate(one, recompute=recompute) as step:
            step(parts(pair, 5), loss)
        found.append(gradients(one))
    assert distance(found[0], found[1]) < EXACT
    assert distance(found[0], found[2]) > 0.1  # other masks


def test_a_block_used_twice_and_a_norm_used_twice() -> None:
    class Again(Small):
        def forward(self, x: Tensor) -> Tensor:
            y = self.blocks(torch.tanh(self.norm(self.stem(x))))
            y = self.blocks[0](self.norm(y))
            return self.head(self.last(y).mean((2, 3)))

    compare(Again().double(), data(), [5, 1, 6], EXACT)
    layers = [lambda: nk.BatchRenorm(C, r_ramp=None, d_ramp=None), lambda: nk.UBN(C)]
    for layer in layers:
        compare(Again(layer).double(), data(), [5, 1, 6], EXACT)


def test_frozen_norms_use_their_running_statistics() -> None:
    model = subjects.trained(Small()).double().train()
    model.blocks[0].norm1.eval()  # type: ignore[union-attr, operator]
    full, ours = copy.deepcopy(model), copy.deepcopy(model)
    pair = data()
    loss(full, pair).backward()
    with accumulate(ours) as step:
        step(parts(pair, 5), loss)
    assert distance(gradients(ours), gradients(full)) < EXACT
    assert distance(statistics(ours), statistics(full)) < EXACT


def test_the_model_is_itself_again_and_usual_calls_in_between_are_usual() -> None:
    model, pair = Small().double(), data()
    before = subjects.portrait(model)
    usual = copy.deepcopy(model).eval()(pair[0])
    with accumulate(model) as step:
        assert torch.equal(model.eval()(pair[0]), usual)
        model.train()
        step(parts(pair, 5), loss, backward=False)
    after = subjects.portrait(model)
    for same in ("modules", "tensors", "hooks", "order"):
        assert after[same] == before[same]
    assert not any("forward" in vars(m) for m in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_an_error_in_a_micro_batch_leaves_the_model_itself() -> None:
    model, (x, y) = Small().double().train(), data()
    with pytest.raises(RuntimeError, match="channels"), accumulate(model) as step:
        step([(x[:4], y[:4]), (x[4:, :2], y[4:])], loss)
    assert not any("forward" in vars(m) for m in model.modules())
    assert counters(model) == [0] * 6


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(C), lambda: nk.BN(C)])
def test_a_step_that_fails_leaves_no_statistics_behind(norm: Callable[[], nn.Module]) -> None:
    model, (x, y) = Small(norm).double().train(), data()
    before = subjects.portrait(model)

    def failing(model: nn.Module, part: Pair) -> Tensor:
        found = loss(model, part)
        if len(part[1]) == 2:
            raise ZeroDivisionError
        return found

    with pytest.raises(ZeroDivisionError), accumulate(model) as step:
        step(parts((x, y), 5), failing)
    after = subjects.portrait(model)
    assert after["values"] == before["values"]


def test_a_model_that_is_moved_after_the_beginning() -> None:
    """to() gives a module new buffers; those that were there must not be the ones updated."""
    model, pair = Small().train(), data()
    with accumulate(model) as step:
        model.double()
        full = copy.deepcopy(model)
        for module in full.modules():
            vars(module).pop("forward", None)
        loss(full, pair).backward()
        step(parts(pair, 5), loss)
    assert distance(gradients(model), gradients(full)) < EXACT
    assert distance(statistics(model), statistics(full)) < EXACT


def test_blocks_can_be_named() -> None:
    model = Small().double()
    with accumulate(model, recompute="blocks") as step:
        assert list(step.blocks) == ["blocks"]
    with accumulate(model, recompute=["blocks.1"]) as step:
        assert list(step.blocks) == ["blocks.1"]
    assert list(accumulate(model).blocks) == ["blocks.0", "blocks.1"]
    compare(model, data(), 5, EXACT, recompute="blocks")  # four norms deep
    compare(model, data(), 5, EXACT, recompute="")  # all six: the model is one block


def test_recomputing_keeps_less() -> None:
    """What autograd holds between forward and backward, counted; offloading sends it away."""
    model, pair = Small().double().train(), data(32)
    sizes = {}
    for recompute in (False, True):
        held: dict[int, int] = {}

        def pack(t: Tensor, held: dict[int, int] = held) -> Tensor:
            held[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        def watched(model: nn.Module, part: Pair, pack: Any = pack) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                return loss(model, part)

        with accumulate(copy.deepcopy(model), recompute=recompute) as step:
            step(parts(pair, 8), watched)
        sizes[recompute] = sum(held.values())
    assert sizes[True] < 0.6 * sizes[False]


class Checkpointing(Small):
    def forward(self, x: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        y = torch.tanh(self.norm(self.stem(x)))
        y = checkpoint(self.blocks, y, use_reentrant=False)
        return self.head(self.last(y).mean((2, 3)))


class ByValue(Small):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.stem(x)))
        if x.shape[0] > 4:
            y = self.blocks(y)
        return self.head(self.last(y).mean((2, 3)))


class InPlace(Block):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return super().forward(x)


def test_what_cannot_be_exact_is_an_error() -> None:
    pair = data()
    for norm in (lambda: nn.BatchNorm2d(C), lambda: nk.BN(C)):
        with (
            pytest.raises(OptionError, match="checkpoints"),
            accumulate(Checkpointing(norm).double().train(), recompute=False) as step,
        ):
            step(parts(pair, 4), loss)
    with (
        pytest.raises(OptionError, match="different ways"),
        accumulate(ByValue().double().train()) as step,
    ):
        step(parts(pair, [4, 8]), loss)
    changing = Small().double().train()
    changing.blocks[1] = InPlace(lambda: nn.BatchNorm2d(C)).double()
    with (
        pytest.raises(OptionError, match=r"blocks\.1 changes its input in place"),
        accumulate(changing) as step,
    ):
        step(parts(pair, 4), loss)
    own = Small(lambda: subjects.BatchNormAct2d(C)).double().train()
    with pytest.raises(OptionError, match="norm: its forward is its own"), accumulate(own) as step:
        step(parts(pair, 4), loss)
    tracked = Small(lambda: nn.InstanceNorm2d(C, track_running_stats=True)).double().train()
    with pytest.raises(OptionError, match="InstanceNorm2d"), accumulate(tracked) as step:
        step(parts(pair, 4), loss)


def test_a_forward_that_changes_other_buffers_is_warned_of() -> None:
    model = Small().double().train()
    torch.nn.utils.parametrizations.spectral_norm(model.head)  # power iterations in each forward
    with pytest.warns(UserWarning, match="changes head"), accumulate(model) as step:
        step(parts(data(), 4), loss)


def test_micro_batches_of_different_image_sizes_are_an_error() -> None:
    model = Small().double().train()
    x, y = data(8)
    small = torch.nn.functional.interpolate(x, size=(2, 2))
    with pytest.raises(OptionError, match="different sizes"), accumulate(model) as step:
        step([(x, y), (small, y)], loss)


def test_bad_arguments() -> None:
    model, pair = Small().double().train(), data()
    with pytest.raises(OptionError, match="with accumulate"):
        accumulate(model)(parts(pair, 4), loss)
    with accumulate(model) as step:
        with pytest.raises(OptionError, match="no micro-batches"):
            step([], loss)
        with pytest.raises(OptionError, match="2 weights for 3"):
            step(parts(pair, 4), loss, weights=[1, 1])
        with pytest.raises(OptionError, match=r"shape \(4, 5\)"):
            step(parts(pair, 4), lambda model, part: model(part[0]))
        with pytest.raises(OptionError, match="inside of another"):
            step(parts(pair, 4), lambda model, part: step(parts(pair, 4), loss))
    with pytest.raises(Exception, match="recompute="):
        accumulate(model, recompute="layer9")
    with pytest.raises(OptionError, match="DataParallel"):
        accumulate(nn.DataParallel(model))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm2d(C), lambda: nk.BN(C)])
@pytest.mark.parametrize("offload", [False, True])
def test_on_a_gpu(offload: bool, norm: Callable[[], nn.Module]) -> None:
    """Threads, streams, random numbers and offloading, and less memory than the full batch."""

    class Deep(Small):
        def __init__(self) -> None:
            super().__init__(norm)
            self.blocks = nn.Sequential(*(Block(norm) for _ in range(12)))

    model = Deep().cuda().train()
    y = torch.arange(256, device="cuda") % 5
    x = torch.randn(256, 3, 128, 128, device="cuda") + y.view(-1, 1, 1, 1) * 0.5
    full, ours = copy.deepcopy(model).double(), copy.deepcopy(model).double()
    few = x[:16, :, :8, :8].double(), y[:16]
    loss(full, few).backward()
    with accumulate(ours, offload=offload) as step:
        step(parts(few, 4), loss)
    assert distance(gradients(ours), gradients(full)) < EXACT
    assert distance(statistics(ours), statistics(full)) < EXACT
    peaks = []
    for shared in (False, True):
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        if shared:
            with accumulate(model, offload=offload) as step:
                step(parts((x, y), 16), loss)
        else:
            loss(model, (x, y)).backward()
        peaks.append(torch.cuda.max_memory_allocated() - start)
        model.zero_grad()
    # a block of two norms keeps its input of about seven tensors; offloaded, not even that
    assert peaks[1] < (0.25 if offload else 0.5) * peaks[0], peaks


def test_a_second_block_for_one_accumulation_is_refused() -> None:
    """The methods put in front by the first block were forgotten, and stayed on the model."""
    model = nn.Sequential(nn.Linear(3, 4), nk.BN(4))
    before = [dict(vars(module)) for module in model.modules()]
    accumulation = nk.accumulate(model)
    with accumulation, pytest.raises(OptionError, match="entered already"):
        accumulation.__enter__()
    assert [vars(module).keys() for module in model.modules()] == [kept.keys() for kept in before]


@pytest.mark.parametrize("switched_off", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_says_so(switched_off: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nk.BN(4))
    parts = list(torch.randn(8, 3).split(4))
    wrong = pytest.raises(OptionError, match="backward=False")
    with nk.accumulate(model) as step, switched_off(), wrong:
        step(parts, lambda model, x: model(x).mean())
    assert model[1].num_batches_tracked == 0
