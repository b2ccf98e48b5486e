"""Conversions fitted on images: the new network gives nearly what the old one gave."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk
from cases import build, every, label
from normkit.conversion.fit.data import ImageRun
from normkit.conversion.fit.linear import LinearSite, linear_sites, ridge_regression
from normkit.conversion.fit.solve import solve
from normkit.errors import DtypeError
from normkit.inspection.batches import LoaderBatch
from normkit.layers.measured import Refusal


class Residual(nn.Module):
    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(before, channels, 1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


def small_network() -> nn.Module:
    return nn.Sequential(
        Residual(1, 32), nn.MaxPool2d(2), Residual(32, 32),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


@cache
def digits() -> tuple[Tensor, Tensor]:
    sets = pytest.importorskip("sklearn.datasets", reason="scikit-learn has the digits")
    data = sets.load_digits()
    order = torch.randperm(len(data.images), generator=torch.Generator().manual_seed(0))
    return (torch.tensor(data.images).float()[:, None] / 8 - 1)[order], torch.tensor(data.target)[
        order
    ]


@cache
def trained() -> nn.Module:
    """A batch-norm network that knows the digits."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, (x, y) = small_network(), digits()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
        for _ in range(5):
            for part in torch.arange(1200).split(64):
                optimizer.zero_grad()
                F.cross_entropy(model(x[part]), y[part]).backward()
                optimizer.step()
    return model.eval().requires_grad_(True)


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    x, y = digits()
    return float((model(x[1200:]).argmax(1) == y[1200:]).double().mean())


# -------------------------------------------------------------------- what it is for


def test_a_trained_network_survives() -> None:
    """Carried scales and shifts alone destroy it."""
    reference = accuracy(trained())
    plain = accuracy(nk.convert(copy.deepcopy(trained()), "gn", groups=8, example=False))
    fitted = copy.deepcopy(trained())
    nk.convert(fitted, "gn", groups=8, fit=digits()[0][:64])
    assert reference > 0.97
    assert plain < 0.6
    assert reference - accuracy(fitted) < 0.25 * (reference - plain)


@pytest.mark.parametrize(
    ("target", "options", "loses"),
    [
        ("gn", {"groups": 1}, 0.04),
        ("ln", {}, 0.04),
        ("torch_gn", {"groups": 1}, 0.04),
        ("pn", {}, 0.06),
        ("bgn", {"groups": 4}, 0.005),  # in eval mode a fixed map like the old one
        ("gbgn", {"groups": 4}, 0.005),
        ("sn", {}, 0.01),
        ("ubn", {}, 0.005),
        ("rms", {}, 0.04),
        ("dyt", {}, 0.04),
    ],
)
def test_targets(target: str, options: dict[str, Any], loses: float) -> None:
    model = copy.deepcopy(trained())
    nk.convert(model, target, fit=digits()[0][:64], **options)
    assert accuracy(model) >= accuracy(trained()) - loses


@pytest.mark.parametrize(("target", "options"), [("ibn", {}), ("bcn", {"groups": 8})])
def test_targets_with_the_weights_of_other_layers(target: str, options: dict[str, Any]) -> None:
    """Norms of few channels lose too much for scales and shifts."""
    model = copy.deepcopy(trained())
    nk.convert(model, target, fit=nk.Fit(digits()[0][:64], parameters="all"), **options)
    assert accuracy(model) >= accuracy(trained()) - 0.04


@pytest.mark.parametrize(("target", "groups"), [("gn", 1), ("bcn", 4)])
def test_weight_standardization_on_top(target: str, groups: int) -> None:
    """Standardizing a network that is trained, or fitted, without it loses what it knows."""
    model = copy.deepcopy(trained())
    nk.convert(model, target, groups=groups, fit=nk.Fit(digits()[0][:64], standardize="ws"))
    alone = copy.deepcopy(trained())
    nk.standardize(alone)
    lost = accuracy(trained()) - accuracy(alone)
    assert lost > 0.1
    assert accuracy(trained()) - accuracy(model) < 0.25 * lost


def test_alpha_is_fitted() -> None:
    """As carried, tanh clips most of what a batch norm let pass; the plan says what is fitted."""
    plan = nk.plan_conversion(trained(), "dyt", fit=digits()[0][:64])
    assert all("alpha" in step.fitted and "alpha" not in step.initialised for step in plan.steps)
    assert min(layer.r2 for layer in plan.fit.layers) > 0.9
    x = 50 + 20 * torch.randn(1000, 3, dtype=torch.float64)
    layer = nk.DyT(3, dtype=torch.float64)
    assert layer.prepare_fit(x, 0.1 * x) == ("alpha",)
    assert 1e-3 < layer.alpha.item() < 0.02  # large enough to bend, small enough not to clip at 90


