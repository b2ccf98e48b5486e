"""Whole networks in training: images a second and peak memory, beside torch's own norms.

Networks are torchvision's, steps are in bfloat16 and channels_last. In each turn every variant is
timed right before or after the first one, so that what a busy host does to one it does to both; a
ratio is the median of such pairs. The first one is timed beside itself.
A variant is a norm and what is done with it: ``bn`` converted, ``bn-fused`` after ``fuse``,
``bn-save`` after ``fuse(save="inputs")``, ``bn-ws`` with standardized weights, ``torch-gn`` torch,
``torch-folded`` by torch's own means, ``bn-folded+fused`` by ``fold(fuse=True)``.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx.experimental.optimization
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk

Step = Callable[[], None]

CLASSES = 1000
SETTLING = 5  # steps in which kernels are loaded, steps recorded
STEADY = 0.02  # turns that differ by less than that are not repeated
TURN_SECONDS = 0.06  # short, so that a pair is of one moment
DETECTION = "maskrcnn_resnet50_fpn"


@dataclass(frozen=True)
class Case:
    """A network of torchvision, and the norms it is measured with; the first is the baseline."""

    model: str
    pixels: int
    batch: int
    variants: tuple[str, ...]
    training: bool = True  # or forward alone, in eval mode

    def tiny(self) -> Case:
        """The same for a trial, on a CPU too."""
        return replace(self, pixels=min(self.pixels, 64), batch=2)

    def norms(self) -> dict[str, list[str]]:
        """Variants that share kernels: those of one norm. torch's have none of ours."""
        groups: dict[str, list[str]] = {}
        for variant in self.variants:
            norm = variant.partition("-")[0]
            if norm != "torch":
                groups.setdefault(norm, []).append(variant)
        return groups


USUAL = ("torch-bn", "torch-gn", "bn", "bn-fused", "gn", "gn-fused", "bcn-fused")
FOLDED = ("bn-folded", "bn-folded+fused")
TRACED = ("gbgn", "ghost_bn", "rms", "ssn")  # without kernels of their own
EVAL = ("gn", "gn-fused", "bcn-fused")
# in the order in which they are measured, where time is short
CASES = {
    "resnet18-32": Case(
        *("resnet18", 32, 128),
        (*USUAL, "ln", "in", "bcn", "rbn-fused", "iebn", "sn", "bgn", "ubn", *TRACED),
    ),
    "resnet50-256": Case(
        *("resnet50", 224, 256),
        (*USUAL, "ubn", "ubn-fused", "bn-save", "gn-save", "bcn-save"),
    ),
    "efficientnet_b0": Case("efficientnet_b0", 224, 128, (*USUAL, "bn-save")),
    "mobilenet_v3_large": Case("mobilenet_v3_large", 224, 128, (*USUAL, "bn-save")),
    "densenet121": Case("densenet121", 224, 32, (*USUAL[:-1], "bn-save")),
    "regnet_y_1_6gf": Case("regnet_y_1_6gf", 224, 64, (*USUAL, "bn-save")),
    "resnet50-8": Case(*("resnet50", 224, 8), (*USUAL, "torch-ln", "ln", "torch-in", "in", "ubn")),
    "resnet50-1": Case("resnet50", 224, 1, USUAL),
    DETECTION: Case(DETECTION, 800, 2, ("torch-bn", "bn-fused", "bn-save")),
    "convnext_tiny": Case("convnext_tiny", 224, 64, ("torch-own", "pn", "pn-save")),
    "resnet50-inference": Case(
        *("resnet50", 224, 256),
        ("torch-bn", "torch-gn", "torch-folded", "bn", "bn-fused", *FOLDED, *EVAL),
        training=False,
    ),
    "resnet50-inference-1": Case(
        *("resnet50", 224, 1),
        ("torch-bn", "torch-gn", "torch-folded", "bn", "bn-fused", *FOLDED, *EVAL),
        training=False,
    ),
}


def build(case: Case, variant: str) -> nn.Module:
    from torchvision import models

    torch.manual_seed(0)
    norm, _, rest = variant.partition("-")
    if case.model == DETECTION:
        options = {"min_size": case.pixels, "max_size": 2 * case.pixels}
        model = models.detection.maskrcnn_resnet50_fpn(
            weights=None, weights_backbone=None, **options
        )
    else:
        model = getattr(models, case.model)(num_classes=CLASSES)
    if variant == "torch-folded":
        return torch.fx.experimental.optimization.fuse(model.eval())
    if norm == "torch":
        return _with(model, TORCH[rest]) if rest in TORCH else model
    if case.model.startswith("convnext"):
        _channels_on_axis_1(model)
    groups: Any = {"groups": 32, "group_policy": "gcd"} if norm in ("gn", "bcn") else {}
    nk.convert(model, norm, example=False, **groups)
    if rest in ("fused", "save"):
        nk.fuse(model, example=False, save="inputs" if rest == "save" else "all")
    if rest == "ws":
        nk.standardize(model)
    if rest.startswith("folded"):
        return nk.fold(model.eval(), fuse=rest == "folded+fused")
    return model


