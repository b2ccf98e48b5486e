"""Recipes: each paper's placement, written down by hand, against what the recipe does."""

from __future__ import annotations

import copy
import doctest
import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.nn.utils import parametrize

import normkit
from normkit.conversion import Plan, recipes
from normkit.conversion.param_groups import param_groups
from normkit.errors import NormkitError, NothingToDo, OptionError, UnknownName
from normkit.layers import BCN, BGN, BNET, GN, GW, IBN, IN, LN, UBN
from normkit.layers.base import Normalizer
from normkit.layers.bcn import follow_learning_rate

MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": torchvision.models.resnet18,
    "resnet50": torchvision.models.resnet50,
    "timm": lambda: timm.create_model("resnet26"),
}
BLOCKS = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3), "timm": (2, 2, 2, 2)}
NORMS = {"resnet18": 2, "resnet50": 3, "timm": 3}  # of a block
DOWN = {
    "resnet18": ["layer2.0", "layer3.0", "layer4.0"],
    "resnet50": ["layer1.0", "layer2.0", "layer3.0", "layer4.0"],
    "timm": ["layer1.0", "layer2.0", "layer3.0", "layer4.0"],
}


def blocks(name: str, stages: tuple[int, ...] = (1, 2, 3, 4)) -> list[str]:
    return [f"layer{s}.{b}" for s in stages for b in range(BLOCKS[name][s - 1])]


def everything(name: str) -> set[str]:
    """Every norm of the model: stem, blocks, shortcuts."""
    inside = {f"{b}.bn{i}" for b in blocks(name) for i in range(1, NORMS[name] + 1)}
    return {"bn1", *inside, *(f"{b}.downsample.1" for b in DOWN[name])}