@pytest.mark.parametrize("source", ["gn", "ln"])
def test_the_other_way_round_and_folded(source: str) -> None:
    """ln → bn: running statistics come from the images, and then the norms can be folded."""
    x = digits()[0]
    model = copy.deepcopy(trained())
    nk.convert(model, source, fit=x[:64], **({"groups": 1} if source == "gn" else {}))
    before = accuracy(model)
    plan = nk.plan_conversion(model, "bn", fit=x[:128])
    plan.apply()
    assert accuracy(model) > before - 0.05
    assert all("running statistics" in step.fitted for step in plan.steps)
    bn = model[0].bn1
    inputs: list[Tensor] = []
    handle = bn.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(x[:128])
    handle.remove()
    assert torch.allclose(bn.running_mean, inputs[0].mean((0, 2, 3)), atol=0.1)
    assert len(nk.survey(nk.fold(model))) == 0


def test_the_best_number_of_groups() -> None:
    plan = nk.plan_conversion(trained(), "gn", groups=[1, 8], fit=digits()[0][:64])
    for step, layer in zip(plan.steps, plan.fit.layers, strict=True):
        assert "groups 1: " in step.reason
        tried = [float(part.rpartition(": ")[2]) for part in step.reason.split("groups ")[1]
                 .split(", ")]  # fmt: skip
        assert layer.r2 == pytest.approx(max(tried), abs=1e-3)
    best = nk.plan_conversion(trained(), "gn", groups="fit", fit=digits()[0][:64])
    assert all(f"{number}: " in best.steps[0].reason for number in (1, 2, 4, 8, 16, 32))
    with pytest.raises(nk.NormkitError, match="fit=images"):
        nk.plan_conversion(trained(), "gn", groups="fit")


# -------------------------------------------------------------------- the arithmetic


def test_least_squares_is_that_of_linear_regression() -> None:
    u, t = torch.randn(200, 3, dtype=torch.float64), torch.randn(200, 3, dtype=torch.float64)
    scale, shift = solve(u, t)
    for c in range(3):
        design = torch.stack([u[:, c], torch.ones(200, dtype=torch.float64)], 1)
        answer = torch.linalg.lstsq(design, t[:, c : c + 1]).solution[:, 0]
        assert torch.allclose(torch.stack([scale[c], shift[c]]), answer)


def test_channels_that_share_and_channels_that_are_constant() -> None:
    u = torch.randn(100, 4, dtype=torch.float64)
    t = u * torch.tensor([2.0, 4, 1, 1]) + 1
    u[:, 3] = 5  # says nothing
    t[:, 3] = 7
    scale, shift = solve(u, t)
    assert torch.allclose(scale, torch.tensor([2.0, 4, 1, 1], dtype=torch.float64))
    assert torch.allclose(shift, torch.tensor([1.0, 1, 1, 2], dtype=torch.float64))
    scale, _ = solve(u[:, :2], t[:, :2], sharing=2)
    assert scale[0] == scale[1]
    assert 2 < scale[0] < 4


def test_after_the_activation_is_never_worse_than_before_it() -> None:
    torch.manual_seed(0)
    t = torch.randn(500, 8, dtype=torch.float64) - 0.5
    u = t + (t < 0) * torch.randn_like(t)  # what is clipped is wrong, what passes is right
    error = [
        float((F.relu(u * scale + shift) - F.relu(t)).square().sum())
        for scale, shift in (solve(u, t), solve(u, t, F.relu))
    ]
    assert error[1] < 0.8 * error[0]