def _groups(channels: int) -> int:
    return next(g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0)


TORCH: dict[str, Callable[[int], nn.Module]] = {
    "gn": lambda channels: nn.GroupNorm(_groups(channels), channels),
    "ln": lambda channels: nn.GroupNorm(1, channels),
    "in": lambda channels: nn.InstanceNorm2d(channels, affine=True),
}


def _with(model: nn.Module, norm: Callable[[int], nn.Module]) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, norm(child.num_features))
    return model


def _channels_on_axis_1(model: nn.Module) -> None:
    """The blocks of a ConvNeXt with convolutions of one pixel in the place of linear layers: the
    same function. Its norms between permutations normalize a last axis, which no layer does."""
    from torchvision.models.convnext import CNBlock, LayerNorm2d

    for block in model.modules():
        if isinstance(block, CNBlock):
            depthwise, _, norm, wide, act, narrow, _ = block.block
            channels = LayerNorm2d(norm.normalized_shape, eps=norm.eps)
            channels.load_state_dict(norm.state_dict())
            block.block = nn.Sequential(depthwise, channels, _pixel(wide), act, _pixel(narrow))


def _pixel(linear: Any) -> nn.Conv2d:
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1)
    with torch.no_grad():
        conv.weight.copy_(linear.weight[:, :, None, None])
        conv.bias.copy_(linear.bias)  # type: ignore[union-attr]
    return conv


def step_of(model: nn.Module, case: Case, device: torch.device) -> Step:
    """A step in bf16 and channels_last; it waits for nothing."""
    model.to(device).to(memory_format=torch.channels_last).train(case.training)
    loss = _detector_loss(model, case, device) if case.model == DETECTION else None
    loss = loss or _classifier_loss(model, case, device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, foreach=True)
    cuda = device.type == "cuda"
    cast = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    @torch.no_grad()
    def forward() -> None:
        with cast:
            loss()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with cast:
            value = loss()
        value.backward()
        optimizer.step()

    return step if case.training else forward


def _classifier_loss(model: nn.Module, case: Case, device: torch.device) -> Callable[[], Tensor]:
    shape = case.batch, 3, case.pixels, case.pixels
    x = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(CLASSES, (case.batch,), device=device)
    return lambda: F.cross_entropy(model(x).float(), y)


def _detector_loss(model: nn.Module, case: Case, device: torch.device) -> Callable[[], Tensor]:
    """Pictures one and a half times as wide as high, eight objects each."""
    high, wide, objects = case.pixels, 3 * case.pixels // 2, 8
    low = torch.rand(objects, 2) * torch.tensor([wide, high]) * 0.6
    boxes = torch.cat([low, low + 0.3 * torch.tensor([wide, high])], 1)
    masks = torch.zeros(objects, high, wide, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    target = {"boxes": boxes, "labels": torch.arange(1, objects + 1), "masks": masks}
    target = {name: value.to(device) for name, value in target.items()}
    images = list(torch.rand(case.batch, 3, high, wide, device=device))
    return lambda: sum(
        model(images, [target] * case.batch).values(), torch.zeros((), device=device)
    )


def prepare(case: Case, variants: list[str], device: torch.device) -> None:
    """Have the kernels of some variants compiled, which are kept on disk."""
    for variant in variants:
        step = step_of(build(case, variant), case, device)
        step()
        step()
        _free(device)


def measure(
    case: Case, device: torch.device, turns: int, log: Callable[[str], None] = print
) -> list[dict[str, Any]]:
    """A row a variant. What a variant cannot do is its ``error``, and the others go on."""
    rows: list[dict[str, Any]] = []
    steps: dict[str, Step] = {}
    for variant in case.variants:
        row: dict[str, Any] = {"variant": variant}
        rows.append(row)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = build(case, variant)
                steps[variant], row["gib"] = settled(model, case, device)
                if case.training and device.type == "cuda":
                    row["from_python"] = from_python(model, steps[variant])
                if device.type == "cuda":
                    row["host_seconds"] = host_seconds(steps[variant])
        except Exception as problem:  # of torchvision, of torch, of a layer that refuses
            row["error"] = first_line(problem)
            log(f"{case.model}, {variant}: {row['error']}")
            _free(device)
    times = in_turns({name: timer(step, device) for name, step in steps.items()}, turns)
    add_ratios(rows, times, case.batch)
    steps.clear()
    _free(device)
    return rows


def first_line(problem: Exception) -> str:
    return f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0][:200]}"


