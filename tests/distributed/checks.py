"""What four processes check together: see ranks.py."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import normkit as nk
from cases import build, every, inputs, noted
from normkit.distributed import meeting
from normkit.errors import RankError
from normkit.integrations.training import NormMonitor
from normkit.layers.synchronised import Synchronised

Groups = dict[int, Any]
# multiples of the runs in tests/cases.py, whose samples share statistics within a process
SPLITS = {1: [6], 2: [6, 12], 3: [12, 0, 6], 4: [6, 0, 12, 6]}
COUNTERS = ("arrivals", "nonfinite_batches")


def pooled_cases() -> list[tuple[str, dict[str, object]]]:
    return [case for case in every() if can_synchronise(build(case))]


def can_synchronise(layer: nn.Module) -> bool:
    return isinstance(layer, Synchronised) and layer.can_synchronise()


def close(mine: Tensor, joined: Tensor, tolerance: float = 1e-9) -> None:
    scale = max(1.0, float(joined.detach().abs().max())) if joined.numel() else 1.0
    torch.testing.assert_close(mine, joined, rtol=0, atol=tolerance * scale)


def equal_to_joined(
    layer: nn.Module,
    split: list[int],
    rank: int,
    group: Any,
    x: Tensor,
    tolerance: float = 1e-9,
    run: Callable[[Any, Tensor], Tensor] | None = None,
) -> None:
    """Outputs, gradients and statistics of two steps, against one process with the joined batch."""
    run = run or (lambda layer, x: layer(x))
    alone = nk.sync(copy.deepcopy(layer), False)
    nk.sync(layer, group).zero_grad()
    for _ in range(2):
        whole, weight = x.clone().requires_grad_(), torch.randn_like(x)
        own = x.split(split)[rank].clone().requires_grad_()
        y, joined = run(layer, own), run(alone, whole)
        (y * weight.split(split)[rank]).sum().backward()
        (joined * weight).sum().backward()
        close(y, joined.split(split)[rank], tolerance)
        close(own.grad, whole.grad.split(split)[rank], tolerance)
        x = x * 0.7 + 0.3
    for (name, mine), parameter in zip(layer.named_parameters(), alone.parameters(), strict=True):
        grad = mine.grad.clone()
        distributed.all_reduce(grad, group=group)
        with noted(name):
            close(grad, parameter.grad, tolerance)
    for (name, mine), buffer in zip(layer.named_buffers(), alone.named_buffers(), strict=True):
        if name not in COUNTERS:
            with noted(name):
                close(mine, buffer[1], tolerance)


def check_every_layer_is_as_with_the_joined_batch(rank: int, groups: Groups) -> None:
    for case in pooled_cases():
        torch.manual_seed(4)
        x, layer = inputs(sum(SPLITS[4])), build(case).requires_grad_(True)
        if layer.virtual_batch is not None:
            layer.virtual_batch = 3  # runs that end where those of a process end
        with noted(case):
            equal_to_joined(layer, SPLITS[4], rank, groups[4], x)


def check_fewer_processes_and_float32(rank: int, groups: Groups) -> None:
    for name in ("bn", "ubn"):
        for size, dtype, tolerance in (
            (1, torch.float64, 1e-9),
            (2, torch.float64, 1e-9),
            (3, torch.float32, 1e-6),
        ):
            torch.manual_seed(size)  # the same on ranks that sit out and draw nothing
            x, layer = inputs(sum(SPLITS[size]), dtype=dtype), build((name, {}), dtype)
            if rank < size:
                with noted(name, size):
                    equal_to_joined(layer, SPLITS[size], rank, groups[size], x, tolerance)


def check_padded_batches(rank: int, groups: Groups) -> None:
    """Each process counts its valid positions, and one of them has no samples at all."""
    for case in pooled_cases():
        torch.manual_seed(5)
        x, layer = inputs(sum(SPLITS[3])), build(case).requires_grad_(True)
        if case[1] or layer.masks_refused() or rank >= 3:
            continue
        if layer.virtual_batch is not None:
            layer.virtual_batch = 3
        with noted(case):
            equal_to_joined(
                layer,
                SPLITS[3],
                rank,
                groups[3],
                x,
                run=lambda layer, x: layer(x, mask=x[:, 0] > 0),
            )


def check_masks_count_what_each_process_has(rank: int, groups: Groups) -> None:
    """Processes with padding and without send the same numbers: how many values there are."""
    mask = torch.ones(8, 4, 4, dtype=torch.bool)
    mask[:2, :, 2:] = mask[5, 1:] = False  # nothing of it on ranks 1 and 3
    for name in ("bn", "rbn", "ubn", "sn"):
        torch.manual_seed(3)
        x, layer = inputs(8), build((name, {}))
        alone = copy.deepcopy(layer)
        nk.sync(layer)
        own, whole = x.split(2)[rank].clone().requires_grad_(), x.clone().requires_grad_()
        mine = mask.split(2)[rank]
        y = layer(own) if mine.all() else layer(own, mask=mine)
        joined = alone(whole, mask=mask)
        y.pow(3).sum().backward()
        joined.pow(3).sum().backward()
        with noted(name):
            close(y, joined.split(2)[rank])
            close(own.grad, whole.grad.split(2)[rank])
            close(layer.running_var, alone.running_var)


def check_means_far_from_zero_keep_their_digits(rank: int, groups: Groups) -> None:
    """E[x²] − E[x]² in float32 would leave nothing of a variance of 1 about a mean of 10⁴."""
    x = inputs(8, dtype=torch.float32) + 1e4
    layer = nk.sync(nk.BN(x.shape[1]))
    own = layer(x.split(2)[rank])
    wide = x.double()
    centred = wide - wide.mean((0, 2, 3), keepdim=True)
    joined = centred / (wide.var((0, 2, 3), correction=0, keepdim=True) + layer.eps).sqrt()
    # a value of 10⁴ is rounded to 5e-4, and so are the means of each process
    torch.testing.assert_close(own, joined.split(2)[rank].float(), rtol=0, atol=2e-3)


def check_neighbours_share_among_themselves(rank: int, groups: Groups) -> None:
    x = inputs(8)
    layer, alone = build(("bn", {})), build(("bn", {}))
    alone.load_state_dict(layer.state_dict())
    nk.sync(layer, within=2)
    first = 0 if rank < 2 else 4
    close(layer(x.split(2)[rank]), alone(x[first : first + 4]).split(2)[rank % 2])
    assert layer.processes.size == 2
    nk.sync(layer, False)
    own = x.split(2)[rank]
    alone.load_state_dict(layer.state_dict())
    close(layer(own), alone(own))
    with pytest.raises(nk.NormkitError, match=r"divide the 4 processes, got 3. Try one of 1, 2, 4"):
        nk.sync(layer, within=3)


def check_compiled_graphs_hold_the_all_reduce(rank: int, groups: Groups) -> None:
    """fullgraph: a graph break is an error. Another batch size runs the same graph."""
    if rank > 1:
        return
    layer = build(("bn", {}), torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for split in ([2, 3], [3, 5]):  # no 4: dynamo takes equal sizes for one, and maps are 4 × 4
        x = inputs(sum(split), dtype=torch.float32)
        equal_to_joined(layer, split, rank, groups[2], x, 1e-6, by(compiled, layer))
    assert counters["stats"]["unique_graphs"] == 1


def by(compiled: Callable[[Tensor], Tensor], layer: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    return lambda which, x: compiled(x) if which is layer else which(x)


def check_the_backward_can_be_differentiated(rank: int, groups: Groups) -> None:
    x, layer = inputs(8), build(("bn", {}))
    alone = copy.deepcopy(layer)
    nk.sync(layer)
    own, whole = x.split(2)[rank].clone().requires_grad_(), x.clone().requires_grad_()
    for norm, given in ((layer, own), (alone, whole)):
        (slope,) = torch.autograd.grad(norm(given).pow(3).sum(), given, create_graph=True)
        slope.square().sum().backward()
    close(own.grad, whole.grad.split(2)[rank], 1e-8)


def check_checkpoints_share_again(rank: int, groups: Groups) -> None:
    """The forward that a checkpoint repeats in the backward meets the others once more."""
    for case in (("ubn", {}), ("batch_renorm", {})):
        x, layer = inputs(8), build(case)
        alone = copy.deepcopy(layer)
        nk.sync(layer)
        own, whole = x.split(2)[rank].clone().requires_grad_(), x.clone().requires_grad_()
        checkpoint(layer, own, use_reentrant=False).square().sum().backward()
        alone(whole).square().sum().backward()
        with noted(case):
            close(own.grad, whole.grad.split(2)[rank])
            close(layer.running_mean, alone.running_mean)
            assert int(layer.num_batches_tracked) == 1


def small_network(norm: Callable[[int], nn.Module], dtype: torch.dtype) -> nn.Module:
    parts = nn.Conv2d(3, 8, 3, bias=False), norm(8), nn.ReLU(), nn.Conv2d(8, 8, 1), norm(8)
    return nn.Sequential(*parts, nn.Flatten(1), nn.Linear(72, 2)).to(dtype)


def check_ddp_with_and_without_broadcast(rank: int, groups: Groups) -> None:
    """Two forwards before a backward: in-place changes of buffers, by DDP or by the second forward,
    were "modified by an inplace operation" with torch's batch norms (pytorch#22095)."""
    for name in ("bn", "ubn", "batch_renorm"):
        for broadcast in (True, False):
            torch.manual_seed(2)
            model = small_network(lambda c, name=name: nk.make(name, c), torch.float64)
            alone = copy.deepcopy(model)
            with warnings.catch_warnings():  # torch 2.15 is about to rename the option
                warnings.simplefilter("ignore", FutureWarning)
                parallel = nn.parallel.DistributedDataParallel
                ddp = parallel(nk.sync(model), broadcast_buffers=broadcast)
            x = inputs(8, (5, 5), channels=3)
            own = x.split(2)[rank]
            for network, first, share in ((ddp, own, 1), (alone, x, 0.25)):
                loss = network(first).square().sum() + network(first.flip(2)).square().sum()
                (loss * share).backward()  # DDP averages
            with noted(name, broadcast):
                for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
                    close(mine.grad, other.grad)
                for mine, other in zip(model.buffers(), alone.buffers(), strict=True):
                    close(mine.double(), other.double())


