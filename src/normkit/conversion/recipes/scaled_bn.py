"""recipes.scaled_bn: batch norms that start small, and everything that goes with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.utils.hooks import RemovableHandle

from normkit.conversion.carry import describe
from normkit.conversion.edits import NONE, Edit, Modules, SetTensor, Successor
from normkit.conversion.plan import Optimizers, Plan, Step
from normkit.conversion.recipes.assembly import BATCH, Recipe, look, norm_path
from normkit.errors import OptionError
from normkit.inspection import Site, select
from normkit.layers.input_norm import InputNorm


def scaled_bn(
    model: nn.Module,
    scale: float = 0.1,
    *,
    input_norm: bool = True,
    sigma_act: float = 0.58,
    initialise: bool = True,
    where: Any = None,
    example: Any = None,
    optimizer: Optimizers = None,
) -> Plan:
    """Batch norms start at a scale below one, after a batch norm of the input; for new models.

    All scales γ become ``scale`` and all shifts 0, whatever a constructor has set: the layers
    keep their classes. The input goes through an ``InputNorm`` that starts at sigma_act · scale
    (0.58 for ReLU) and becomes the model's child ``input_norm``; give images as they come, scaled
    to 0 … 1. Weights are drawn by fan-in: of convolutions normal with variance 2 / fan-in, of
    linear layers uniform up to √(6 / fan-in), biases 0. ``initialise=False`` leaves weights and
    biases as they are.

    The other half of the method is the optimizer: ``normkit.param_groups`` trains γ at a hundredth
    of the learning rate, without decay. Make the groups after ``apply``.

    Paper: Davis & Frank 2021, "Revisiting Batch Normalization"; they compare scales of 0.01 to 1,
    and 0.05, 0.1, 0.5 in most tables. What was trained before is overwritten. Mind width and
    schedule: at a learning rate of 0.1 without warm-up a ResNet-18 gained 6 points by it in eight
    epochs of CIFAR-10, and with an epoch of warm-up less than half a point; a ResNet-20 lost 4 in
    five without, and 9 with it (docs/evidence.md, a).

    >>> import torchvision, normkit as nk
    >>> model = torchvision.models.resnet18()
    >>> _ = nk.recipes.scaled_bn(model, 0.1).apply()
    >>> model.layer4[1].bn2.weight.unique().tolist(), model.input_norm.weight.tolist()[0]
    ([0.10000000149011612], 0.057999998331069946)
    """
    if not isinstance(scale, int | float) or not 0 < scale <= 1:
        raise OptionError(f"scaled_bn expects a scale above 0 and up to 1, got {scale!r}.")
    norms = look(model, example, "scaled_bn")
    chosen = {id(site) for site in select(norms, where)}
    edits: list[Edit] = []
    steps: list[Step] = []
    for site in norms:
        reason = "" if id(site) in chosen else "left out by where"
        reason = reason or _refusal(site)
        if not reason:
            at = norm_path(site.path, site.module)
            edits.append(SetTensor(f"{at}.weight", scale, f"{at}.weight starts at {scale}"))
            edits.append(SetTensor(f"{at}.bias", 0.0, f"{at}.bias starts at 0"))
        steps.append(_step(site, scale, reason))
    if initialise:
        edits += _by_fan_in(model)
    if input_norm:
        like = next(p for p in model.parameters() if p.is_floating_point())
        layer = InputNorm(
            _input_channels(model, example),
            scale_init=scale,
            sigma_act=sigma_act,
            device=like.device,
            dtype=like.dtype,
        )
        edits.append(AddInputNorm(layer.train(model.training)))
    title = f"{norms.title}, recipe scaled_bn, γ₀ {scale}"
    return Plan(model, edits, steps, example=example, optimizer=optimizer, title=title)


def _refusal(site: Site) -> str:
    if site.kind not in BATCH:
        return f"it is {site.kind}, no batch norm"
    return "" if site.affine else "it has no scale"


def _step(site: Site, scale: float, reason: str) -> Step:
    was = describe(site.module)
    if reason:
        return Step(site.path, was, action="keep", reason=reason, paths=site.paths)
    started = (f"weight at {scale}", "bias at 0")
    return Step(
        site.path,
        was,
        f"{was}, γ = {scale}",
        carried=("running statistics",) if site.tracked else (),
        initialised=started,
        lost=("weight", "bias"),
        paths=site.paths,
    )


def _by_fan_in(model: nn.Module) -> Iterator[SetTensor]:
    """New weights for all convolutions and linear layers, and zeros for their biases."""
    drawn: set[int] = set()
    for path, layer in model.named_modules():
        if not isinstance(layer, _ConvNd | nn.Linear):
            continue
        for name, parameter in layer.named_parameters(path):
            last = name.rpartition(".")[2]
            if id(parameter) in drawn or last not in ("weight", "bias", "original"):
                continue
            drawn.add(id(parameter))
            if parameter.dim() < 2:
                yield SetTensor(name, 0.0, f"{name} starts at 0")
            else:
                yield SetTensor(name, _draw(layer, parameter), f"{name} is drawn by fan-in")


def _draw(layer: nn.Module, weight: nn.Parameter) -> torch.Tensor:
    values = torch.empty_like(weight, requires_grad=False)
    inputs = weight[0].numel()
    if isinstance(layer, _ConvTransposeNd):  # (in, out / groups, *kernel)
        inputs = layer.in_channels // layer.groups * weight[0, 0].numel()
    if isinstance(layer, nn.Linear):
        bound = math.sqrt(6 / inputs)
        return values.uniform_(-bound, bound)
    return values.normal_(0, math.sqrt(2 / inputs))


def _input_channels(model: nn.Module, example: Any) -> int:
    """How many channels an input has: those of the example, or of the first convolution."""
    first = example
    if isinstance(example, dict | tuple | list) and example:
        first = next(iter(example.values() if isinstance(example, dict) else example))
    if isinstance(first, torch.Tensor) and first.dim() > 1:
        return first.shape[1]
    for module in model.modules():
        if isinstance(module, _ConvNd):
            return module.in_channels
    raise OptionError(
        "scaled_bn cannot tell how many channels the input has. Try example=x with an input of "
        "the model, or input_norm=False."
    )


RECIPE = Recipe(scaled_bn)


# -------------------------------------------------------------------- a norm of the input


class AddInputNorm(Edit):
    """Normalize the first input of the model, with a norm that becomes its child ``name``.

    A Sequential runs all its children, so there the norm becomes the first of them; elsewhere a
    hook calls it.
    """

    def __init__(self, norm: nn.Module, name: str = "input_norm") -> None:
        self.norm, self.name = norm, name
        self.description = f"{name} = {type(norm).__name__} before everything else"
        self._handle: RemovableHandle | None = None

    def check(self, model: nn.Module, new: Modules = NONE) -> None:
        if hasattr(model, self.name):
            raise OptionError(
                f"The model has an attribute {self.name!r} already, so no norm of that name can "
                "be added to its input."
            )

    def do(self, model: nn.Module) -> None:
        rest = dict(model._modules)
        model.add_module(self.name, self.norm)
        if type(model).forward is nn.Sequential.forward:
            for name, module in rest.items():  # to the end, in their order
                del model._modules[name]
                model._modules[name] = module
        else:
            hook = _Prepended(self.name)
            self._handle = model.register_forward_pre_hook(hook, with_kwargs=True)

    def undo(self, model: nn.Module) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if model._modules.get(self.name) is self.norm:
            del model._modules[self.name]

    def successors(self) -> list[Successor]:
        return [Successor(p, None) for p in self.norm.parameters()]


class _Prepended:
    """A hook that looks the norm up by its name, so that copies of the model use their own."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        norm = model._modules[self.name]
        assert norm is not None
        if args:
            return (norm(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs))
        return args, {**kwargs, first: norm(kwargs[first])}
