"""From a setting and a seed to a model: what variants share, and how new layers start."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normkit as nk
from normkit.errors import NormkitError, NothingToDo, OptionError, ShapeError, UnknownName
from normkit.lab.experiment import Data, Model, ModelStep, Run, Setting, Train
from normkit.lab.models.variant import build_variant, learning_rate_followers

# every normalizer is made with its default options, and bgn says what that means for it
pytestmark = pytest.mark.filterwarnings("ignore:.*Without groups=")

SMALL = (1, 8, 8)
SEED = Run(Setting(), 1).torch_seed()
ACTIVATION, WEIGHT = nk.names("activation"), nk.names("weight")
MODELS = {
    "four_layer": Model("native:four_layer"),
    "mlp": Model("native:mlp", options={"depth": 2}),
    "resnet": Model("native:resnet", options={"depth": 8}),
    "small_cnn": Model("native:small_cnn"),
    "wrn": Model("native:wrn", options={"depth": 10, "width": 1}),
}


def step(name: str, **options: Any) -> ModelStep:
    kind = "weights" if name in WEIGHT else "norm"
    return ModelStep(kind, name, options=options)


def made(*steps: ModelStep, model: Model = MODELS["small_cnn"], seed: int = SEED) -> nn.Module:
    return build_variant(Setting(model=model, steps=steps), 10, SMALL, seed)


def norms(model: nn.Module) -> list[Any]:
    found = (site.module for site in nk.survey(model))
    return [norm.norm if isinstance(norm, nk.NormAct) else norm for norm in found]


# ---------------------------------------------------------------- every variant trains


# all of them in two models; the others have the same layers in other places, and take turns
TURNS = [
    (model, name)
    for place, model in enumerate(MODELS)
    for number, name in enumerate([*ACTIVATION, *WEIGHT])
    if model in ("mlp", "small_cnn") or (number + place) % 3 == 0
]


@pytest.mark.parametrize(("model", "name"), TURNS)
def test_every_normalizer_trains_a_step(model: str, name: str) -> None:
    size = (1, 16, 16)
    setting = Setting(model=MODELS[model], steps=(step(name),))
    x, target = torch.randn(8, *size), torch.arange(8)
    if model == "mlp" and name in WEIGHT:
        with pytest.raises(NothingToDo, match="no convolution"):
            build_variant(setting, 10, size, SEED)
        return
    net = build_variant(setting, 10, size, SEED)
    if model == "mlp" and name in ("in", "ibn"):
        with pytest.raises(ShapeError, match="more than one position"):
            net(x)
        return
    before = [p.detach().clone() for p in net.parameters()]
    loss = nn.functional.cross_entropy(net(x), target)
    loss.backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    assert math.isfinite(loss.item())
    changed = [not torch.equal(p, q) for p, q in zip(net.parameters(), before, strict=True)]
    assert changed[0], "the first layer has no gradient"
    assert sum(changed) > len(changed) / 2
    converted = {site.kind for site in nk.survey(net)}
    assert converted == {name} if name in ACTIVATION else len(nk.survey(net).weights) > 0


# ---------------------------------------------------------------- what variants share


def shared(a: nn.Module, b: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """Tensors of one name and shape in both models, but for those of norms."""
    own, other = dict(a.named_parameters()), dict(b.named_parameters())
    inside = tuple(f"{site.path}." for model in (a, b) for site in nk.survey(model))
    names = [n for n in own if n in other and not n.startswith(inside)]
    return [(n, own[n], other[n]) for n in names if own[n].shape == other[n].shape]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", ["bn", "bcn", "bnet", "ubn", "sn", "shifted_bn"])
def test_shared_parameters_are_the_same_bits(model: str, name: str) -> None:
    plain, other = made(model=MODELS[model]), made(step(name), model=MODELS[model])
    pairs = shared(plain, other)
    assert len(pairs) == len([p for p in plain.parameters() if p.dim() > 1]) + 1 or model == "mlp"
    for name, a, b in pairs:
        assert torch.equal(a, b), name


def test_weights_before_standardization_are_the_same_bits() -> None:
    plain, ws = made(), made(step("gn"), step("ws"))
    assert torch.equal(ws.conv2.conv.parametrizations.weight.original, plain.conv2.conv.weight)


def test_equal_layers_start_equally_whatever_the_other_options() -> None:
    """The ablations of a layer, and bnet's kernel and ubn's, differ in what they say alone."""
    a, b = made(step("ubn", tau=0.15)), made(step("ubn", tau=0.25, centering=False))
    c = made(step("bnet"))
    for path in ("conv1.norm", "conv3.norm"):
        first, second, third = (m.get_submodule(path).weight for m in (a, b, c))
        assert torch.equal(first, second)
        assert torch.equal(first, third)


def test_a_choice_of_layers_changes_no_other_layer() -> None:
    everywhere, one = made(step("ubn")), made(ModelStep("norm", "ubn", where="conv3"))
    assert torch.equal(everywhere.conv3.norm.weight, one.conv3.norm.weight)
    assert isinstance(one.conv1.norm, nn.BatchNorm2d)


def test_scales_of_the_recipe_share_their_weights() -> None:
    a, b = (made(ModelStep("recipe", "scaled_bn", options={"scale": s})) for s in (0.1, 1.0))
    assert torch.equal(a.conv2.conv.weight, b.conv2.conv.weight)
    assert torch.equal(a.fc.weight, b.fc.weight)
    assert a.conv1.norm.weight.unique().tolist() == pytest.approx([0.1])


def test_a_seed_is_a_model_and_another_seed_another() -> None:
    again, other = (made(step("ubn"), seed=s) for s in (SEED, SEED + 1))
    for (name, p), q in zip(made(step("ubn")).named_parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q), name
    assert not torch.equal(again.conv1.conv.weight, other.conv1.conv.weight)
    assert not torch.equal(again.conv1.norm.weight, other.conv1.norm.weight)


def test_torchs_random_numbers_go_on_as_if_nothing_was_made() -> None:
    state = torch.get_rng_state()
    made(step("ubn"), step("ws"))
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- fresh starts


@pytest.mark.parametrize("name", ACTIVATION)
def test_layers_start_as_their_constructor_starts_them(name: str) -> None:
    drawn = {"bnet": ("weight", "bias"), "ubn": ("weight", "bias")}.get(name, ())
    for layer in norms(made(step(name))):
        options = {"seed": layer.seed} if name == "shifted_bn" else {}
        new = nk.make(name, layer.channels, **options)
        assert repr(layer) == repr(new)
        for key, value in layer.state_dict().items():
            if key not in drawn:
                assert torch.equal(value, new.state_dict()[key]), key


@pytest.mark.parametrize("name", ["bnet", "ubn"])
def test_kernels_start_in_torchs_default_range(name: str) -> None:
    values = torch.cat([layer.weight.flatten() for layer in norms(made(step(name)))])
    assert values.abs().max() <= 1 / 3  # of a 3×3 depthwise convolution
    assert values.std().item() == pytest.approx(1 / 3 / math.sqrt(3), rel=0.1)  # uniform
    assert len(values.unique()) > 0.9 * len(values)


def test_scale_init_counts_for_every_layer_even_where_the_network_says_zero() -> None:
    zero = Model("native:resnet", options={"depth": 8, "zero_init_residual": True})
    for layer in norms(made(step("bn", scale_init=0.1), model=zero)):
        assert layer.weight.unique().tolist() == pytest.approx([0.1])


@pytest.mark.parametrize("name", ["bn", "gn", "rbn", "bcn", "ubn", "sn"])
def test_a_branch_that_starts_at_zero_stays_at_zero(name: str) -> None:
    zero = Model("native:resnet", options={"depth": 8, "zero_init_residual": True})
    model = made(step(name), model=zero)
    x = torch.rand(4, 16, 8, 8)
    assert torch.equal(model.layer1[0](x), x)
    model.layer1[0](x).square().mean().backward()
    last = model.layer1[0].bn2
    gradient = last.group_weight.grad if name == "bcn" else last.weight.grad
    assert gradient.abs().max() > 0, "the branch could never leave zero"


def test_what_the_network_sets_on_purpose_is_kept() -> None:
    """timm's EfficientNets for TensorFlow weights have eps 1e-3."""
    pytest.importorskip("timm")
    model = Model("timm:inception_v4", stem="cifar")
    net = build_variant(Setting(model=model, steps=(step("gn"),)), 10, (3, 32, 32), SEED)
    assert {layer.eps for layer in norms(net)} == {1e-3}
    kept = [m for m in net.modules() if isinstance(m, nk.NormAct)]
    assert all(isinstance(m.act, nn.ReLU) for m in kept)
    assert len(kept) == len(norms(net))


