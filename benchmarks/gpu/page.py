"""docs/benchmark-gpu.md and what README.md says of GPUs, made of the file of one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import parts
from benchmarks.gpu.compiled import CASE
from benchmarks.gpu.networks import CASES
from benchmarks.gpu.parts import LAB_IMAGES
from normkit.core.atomic_write import write_text

BEGIN, END = "<!-- of docs/benchmark-gpu.json -->", "<!-- until here -->"
PASSES = 8  # over the input: three forward, five backward
MISSING = "–"
BN, GN = "nn.BatchNorm2d", "nn.GroupNorm(32)"
NORMS = {"torch-bn": BN, "torch-gn": "nn.GroupNorm", "torch-ln": "nn.GroupNorm(1)"}
NORMS |= {"torch-in": "nn.InstanceNorm2d", "torch-own": "as torchvision has it"}
NORMS |= {"torch-folded": "nn.BatchNorm2d, folded by torch.fx"}
ADDED = {
    "folded": "{}, folded",
    "folded+fused": "{}, folded, fuse=True",
    "fused": "{}, fused",
    "save": '{}, fused, save="inputs"',
    "ws": "{}, weights by ws",
}
TITLES = {
    "resnet18-32": "ResNet-18, 32 px",
    "resnet50-256": "ResNet-50",
    "resnet50-8": "ResNet-50",
    "resnet50-1": "ResNet-50",
    "resnet50-inference": "ResNet-50, inference",
    "resnet50-inference-1": "ResNet-50, inference",
    "efficientnet_b0": "EfficientNet-B0",
    "mobilenet_v3_large": "MobileNetV3-large",
    "densenet121": "DenseNet-121",
    "regnet_y_1_6gf": "RegNetY-1.6GF",
    "convnext_tiny": "ConvNeXt-T",
    "maskrcnn_resnet50_fpn": "Mask R-CNN, 800×1200 px",
}
SMALL = ("resnet18-32", "efficientnet_b0", "mobilenet_v3_large", "densenet121", "regnet_y_1_6gf")

HEAD = """\
# On a GPU

One {device}, torch {torch}, Triton {triton}, Python {Python}, {cores} cores, commit {commit}.
Everything on this page is written by one command from [the numbers of one run](benchmark-gpu.json),
but for profiles that it quotes (commit 2bc3917; kernels overlap, so that their times add up to more
than a step); parts that it had no time for are listed at the end:

    python -m benchmarks.gpu            measure, all or what is missing (about 7 minutes)
    python -m benchmarks.gpu --page     write this page and the README's figures
"""
NETWORKS = """\
## Whole networks

A step of training of torchvision's networks in eager mode, bfloat16 autocast, channels_last, SGD
with momentum, 224×224 pixels unless it says otherwise; inference is forward in eval mode.
Each variant is timed in turns right beside the first one, up to 15 times; a ratio is the median of
these pairs, with half of a 95 % interval; nn.BatchNorm2d beside itself shows what is noise. Peak
memory is that of a step, with the network and its optimizer.
"""
HOST_SHARE = """\
Host: how long the host works on a step, as a share of the step's time. Near 1 the network waits for
the host.
"""
FROM_PYTHON = "Steps that are started from Python each time, and not replayed from C++:\n"
MEMORY = """\
## Memory

`nk.fuse(model, save="inputs")` keeps the inputs of norms and recomputes their outputs in backward.
Memory and speed in units of the network with torch's norms; speed also against the fused network
that keeps both (ConvNeXt: the converted one). The last column says how much larger a batch fits.

Where a step is limited by the GPU this cannot be free. A profile of ResNet-50 at batch 256, bn: of
the 4.6 ms that it adds to the fused network's 37.1, 3.4 are recomputed outputs and 0.8 the second
max pooling. Recomputing reads and writes 13 GB, 3.1 ms at the rate of a copy: 0.92 of the fused
network's speed would be the best.
"""
COMPILED = """\
## Under torch.compile

ResNet-50, batch 256, as above, compiled; each network in a process of its own, in turns.
"""
HOST = """\
## Host time

