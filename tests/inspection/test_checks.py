"""Wrapped and compiled models are refused, with what to do instead."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from normkit.errors import OptionError
from normkit.inspection import refuse_wrapped, survey

X = torch.zeros(2, 3, 8, 8)


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()


def scripted() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return torch.jit.script(network())


def exported() -> Any:
    return torch.export.export(network(), (X,))


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: nn.DataParallel(network()), r"DataParallel.*Try model\.module"),
        (lambda: torch.compile(network(), backend="eager"), r"Try model\._orig_mod"),
        (lambda: nn.Sequential(nn.DataParallel(network())), r"The model's 0.*model\.0\.module"),
        (scripted, "TorchScript.*nn.Module that was scripted"),
        (lambda: nn.Sequential(scripted()), "The model's 0 is compiled by TorchScript"),
        (exported, "nn.Module that was exported"),
        (lambda: exported().module(), "nn.Module that was exported"),
        (lambda: torch.export.unflatten(exported()), "nn.Module that was exported"),
        (lambda: "resnet50", "an nn.Module, got str"),
        (lambda: nn.BatchNorm2d, "an nn.Module, got type"),
    ],
    ids=[
        *("DataParallel", "compiled", "part of a model", "scripted", "scripted part"),
        *("ExportedProgram", "its module", "unflattened", "text", "class"),
    ],
)
def test_refused(build: Any, words: str) -> None:
    model = build()
    with pytest.raises(OptionError, match=words):
        survey(model)


@pytest.mark.usefixtures("one_process")
def test_distributed_models_are_refused() -> None:
    with pytest.raises(OptionError, match=r"DistributedDataParallel.*model\.module"):
        refuse_wrapped(nn.parallel.DistributedDataParallel(network()))
    sharded = network()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))  # becomes an FSDPSequential
    with pytest.raises(OptionError, match=r"before fully_shard\(model\)"):
        refuse_wrapped(sharded)


def test_a_traced_graph_of_modules_is_fine() -> None:
    traced = torch.fx.symbolic_trace(network())
    assert [site.path for site in survey(traced)] == ["1"]
