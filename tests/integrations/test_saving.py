"""safetensors and the Hugging Face hub keep whatever a layer keeps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import normkit as nk
from cases import build, every, inputs, label


class SideBySide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({label(c).replace(".", "_"): build(c) for c in every()})


def test_safetensors(tmp_path: Path) -> None:
    """Every layer after two batches, in one file; the twin goes on as the layer does."""
    library = pytest.importorskip("safetensors.torch")
    nets = SideBySide(), SideBySide()
    for layer in nets[0].layers.values():
        layer(inputs()), layer(inputs())
    library.save_model(nets[0], str(tmp_path / "net.safetensors"))
    missing, unexpected = library.load_model(nets[1], str(tmp_path / "net.safetensors"))
    assert (missing, unexpected) == (set(), [])
    x = inputs()
    for name, layer in nets[0].layers.items():
        twin = nets[1].layers[name]
        torch.testing.assert_close(twin(x), layer(x), rtol=0, atol=0, msg=name)
        for key, value in layer.state_dict().items():
            assert torch.equal(twin.state_dict()[key], value) or value.isnan().all(), (name, key)


def test_a_model_of_the_hub(tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")

    class Net(nn.Module, hub.PyTorchModelHubMixin):
        def __init__(self, norm: str = "bn", channels: int = 8) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, channels, 3), nk.make(norm, channels))

    net, x = Net("ubn"), torch.randn(4, 3, 6, 6)
    net.net(x)
    net.save_pretrained(tmp_path)
    twin = Net.from_pretrained(tmp_path)
    assert isinstance(twin.net[1], nk.UBN)
    torch.testing.assert_close(twin.net.eval()(x), net.net.eval()(x), rtol=0, atol=0)