Host time of a step of one layer, forward and backward, in a chain of 40 layers of 8×64×8×8,
float32, channels_last, in µs; the kernels themselves take less. In this run steps of dn, gw and ssn
were not replayed from C++. Since then those of ssn are: 4 times the time of nn.BatchNorm2d instead
of 27 (commit 1ded2c2, a run of fewer parts on a slower host). One reason why gbgn,
ghost_bn, rms and ssn are slow in the ResNet-18 above (0.37, 0.41, 0.54 and 0.20 in that run) is its
last five layers: of maps of one position coefficients were left to torch's operations, with torch
2.11. That is mended since; what it is worth has not been measured.
"""
LAYERS = """\
## One layer

A training step in bfloat16: forward, and backward to the input and all parameters. GPU time
alone, by CUDA-graph replay, as a multiple of the memory floor: eight passes over the input at the
rate of a copy ({rate:.2f} TB/s). {missing}: the layer refuses the shape, or cannot be recorded.

Where a program can hold all values that share statistics (gn and in at 14×14 and, channels_last,
at 7×7), x and dy are read once: five passes instead of eight. dyt needs five, too, and
frozen_bn four.

What keeps the others from the floor where a layer is small is in its reductions and between its
launches. A profile of bn at 128×1024×14×14, in µs, and in brackets what the bytes take: moments 21
(12), map 24 (24), sums of backward 37 (24), dx 34 (36), coefficients 6 and 6 (0). In bcn moments
and sums are of each sample: 33 and 42, dx 41, coefficients 9 and 10. In contiguous memory rows of
7 × 7 values start at any address. A vector that is loaded then has values of two rows, which are
told apart and added up one after the other: moments and sums take 21 and 24 µs where their bytes
take 6 and 12, the maps 17 and 20 (12 and 18), coefficients 8 and 4. dn doubles its blocks ten
times, each a dozen small operations and their gradients, more than are compiled at once: 608
kernels a step, a millisecond.

bnet and ubn take eight passes as well: a 3×3 kernel reads its neighbours from registers and caches.
But each value is multiplied 27 times in a step, which takes about as long as its bytes, and ubn
reads the first 16 samples once more for its score.

gw has no kernel of its own, and eight passes are not its floor. At 32×256×56×56 with 64 groups
its five products of matrices (covariance, map, and three in backward) are 16 GFLOP: 0.25 ms of
float32 arithmetic at the 67 TFLOP/s of an H200's data sheet, 2.5 times those passes. Newton's
five steps are 45 products of 64×64 matrices, forward and backward, most of which wait for the one
before, at 4 µs: 0.2 ms. Four times the floor would take kernels of its own, on tensor cores,
which round what they multiply, while this layer computes in float32.
"""
STRAIGHTFORWARD = """\
The same at {shape} beside the formula as one would write it in torch: multiples of the floor,
kernels of a step, its memory beyond input and gradient in units of {base}'s; eager, with the
host, in ms.
"""
LAB = """\
## Training in the lab

