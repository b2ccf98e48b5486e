"""Whoever looks into the arithmetic finds it: tracers, forward-mode derivatives, fake tensors."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch._subclasses.fake_tensor import FakeTensorMode

import normkit as nk
from cases import ACTIVATION, build, every, inputs, label
from normkit.core import layout


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("case", every(), ids=label)
def test_traced_saved_and_called_with_another_size(case):
    """Tracing ended in "IndexError: unordered_map::at"."""
    layer = build(case).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)  # checks of the shape
        traced = torch.jit.trace(layer, inputs())
    # sizes that are tensors of a graph are of no use later
    assert all(type(size) is int for key in layout._known for size in key[1])
    file = io.BytesIO()
    torch.jit.save(traced, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    sizes = [inputs()] if case[1].get("groups", 1) == 5 else [inputs(), inputs(4, (5, 6))]
    for x in sizes:  # uneven groups are cut for the size they were traced with
        wanted = copy.deepcopy(layer)(x)  # a layer may count in eval mode too
        torch.testing.assert_close(loaded(x), wanted)


@pytest.mark.parametrize("case", every(), ids=label)
def test_one_node_to_torch_fx(case):
    """As layers of torch.nn: tools that cut models into features look for it by its name."""
    model = torch.nn.Sequential(build(case), torch.nn.ReLU()).eval()
    graph = torch.fx.symbolic_trace(model)
    called = [node.target for node in graph.graph.nodes if node.op == "call_module"]
    assert called == ["0", "1"]
    x, again = inputs(), copy.deepcopy(model)  # a layer may count in eval mode too
    torch.testing.assert_close(graph(x), again(x))


def test_features_of_a_converted_model():
    models = pytest.importorskip("torchvision.models", reason="torchvision is not installed")
    from torchvision.models.feature_extraction import create_feature_extractor as features

    model = nk.convert(models.resnet18(num_classes=10), "bcn").eval()
    x, seen = torch.randn(1, 3, 64, 64), []
    model.layer3[0].bn1.register_forward_hook(lambda layer, given, y: seen.append(y.clone()))
    model(x)
    for made in (model, nk.fuse(copy.deepcopy(model))):
        found = features(made, {"layer3.0.bn1": "norm", "fc": "end"})(x)
        torch.testing.assert_close(found["end"], made(x))
    found = features(model, {"layer3.0.bn1": "norm"})(x)
    torch.testing.assert_close(found["norm"], seen[0])


def test_what_is_no_tensor_is_named():
    with pytest.raises(nk.errors.DtypeError, match=r"expects a tensor.*got list. Try torch.stack"):
        nk.BN(8)([torch.randn(8, 4, 4)])


@pytest.mark.parametrize("name", ACTIVATION)
def test_dual_numbers(name):
    """Forward-mode derivatives, as torch.nn has them: against differences."""
    layer, x = build((name, {})).eval(), inputs()
    tangent, h = torch.randn_like(x), 1e-5
    with fwd.dual_level():
        found = fwd.unpack_dual(layer(fwd.make_dual(x, tangent))).tangent
    ahead, behind = (layer(x + s * h * tangent).detach() for s in (1, -1))
    torch.testing.assert_close(found, (ahead - behind) / (2 * h), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", every(), ids=label)
def test_fake_tensors(case):
    """What estimators of memory and operations run a model with: shapes without values."""
    with FakeTensorMode():
        layer, x = build(case), inputs(memory="channels_last").requires_grad_()
        y = layer(x, torch.randn_like(x), "relu")
        y.sum().backward()
        assert y.shape == x.shape
        assert x.grad.shape == x.shape
    real = build(case)  # nothing fake is left behind
    assert real(inputs(memory="channels_last")).isfinite().all()


class TestCutsThatAreRemembered:
    """Uneven groups are worked out once a shape, by whoever comes first."""

    def test_validation_in_inference_mode_comes_first(self):
        """The first training step failed: inference tensors cannot be saved for backward."""
        layer, x = nk.BGN(8, groups=5), torch.randn(4, 8, 3, 11)
        with torch.inference_mode():
            layer.eval()(x)
        layer.train()(x).sum().backward()
        assert layer.weight.grad is not None

    def test_whatever_the_default_device_is(self):
        layer, x = nk.BGN(8, groups=5), torch.randn(4, 8, 3, 13)
        with torch.device("meta"):
            found = layer(x)
        assert found.device.type == "cpu"
        assert found.isfinite().all()
