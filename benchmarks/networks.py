"""Whole networks in training: images a second and peak memory, beside torch's own norms.

    python -m benchmarks.networks --device cuda --json networks.json --markdown networks.md
    python -m benchmarks.networks --networks resnet18-32 --variants torch-bn bn bn-fused

Networks are torchvision's. Variants of a network are timed in turns, so that a slow minute of the
machine is everyone's, and a ratio is the median over turns. Peak memory is that of a step alone,
with nothing else on the device. ``-save`` is ``fuse(save="inputs")``.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normkit as nk
from normkit.errors import nearest

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    model: str  # of torchvision
    pixels: int
    batch: int
    variants: tuple[str, ...]


FEW = ("torch-bn", "bn", "bn-fused", "gn-fused", "torch-gn")
MANY = ("torch-bn", "torch-gn", "bn", "bn-fused", "gn", "gn-fused", "bcn-fused", "rbn-fused", "ubn")
MEMORY = ("torch-bn", "bn-fused", "bn-save", "gn-save", "bcn-save", "ubn-fused", "ubn-save")
CASES = {
    "resnet18-32": Case("resnet18", 32, 128, MANY),
    "resnet50-256": Case("resnet50", 224, 256, MEMORY),
    "efficientnet_b0": Case("efficientnet_b0", 224, 128, (*FEW, "bn-save")),
    "mobilenet_v3_large": Case("mobilenet_v3_large", 224, 128, (*FEW, "bn-save")),
    "densenet121": Case("densenet121", 224, 32, (*FEW, "bn-save")),
    "regnet_y_1_6gf": Case("regnet_y_1_6gf", 224, 64, (*FEW, "bn-save")),
    "resnet50-1": Case("resnet50", 224, 1, FEW),
    "resnet50-8": Case("resnet50", 224, 8, FEW),
}


def build(case: Case, variant: str) -> nn.Module:
    from torchvision import models

    torch.manual_seed(0)
    model = getattr(models, case.model)(num_classes=1000)
    norm, _, rest = variant.partition("-")
    if norm == "torch":
        return _group_norms(model) if rest == "gn" else model
    options: Any = {"groups": 32, "group_policy": "gcd"} if norm in ("gn", "bcn") else {}
    nk.convert(model, norm, example=False, **options)
    if rest in ("fused", "save"):
        nk.fuse(model, example=False, save="inputs" if rest == "save" else "all")
    return model


def _group_norms(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                channels = child.num_features
                groups = next(g for g in (32, 16, 8, 4, 2, 1) if channels % g == 0)
                setattr(module, name, nn.GroupNorm(groups, channels))
    return model


def step_of(model: nn.Module, case: Case, device: torch.device) -> Step:
    """A step of training in bf16 and channels_last; it waits for nothing."""
    model.to(device).to(memory_format=torch.channels_last).train()
    shape = case.batch, 3, case.pixels, case.pixels
    x = torch.randn(shape, device=device).to(memory_format=torch.channels_last)
    y = torch.randint(1000, (case.batch,), device=device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, foreach=True)
    cuda = device.type == "cuda"
    cast = torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with cast:
            output: Tensor = model(x)
        F.cross_entropy(output.float(), y).backward()
        optimizer.step()

    return step


def peak(case: Case, variant: str, device: torch.device) -> float | None:
    """GiB that training takes at most, alone on the device."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = step_of(build(case, variant), case, device)
    step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(case: Case, device: torch.device, options: Any) -> list[dict[str, Any]]:
    variants = [v for v in case.variants if not options.variants or v in options.variants]
    rows: list[dict[str, Any]] = [{"variant": v, "gib": peak(case, v, device)} for v in variants]
    gc.collect()
    steps = {v: step_of(build(case, v), case, device) for v in variants}
    for step in steps.values():
        for _ in range(options.warm_up):  # kernels are compiled, steps recorded
            step()
    turns: dict[str, list[float]] = {v: [] for v in variants}
    for turn in range(options.turns):
        for variant in variants if turn % 2 else variants[::-1]:
            turns[variant].append(_seconds(steps[variant], device, options.steps))
    base = turns[variants[0]]
    for row in rows:
        own = turns[str(row["variant"])]
        row["images_per_second"] = case.batch * options.steps / statistics.median(own)
        row["ratio"] = statistics.median(b / s for b, s in zip(base, own, strict=True))
        row["memory"] = row["gib"] / rows[0]["gib"] if row["gib"] else None
    return rows


def _seconds(step: Step, device: torch.device, steps: int) -> float:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def markdown(results: dict[str, Any]) -> str:
    lines = [
        "| network | batch | norms | images/s | × the first | peak GiB | × the first |",
        "|---|---:|---|---:|---:|---:|---:|",
    ]
    for name, rows in results["networks"].items():
        case = CASES[name]
        for number, row in enumerate(rows):
            memory = ["" if row[key] is None else f"{row[key]:.2f}" for key in ("gib", "memory")]
            head = (f"{case.model}, {case.pixels} px", str(case.batch)) if not number else ("", "")
            rate = f"{row['images_per_second']:,.0f}"
            cells = *head, row["variant"], rate, f"{row['ratio']:.2f}", *memory
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    unknown = [name for name in options.networks if name not in CASES]
    if unknown:
        print(f"Unknown network {unknown[0]!r}. {nearest(unknown[0], CASES)}", file=sys.stderr)
        return 2
    device = torch.device(options.device)
    what = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    results: dict[str, Any] = {"device": what, "torch": torch.__version__, "networks": {}}
    results["cpp"] = bool(device.type == "cuda" and nk.build_extension())
    began = time.perf_counter()
    for name in options.networks:
        results["networks"][name] = measure(CASES[name], device, options)
        if options.json:
            options.json.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    table = markdown(results)
    if options.markdown:
        options.markdown.write_text(table + "\n")
    print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.networks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--networks", nargs="+", default=list(CASES), metavar="NAME")
    parser.add_argument("--variants", nargs="+", help="of those that a network has (all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8, help="of each variant in a turn (8)")
    parser.add_argument("--warm-up", type=int, default=4, help="steps before (4)")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