Seconds an epoch and run: a ResNet-18 with a stem for 32×32 images, {images:,} made images with
flips and random crops on the device, batch 128, bfloat16, channels_last. "Recorded" steps are
CUDA graphs.
"""
README_LAYERS = """\
On an {device} (bfloat16, channels_last, {shape}) a training step takes this many times the memory
floor, eight passes over the input: bn, gn, bcn, rbn and sn {low:.2f} to {high:.2f},
nn.BatchNorm2d (cuDNN) {bn:.2f}, nn.GroupNorm {gn:.2f}.
"""
README_SMALL = """\
Small networks are limited by the host: there a step is recorded once and then started from C++,
where a compiler is found (`nk.build_extension()`). Eager images a second in units of
nn.BatchNorm2d's, medians of pairs timed side by side, ± {half:.0f} % (95 %):
"""
README_MEMORY = """\
`nk.fuse(model, save="inputs")` keeps the inputs of norms only and recomputes their outputs in
backward, exact to the last bit. Peak memory in GiB, and the effect:
"""

Row = dict[str, Any]


class GpuRun:
    """The file of a run. Parts that were not measured have no rows."""

    def __init__(self, path: Path) -> None:
        self.document = json.loads(path.read_text(encoding="utf-8"))
        self.parts = self.document["parts"]
        self.environment = self.document["environment"]

    def rows(self, part: str) -> list[Row]:
        return self.parts.get(part, {}).get("rows", [])

    def starting(self, kind: str) -> dict[str, list[Row]]:
        """Rows of the parts of a kind, by what follows it in their names."""
        found = (name for name in self.parts if name.startswith(kind))
        return {name.removeprefix(kind): self.rows(name) for name in found}

    def network(self, name: str, variant: str, key: str) -> float | None:
        rows = self.rows(f"network {name}")
        return next((row.get(key) for row in rows if row["variant"] == variant), None)

    def floor(self, shape: str) -> float:
        """Seconds of eight passes over an input in bfloat16, at the measured copy rate."""
        elements = 1
        for size in shape.split()[0].split("x"):
            elements *= int(size)
        return PASSES * 2 * elements / self.document["copy_rate"]

    def multiples(self, shape: str, key: str = "replay_seconds") -> dict[str, float]:
        rows = self.rows(f"layers {shape}")
        return {row["layer"]: row[key] / self.floor(shape) for row in rows if row.get(key)}


def write_pages(path: Path, root: Path) -> list[Path]:
    """All pages with figures of a run."""
    from tools.evidence.which import which_page

    readme = root / "README.md"
    pages = {
        root / "docs" / "benchmark-gpu.md": gpu_page(path),
        readme: with_block(readme.read_text(encoding="utf-8"), path),
        root / "docs" / "which-normalizer.md": which_page(),
    }
    for target, text in pages.items():
        write_text(target, text)
    return list(pages)


def gpu_page(path: Path) -> str:
    run = GpuRun(path)
    return "\n".join(_lines(run)).rstrip() + "\n"


def _lines(run: GpuRun) -> Iterator[str]:
    yield HEAD.format(**run.environment, commit=run.document["commit"])
    for section in (_networks, _memory, _compiled, _host, _layers, _lab, _remarks):
        yield from section(run)


def _networks(run: GpuRun) -> Iterator[str]:
    found = run.starting("network ")
    if not found:
        return
    yield NETWORKS
    batches = {name: case.batch for name, case in CASES.items()}
    header = ["network", "batch", "norms", "images/s", f"× {BN}", "±", "peak GiB", "×"]
    with_host = any("host_seconds" in row for rows in found.values() for row in rows)
    if with_host:  # not in files of earlier versions
        yield HOST_SHARE
        header.insert(4, "host")
    lines = []
    for name, rows in found.items():
        head = [TITLES[name], str(batches[name])]
        for row in rows:
            if "error" not in row:
                share = row.get("uncertainty")
                half = None if share is None else row["ratio"] * share
                numbers = [_rate(row), *([_host_share(row, batches[name])] if with_host else [])]
                numbers += map(_number, (row.get("ratio"), half, row.get("gib"), row.get("memory")))
                lines.append([*head, title(row["variant"]), *numbers])
                head = ["", ""]
    yield from grid(header, lines, left=(0, 2))
    reasons = [
        f"- {TITLES[name]}, {title(row['variant'])}, {count} of its layers: {reason}"
        for name, rows in found.items()
        for row in rows
        for reason, count in row.get("from_python", {}).items()
    ]
    if reasons:
        yield from (FROM_PYTHON, *reasons, "")


def _memory(run: GpuRun) -> Iterator[str]:
    lines = []
    batches = {name: case.batch for name, case in CASES.items()}
    for name, rows in run.starting("network ").items():
        by = {row["variant"]: row for row in rows}
        for variant, row in by.items():
            fused = by.get(variant.replace("-save", "-fused")) or by.get(variant.partition("-")[0])
            if variant.endswith("-save") and row.get("memory") and fused and "error" not in fused:
                against = row["images_per_second"] / fused["images_per_second"]
                cells = [_number(row["memory"]), _number(row["ratio"]), _number(against)]
                larger = f"{1 / row['memory']:.1f}"
                norm = variant.partition("-")[0]
                lines.append([TITLES[name], str(batches[name]), norm, *cells, larger])
    if lines:
        yield MEMORY
        header = ["network", "batch", "norm", "memory ×", "speed ×", "speed × fused", "batch ×"]
        yield from grid(header, lines, left=(0, 2))


def _compiled(run: GpuRun) -> Iterator[str]:
    rows = [row for row in run.rows("compiled") if "error" not in row]
    if rows:
        yield COMPILED
        lines = [
            [
                *(title(row["variant"]), _rate(row), _host_share(row, CASE.batch)),
                *(_number(row.get("ratio")), _number(row.get("gib"))),
            ]
            for row in rows
        ]
        yield from grid(["norms", "images/s", "host", f"× {BN} compiled", "peak GiB"], lines)


def _host(run: GpuRun) -> Iterator[str]:
    rows = [row for row in run.rows("host") if "error" not in row]
    if rows:
        yield HOST
        lines = [
            [
                row["layer"],
                f"{row['microseconds']:.0f}",
                f"{100 * (row['uncertainty'] or 0):.0f} %",
                _number(row["ratio"]),
            ]
            for row in rows
        ]
        yield from grid(["layer", "µs", "±", f"× {BN}"], lines)


def _layers(run: GpuRun) -> Iterator[str]:
    found = run.starting("layers ")
    if not found:
        return
    yield LAYERS.format(rate=run.document["copy_rate"] / 1e12, missing=MISSING)
    multiples = {shape: run.multiples(shape) for shape in found}
    names = dict.fromkeys(row["layer"] for rows in found.values() for row in rows)
    heads = [f"{shape.split()[0].replace('x', '×')} {_memory_word(shape)}" for shape in found]
    floors = [f"{1000 * run.floor(shape):.3f}" for shape in found]
    lines = [["floor, ms", *floors]]
    lines += [[name, *(_number(multiples[s].get(name)) for s in found)] for name in names]
    yield from grid(["layer", *heads], lines)
    for shape, rows in found.items():
        own = [row for row in rows if row.get("straightforward_seconds")]
        if own:
            yield from _straightforward(run, shape, rows)


def _straightforward(run: GpuRun, shape: str, rows: list[Row]) -> Iterator[str]:
    yield STRAIGHTFORWARD.format(shape=shape.split()[0].replace("x", "×"), base=BN)
    theirs = run.multiples(shape, "straightforward_replay_seconds")
    ours = run.multiples(shape)
    base = next((row.get("peak_bytes") for row in rows if row["layer"] == BN), None)
    lines = []
    for row in rows:
        if "error" in row:
            continue
        name = row["layer"]
        peaks = [row.get("peak_bytes"), row.get("straightforward_peak_bytes")]
        memory = [_number(peak / base if peak and base else None) for peak in peaks]
        kernels = [str(row.get(f"{kind}kernels") or MISSING) for kind in ("", "straightforward_")]
        times = [_number(ours.get(name)), _number(theirs.get(name), 1)]
        lines.append([name, *times, *kernels, *memory, f"{1000 * row['seconds']:.2f}"])
    two = ["straightforward"]
    header = ["layer", "× floor", *two, "kernels", *two, "memory", *two, "eager, ms"]
    yield from grid(header, lines)


def _lab(run: GpuRun) -> Iterator[str]:
    rows = run.rows("lab")
    if rows:
        yield LAB.format(images=LAB_IMAGES)
        ways = dict.fromkeys((row["way"], row["runs"]) for row in rows)
        heads = [f"{way}, {runs} side by side" if runs > 1 else way for way, runs in ways]
        lines = []
        for norm in dict.fromkeys(row["norm"] for row in rows):
            own = {(row["way"], row["runs"]): row["seconds"] for row in rows if row["norm"] == norm}
            title = BN if norm == "torch" else norm
            lines.append([title, *(_number(own.get(way), 3) for way in ways)])
        yield from grid(["norms", *heads], lines)


def _remarks(run: GpuRun) -> Iterator[str]:
    """What was refused, or not begun, is said, so that no row is missing in silence."""
    errors = [
        f"- {part}: no time was left for it" for part in parts.names() if part not in run.parts
    ]
    errors += [
        f"- {part}: {row.get('variant') or row.get('layer')}: {row['error']}"
        for part, result in run.parts.items()
        for row in result["rows"]
        if row.get("error")
    ]
    if errors:
        yield "## Not measured"
        yield ""
        yield from errors


def with_block(readme: str, path: Path) -> str:
    """The README with its figures of a GPU."""
    before, _, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"README.md lacks the lines {BEGIN} and {END}: put them where figures go.")
    return "\n".join([before + BEGIN, *_readme_lines(GpuRun(path)), END + after])


def _readme_lines(run: GpuRun) -> Iterator[str]:
    shapes = ("128x256x56x56 channels_last", "32x256x56x56 channels_last")
    shape = next((each for each in shapes if run.rows(f"layers {each}")), shapes[0])
    large = run.multiples(shape)
    near = [large[name] for name in ("bn", "gn", "bcn", "rbn", "sn") if name in large]
    if near and BN in large and GN in large:
        ends = {"low": min(near), "high": max(near), "bn": large[BN], "gn": large[GN]}
        size = shape.split()[0].replace("x", "×")
        yield README_LAYERS.format(device=run.environment["device"], shape=size, **ends)
    lines = []
    for norm in ("torch-bn", "torch-gn", "bn", "gn", "bcn", "rbn", "ubn"):
        kinds = (norm, f"{norm}-fused", f"{norm}-save")
        rates = [run.network("resnet50-256", kind, "images_per_second") for kind in kinds]
        compiled = next(
            (
                row.get("images_per_second")
                for row in run.rows("compiled")
                if row["variant"] in (norm, f"{norm}-fused") and norm != "torch-gn"
            ),
            None,
        )
        if any(rates):
            cells = [MISSING if rate is None else f"{rate:,.0f}" for rate in (*rates, compiled)]
            lines.append([title(norm), *cells])
    if lines:
        header = ["ResNet-50, batch 256, images/s", "eager", "after `nk.fuse`"]
        header += ['`save="inputs"`', "fused and compiled"]
        if not run.rows("compiled"):
            header, lines = header[:-1], [line[:-1] for line in lines]
        yield from grid(header, lines)
    lines = []
    for name in SMALL:
        small = ("bn", "bn-fused", "gn", "gn-fused", "torch-gn")
        ratios = [run.network(name, kind, "ratio") for kind in small]
        if ratios[0]:
            lines.append([TITLES[name], *(_number(ratio) for ratio in ratios)])
    if lines:
        yield README_SMALL.format(half=_usual_half(run))
        yield from grid(["", "bn", "bn, fused", "gn", "gn, fused", "nn.GroupNorm"], lines)
    lines = []
    for name in ("resnet50-256", *SMALL[1:]):
        gib = [run.network(name, kind, "gib") for kind in ("torch-bn", "bn-save")]
        ratio = run.network(name, "bn-save", "ratio")
        if all(gib) and ratio:
            share = gib[1] / gib[0]  # type: ignore[operator]
            cells = [f"{value:.1f}" for value in gib] + [f"{share:.2f}", f"{1 / share:.1f}"]
            lines.append([TITLES[name], *cells, f"{ratio:.2f}"])
    if lines:
        yield README_MEMORY
        header = ["", BN, "bn, saved", "memory ×", "a batch that fits ×", "speed ×"]
        yield from grid(header, lines)


def _usual_half(run: GpuRun) -> float:
    """Of the small networks' ratios, half of their intervals, in percent: the median."""
    rows = [row for name in SMALL for row in run.rows(f"network {name}")]
    return 100 * statistics.median(row["uncertainty"] for row in rows if row.get("uncertainty"))


def title(variant: str) -> str:
    """A variant as people call it."""
    if variant in NORMS:
        return NORMS[variant]
    norm, _, rest = variant.partition("-")
    return ADDED[rest].format(norm) if rest in ADDED else norm


def grid(
    header: Sequence[str], lines: Iterable[Sequence[str]], left: tuple[int, ...] = (0,)
) -> Iterator[str]:
    rule = ["---" if i in left else "---:" for i in range(len(header))]
    for line in (header, rule, *lines):
        yield "| " + " | ".join(line) + " |"
    yield ""


def _memory_word(shape: str) -> str:
    return "NCHW" if shape.endswith("contiguous") else ""


def _number(value: float | None, digits: int = 2) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def _host_share(row: Row, batch: int) -> str:
    host = row.get("host_seconds")
    return _number(None if host is None else host * row["images_per_second"] / batch)


def _rate(row: Row) -> str:
    return f"{row['images_per_second']:,.0f}"