def settled(model: nn.Module, case: Case, device: torch.device) -> tuple[Step, float | None]:
    """A step that has run some times, and the GiB that it takes at most beyond what was there."""
    _free(device)
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    step = step_of(model, case, device)
    for _ in range(SETTLING if cuda else 1):
        step()
    if not cuda:
        return step, None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return step, (torch.cuda.max_memory_allocated() - before) / 2**30


def from_python(model: nn.Module, step: Step) -> dict[str, int]:
    """Why layers do not repeat a recorded step, and how many do not for each reason. What goes
    wrong with that question is an answer: the step itself has been measured."""
    found: Counter[str] = Counter()

    def look(layer: nn.Module, given: Any, named: Any, y: Any) -> None:
        try:
            if y.grad_fn is not None and "NormalizerStep" not in y.grad_fn.name():
                x = given[0] if given else named["x"]
                found[nk.why(layer, x.detach())] += 1
        except Exception as problem:
            found[first_line(problem)] += 1

    layers = [module for module in model.modules() if isinstance(module, nk.Normalizer)]
    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in layers]
    try:
        step()
    except Exception as problem:
        found[first_line(problem)] += 1
    finally:
        for hook in hooks:
            hook.remove()
    return dict(found)


def host_seconds(step: Step) -> float:
    """How long the host works on a step for which the GPU has nothing else to do: a network whose
    steps take hardly longer waits for the host."""
    found = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        found.append(time.perf_counter() - begin)
    return statistics.median(found)


def timer(step: Step, device: torch.device) -> Callable[[int], float]:
    """Seconds of so many steps."""

    def seconds(count: int) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    return seconds


@dataclass
class Turns:
    """Seconds of a step, turn by turn, and of a step of the first variant beside it."""

    own: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)

    @property
    def ratios(self) -> list[float]:
        """How much faster than the first one, turn by turn."""
        return [first / own for first, own in zip(self.first, self.own, strict=True)]


def in_turns(
    timers: dict[str, Callable[[int], float]], turns: int, seconds: float = TURN_SECONDS
) -> dict[str, Turns]:
    """What a step of each takes, in turns of so many seconds; three where no more are needed."""
    counts = {name: _count(timer, seconds) for name, timer in timers.items()}
    times = {name: Turns() for name in timers}
    first = next(iter(timers), "")
    for turn in range(turns):
        for name, found in times.items():
            pair = [(first, found.first), (name, found.own)]
            for each, into in pair if turn % 2 else pair[::-1]:  # nobody is always in front
                into.append(timers[each](counts[each]) / counts[each])
        if turn >= 2 and all(_spread(found.own) < STEADY for found in times.values()):
            break
    return times


def _count(timer: Callable[[int], float], seconds: float) -> int:
    timer(1)  # memory that was given back is asked for again
    return max(2, min(30, round(seconds / timer(1))))


def _spread(values: list[float]) -> float:
    return (max(values) - min(values)) / statistics.median(values)


def uncertainty(values: list[float]) -> float | None:
    """Half of a 95 % interval of the median, as a share of it: 1.57 · (distance of quartiles) / √n,
    as in McGill, Tukey, Larsen 1978."""
    if len(values) < 2:
        return None
    low, middle, high = statistics.quantiles(values, method="inclusive")
    return 1.57 * (high - low) / math.sqrt(len(values)) / middle


def add_ratios(rows: list[dict[str, Any]], times: dict[str, Turns], batch: int) -> None:
    """Images a second, and against the first row."""
    for row in rows:
        found = times.get(row["variant"])
        if found is None:
            continue
        row["images_per_second"] = batch / statistics.median(found.own)
        if rows[0]["variant"] in times:
            row["ratio"] = statistics.median(found.ratios)
            row["uncertainty"] = uncertainty(found.ratios)
        if row.get("gib") and rows[0].get("gib"):
            row["memory"] = row["gib"] / rows[0]["gib"]


def _free(device: torch.device) -> None:
    gc.collect()  # graphs refer to themselves
    if device.type == "cuda":
        torch.cuda.empty_cache()