def check_fsdp2_keeps_statistics_wide(rank: int, groups: Groups) -> None:
    model = nk.sync(small_network(nk.BN, torch.float32))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), mp_policy=policy)
    x = inputs(8, (5, 5), channels=3, dtype=torch.bfloat16)
    model(x.split(2)[rank]).float().square().sum().backward()
    for layer in (model[1], model[4]):
        assert layer.running_var.dtype is torch.float32
        assert int(layer.num_batches_tracked) == 1
    gathered = [torch.empty_like(model[4].running_var) for _ in range(4)]
    distributed.all_gather(gathered, model[4].running_var)
    assert all(torch.equal(gathered[0], other) for other in gathered)
    assert all(p.grad is not None for p in model.parameters())


def check_calibration_on_parts_is_that_of_the_whole(rank: int, groups: Groups) -> None:
    """Callbacks calibrated each process on its own part: the file had a quarter of the data."""
    conv = nn.Conv2d(4, 6, 3)
    model = nn.Sequential(conv, nk.BN(6), nn.ReLU(), nn.BatchNorm2d(6), nk.RBN(6)).double()
    whole, x = copy.deepcopy(model), torch.randn(14, 4, 6, 6).double()
    x += torch.arange(14.0)[:, None, None, None]  # the parts differ
    nk.calibrate(whole, x.split([2, 2, 1, 2, 2, 2, 2, 1]))
    monitor = NormMonitor(every=None, calibrate=True)
    monitor.start(model, None)
    done = monitor.finish(x.split([2, 3, 4, 5])[rank].split(2))
    assert done is not None
    assert done.images == 14
    for mine, joined in zip(model.buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(mine, joined)


def check_torchs_own_conversion_reaches_our_layers(rank: int, groups: Groups) -> None:
    """It left them as they were, without a word: 4 processes trained 4 sets of statistics."""
    model = nn.Sequential(nk.BN(8), nn.BatchNorm2d(8), nk.GN(8))
    nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert model[0].processes.size == 4
    nn.SyncBatchNorm.convert_sync_batchnorm(model, groups[4])
    assert model[0].processes.name == groups[4].group_name
    assert isinstance(model[1], nn.SyncBatchNorm)


def check_copies_share_and_files_say_so(rank: int, groups: Groups) -> None:
    layer = nk.sync(nk.BN(8))
    assert copy.deepcopy(layer).processes is layer.processes
    loaded = pickle.loads(pickle.dumps(layer))
    with pytest.raises(nk.NormkitError, match="BN shares its statistics with 4 processes, but"):
        loaded(inputs(2))
    loaded.eval()(inputs(2))
    replica = layer._replicate_for_data_parallel()
    with pytest.raises(nk.NormkitError, match=r"replica of nn.DataParallel"):
        replica(inputs(2))


def check_a_preflight_that_agrees(rank: int, groups: Groups) -> None:
    model = nk.sync(small_network(nk.BN, torch.float64))
    own = inputs(8, (5, 5), channels=3).split(2)[rank]
    report = nk.check_distributed(model, [1, 2], step=lambda: model(own).sum().backward())
    assert str(report) == (
        "4 processes with the same 2 norms, 2 of them synchronised, 2 batches each. "
        "Their running statistics agree."
    )
    with torch.no_grad():
        model[4].running_mean[3] += rank * model[4].running_var[3].sqrt()
    report = nk.check_distributed(model)
    assert not report.agree
    first, second = report.disagreements
    assert (first.path, round(first.mean, 6), second.mean < 1e-6) == ("4", 3.0, True)
    assert str(report).splitlines()[-1].split() == ["4", "3", "1"]


def check_a_preflight_names_what_differs(rank: int, groups: Groups) -> None:
    model = nk.sync(small_network(nk.BN, torch.float32))
    model[4].train(rank != 2)
    message = r"norm 2, 4 \(rank 0, 1, 3: train mode; rank 2: eval mode\)"
    with pytest.raises(RankError, match=message):
        nk.check_distributed(model)
    model.train()
    with pytest.raises(RankError, match=r"batches \(rank 0: 7; rank 1, 2, 3: 8\)"):
        nk.check_distributed(model, 8 - (rank == 0))
    other = small_network(nk.BN if rank else nk.RBN, torch.float32)
    with pytest.raises(RankError, match=r"norm 1, 1 \(rank 0: RBN\(8\); rank 1, 2, 3: BN\(8\)\)"):
        nk.check_distributed(other)


def check_a_hang_names_the_layer(rank: int, groups: Groups) -> None:
    """One rank leaves a layer out: its collective would wait for ever, or meet that of another."""
    model = nk.sync(small_network(nk.BN, torch.float32))
    own = inputs(8, (5, 5), channels=3, dtype=torch.float32).split(2)[rank]
    parts = nn.Sequential(*(m for m in model if rank != 1 or m is not model[4]))
    message = r"number 2: rank 0, 2, 3: 4 \(train mode\); rank 1: the backward of 1\. "
    with pytest.raises(RankError, match=message):
        nk.check_distributed(model, step=lambda: parts(own).sum().backward())

    def failing() -> None:
        if rank == 3:
            raise ZeroDivisionError("a loss")
        model(own)

    expected = ZeroDivisionError if rank == 3 else RankError
    with pytest.raises(expected, match="a loss"):
        nk.check_distributed(model, step=failing)
    if rank != 1:
        with pytest.raises(RankError, match=r"Rank 1 did not come to check_distributed within 0.5"):
            nk.check_distributed(model, timeout=0.5)
    else:
        next(meeting._meetings)