def small(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        return (x + self.bn2(self.conv2(y))).relu()


class Tiny(nn.Module):
    """A residual network of its own make: two stages of two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16)
        self.stage1 = nn.Sequential(Block(16), Block(16))
        self.stage2 = nn.Sequential(Block(16), Block(16))
        self.fc = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.stage2(self.stage1(self.bn(self.conv(x)).relu())).mean((2, 3)))


def meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


def converted(plan: Plan) -> set[str]:
    return {step.path for step in plan.steps if step.action == "convert"}


def kinds(model: nn.Module, kind: type) -> set[str]:
    return {path for path, m in model.named_modules() if type(m) is kind}


def trains(model: nn.Module, after: Callable[[torch.optim.Optimizer], Any] = id) -> None:
    """One step: every parameter that is trained has a finite gradient."""
    optimizer = torch.optim.SGD(param_groups(model, 0.01, 1e-4))
    after(optimizer)
    loss = nn.functional.cross_entropy(model.train()(torch.rand(4, 3, 64, 64)), torch.arange(4))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    optimizer.step()


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "modules": {path: (id(m), type(m)) for path, m in model.named_modules()},
        "hooks": len(model._forward_pre_hooks),
        "values": {
            name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()
        },
    }


def unchanged(model: nn.Module, before: dict[str, Any]) -> bool:
    now = snapshot(model)
    values = now.pop("values"), before["values"]
    rest = {key: value for key, value in before.items() if key != "values"}
    same = values[0].keys() == values[1].keys() and all(
        identity == values[1][name][0] and torch.equal(t, values[1][name][1])
        for name, (identity, t) in values[0].items()
    )
    return now == rest and same


PLANS: dict[str, Callable[..., Plan]] = {
    "ubn": recipes.ubn,
    "ubn-fan_out": lambda m, **k: recipes.ubn(m, start="fan_out", **k),
    "scaled_bn": recipes.scaled_bn,
    "xbn": recipes.xbn,
    "micro_batch": recipes.micro_batch,
    "micro_batch-gn": lambda m, **k: recipes.micro_batch(m, "gn", zero_last=True, **k),
    "bgn": lambda m, **k: recipes.bgn(m, 4, **k),
    "ibn": recipes.ibn,
    "bnet": recipes.bnet,
    "bnet-all": lambda m, **k: recipes.bnet(m, "all", start="zero", **k),
}


# -------------------------------------------------------------------- what holds for all


@pytest.mark.parametrize("recipe", PLANS)
def test_the_plan_changes_nothing_and_undo_brings_everything_back(recipe: str) -> None:
    model, x = Tiny().eval(), torch.rand(2, 3, 9, 9)
    before = snapshot(model)
    expected = model(x)
    plan = PLANS[recipe](model)
    assert unchanged(model, before)
    certificate = plan.apply(x)
    assert certificate.probed
    assert str(certificate.converted) in str(plan)
    assert not unchanged(model, before)
    plan.undo()
    assert unchanged(model, before)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize(
    ("recipe", "name"), [*((recipe, "resnet18") for recipe in PLANS), ("xbn", "timm")]
)
def test_the_model_trains(recipe: str, name: str) -> None:
    model = small(name)
    PLANS[recipe](model).apply(example=False)
    follow = recipe == "micro_batch"
    trains(model, (lambda o: follow_learning_rate(model, o)) if follow else id)


@pytest.mark.parametrize("recipe", [r for r in PLANS if r != "scaled_bn"])
def test_twice_is_once(recipe: str) -> None:
    model = Tiny()
    PLANS[recipe](model).apply(example=False)
    again = PLANS[recipe](model)
    assert again.count() == 0
    assert not any(type(edit).__name__ in ("ReplaceModule", "Standardize") for edit in again.edits)


@pytest.mark.parametrize("recipe", PLANS)
def test_on_the_meta_device(recipe: str) -> None:
    model = meta("resnet18")
    certificate = PLANS[recipe](model).apply()
    assert not certificate.probed
    assert all(t.is_meta for t in model.state_dict().values())


@pytest.mark.parametrize("recipe", PLANS)
def test_an_optimizer_goes_on(recipe: str) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    PLANS[recipe](model, optimizer=optimizer).apply(example=False)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert known == {id(p) for p in model.parameters()}


@pytest.mark.parametrize("recipe", PLANS)
def test_models_without_batch_norms_are_refused(recipe: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm([8, 6, 6]))
    before = snapshot(model)
    with pytest.raises(NothingToDo, match="starts from batch norms, and Sequential has none"):
        PLANS[recipe](model)
    assert unchanged(model, before)


@pytest.mark.parametrize("recipe", ["xbn", "ibn", "bnet"])
def test_models_without_blocks_are_refused(recipe: str) -> None:
    with torch.device("meta"):
        model = torchvision.models.vgg11_bn()
    with pytest.raises(OptionError, match="VGG has no blocks with several norms"):
        PLANS[recipe](model)
    assert kinds(model, nn.BatchNorm2d) == {f"features.{i}" for i in (1, 5, 9, 12, 16, 19, 23, 26)}


@pytest.mark.parametrize(
    ("recipe", "error", "words"),
    [
        (lambda m: recipes.xbn(m, 4), OptionError, "position=4, and no block has more than 2"),
        (lambda m: recipes.xbn(m, 0), OptionError, "position to be a positive integer, got 0"),
        (lambda m: recipes.xbn(m, norm="gnn"), UnknownName, "Did you mean 'gn'"),
        (lambda m: recipes.xbn(m, norm="bn"), UnknownName, "xbn got norm='bn'"),
        (lambda m: recipes.xbn(m, every=9), OptionError, "every=9, and ResNet has 8 blocks"),
        (lambda m: recipes.xbn(m, every=True), OptionError, "every to be a positive integer"),
        (lambda m: recipes.xbn(m, groups=0), OptionError, "groups to be a positive integer"),
        (lambda m: recipes.xbn(m, stem="gn"), OptionError, "xbn got stem='gn'"),
        (lambda m: recipes.xbn(m, eeps=1), OptionError, "no option 'eeps'"),
        (lambda m: recipes.ubn(m, start="dirak"), OptionError, "Did you mean 'dirac'"),
        (lambda m: recipes.ubn(m, taw=1), OptionError, "no option 'taw'"),
        (lambda m: recipes.scaled_bn(m, 0), OptionError, "scale above 0 and up to 1, got 0"),
        (lambda m: recipes.scaled_bn(m, 1.5), OptionError, "got 1.5"),
        (lambda m: recipes.scaled_bn(m, "0.1"), OptionError, "got '0.1'"),
        (lambda m: recipes.micro_batch(m, "bn"), UnknownName, "micro_batch got norm='bn'"),
        (lambda m: recipes.micro_batch(m, variant="p"), OptionError, "variant='p'"),
        (lambda m: recipes.micro_batch(m, "gn", update_rate=0.1), OptionError, "update_rate with"),
        (lambda m: recipes.micro_batch(m, update_rate=-1), OptionError, "update_rate above 0"),
        (
            lambda m: recipes.micro_batch(m, groups=48),
            OptionError,
            r"groups=48 does not .* bn1 \(64\)",
        ),
        (lambda m: recipes.bgn(m), OptionError, "either batch_size"),
        (lambda m: recipes.bgn(m, 8, groups=8), OptionError, "either batch_size"),
        (lambda m: recipes.bgn(m, 0), OptionError, "positive integer, got 0"),
        (lambda m: recipes.ibn(m, stages=[5]), OptionError, r"between 1 and 4 .*got \[5\]"),
        (lambda m: recipes.bnet(m, "lst"), OptionError, "Did you mean 'last'"),
        (lambda m: recipes.bnet(m, kernel_size=2), OptionError, "odd kernel_size, got 2"),
        (lambda m: recipes.ubn(m, where="layer9.*"), NormkitError, "layer9"),
    ],
)
def test_bad_input_says_what_to_do(
    recipe: Callable[[nn.Module], Plan], error: type[Exception], words: str
) -> None:
    model = meta("resnet18")
    modules = dict(model.named_modules())
    with pytest.raises(error, match=words):
        recipe(model)
    assert dict(model.named_modules()) == modules


def test_a_model_that_fails_on_the_example_is_left_alone() -> None:
    model = Tiny()
    before = snapshot(model)
    for recipe in (recipes.ubn, recipes.micro_batch):
        with pytest.raises((NormkitError, RuntimeError)):
            recipe(model, example=torch.rand(2, 5, 9, 9)).apply()
        assert unchanged(model, before)


@pytest.mark.parametrize("name", [n for n, f in vars(recipes).items() if inspect.isfunction(f)])
def test_examples_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normkit, "recipes", recipes, raising=False)
    text = inspect.getdoc(getattr(recipes, name)) or ""
    test = doctest.DocTestParser().get_doctest(text, {}, name, None, 0)
    assert test.examples or name == "groups_for"
    report: list[str] = []
    assert doctest.DocTestRunner().run(test, out=report.append).failed == 0, "".join(report)


# -------------------------------------------------------------------- ubn, bnet


@pytest.mark.parametrize("name", MODELS)
def test_ubn_is_everywhere(name: str) -> None:
    model = meta(name)
    plan = recipes.ubn(model, tau=0.25)
    assert converted(plan) == everything(name)
    plan.apply()
    assert kinds(model, UBN) == everything(name)
    assert {m.tau for m in model.modules() if isinstance(m, UBN)} == {0.25}


@pytest.mark.parametrize("recipe", [recipes.ubn, recipes.bnet])
def test_trained_batch_norms_go_on_exactly(recipe: Callable[..., Plan]) -> None:
    model = small("resnet18")
    model(torch.rand(8, 3, 64, 64))
    plan = recipe(model.eval())
    assert plan.exact
    certificate = plan.apply(torch.rand(2, 3, 64, 64))
    assert certificate.exact
    assert certificate.difference is not None
    assert certificate.difference <= 1e-5


@pytest.mark.parametrize("start", ["torch", "fan_out", "zero", "dirac"])
def test_kernels_start_as_asked(start: str) -> None:
    model = small("resnet18")
    recipes.bnet(model, start=start).apply(example=False)
    kernel, bias = model.layer4[1].bn2.weight.detach(), model.layer4[1].bn2.bias.detach()
    assert kernel.shape == (512, 1, 3, 3)
    if start == "zero":
        assert not kernel.any()
    elif start == "dirac":
        assert kernel.sum((1, 2, 3)).eq(1).all()
        assert kernel.abs().sum() == 512
    elif start == "torch":
        assert kernel.abs().max() <= 1 / 3
        assert kernel.std().item() == pytest.approx(1 / 3 / math.sqrt(3), rel=0.05)
    else:
        # 4,608 normal numbers: their deviation is known to 1 %, five times that is no chance
        assert kernel.std().item() == pytest.approx(math.sqrt(2 / (9 * 512)), rel=0.05)
    assert (bias.abs().max() <= 1 / 3).item()
    assert bias.any() == (start in ("torch", "fan_out"))


@pytest.mark.parametrize("name", MODELS)
def test_bnet_is_last_or_everywhere(name: str) -> None:
    last = {f"{b}.bn{NORMS[name]}" for b in blocks(name)}
    for placement, expected in (("last", last), ("all", everything(name))):
        model = meta(name)
        plan = recipes.bnet(model, placement, kernel_size=5)
        assert converted(plan) == expected
        plan.apply()
        assert kinds(model, BNET) == expected
        assert {m.weight.shape[2:] for m in model.modules() if isinstance(m, BNET)} == {(5, 5)}


# -------------------------------------------------------------------- xbn


def by_hand(name: str, position: int) -> set[str]:
    """Bottlenecks: the norm of that number. Basic blocks: P1 and P2 mean the first of the two."""
    number = position if NORMS[name] == 3 else (1, 1, 2)[position - 1]
    return {f"{b}.bn{number}" for b in blocks(name)}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("position", [1, 2, 3])
@pytest.mark.parametrize("stem", ["bfn", "bn"])
def test_xbn_positions(name: str, position: int, stem: str) -> None:
    model = meta(name)
    recipes.xbn(model, position, stem=stem).apply()
    expected = by_hand(name, position) | ({"bn1"} if stem == "bfn" else set())
    assert kinds(model, GN) == expected
    assert kinds(model, nn.BatchNorm2d) | kinds(model, timm.layers.BatchNormAct2d) == (
        everything(name) - expected
    )


EVERY = {
    2: "1.1 2.0 2.2 3.0 3.2 3.4 4.0 4.2",
    4: "2.0 3.0 3.4 4.2",
    8: "3.0 4.2",
}


@pytest.mark.parametrize("every", EVERY)
def test_xbn_every_second_fourth_eighth_block_of_resnet50(every: int) -> None:
    """Blocks are numbered from 1 over the whole network: 3, 7, 13 and 16 end the stages."""
    plan = recipes.xbn(meta("resnet50"), every=every, stem="bn")
    assert converted(plan) == {f"layer{block}.bn2" for block in EVERY[every].split()}
    assert plan.count() == 16 // every


def test_xbn_groups() -> None:
    """64 groups: one channel each in the stem and stage 1, then 2, 4 and 8."""
    model = meta("resnet50")
    recipes.xbn(model).apply()
    found = {path: m for path, m in model.named_modules() if isinstance(m, GN)}
    assert {m.groups for m in found.values()} == {64}
    assert {path: m.channels for path, m in found.items() if ".0." in path or path == "bn1"} == {
        "bn1": 64,
        "layer1.0.bn2": 64,
        "layer2.0.bn2": 128,
        "layer3.0.bn2": 256,
        "layer4.0.bn2": 512,
    }


@pytest.mark.parametrize(("norm", "kind"), [("in", IN), ("gw", GW), ("ln", LN)])
def test_xbn_with_other_norms(norm: str, kind: type[Normalizer]) -> None:
    model = meta("resnet18")
    recipes.xbn(model, norm=norm).apply()
    layers = [m for m in model.modules() if isinstance(m, Normalizer)]
    assert {type(m) for m in layers} == {kind}
    assert len(layers) == 9
    assert {m.affine for m in layers} == {norm != "in"}  # as in the authors' code
    if norm == "gw":
        assert {m.groups for m in layers} == {64}


def test_xbn_lowers_groups_that_do_not_divide() -> None:
    """MobileNetV2: the depthwise norm, in the block without expansion too."""
    with torch.device("meta"):
        model = torchvision.models.mobilenet_v2()
    recipes.xbn(model, groups=16, stem="bn").apply()
    found = {path: m for path, m in model.named_modules() if isinstance(m, GN)}
    depthwise = {
        f"features.{i}.conv.{0 if i == 1 else 1}.1": m for i, m in enumerate(model.features) if i
    }
    assert set(found) == set(list(depthwise)[:17])
    assert {m.groups for m in found.values()} == {16}  # 32, 96, 144, ... 960 channels
    with torch.device("meta"):
        other = torchvision.models.mobilenet_v2()
    plan = recipes.xbn(other, groups=64, stem="bn")
    assert "groups=64 does not divide 96, 144 channels: it becomes 32, 16 there." in str(plan)
    plan.apply()
    groups = {m.channels: m.groups for m in other.modules() if isinstance(m, GN)}
    assert groups == {32: 32, 96: 32, 144: 16, 192: 64, 384: 64, 576: 64, 960: 64}


# -------------------------------------------------------------------- micro batches


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("norm", ["bcn", "gn"])
def test_micro_batch_places(name: str, norm: str) -> None:
    model = meta(name)
    convolutions = kinds(model, nn.Conv2d)
    recipes.micro_batch(model, norm).apply()
    assert kinds(model, BCN if norm == "bcn" else GN) == everything(name)
    standardized = {path for path, m in model.named_modules() if parametrize.is_parametrized(m)}
    assert standardized == convolutions  # stem and shortcuts too, but not the classifier
    groups = {m.groups for m in model.modules() if isinstance(m, Normalizer)}
    assert groups == {32}


def test_micro_batch_leaves_what_predicts() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1, groups=8),  # one weight per output channel
        nn.BatchNorm2d(8),
        nn.Conv2d(8, 5, 1),  # predicts
    )
    recipes.micro_batch(model, update_rate=0.1, variant="bcn").apply(torch.rand(1, 3, 9, 9))
    assert [parametrize.is_parametrized(m) for m in model] == [True, *[False] * 5]
    assert model[0].parametrizations.weight[0].variant == "bcn"
    assert [m.micro for m in model if isinstance(m, BCN)] == [True, True]
    model(torch.rand(1, 3, 9, 9))  # one image is enough


def test_micro_batch_asks_for_the_rate() -> None:
    model = Tiny()
    plan = recipes.micro_batch(model)
    assert "follow_learning_rate" in str(plan)
    plan.apply(example=False)
    with pytest.raises(OptionError, match="follow_learning_rate"):
        model.train()(torch.rand(1, 3, 9, 9))


@pytest.mark.parametrize("norm", ["bcn", "gn"])
def test_the_last_norms_start_at_zero_if_asked(norm: str) -> None:
    model = small("resnet18")
    recipes.micro_batch(model, norm, zero_last=True, micro=norm == "bcn").apply(example=False)
    name = "group_weight" if norm == "bcn" else "weight"
    zero = {p for p, t in model.named_parameters() if p.endswith(f".{name}") and not t.any()}
    assert zero == {f"{b}.bn2.{name}" for b in blocks("resnet18")}
    if norm == "bcn":
        assert model.layer1[0].bn2.weight.eq(1).all()  # the scale of its batch part stays


# -------------------------------------------------------------------- bgn

PAPER = {2: 1, 4: 2, 8: 16, 16: 64, 32: 128, 64: 256, 128: 512}


def test_groups_of_the_paper() -> None:
    assert {n: recipes.groups_for(n) for n in PAPER} == PAPER
    assert recipes.groups_for(96) == 256  # its architecture search
    assert [recipes.groups_for(n) for n in (1, 256, 4096)] == [1, 512, 512]
    # log2 of 4 … 8 images is 2 … 3, of 2 … 16 groups 1 … 4: 6 images give 2^2.75, rounded down
    assert recipes.groups_for(6) == 4
    between = [recipes.groups_for(n) for n in range(1, 200)]
    assert between == sorted(between)


@pytest.mark.parametrize("name", MODELS)
def test_bgn_is_everywhere(name: str) -> None:
    model = meta(name)
    plan = recipes.bgn(model, batch_size=128)
    assert converted(plan) == everything(name)
    plan.apply()
    assert {m.groups for m in model.modules() if isinstance(m, BGN)} == {512}


def test_bgn_fits_what_is_there() -> None:
    """The maps of layer4 are 1×1 for images of 32: its 512 channels hold 512 values."""
    model = small("resnet18")
    model.layer4[1].bn2 = nn.BatchNorm2d(512)
    recipes.bgn(model, groups=1024, example=torch.rand(2, 3, 32, 32)).apply()
    found = {path: m.groups for path, m in model.named_modules() if isinstance(m, BGN)}
    assert {groups for path, groups in found.items() if "layer4" in path} == {512}
    assert {groups for path, groups in found.items() if "layer4" not in path} == {1024}
    model.train()(torch.rand(4, 3, 32, 32))


def test_bgn_after_a_linear_layer_has_the_channels_only() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8 * 36, 16)
    )
    model.append(nn.BatchNorm1d(16))
    recipes.bgn(model, batch_size=32).apply(torch.rand(4, 3, 8, 8))
    assert [m.groups for m in model if isinstance(m, BGN)] == [128, 16]


# -------------------------------------------------------------------- ibn


@pytest.mark.parametrize("name", MODELS)
def test_ibn_is_first_in_the_blocks_of_stages_1_to_3(name: str) -> None:
    model = meta(name)
    recipes.ibn(model).apply()
    assert kinds(model, IBN) == {f"{b}.bn1" for b in blocks(name, (1, 2, 3))}


def test_ibn_stages_and_places() -> None:
    assert converted(recipes.ibn(meta("resnet18"), stages=[1, 4])) == {
        *("layer1.0.bn1", "layer1.1.bn1", "layer4.0.bn1", "layer4.1.bn1")
    }
    with torch.device("meta"):
        model = torchvision.models.mobilenet_v2()
    with pytest.raises(OptionError, match=r"all in 'features'. Try where"):
        recipes.ibn(model)
    plan = recipes.ibn(model, where=["features.2", "features.3"])
    assert converted(plan) == {"features.2.conv.0.1", "features.3.conv.0.1"}


# -------------------------------------------------------------------- scaled_bn


@pytest.mark.parametrize("name", MODELS)
def test_every_scale_starts_small(name: str) -> None:
    """torchvision sets γ to 1, or to 0 at the end of blocks, when it builds a model."""
    model = (
        torchvision.models.resnet18(zero_init_residual=True) if name == "resnet18" else small(name)
    )
    plan = recipes.scaled_bn(model, 0.1)
    assert converted(plan) == everything(name)
    plan.apply(example=False)
    scales = {
        p: t for p, t in model.named_parameters() if p.removesuffix(".weight") in everything(name)
    }
    assert set(scales) == {f"{path}.weight" for path in everything(name)}
    assert all(t.eq(torch.tensor(0.1)).all() for t in scales.values())
    assert all(not t.any() for p, t in model.named_parameters() if p.endswith("bias"))
    assert model.input_norm.weight.tolist() == pytest.approx([0.058] * 3)
    assert not model.input_norm.bias.requires_grad


def test_weights_are_drawn_by_fan_in() -> None:
    """The deviation of n normal numbers is known to 1/√(2n); we allow five times that."""
    model = small("resnet18")
    recipes.scaled_bn(model).apply(example=False)
    for path, m in model.named_modules():
        if isinstance(m, nn.Conv2d):
            expected = math.sqrt(2 / m.weight[0].numel())
            error = 5 / math.sqrt(2 * m.weight.numel())
            assert m.weight.std().item() == pytest.approx(expected, rel=error), path
    bound = math.sqrt(6 / 512)
    assert 0.999 * bound < model.fc.weight.abs().max().item() <= bound
    assert not model.fc.bias.any()


def test_the_input_is_normalized_first() -> None:
    model = small("resnet18")
    recipes.scaled_bn(model, 0.5, sigma_act=0.6).apply(example=False)
    seen: list[Tensor] = []
    model.conv1.register_forward_pre_hook(lambda m, args: seen.append(args[0]))
    x = 3 + 2 * torch.rand(8, 3, 64, 64)
    model.train()(x)
    deviation = seen[0].std((0, 2, 3), correction=0)
    # eps adds 1e-5 to a variance of 1/3, a share of 3e-5
    torch.testing.assert_close(deviation, torch.full((3,), 0.3), rtol=5e-5, atol=0)
    assert torch.equal(copy.deepcopy(model).eval()(x), model.eval()(x))


def test_gamma_is_trained_a_hundred_times_slower() -> None:
    model = small("resnet18")
    recipes.scaled_bn(model).apply(example=False)
    groups = {group["name"]: group for group in param_groups(model, 0.1, 1e-4)}
    assert len(groups["scales"]["params"]) == 21
    assert groups["scales"]["lr"] == 0.1 / 100


def test_parts_of_it() -> None:
    model = small("resnet18")
    weight = model.conv1.weight.detach().clone()
    recipes.scaled_bn(model, 0.5, input_norm=False, initialise=False, where="last").apply(
        example=False
    )
    assert torch.equal(model.conv1.weight, weight)
    assert not hasattr(model, "input_norm")
    halves = {p for p, t in model.named_parameters() if t.dim() == 1 and t.eq(0.5).all()}
    assert halves == {f"{b}.bn2.weight" for b in blocks("resnet18")}


def test_the_channels_of_the_input() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
    with pytest.raises(OptionError, match="how many channels the input has"):
        recipes.scaled_bn(model)
    plan, x = recipes.scaled_bn(model, example=torch.rand(4, 6)), torch.rand(4, 6)
    plan.apply()
    assert model.input_norm.channels == 6
    model.eval()
    once = nn.functional.batch_norm(
        x, model.input_norm.running_mean, model.input_norm.running_var, model.input_norm.weight
    )
    torch.testing.assert_close(model(x), model.get_submodule("1")(model.get_submodule("0")(once)))
    plan.undo()
    assert list(model._modules) == ["0", "1"]