@pytest.mark.parametrize("case", every(), ids=label)
def test_every_layer_takes_an_output_map_or_says_why_not(case: Any) -> None:
    """With the values it names, a layer gives scale · y + shift."""
    layer = build(case).eval()
    x = torch.randn(4, 8, 5, 5, dtype=torch.float64)
    if not isinstance(layer, nk.Normalizer):
        return
    wide = layer.channels_sharing_a_scale
    scale = (torch.randn(8 // wide, dtype=torch.float64) + 2).repeat_interleave(wide)
    shift = torch.randn(8 // wide, dtype=torch.float64).repeat_interleave(wide)
    values = layer.with_output_map(scale, shift)
    if isinstance(values, Refusal):
        assert values
        return
    shape = (8, 1, 1)
    with torch.no_grad():
        expected = layer(x) * scale.reshape(shape) + shift.reshape(shape)
        for name, value in values.items():
            getattr(layer, name).copy_(value)
        assert torch.allclose(layer(x), expected, atol=1e-10)


# -------------------------------------------------------------------- weights of other layers


def test_ridge_regression_is_that_of_the_normal_equations() -> None:
    """With fewer and with more rows than inputs, with and without a shift."""
    for rows, size, shift in ((30, 4, True), (5, 12, False), (5, 12, True)):
        x = torch.randn(2, rows, size, dtype=torch.float64)
        gap = torch.randn(2, rows, 3, dtype=torch.float64)
        change, moved = ridge_regression(x, gap, 0.1, shift)
        for g in range(2):
            a = x[g] - x[g].mean(0) if shift else x[g]
            b = gap[g] - gap[g].mean(0) if shift else gap[g]
            level = 0.1 * a.square().sum() / size
            whole = torch.cat([a, level.sqrt() * torch.eye(size, dtype=a.dtype)])
            wanted = torch.cat([b, torch.zeros(size, 3, dtype=a.dtype)])
            answer = torch.linalg.lstsq(whole, wanted, driver="gelsd").solution
            assert torch.allclose(change[g], answer)
            expected = gap[g].mean(0) - x[g].mean(0) @ answer if shift else torch.zeros(3).double()
            assert torch.allclose(moved[g, 0], expected)


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv2d(6, 4, 3, stride=2, padding=1), (20, 6, 9, 9)),
        (nn.Conv2d(6, 6, 3, padding=1, groups=6, bias=False), (20, 6, 7, 7)),
        (nn.Conv2d(6, 4, 1, groups=2), (20, 6, 5, 5)),
        (nn.Linear(6, 4), (60, 6)),
        (nn.Linear(6, 4, bias=False), (20, 5, 6)),
    ],
)
def test_a_layer_learns_to_give_what_it_gave(layer: Any, shape: tuple[int, ...]) -> None:
    """Its inputs become half as large: its weights are to become twice as large."""
    x = torch.randn(shape)
    run = ImageRun(LoaderBatch(x), 1, torch.arange(len(x)) % 5 == 4)
    place = LinearSite("layer", layer)
    with torch.no_grad():
        wanted = layer(x)
        place.fit([0.5 * x], [wanted], [run])
        error = [float((y - wanted).square().mean()) for y in (layer(0.5 * x), place(0.5 * x))]
    assert error[1] < 0.2 * error[0]  # the ridge leaves the old weights some weight
    assert set(place.values()) == {f"layer.{name}" for name, _ in layer.named_parameters()}


def test_weights_are_fitted_as_well() -> None:
    """Eight groups lose what no scale and shift brings back; undo is exact."""
    x = digits()[0][:64]
    reports, gaps = [], []
    for parameters in ("norms", "all"):
        model = copy.deepcopy(trained())
        before = copy.deepcopy(model.state_dict())
        plan = nk.plan_conversion(model, "gn", groups=8, fit=nk.Fit(x, parameters=parameters))
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        plan.apply()
        reports.append(plan.fit)
        with torch.no_grad():
            old, new = trained()(digits()[0][64:400]), model(digits()[0][64:400])
        gaps.append(float((new - old).norm()))
        moved = not torch.equal(model[2].conv1.weight, before["2.conv1.weight"])
        assert moved == (parameters == "all")
        assert torch.equal(model[0].conv1.weight, before["0.conv1.weight"])  # it gets the same
        plan.undo()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert reports[1].output_error < 0.8 * reports[0].output_error
    assert gaps[1] < 0.8 * gaps[0]


def test_shared_and_tied_layers_stay_as_they_are() -> None:
    shared, one, two = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
    two.weight = one.weight
    usual = nn.Conv2d(3, 4, 3)
    model = nn.ModuleList([shared, one, two, usual, nn.Conv2d(3, 4, 3, dilation=2)])
    assert [site.path for site in linear_sites(model)] == ["0", "3"]


# -------------------------------------------------------------------- models of all kinds


