"""Is it the layers, or the method? First steps of claims by them, and by plain torch beside it.

    NORMKIT_DATA=… python -m tools.evidence.collapse --steps 60 --warmup 0 391

Without warm-up BCN + WS ends in a constant answer in a ResNet-18 more often than not (l), and an
XBN of bottlenecks starts worse than batch norms (j). Here their first steps are trained in
float32, from the same start on the same batches, once by the library's layers and once by formulas
as one would write them in torch (benchmarks/straightforward.py, and weights standardized by mean
and deviation). Both take nearly the same steps, or one of them is wrong. A ``--warmup`` is in
steps: 391 are an epoch. Mean losses of ten steps each are kept in RESULTS, with the device and the
seconds, from which docs/evidence.md is written. The shape counts: values differ by some percent
from device to device, as they do between the two.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.straightforward import FORMULAS, Plain
from normkit.core.atomic_write import write_text
from normkit.errors import NormkitError
from normkit.lab.data import load
from normkit.lab.data.transforms import normalize
from normkit.lab.models.variant import build_variant
from normkit.lab.train.device import environment
from normkit.layers.base import Normalizer
from tools.evidence.claims import experiment_of

CASES = {"l-resnet18": ("bcn + ws",), "j-xbn-positions": ("bn", "xbn, second")}  # by experiment
RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "collapse.json"
LINE = 10  # steps
BATCH = 128


class StandardizedConv(nn.Module):
    """A convolution with w = (v − mean) / deviation of each filter, by nothing but torch."""

    def __init__(self, conv: nn.Conv2d, weight: Tensor, eps: float, unbiased: bool) -> None:
        super().__init__()
        self.v = nn.Parameter(weight.detach().clone())
        self.stride, self.padding, self.eps, self.unbiased = (
            conv.stride,
            conv.padding,
            eps,
            unbiased,
        )

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(self.v, (1, 2, 3), correction=int(self.unbiased), keepdim=True)
        w = (self.v - mean) / torch.sqrt(var + self.eps)
        return F.conv2d(x, w, None, self.stride, self.padding)


def by_layers(file: str, variant: str, seed: int) -> nn.Module:
    """The network of a claim, with the library's layers."""
    setting = next(v.setting for v in experiment_of(file).variants if v.name == variant)
    return build_variant(setting, 10, (3, 32, 32), seed=seed)


def by_torch(model: nn.Module) -> nn.Module:
    """The same network from the same start, by plain torch."""
    twin = copy.deepcopy(model)
    for parent in list(twin.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Normalizer) and child.card.kind == "activation":
                setattr(parent, name, Plain(child, FORMULAS[child.card.name]))
            elif isinstance(child, nn.Conv2d) and parametrize.is_parametrized(child):
                pairs: Any = child.parametrizations
                ws = pairs["weight"]
                own = StandardizedConv(child, ws.original, ws[0].eps, ws[0].unbiased)
                setattr(parent, name, own)
    return twin


def batches(seed: int, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches of CIFAR-10, flipped and cropped, the same for whoever asks."""
    sets = load(experiment_of(next(iter(CASES))).variants[0].setting.data, device)
    draw = torch.Generator().manual_seed(seed)
    train: Any = sets.train
    images, labels, scale, shift = (
        t.cpu() for t in (train.images, train.labels, train.scale, train.shift)
    )
    while True:
        for chosen in torch.randperm(len(images), generator=draw).split(size):
            if len(chosen) < size:
                continue
            x = F.pad(normalize(images[chosen], scale, shift), (4, 4, 4, 4))
            top, left = torch.randint(9, (2,), generator=draw).tolist()
            x = x[:, :, top : top + 32, left : left + 32]
            flip = torch.rand(size, generator=draw) < 0.5
            yield torch.where(flip[:, None, None, None], x.flip(3), x), labels[chosen]


def losses(
    model: nn.Module, seed: int, steps: int, warmup: int, device: torch.device
) -> list[float]:
    """The mean training loss of each ten steps."""
    model = model.to(device).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    found: list[float] = []
    for step, (x, y) in zip(range(steps), batches(seed, BATCH, device), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(1.0, (step + 1) / max(1, warmup))
        optimizer.zero_grad()
        x, y = x.to(device, memory_format=torch.channels_last), y.to(device)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        if len(found) % LINE == 0:
            print(f"  step {len(found)}: {sum(found[-LINE:]) / LINE:.3f}", flush=True)
    return [
        round(sum(found[i : i + LINE]) / LINE, 4) for i in range(0, len(found) - LINE + 1, LINE)
    ]


@contextmanager
def full_float32() -> Iterator[None]:
    """Without TF32, which rounds to ten bits on a GPU: what float32 does is asked here. By the
    setters behind ``torch.backends``, which programs that freeze its flags do not refuse."""
    flags: Any = torch._C
    before = flags._get_cublas_allow_tf32(), flags._get_cudnn_allow_tf32()
    flags._set_cublas_allow_tf32(False)
    flags._set_cudnn_allow_tf32(False)
    try:
        yield
    finally:
        flags._set_cublas_allow_tf32(before[0])
        flags._set_cudnn_allow_tf32(before[1])


def rows(path: Path = RESULTS) -> list[dict[str, Any]]:
    """What was kept: experiment, variant, seed, by what, steps of warm-up, losses.

    Seconds and environment too, but of the oldest.
    """
    if not path.exists():
        return []
    kept: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return kept


def keep(row: dict[str, Any], path: Path) -> None:
    """In the place of an earlier run of the same."""
    same = ("of", "variant", "seed", "by", "warmup")
    others = [old for old in rows(path) if any(old[name] != row[name] for name in same)]
    order = ("of", "variant", "warmup", "seed", "by")
    kept = sorted([*others, row], key=lambda each: [each[name] for name in order])
    lines = ",\n ".join(json.dumps(each) for each in kept)
    write_text(path, f"[{lines}]\n")


def _steps(text: str) -> int:
    """Enough for a mean: with fewer, rows that are kept would lose their losses."""
    if not text.isdecimal() or int(text) < LINE:
        raise argparse.ArgumentTypeError(f"got {text}, expected {LINE} or more, for a mean")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evidence.collapse",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--of", choices=CASES, nargs="+", default=[*CASES], metavar="EXPERIMENT")
    parser.add_argument("--steps", type=_steps, default=60, help=f"{LINE} or more (default: 60)")
    parser.add_argument("--warmup", type=int, nargs="+", default=[0], help="0 and 391, say")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--by", choices=("both", "layers", "torch"), default="both")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        cases = [(file, name) for file in options.of for name in CASES[file]]
        for (file, name), seed, warmup in product(cases, options.seeds, options.warmup):
            model = by_layers(file, name, seed)
            for by, one in (("layers", model), ("torch", by_torch(model))):
                if options.by not in ("both", by):
                    continue
                print(f"{file}, {name}: seed {seed}, {warmup} steps of warm-up, by {by}")
                since = time.monotonic()
                with full_float32():
                    found = losses(one, seed, options.steps, warmup, device)
                row = {"of": file, "variant": name, "seed": seed, "by": by, "warmup": warmup}
                spent = {"seconds": round(time.monotonic() - since, 1)}
                where = {"environment": environment(device)}
                keep({**row, "losses": found, **spent, **where}, options.results)
    except NormkitError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
