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

import normkit as nk
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


# ---------------------------------------------------------------- integers


@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is deprecated, and says so
def test_a_quantized_model_is_refused_by_every_verb() -> None:
    """A ResNet of int8 was told that it "has no normalization layers": they had gone into the
    convolutions. The model before quantization has FloatFunctional inside, and is fine."""
    ao = pytest.importorskip("torch.ao.quantization")
    model = nn.Sequential(ao.QuantStub(), *network(), ao.DeQuantStub()).eval()
    assert len(survey(model)) == 1
    model.add_module("sum", torch.ao.nn.quantized.FloatFunctional())
    assert len(survey(model)) == 1
    del model.sum
    ao.fuse_modules(model, ["1", "2", "3"], inplace=True)
    model.qconfig = ao.get_default_qconfig(torch.backends.quantized.engine)
    ao.prepare(model, inplace=True)
    model(X)
    ao.convert(model, inplace=True)
    model(X)
    batches = [(X, torch.zeros(2, dtype=torch.long))]
    for verb in (
        lambda: nk.survey(model),
        lambda: nk.convert(model, "gn"),
        lambda: nk.diagnose(model, batches),
        lambda: nk.calibrate(model, batches),
        lambda: nk.adapt(model, batches),
        lambda: nk.attribute_gap(model, batches),
        lambda: nk.observe(model),
        lambda: nk.fold(model),
        lambda: nk.fuse(model),
        lambda: nk.standardize(model),
        lambda: nk.freeze(model),
        lambda: nk.recipes.micro_batch(model),
    ):
        with pytest.raises(OptionError, match=r"quantized.*before quantization"):
            verb()


@pytest.mark.filterwarnings("ignore")
def test_linear_layers_of_integers_do_not_hide_the_norms() -> None:
    ao = pytest.importorskip("torch.ao.quantization")
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()
    ao.quantize_dynamic(model, {nn.Linear}, inplace=True)
    assert type(model[0]) is not nn.Linear
    assert isinstance(nk.convert(model, "rbn")[1], nk.RBN)


# ---------------------------------------------------------------- sparse inputs


def test_models_that_take_sparse_tensors_are_looked_at() -> None:
    """diagnose, calibrate and adapt ended in torch's NotImplementedError of as_strided."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, 6))
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.norm(torch.sparse.mm(x, self.weight))
            return y

    model = Bag().eval()
    words = torch.randn(4, 8, 9).relu()
    labels = torch.randint(6, (4, 8))
    sparse = [(x.to_sparse(), y) for x, y in zip(words, labels, strict=True)]
    dense = list(zip(words, labels, strict=True))
    ours, theirs = nk.diagnose(model, sparse), nk.diagnose(model, dense)
    assert [f.kind for f in ours.findings] == [f.kind for f in theirs.findings]
    assert nk.calibrate(model, sparse).kept
    expected = (words.flatten(0, 1) @ model.weight).mean(0)
    assert torch.allclose(model.norm.running_mean, expected, atol=1e-5)
    nk.adapt(model, sparse)