class Twice(nn.Module):
    """One norm in two places, a dictionary out, two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor, factor: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.bn(self.first(image * factor)))
        x = F.relu(self.bn(self.second(x)))
        return {"logits": self.head(x.mean((2, 3))), "map": x}


def test_a_norm_that_is_called_twice_several_inputs_and_a_dictionary() -> None:
    torch.manual_seed(0)
    model = Twice()
    image, factor = torch.randn(48, 3, 10, 10), torch.rand(48, 1, 1, 1) + 0.5
    model.train()
    for _ in range(20):
        model(image, factor)
    model.eval()
    with torch.no_grad():
        before = model(image, factor)
        plain = nk.convert(copy.deepcopy(model), "gn", groups=1, example=False)(image, factor)
    batches = [{"image": image[i : i + 16], "factor": factor[i : i + 16]} for i in (0, 16, 32)]
    plan = nk.plan_conversion(model, "gn", groups=1, fit=batches)
    plan.apply()
    with torch.no_grad():
        after = model(image, factor)
    gaps = [float((x["logits"] - before["logits"]).norm()) for x in (plain, after)]
    assert gaps[1] < 0.8 * gaps[0]  # one scale and shift for both calls
    assert plan.fit.agreement is not None
    assert plan.fit.images == 48


def test_a_forward_of_ones_own_for_batches_of_another_form() -> None:
    """The message for such batches proposes forward=, which fit= did not have.

    A batch is a list (image, factor, label): read as (inputs, target) the model would get the image
    alone. It is cut into forwards, held out and distilled like any other.
    """
    torch.manual_seed(0)
    model = Twice().eval()
    image, factor = torch.randn(24, 3, 10, 10), torch.rand(24, 1, 1, 1) + 0.5
    batches = [[image, factor, torch.arange(24)]]
    with pytest.raises(nk.NormkitError, match="forward=lambda model, batch"):
        nk.plan_conversion(model, "gn", groups=1, fit=batches)

    def forward(network: nn.Module, batch: list[Tensor]) -> Tensor:
        assert len(batch) == 3
        output: Tensor = network(batch[0], factor=batch[1])["logits"]
        return output

    fit = nk.Fit(batches, forward=forward, max_images=20, batch=8, distill=2, parameters="norms")
    plan = nk.plan_conversion(model, "gn", groups=1, fit=fit)
    certificate = plan.apply()
    as_mapping = {"image": image[:20], "factor": factor[:20]}
    same = nk.plan_conversion(
        copy.deepcopy(plan.undo() or model), "gn", groups=1, fit=nk.Fit(as_mapping, batch=8)
    )
    assert plan.fit.images == 20
    assert plan.fit.agreement is not None
    assert [x.r2 for x in plan.fit.layers] == [x.r2 for x in same.fit.layers]
    assert "(2, 3, 10, 10), (2, 1, 1, 1)" in certificate.probe  # measured on two of the images


class Detector(nn.Module):
    """Takes a list of images of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        return [{"map": self.body(image[None])} for image in images]


def test_a_list_of_images() -> None:
    torch.manual_seed(0)
    model = Detector().eval()
    images = [torch.randn(3, 8 + i, 9) for i in range(6)]
    plan = nk.plan_conversion(model, "gn", groups=1, fit=images)
    plan.apply()
    assert plan.fit.images == 6
    assert isinstance(model.body[1], nk.GN)


class BoxHead(Detector):
    """A linear layer whose rows are boxes; an image may have none."""

    def __init__(self, boxes: int) -> None:
        super().__init__()
        self.boxes, self.head = boxes, nn.Linear(8, 4)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        maps = self.body(torch.stack(images))
        return [{"boxes": self.head(maps.flatten(2).transpose(1, 2)[0, : self.boxes])}]


@pytest.mark.parametrize("boxes", [0, 3])
def test_layers_without_held_out_rows_keep_their_weights(boxes: int) -> None:
    """It ended in "cannot reshape tensor of 0 elements"; and the outputs were not spoken of."""
    torch.manual_seed(0)
    model = BoxHead(boxes).eval()
    before = model.head.weight.detach().clone()
    images = [torch.randn(3, 9, 9) for _ in range(4)]
    plan = nk.plan_conversion(model, "gn", groups=1, fit=nk.Fit(images, parameters="all"))
    plan.apply()
    assert torch.equal(model.head.weight, before)
    assert "outputs were not measured: they have no row for each image" in str(plan.fit)


