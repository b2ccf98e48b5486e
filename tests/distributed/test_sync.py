"""What ``sync`` and ``check_distributed`` say where there are no other processes."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn

import normkit as nk
from normkit.core import processes
from normkit.core.processes import Processes
from normkit.distributed.meeting import Meeting
from normkit.errors import RankError
from normkit.inspection import undisturbed
from normkit.layers import synchronised


def test_without_a_process_group_it_is_an_error_and_nothing_changes() -> None:
    model = nn.Sequential(nk.BN(8))
    with pytest.raises(nk.NormkitError, match=r"no process group. Try torch.distributed.init"):
        nk.sync(model)
    with pytest.raises(nk.NormkitError, match=r"no process group. Try torch.distributed.init"):
        nk.check_distributed(model)
    assert model[0].processes is None


def test_a_model_without_batch_statistics_has_nothing_to_share() -> None:
    with pytest.raises(nk.NormkitError, match="no norm of normkit with statistics of a batch"):
        nk.sync(nn.Sequential(nk.GN(8), nk.SN(8, use_bn=False), nk.IBN(8, ratio=1.0)), False)
    with pytest.raises(nk.NormkitError, match=r'nk.convert\(model, "bn"\) first'):
        nk.sync(nn.Sequential(nn.BatchNorm2d(8)), False)


def test_within_needs_statistics_that_are_shared() -> None:
    with pytest.raises(nk.NormkitError, match="within= with statistics that are shared"):
        nk.sync(nn.Sequential(nk.BN(8)), False, within=2)


def test_torchs_own_conversion_warns_where_it_cannot_work() -> None:
    """It goes by our layers without a word otherwise: every process trains its own statistics."""
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nk.BN(8))
    with pytest.warns(UserWarning, match=r"leaves BN as it is, without a process group. Try nk.sy"):
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert [name for name, _ in model.named_children()] == ["0", "1"]


def test_torchs_own_conversion_in_a_process_outside_of_the_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was an AttributeError: what stands for a group there is a number."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    outside = torch.distributed.GroupMember.NON_GROUP_MEMBER
    with pytest.raises(nk.NormkitError, match="this process is no member of"):
        nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nk.BN(8)), outside)


def test_training_without_the_processes_is_an_error_and_eval_is_not() -> None:
    layer = nk.BN(8)
    layer.synchronise(Processes("0", 4, 0))
    x = torch.randn(4, 8, 3, 3)
    with pytest.raises(nk.NormkitError, match=r"4 processes, but here is no process group of them"):
        layer(x)
    plain = copy.deepcopy(layer).eval()
    torch.testing.assert_close(layer.eval()(x), nk.sync(plain, False)(x))
    layer.synchronise(Processes("0", 1, 0))  # one process shares with nobody
    assert layer.train()(x).shape == x.shape


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> nk.BN:
    """A layer that takes itself for one of four."""
    layer = nk.BN(8)
    layer.synchronise(Processes("0", 4, 0))
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    return layer


def test_why_no_kernel_makes_the_map(shared: nk.BN) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    x = torch.randn(4, 8, 3, 3, device="cuda" if torch.cuda.is_available() else "cpu")
    with nk.use_backend("triton"):
        text = nk.why(shared.to(x.device), x)
        assert text.endswith("coefficients by torch, because other processes share its statistics.")
        assert "processes" not in nk.why(shared.eval(), x)


def test_a_collective_that_fails_names_the_layer(
    shared: nk.BN, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gloo says "Connection closed by peer [127.0.0.1]:5248", and nothing of where that was."""

    def closed(*args: object) -> None:
        raise RuntimeError("Connection closed by peer.")

    monkeypatch.setattr(synchronised, "merged", closed)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), shared)
    with pytest.raises(
        RankError, match=r"BN \(1\) could not share.*4 processes: Connection closed"
    ):
        model(torch.randn(2, 3, 4, 4))


def test_replicas_of_data_parallel_count_in_the_original() -> None:
    """nn.DataParallel calls shallow copies of a layer; that on the first device has its buffers."""
    layer = nk.UBN(8)
    replica = layer._replicate_for_data_parallel()
    for name, parameter in layer.named_parameters():
        setattr(replica, name, parameter.clone())
    replica(torch.randn(4, 8, 3, 3)).sum().backward()
    assert int(layer.num_batches_tracked) == 1
    assert float(layer.score) != 1.0
    assert all(p.grad is not None for p in layer.parameters())


# -------------------------------------------------------------------- looking at a model


def _refused(*args: object) -> None:
    raise AssertionError("waits for other processes, which are not looking")


