"""What ``sync`` and ``check_distributed`` say where there are no other processes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import normkit as nk
from normkit.core.processes import Processes
from normkit.errors import RankError
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