def test_a_mapping_of_tensors_is_cut_as_well() -> None:
    model = Named().eval()
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda _, __, kwargs: sizes.append(len(kwargs["image"])), with_kwargs=True
    )
    fit = nk.Fit({"image": torch.randn(40, 3, 9, 9)}, max_images=20, batch=8)
    assert nk.plan_conversion(model, "gn", groups=1, fit=fit).fit.images == 20
    assert max(sizes) == 8


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

    def forward(self, *, image: Tensor) -> Tensor:
        y: Tensor = self.body(image)
        return y


def test_numbers_of_groups_of_which_none_divides() -> None:
    """It converted nothing, without a word."""
    with pytest.raises(
        nk.NormkitError, match=r"\[5, 7\] does not divide .* all: 1, 2, 4, 8, 16, 32"
    ):
        nk.convert(copy.deepcopy(trained()), "gn", groups=[5, 7], fit=digits()[0][:8])


def test_the_agreement_has_an_interval() -> None:
    report = nk.plan_conversion(trained(), "gn", groups=1, fit=digits()[0][:40]).fit
    low, high = report.agreement_interval
    assert 0 <= low < report.agreement <= high <= 1
    full = replace(report, agreement=1.0, held_out=13).agreement_interval
    assert full == pytest.approx((0.7719, 1.0), abs=1e-3)  # 13 / (13 + 1.96²)
    assert "8 held-out ones" in report.verdict


def test_a_plan_for_weights_that_have_changed_is_refused() -> None:
    """Changed norms were refused, changed convolutions overwritten."""
    model = copy.deepcopy(trained())
    plan = nk.plan_conversion(model, "gn", groups=8, fit=nk.Fit(digits()[0][:48], parameters="all"))
    with torch.no_grad():
        model[2].conv2.weight.add_(1)
    with pytest.raises(nk.NormkitError, match=r"2\.conv2\.weight have changed"):
        plan.apply()
    with torch.no_grad():
        model[2].conv2.weight.copy_(trained()[2].conv2.weight)
    plan.apply()
    plan.undo()
    plan.apply()


def test_a_model_with_nan_is_told_so() -> None:
    """It was said of the images' scale."""
    model = copy.deepcopy(trained())
    with torch.no_grad():
        model[0].conv1.weight[0] = torch.nan
    with pytest.raises(nk.NormkitError, match=r"0\.conv1\.weight of the model is not finite"):
        nk.convert(model, "gn", groups=8, fit=digits()[0][:8])


def test_a_loader_and_one_tensor_give_the_same() -> None:
    x, y = digits()
    loader = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 64, 8)]
    models = []
    for images in (x[:64], loader, iter(loader)):
        models.append(nk.convert(copy.deepcopy(trained()), "gn", groups=1, fit=images))
    for model in models[1:]:
        for a, b in zip(models[0].parameters(), model.parameters(), strict=True):
            assert torch.equal(a, b)


def test_no_more_images_than_wanted() -> None:
    x = digits()[0]
    report = nk.plan_conversion(trained(), "ln", fit=nk.Fit([x[:40]] * 9, max_images=50)).fit
    assert report.images == 50
    report = nk.plan_conversion(trained(), "ln", fit=x[:3]).fit
    assert (report.images, report.held_out) == (3, 1)


# -------------------------------------------------------------------- the model and its optimizer


def test_a_plan_changes_nothing_and_undo_is_exact() -> None:
    model = copy.deepcopy(trained())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = nk.plan_conversion(model, "gn", groups=1, fit=digits()[0][:32], optimizer=optimizer)

    def unchanged() -> bool:
        state = model.state_dict()
        return state.keys() == before.keys() and all(
            torch.equal(state[n], before[n]) for n in state
        )

    assert unchanged()
    certificate = plan.apply()
    assert certificate.fit is plan.fit
    assert '"agreement"' in certificate.to_json()
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert all(id(p) in known for p in model.parameters())
    plan.undo()
    assert unchanged()
    assert not any("forward" in vars(m) for m in model.modules())


def test_the_report_is_of_the_images_that_are_held_out() -> None:
    x = digits()[0]
    plan = nk.plan_conversion(trained(), "gn", groups=1, fit=nk.Fit(x[:80], held_out=0.25))
    report = plan.fit
    assert (report.images, report.held_out) == (80, 20)
    model = copy.deepcopy(trained())
    nk.convert(model, "gn", groups=1, fit=nk.Fit(x[:80], held_out=0.25))
    held = x[:80][torch.arange(80) % 4 == 3]
    with torch.no_grad():
        old, new = trained()(held), model(held)
    assert report.agreement == pytest.approx(
        float((old.argmax(1) == new.argmax(1)).double().mean())
    )
    assert report.output_error == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-3)
    assert len(report.layers) == 4
    assert all(layer.r2 > layer.plain_r2 for layer in report.layers)
    assert report.worst in report.layers
    assert report.worst.path in str(report)


