"""ONNX files: every layer in onnxruntime, and what is refused before a file is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from cases import build, every, inputs, label
from normkit.errors import NormkitError, OptionError

onnx = pytest.importorskip("onnx", reason="needs onnx: pip install 'normkit[onnx]'")
runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
pytest.importorskip("onnxscript", reason="needs onnxscript")

from normkit.integrations.onnx import export_onnx  # noqa: E402

pytestmark = pytest.mark.integration

REFUSED = [case for case in every() if build(case).not_in_onnx(any_size=False)]
FIXED = [case for case in every() if build(case).not_in_onnx(any_size=True) and case not in REFUSED]
HELD = [case for case in every() if case not in (*REFUSED, *FIXED)]


class SideBySide(nn.Module):
    """Layers that all get the input: one program, for a program each costs seconds."""

    def __init__(self, cases: list) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build(case, torch.float32) for case in cases)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in self.layers]


def small_net() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nk.GN(8, groups=4)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 2)),
    )


@pytest.mark.parametrize("name", sorted({case[0] for case in HELD}))
def test_every_layer(name: str, tmp_path: Path) -> None:
    """Whatever the batch and the size of the images."""
    cases = [case for case in HELD if case[0] == name]
    example = inputs(6, dtype=torch.float32)
    written = export_onnx(SideBySide(cases), example, tmp_path / "layers.onnx", any_size=True)
    assert len(written.shapes) == 3
    assert written.difference <= 1e-5


@pytest.mark.parametrize("case", FIXED, ids=label)
def test_groups_that_cut_channels_have_one_size(case: tuple, tmp_path: Path) -> None:
    """Uneven groups could not be exported, for a number of repetitions that torch's converter does
    not know; equal ones gave a file that failed for the second size."""
    net, x = nn.Sequential(build(case, torch.float32)), inputs(6, (5, 3), dtype=torch.float32)
    with pytest.raises(OptionError, match=r"0: its groups cut channels.*any_size=False"):
        export_onnx(net, x, tmp_path / "layer.onnx", any_size=True)
    assert export_onnx(net, x, tmp_path / "layer.onnx").difference <= 1e-5


def test_layers_that_cannot_be_exported_are_named(tmp_path: Path) -> None:
    assert {case[0] for case in REFUSED} == {"gw", "ubn"}
    net = nn.Sequential(*(build(case, torch.float32) for case in REFUSED))
    with pytest.raises(OptionError, match=r"0: ONNX has no eigenvalues.*; 1: its score moves"):
        export_onnx(net, inputs(dtype=torch.float32), tmp_path / "net.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("opset", [3, 17, 99, True, 18.5])
def test_an_opset_that_torch_cannot_write(opset: object, tmp_path: Path) -> None:
    """torch writes another and says so in its log."""
    with pytest.raises(OptionError, match=r"opset of 18 to \d\d, got"):
        export_onnx(small_net(), torch.randn(1, 3, 8, 8), tmp_path / "net.onnx", opset=opset)


def test_a_network_is_folded_compared_and_unchanged(tmp_path: Path) -> None:
    """In train mode, and with one image, which torch would make a constant."""
    net, x = small_net(), torch.randn(1, 3, 12, 12)
    state = {key: value.clone() for key, value in net.state_dict().items()}
    written = export_onnx(net, x, tmp_path / "new" / "net.onnx", opset=20)
    assert net.training
    assert all(torch.equal(state[key], value) for key, value in net.state_dict().items())
    assert (written.opset, written.folded) == (20, ("1",))
    assert "1 norms folded" in str(written)
    operators = [node.op_type for node in onnx.load(written.path).graph.node]
    assert "BatchNormalization" not in operators
    session = runtime.InferenceSession(str(written.path), providers=["CPUExecutionProvider"])
    many = torch.randn(5, 3, 12, 12)
    (found,) = session.run(None, {session.get_inputs()[0].name: many.numpy()})
    torch.testing.assert_close(torch.as_tensor(found), net.eval()(many), rtol=1e-5, atol=1e-5)


def test_narrow_types(tmp_path: Path) -> None:
    """Half models were refused for the rounding of half, bfloat16 failed inside of numpy."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nk.BN(8)).eval().half(), torch.randn(2, 3, 8, 8)
    assert export_onnx(net, x.half(), tmp_path / "half.onnx").difference <= 1e-2
    with pytest.raises(OptionError, match=r"or tolerance= if"):
        export_onnx(net, x.half(), tmp_path / "no.onnx", tolerance=1e-12)
    with pytest.raises(OptionError, match=r"torch.bfloat16.*Try model.float\(\)"):
        export_onnx(net.bfloat16(), x.bfloat16(), tmp_path / "no.onnx")
    assert not (tmp_path / "no.onnx").exists()


def test_what_torch_cannot_write(tmp_path: Path) -> None:
    class Eigen(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.linalg.eigvalsh(x @ x.mT)

    with pytest.raises(NormkitError, match="torch cannot write this model for ONNX"):
        export_onnx(Eigen(), torch.randn(2, 3, 3), tmp_path / "net.onnx", fold=False)
    assert list(tmp_path.iterdir()) == []
