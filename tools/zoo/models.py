"""The models of timm and torchvision: which there are, building them quickly, running them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normkit.models import build as build_model
from normkit.models import names, require

BATCH_NORM = nn.modules.batchnorm._BatchNorm
PER_FAMILY = 6  # models of each family among which a sample is chosen
DRAWN = 65_521  # how many numbers of a large tensor are random; a prime, out of step with its rows
# methods that change values and nothing else; functions of torch.nn.init are known by their module
CHANGES = frozenset(
    {"add_", "clamp_", "copy_", "div_", "erfinv_", "fill_", "log_normal_", "mul_", "normal_"}
    | {"sub_", "trunc_normal_", "uniform_", "zero_"}
)
PLAIN = ("normal_", "uniform_")
BY_FAN = ("kaiming_normal_", "kaiming_uniform_")
BATCH = 2  # the least with which batch norms train on maps of one pixel
SIZES = (32, 64, 96, 128, 224, 299)  # tried from the smallest, up to the model's own
IMAGE = 64  # for detectors
KEYPOINTS = 17  # of a person, as the detectors of torchvision have them
DETECTION = "torchvision.models.detection"
FEW_BOXES = {  # of the thousands that go through the second stage
    "rpn_post_nms_top_n_train": 8,
    "rpn_post_nms_top_n_test": 8,
    "box_batch_size_per_image": 8,
    "box_detections_per_img": 4,
}


@dataclass(frozen=True)
class ZooModel:
    """A model of a library, and how large it is."""

    reference: str
    """As in ``normkit survey``."""
    family: str
    """What it is built like: the file of timm or the kind of torchvision that defines it."""
    batch_norms: int
    parameters: int


def timm_references() -> list[str]:
    """Every model that this timm has."""
    return [f"timm:{name}" for name in names("timm")]


def few_of_each_family(references: Iterable[str]) -> list[str]:
    """Of some models of timm, a few of each family, evenly over their names.

    To build all models takes longer than to run a sample of them.
    """
    timm, wanted = require("timm", "models", "The zoo"), set(references)
    result = []
    for family in timm.list_modules():
        members = [f"timm:{name}" for name in timm.list_models(module=family)]
        members = [name for name in members if name in wanted]
        few = min(PER_FAMILY, len(members))
        result += [members[i * len(members) // few] for i in range(few)]
    return result


def torchvision_references() -> list[str]:
    """Every model of torchvision for classification, segmentation and detection."""
    library = require("torchvision.models", "models", "The zoo")
    parts = (library, library.segmentation, library.detection)
    return [f"torchvision:{name}" for part in parts for name in library.list_models(part)]


def describe(reference: str) -> ZooModel:
    """Build a model on the meta device, and count."""
    with without_values():
        model = build_model(reference)
    size = sum(p.numel() for p in model.parameters())
    return ZooModel(reference, type(model).__module__, count_batch_norms(model), size)


def count_batch_norms(module: nn.Module) -> int:
    """How many batch norms of torch a module has, itself included."""
    return sum(isinstance(part, BATCH_NORM) for part in module.modules())


def choose(models: Iterable[ZooModel], count: int) -> list[ZooModel]:
    """The smallest model of each family, then the second smallest of each, and so on.

    Families come in the order of their smallest model, so that the choice is the cheapest one
    with so many families in it; it depends on nothing but the models.
    """
    by_family: dict[str, list[ZooModel]] = {}
    for model in sorted(models, key=lambda m: (m.parameters, m.reference)):
        by_family.setdefault(model.family, []).append(model)
    turns = zip_longest(*by_family.values())
    return [model for turn in turns for model in turn if model is not None][:count]


class _FillMode(TorchFunctionMode):
    """Changes how tensors are filled with values, and nothing else."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in CHANGES or getattr(func, "__module__", "") == "torch.nn.init":
            # methods get their tensor as the first argument, functions of torch.nn.init by name
            tensor = args[0] if args else kwargs.pop("tensor", None)
            if not isinstance(tensor, Tensor):
                return func(*args, **kwargs)
            if not self.fill(name, tensor, lambda t: func(t, *args[1:], **kwargs), kwargs):
                func(tensor, *args[1:], **kwargs)
            return tensor
        return func(*args, **kwargs)

    def fill(
        self, name: str, tensor: Tensor, draw: Callable[[Tensor], Any], options: dict[str, Any]
    ) -> bool:
        """Fill the tensor, and say whether that was done: else it is filled as usual."""
        raise NotImplementedError


class _WithoutValues(_FillMode):
    """On the meta device nothing has a value, so that filling it in is lost time."""

    def fill(
        self, name: str, tensor: Tensor, draw: Callable[[Tensor], Any], options: dict[str, Any]
    ) -> bool:
        return tensor.is_meta