def test_images_unlike_those_of_the_training() -> None:
    x = digits()[0][:64]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        good = nk.plan_conversion(trained(), "ln", fit=x).fit
    with pytest.warns(UserWarning, match="unlike those the network was trained on"):
        nk.convert(copy.deepcopy(trained()), "ln", fit=x * 100 + 50)
    scaled = nk.plan_conversion(trained(), "ln", fit=x * 100 + 50).fit  # a plan says it itself
    assert good.unlike < 0.1 < scaled.unlike
    assert "unlike" in str(scaled)


def test_another_scale_is_seen_at_the_first_norm() -> None:
    """Pixels in 0 … 1 in place of -1 … 1: later norms hardly notice."""
    x = digits()[0][:64]
    good = nk.plan_conversion(trained(), "ln", fit=x).fit
    scaled = nk.plan_conversion(trained(), "ln", fit=x / 2 + 0.5).fit
    assert good.unlike_first < 0.1
    assert not good.notes
    assert scaled.unlike_first > 0.2
    assert "in the first norm" in str(scaled)
    with pytest.warns(UserWarning, match="in the first norm"):
        nk.convert(copy.deepcopy(trained()), "ln", fit=x / 2 + 0.5)


def test_images_of_a_scale_out_of_all_proportion() -> None:
    """Layers with a fixed map in eval mode, such as ubn, took them in silence."""
    for factor in (1e20, 1e30):
        with pytest.raises(nk.NormkitError, match="out of all proportion"):
            nk.convert(copy.deepcopy(trained()), "ubn", fit=digits()[0][:16] * factor)


# -------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("images", "complaint"),
    [
        (torch.empty(0, 1, 8, 8), "no images"),
        ([], "no batches"),
        (torch.randn(1, 1, 8, 8), "at least 2 images"),
        (torch.zeros(8, 1, 8, 8), "constant or all the same"),
        (torch.full((8, 1, 8, 8), torch.nan), "finite"),
        (torch.arange(8), "looks like labels"),
        (torch.randn(8, 1, 8, 8).numpy(), r"Try torch.as_tensor\(images\)"),
        (torch.utils.data.TensorDataset(torch.randn(8, 1, 8, 8)), "DataLoader"),
        ([torch.randn(3, 8, 8)] * 4, r"single images, try torch.stack\(images\)"),
        (torch.randn(8, 3, 8, 8), "fails on batch 1"),
        ("photos/", "expects images"),
        (torch.randn(8, 1, 8, 8, dtype=torch.float64), "type torch.float64.*torch.float32"),
        (torch.randint(0, 255, (8, 1, 8, 8), dtype=torch.uint8), "type torch.uint8"),
    ],
)
def test_bad_images(images: Any, complaint: str) -> None:
    model = copy.deepcopy(trained())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(nk.NormkitError, match=complaint):
        nk.convert(model, "gn", groups=1, fit=images)
    state = model.state_dict()
    assert all(torch.equal(state[name], before[name]) for name in before)
    assert not any("forward" in vars(m) for m in model.modules())


def test_images_of_another_type_are_a_type_error() -> None:
    """They were called a wrong shape."""
    for images in (torch.randn(8, 1, 8, 8).double(), torch.randn(8, 1, 8, 8).half()):
        with pytest.raises(DtypeError, match=str(images.dtype)):
            nk.convert(copy.deepcopy(trained()), "ln", fit=images)