def test_a_papers_own_momentum_is_not_torchs() -> None:
    assert {layer.momentum for layer in norms(made(step("batch_renorm")))} == {0.01}
    assert {layer.momentum for layer in norms(made(step("bn", momentum=0.9)))} == {0.9}


def test_shifted_targets_differ_from_layer_to_layer_and_seed_to_seed() -> None:
    first, second = (
        made(step("shifted_bn", mean_spread=1.0), model=MODELS["four_layer"]),
        made(step("shifted_bn", mean_spread=1.0), model=MODELS["four_layer"], seed=SEED + 1),
    )
    targets = [layer.target_mean for layer in (*norms(first), *norms(second))]
    assert len({tuple(t.tolist()) for t in targets}) == 8


# ---------------------------------------------------------------- steps


def test_steps_are_done_in_their_order() -> None:
    model = made(
        step("bn"), ModelStep("norm", "gn", where="conv3", options={"groups": 4}), step("ws")
    )
    kinds = [site.kind for site in nk.survey(model)]
    assert kinds == ["bn", "bn", "gn"]
    assert model.conv3.norm.groups == 4
    assert len(nk.survey(model).weights) == 3


def test_the_norm_of_the_input_is_not_converted() -> None:
    """revisiting-bn compares rbn with its own method, both after the same input norm."""
    recipe = ModelStep("recipe", "scaled_bn", options={"scale": 1.0})
    model = made(recipe, step("rbn", centering=False))
    assert isinstance(model.input_norm, nk.InputNorm)
    assert [site.kind for site in nk.survey(model)].count("rbn") == 3