class _RepeatedValues(_FillMode):
    """Draws the first numbers of a large tensor, and repeats them to its end.

    As good as fresh ones for finding out whether a model runs: the largest models would spend
    more time on their start than on the run.
    """

    def fill(
        self, name: str, tensor: Tensor, draw: Callable[[Tensor], Any], options: dict[str, Any]
    ) -> bool:
        fan_in = name in BY_FAN and options.get("mode") == "fan_in" and tensor.dim() > 1
        if not (name in PLAIN or fan_in) or tensor.numel() <= DRAWN or not tensor.is_contiguous():
            return False
        with torch.no_grad():
            # whole rows where the spread depends on their length
            rows = tensor.detach() if fan_in else tensor.detach().view(-1, 1)
            drawn = min(len(rows), -(-DRAWN // rows[0].numel()))
            draw(rows[:drawn] if fan_in else rows[:drawn].view(-1))
            for start in range(drawn, len(rows), drawn):
                part = rows[start : start + drawn]
                part.copy_(rows[: len(part)])
        return True


def build(reference: str, with_values: bool) -> nn.Module:
    """A model with values, the same every time, or on the meta device."""
    torch.manual_seed(0)
    options = build_options(reference)
    with with_quick_values() if with_values else without_values():
        return build_model(reference, **options)


@contextmanager
def without_values() -> Iterator[None]:
    """Models built inside are on the meta device: modules and shapes, but no memory."""
    with torch.device("meta"), _WithoutValues():
        yield


@contextmanager
def with_quick_values() -> Iterator[None]:
    """Models built inside have random values of the right size, not all of them independent."""
    with _RepeatedValues():
        yield


@dataclass(frozen=True)
class TrainingPass:
    """One forward and backward pass in training mode."""

    names: frozenset[str]
    """The parameters that got a gradient."""
    finite: bool
    """Whether the loss and all gradients are."""


def build_options(reference: str) -> dict[str, Any]:
    """What the constructor of a detector needs so that it stays quick."""
    library, _, name = reference.partition(":")
    if library != "torchvision":
        return {}
    vision = require("torchvision.models", "models", reference)
    if name not in vision.list_models(vision.detection) or name.startswith("ssd"):
        return {}  # ssd has one size, which is not ours to choose
    small = {"min_size": IMAGE, "max_size": IMAGE}
    return {**small, **FEW_BOXES} if "rcnn" in name else small


def smallest_input(model: nn.Module) -> tuple[tuple[Any, ...], TrainingPass]:
    """Positional arguments, as small as the model can be trained on, and what came of them."""
    if is_detector(model):
        args: tuple[Any, ...] = images_and_targets()
        return args, train_once(model, args)
    problem: Exception | None = None
    for shape in input_shapes(model):
        args = (torch.randn(BATCH, *shape, generator=torch.Generator().manual_seed(0)),)
        try:
            return args, train_once(model, args)
        except Exception as error:  # too small for a stride or a window, in as many words
            problem = error
    assert problem is not None
    raise problem


def input_shapes(model: nn.Module) -> Iterator[tuple[int, int, int]]:
    """Channels, height and width to try."""
    about = getattr(model, "pretrained_cfg", None) or {}  # of timm
    channels, height, width = about.get("input_size", (3, SIZES[-1], SIZES[-1]))
    if not about.get("fixed_input_size"):
        least = max(about.get("min_input_size") or (0,))
        yield from ((channels, size, size) for size in SIZES if least <= size < height)
    yield channels, height, width


def images_and_targets() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Two images with one object each, for the detectors of torchvision."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.rand(3, IMAGE, IMAGE, generator=generator) for _ in range(BATCH)]
    points = torch.full((1, KEYPOINTS, 3), IMAGE / 2)
    points[..., 2] = 1.0  # visible
    target = {
        "boxes": torch.tensor([[IMAGE / 8, IMAGE / 8, IMAGE / 1.5, IMAGE / 1.5]]),
        "labels": torch.tensor([1]),
        "masks": torch.ones(1, IMAGE, IMAGE, dtype=torch.uint8),
        "keypoints": points,
    }
    return images, [dict(target) for _ in images]


def train_once(model: nn.Module, args: tuple[Any, ...]) -> TrainingPass:
    """One batch in training mode. Parameters stay what they are; buffers go on."""
    model.train()
    torch.manual_seed(0)  # of dropout and its kin
    largest: dict[str, Tensor] = {}

    def take(name: str, parameter: Tensor) -> None:
        assert parameter.grad is not None
        largest[name] = parameter.grad.abs().amax()
        parameter.grad = None  # at once: all together are as large as the model

    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(partial(take, name))
                stack.callback(hook.remove)
        loss = torch.stack([t.float().square().mean() for t in float_tensors(model(*args))]).sum()
        loss.backward()
    finite = bool(torch.stack([loss.detach(), *largest.values()]).isfinite().all())
    return TrainingPass(frozenset(largest), finite)


@torch.no_grad()
def evaluate(model: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    """What the model gives in eval mode; of a detector, the features that it looks at."""
    model.eval()
    torch.manual_seed(0)
    if is_detector(model):
        return list(float_tensors(model.backbone(torch.stack(args[0]))))  # type: ignore[operator]
    return list(float_tensors(model(*args)))


def difference(before: list[Tensor], after: list[Tensor]) -> float:
    """The largest difference of an output, relative to its largest number."""
    if [t.shape for t in before] != [t.shape for t in after]:
        return float("inf")
    differences = [
        ((a - b).abs().max() / a.abs().max().clamp(min=torch.finfo(a.dtype).tiny)).item()
        for a, b in zip(before, after, strict=True)
        if a.numel()
    ]
    return max(differences, default=0.0)


def float_tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors in whatever a model returned."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from float_tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from float_tensors(value)


def is_detector(model: nn.Module) -> bool:
    """Whether it gives boxes: these change by leaps, as a score near a threshold decides."""
    return type(model).__module__.startswith(DETECTION)


def shape_of(args: tuple[Any, ...]) -> str:
    """The input in a word: 2x3x32x32."""
    first = torch.stack(args[0]) if isinstance(args[0], list) else args[0]
    return "x".join(map(str, first.shape))