def test_never_worse_than_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a fit makes the outputs worse on what is held out, scales and shifts stay as carried."""

    def spoiled(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        scale, shift = solve(*args, **options)
        return -scale, shift

    x = digits()[0][:32]
    monkeypatch.setattr("normkit.conversion.fit.lockstep.solve", spoiled)
    model, plain = (copy.deepcopy(trained()) for _ in range(2))
    plan = nk.plan_conversion(model, "bcn", groups=1, fit=x)
    plan.apply()
    nk.convert(plain, "bcn", groups=1, example=False)
    assert "as carried the outputs are nearer" in str(plan.fit)
    held = x[torch.arange(32) % 5 == 4]
    with torch.no_grad():
        old, new, carried = trained()(held), model(held), plain(held)
    assert torch.equal(new, carried)
    assert plan.fit.output_error == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-3)


def test_a_loader_of_several_shapes() -> None:
    """Other sizes are taken, other channels are refused with the number of the batch."""
    batches = [torch.randn(8, 1, 8, 8), torch.randn(8, 1, 12, 10)]
    report = nk.plan_conversion(trained(), "ln", fit=batches).fit
    assert report.images == 16
    with pytest.raises(nk.NormkitError, match="fails on batch 2"):
        nk.plan_conversion(trained(), "ln", fit=[batches[0], torch.randn(8, 3, 8, 8)])


def test_a_model_whose_outputs_are_not_finite() -> None:
    model = copy.deepcopy(trained())
    with torch.no_grad():
        model[-1].weight.fill_(torch.inf)
    with pytest.raises(nk.NormkitError, match="not finite"):
        nk.convert(model, "gn", groups=1, fit=digits()[0][:16])


def test_a_model_in_train_mode_is_fitted_to_its_eval_mode() -> None:
    model = copy.deepcopy(trained()).train()
    plan = nk.plan_conversion(model, "ln", fit=digits()[0][:32])
    assert "train mode" in str(plan.fit)
    assert all(m.training for m in model.modules())
    still = nk.plan_conversion(trained(), "ln", fit=digits()[0][:32]).fit
    assert plan.fit.layers == still.layers


def test_what_cannot_be_fitted_is_refused_with_the_reason() -> None:
    with pytest.raises(nk.NormkitError, match="no scale and shift"):
        nk.convert(copy.deepcopy(trained()), "gn", groups=1, affine=False, fit=digits()[0][:16])


# -------------------------------------------------------------------- the recipe


def test_the_recipe_for_small_batches() -> None:
    model = copy.deepcopy(trained())
    plan = nk.recipes.small_batch(model, digits()[0][:64])
    assert "Frozen batch norms" in str(plan)  # what was measured to be the better choice
    plan.apply()
    assert {type(norm.module) for norm in nk.survey(model)} == {nk.GN}
    assert accuracy(model) > accuracy(trained()) - 0.05
    model.train()(digits()[0][:1]).sum().backward()  # one image is enough
    still = nk.recipes.small_batch(copy.deepcopy(trained()))
    assert still.apply(digits()[0][:2]).exact
    assert "fit=images" in str(still)


# -------------------------------------------------------------------- distilling


@pytest.mark.parametrize("parameters", ["norms", "all"])
def test_distilling_goes_on_from_the_fit_and_is_never_worse(parameters: Any) -> None:
    x = digits()[0][:96]
    fitted = nk.plan_conversion(trained(), "gn", groups=8, fit=nk.Fit(x, parameters=parameters)).fit
    told: list[tuple[int, float]] = []
    model = copy.deepcopy(trained())
    before = copy.deepcopy(model.state_dict())
    images = nk.Fit(x, parameters=parameters, progress=lambda step, now: told.append((step, now)))
    plan = nk.plan_conversion(model, "gn", groups=8, fit=images, distill=30)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    plan.apply()
    report = plan.fit
    assert report.output_error < fitted.output_error
    assert told[0] == (0, pytest.approx(fitted.output_error, rel=1e-3))
    assert report.output_error == pytest.approx(min(error for _, error in told), rel=1e-3)
    held = x[torch.arange(96) % 5 == 4]
    with torch.no_grad():
        old, new = trained()(held), model(held)
    assert report.output_error == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-3)
    moved = not torch.equal(model[0].conv1.weight, before["0.conv1.weight"])
    assert moved == (parameters == "all")
    plan.undo()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_distilling_goes_on_after_an_interruption(tmp_path: Path) -> None:
    """To the same numbers as without; a file of another run is refused."""
    x, file = digits()[0][:48], tmp_path / "state.pt"

    def planned(steps: int = 12, **options: Any) -> dict[str, Tensor]:
        model = copy.deepcopy(trained())
        nk.convert(model, "gn", groups=8, fit=nk.Fit(x, distill=steps, **options))
        return model.state_dict()

    def stop(step: int, _: float) -> None:
        if step == 7:
            raise KeyboardInterrupt

    steps: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        planned(checkpoint=file, progress=stop)
    again = planned(checkpoint=file, progress=lambda step, _: steps.append(step))
    assert steps[0] == 8
    through = planned()
    assert all(torch.equal(again[name], value) for name, value in through.items())
    with pytest.raises(nk.NormkitError, match=r"number of steps \(12 there, 14 here"):
        planned(14, checkpoint=file)
    file.write_text("something else")
    with pytest.raises(nk.NormkitError, match="holds no state of distilling"):
        planned(checkpoint=file)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda model: ("ln", {}), r"new norms \(0\.bn1: GN.* there, LN.* here\)"),
        (lambda model: ("gn", {"groups": 8, "parameters": "norms"}), "parameters"),
        (lambda model: model[2].bn1.bias.data.mul_(0.5) is None, "outputs of the old network"),
    ],
)
def test_a_checkpoint_of_another_conversion_is_refused(
    change: Any, told: str, tmp_path: Path
) -> None:
    """One of gn(16) was taken for ln, and the error of the outputs went from 4 to 71 %."""
    x, file = digits()[0][:48], tmp_path / "state.pt"
    nk.convert(copy.deepcopy(trained()), "gn", groups=8, fit=nk.Fit(x, distill=2, checkpoint=file))
    model = copy.deepcopy(trained())
    target, options = change(model) or ("gn", {"groups": 8})
    fit = nk.Fit(x, distill=2, checkpoint=file, parameters=options.pop("parameters", None))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(nk.NormkitError, match=told) as caught:
        nk.convert(model, target, fit=fit, **options)
    assert str(file) in str(caught.value)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_spoilt_checkpoint_does_not_end_worse_than_the_fit(tmp_path: Path) -> None:
    x, file = digits()[0][:48], tmp_path / "state.pt"
    options: dict[str, Any] = {"parameters": "norms", "distill": 2, "checkpoint": file}
    nk.plan_conversion(trained(), "gn", groups=8, fit=nk.Fit(x, **options))
    state = torch.load(file)
    state["best"] = {name: value * 3 for name, value in state["best"].items()}
    torch.save(state, file)
    report = nk.plan_conversion(trained(), "gn", groups=8, fit=nk.Fit(x, **options)).fit
    fitted = nk.plan_conversion(trained(), "gn", groups=8, fit=x).fit
    assert report.output_error == pytest.approx(fitted.output_error, rel=1e-3)
    assert report.distilled == 0


@pytest.mark.parametrize("distill", [0, 1])
def test_all_parameters_are_never_worse_than_norms(
    distill: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """distill= fitted everything, and ended worse than the fit of the norms where that is bad."""

    def bad(layer: LinearSite, *_: Any) -> None:
        layer.weight = torch.zeros_like(layer.module.weight)

    monkeypatch.setattr(LinearSite, "fit", bad)
    x = digits()[0][:48]
    norms = nk.plan_conversion(trained(), "gn", groups=8, fit=x).fit
    report = nk.plan_conversion(
        trained(), "gn", groups=8, fit=nk.Fit(x, parameters="all", distill=distill)
    ).fit
    assert report.output_error <= norms.output_error * 1.0001
    assert any("only norms were fitted" in note for note in report.notes)


def test_frozen_parameters_stay_as_they_are() -> None:
    model = copy.deepcopy(trained())
    model[0].requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    nk.convert(model, "gn", groups=8, fit=nk.Fit(digits()[0][:48], distill=2))
    assert torch.equal(model[0].conv2.weight, before["0.conv2.weight"])
    assert not torch.equal(model[2].conv2.weight, before["2.conv2.weight"])
    model = copy.deepcopy(trained()).requires_grad_(False)
    with pytest.raises(nk.NormkitError, match="nothing to train"):
        nk.convert(model, "gn", groups=8, fit=nk.Fit(digits()[0][:48], distill=2))


def test_what_cannot_be_distilled() -> None:
    with pytest.raises(nk.NormkitError, match="fit=images"):
        nk.convert(copy.deepcopy(trained()), "gn", distill=10)
    images = [torch.randn(3, 9, 9) for _ in range(4)]
    with pytest.raises(nk.NormkitError, match="no row for each image"):
        nk.convert(Detector().eval(), "gn", groups=1, fit=images, distill=10)


def test_variance_that_is_kept() -> None:
    """Least squares shrink a channel that fits badly; shrink=0 does not."""
    torch.manual_seed(0)
    u = torch.randn(4000, 2, dtype=torch.float64)
    t = 3 * u + 4 * torch.randn_like(u)
    for shrink, expected in ((1.0, 3.0), (0.0, 5.0)):
        scale, shift = solve(u, t, shrink=shrink)
        assert torch.allclose(scale, torch.full_like(scale, expected), atol=0.2)
        assert shift.abs().max() < 0.3