def test_alternative_forms_with_the_recipe() -> None:
    recipe = ModelStep("recipe", "scaled_bn", options={"scale": 0.1})
    model = made(step("bn", form="a2"), recipe)
    assert model.conv1.norm.weight.unique().tolist() == pytest.approx([0.1])
    assert model.conv1.norm.inner_weight.unique().tolist() == [1.0]


def test_groups_of_bgn_follow_the_images_a_worker() -> None:
    train = Train(batch=64, worker_batch=8)
    setting = Setting(model=MODELS["resnet"], steps=(ModelStep("recipe", "bgn"),), train=train)
    assert {layer.groups for layer in norms(build_variant(setting, 10, SMALL, SEED))} == {16}


def test_recipes_of_kernels_start_as_the_authors_start_them() -> None:
    ubn = norms(made(ModelStep("recipe", "ubn"), model=MODELS["resnet"]))
    wide = torch.cat([layer.weight.flatten() for layer in ubn if layer.channels == 64])
    assert wide.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.1)  # by fan-out
    bnet = made(ModelStep("recipe", "bnet"), model=MODELS["resnet"])
    x = torch.rand(2, 16, 8, 8)
    assert torch.equal(bnet.layer1[0](x), x)


def test_bnet_everywhere_does_not_start_at_zero() -> None:
    model = made(ModelStep("recipe", "bnet", options={"placement": "all"}))
    model(torch.randn(4, *SMALL)).square().mean().backward()
    assert model.conv1.conv.weight.grad.abs().max() > 0


def test_a_momentum_that_a_layer_cannot_use_is_left_out() -> None:
    model = made(step("bn", momentum=0.9), step("bcn", micro=True))
    assert {site.kind for site in nk.survey(model)} == {"bcn"}
    kept = made(step("bn", momentum=0.9), step("rbn"))
    assert {layer.momentum for layer in norms(kept)} == {0.9}


def test_micro_batch_layers_are_told_the_learning_rate() -> None:
    micro, fixed = made(step("bcn", micro=True)), made(step("bcn", micro=True, update_rate=0.01))
    assert (
        len(learning_rate_followers(micro)),
        len(learning_rate_followers(fixed)),
        len(learning_rate_followers(made())),
    ) == (3, 0, 0)
    for layer in learning_rate_followers(micro):
        layer.set_update_rate(0.5)
    assert torch.isfinite(micro(torch.randn(1, *SMALL))).all()


@pytest.mark.parametrize(
    ("steps", "error", "says"),
    [
        ([ModelStep("norm", "ubm")], UnknownName, "Did you mean 'ubn'"),
        ([ModelStep("norm", "gn", options={"groups": 5})], OptionError, "does not divide"),
        ([ModelStep("norm", "gn", where="layer9")], NothingToDo, "fits none"),
        ([ModelStep("recipe", "scaled")], UnknownName, "Did you mean 'scaled_bn'"),
        ([ModelStep("recipe", "xbn")], OptionError, "no blocks"),
        ([ModelStep("weights", "wz")], UnknownName, "no method"),
        ([ModelStep("weights", "ws", where="conv1")], OptionError, "no where"),
        ([ModelStep("nrm", "gn")], OptionError, "Did you mean 'norm'"),
    ],
)
def test_what_cannot_be_is_told(
    steps: list[ModelStep], error: type[NormkitError], says: str
) -> None:
    with pytest.raises(error, match=says):
        made(*steps)


def test_a_model_without_norms_is_told() -> None:
    bare = Model("native:mlp", options={"norm": False, "depth": 2})
    with pytest.raises(NothingToDo, match="No norm of the model can become gn"):
        made(step("gn"), model=bare)


def test_other_data_gives_the_same_model_where_the_shape_is_the_same() -> None:
    a = build_variant(Setting(data=Data(name="digits")), 10, SMALL, SEED)
    b = build_variant(Setting(data=Data(name="synthetic")), 10, SMALL, SEED)
    assert torch.equal(a.fc.weight, b.fc.weight)