@pytest.fixture
def network(shared: nk.BN, monkeypatch: pytest.MonkeyPatch) -> nn.Sequential:
    """One of four, and any collective is an error."""
    monkeypatch.setattr(processes, "_all_reduce", _refused)
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    model = nn.Sequential(nn.Conv2d(3, 8, 1), shared, nn.ReLU(), head)
    with pytest.raises(AssertionError, match="waits for other"):
        model(torch.randn(2, 3, 4, 4))
    return model


def test_looking_at_a_model_waits_for_nobody(network: nn.Sequential) -> None:
    """One rank that diagnosed a synchronised model hung, or mixed its sums into a training step."""
    batches = [(torch.randn(8, 3, 4, 4), torch.randint(0, 3, (8,))) for _ in range(2)]
    nk.diagnose(network, batches)
    nk.attribute_gap(network, batches, method="swap")
    for mode in (True, False):
        with nk.batch_statistics(network.train(mode)):
            network(batches[0][0])
    with pytest.raises(ZeroDivisionError), nk.batch_statistics(network), undisturbed(network):
        raise ZeroDivisionError
    assert "_lookers" not in vars(network[1])
    with pytest.raises(AssertionError, match="waits for other"):
        network.train()(batches[0][0])


def test_a_look_is_of_one_thread_and_not_of_copies(network: nn.Sequential) -> None:
    seen: list[object] = []
    with nk.batch_statistics(network), undisturbed(network):
        network[1].training = True
        assert network[1].sharing() is None
        thread = threading.Thread(target=lambda: seen.append(network[1].sharing()))
        thread.start()
        thread.join()
        seen.append(copy.deepcopy(network[1]).sharing())
    assert seen == [network[1].processes] * 2
    first, second = (nk.batch_statistics(network) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert network[1].sharing() is None
    second.__exit__(None, None, None)
    assert network[1].train().sharing() is network[1].processes


# -------------------------------------------------------------------- conversion


def test_conversion_carries_the_sharing_or_says_that_it_is_lost(network: nn.Sequential) -> None:
    """To ubn it was lost in silence: each process then trained on its own statistics."""
    among = "sharing with 4 processes"
    step = nk.plan_conversion(network, "gn", groups=2, example=False).steps[0]
    assert among in step.lost
    step = nk.plan_conversion(network, "torch_bn", example=False).steps[0]
    assert among in step.lost
    known = network[1].processes
    plan = nk.plan_conversion(network, "ubn", example=False)
    plan.apply()
    assert among in plan.steps[0].carried
    assert network[1].processes is known
    nk.convert(network, "torch_bn", example=False)
    assert not hasattr(network[1], "processes")


def test_sync_says_that_torchs_layers_share_already() -> None:
    with pytest.raises(nk.NormkitError, match=r"nn.SyncBatchNorm share theirs already.*try nk.con"):
        nk.sync(nn.Sequential(nn.SyncBatchNorm(8)), False)


# -------------------------------------------------------------------- check_distributed


@pytest.fixture
def one_process() -> Iterator[None]:
    """A process group of this process alone."""
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_check_looks_through_wrappers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes nothing, but refused what docs/distributed.md shows: the model inside of DDP."""
    model = nk.sync(nn.Sequential(nn.Conv2d(3, 8, 1), nk.BN(8)))
    x = torch.randn(4, 3, 2, 2)
    places: list[str] = []
    meet = Meeting.meet
    monkeypatch.setattr(
        Meeting, "meet", lambda self, place, *a: (places.append(place), meet(self, place, *a))[1]
    )
    plain = torch.compile(model, backend="eager")
    plain(x)  # code that is there before the hooks are
    for wrapped in (nn.parallel.DistributedDataParallel(model), plain, nn.DataParallel(plain)):
        places.clear()
        report = nk.check_distributed(wrapped, step=lambda w=wrapped: w(x).sum().backward())
        assert report.norms == 1
        assert places[1:3] == ["1 (train mode)", "the backward of 1"]


@pytest.mark.usefixtures("one_process")
def test_check_refuses_what_was_loaded_from_a_file() -> None:
    """It was called synchronised, but every forward in training was an error."""
    layer = nk.BN(8)
    layer.synchronise(Processes("0", 4, 0))
    model = nn.Sequential(pickle.loads(pickle.dumps(layer)))
    with pytest.raises(RankError, match=r"1 norm, such as 0, would share.*Try nk.sync\(model\) ag"):
        nk.check_distributed(model)
    assert nk.check_distributed(nk.sync(model)).norms == 1
