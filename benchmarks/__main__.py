"""Time and memory of every layer beside torch's own: python -m benchmarks --help"""

from __future__ import annotations

import argparse
import itertools
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

import normkit
from benchmarks import layers, report, step_cost
from benchmarks.layers import BenchmarkRun, LayerRow, LayerTable
from normkit import timing
from normkit.errors import nearest
from normkit.timing import DTYPES, FORMATS, InputSpec

COMPILED_BY_DEFAULT = ("bn", "gn", "rbn", "bcn")

EXAMPLES = """\
examples:
  python -m benchmarks
      every layer on 64x64x32x32, both memory formats, on the CPU: some minutes on two cores.
      torch.compile is slow to start, so of all layers only bn, gn, rbn and bcn are compiled.
  python -m benchmarks --layers bn,bcn --shape 32x64x16x16 --no-compile
      two layers on a small input, in seconds
  python -m benchmarks --layers rbn --shape 8x256x56x56 64x64x32x32 --format channels_last
      one layer on two shapes; layers chosen by name are compiled too
  python -m benchmarks --device cuda --dtype bfloat16 --shape 128x256x56x56 --compile all
      on a GPU, which adds CUDA-graph replay, peak memory, kernels and the memory floor
  python -m benchmarks.gpu
      whole networks, host time, memory, compiled: docs/benchmark-gpu.md
  python -m benchmarks --json bench.json --markdown bench.md
      every number for a program, and the tables for a page

exit status: 0 measured; 1 a layer and its straightforward version disagree; 2 bad arguments"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    given = sys.argv[1:] if arguments is None else arguments
    run = BenchmarkRun(
        environment(options), command=shlex.join(["python", "-m", "benchmarks", *given])
    )
    run.environment["freed memory"] = "kept" if timing.keep_memory() else "returned"
    device = torch.device(options.device)
    specs = [
        InputSpec(shape, memory, DTYPES[dtype], device)
        for shape, dtype, memory in itertools.product(options.shape, options.dtype, options.format)
    ]
    progress = ProgressLine(2 * len(specs) * len(options.layers))
    compiler = timing.Compiler()
    rate = step_cost.copy_rate(device) if device.type == "cuda" else None
    if rate is not None:
        run.environment["copy rate in TB/s"] = round(rate / 1e12, 2)
    print(report.environment(run), flush=True)
    for spec in specs:
        table = LayerTable(spec, floor=None if rate is None else 8 * spec.input_bytes / rate)
        if not check(table, options.layers, progress):
            return 1
        for i, (name, refused) in enumerate([(row.layer, row.note) for row in table.rows]):
            progress(f"{spec}: measuring {name}")
            if not refused:
                wanted = compiler if name in options.compile else None
                table.rows[i] = layers.measure(name, spec, options.repeats, wanted)
        progress.clear()
        run.tables.append(table)
        save(run, options)  # now: whoever stops a long run keeps what it has
        print(f"\n{report.text(table)}", flush=True)
    run.remarks += compiler.reasons
    for remark in run.remarks:
        print(remark)
    save(run, options)
    print(run.summary())
    return 0


def save(run: BenchmarkRun, options: argparse.Namespace) -> None:
    if options.json is not None:
        options.json.write_text(report.as_json(run), encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(report.markdown(run), encoding="utf-8")


def check(table: LayerTable, names: Sequence[str], progress: ProgressLine) -> bool:
    """Fill the table with empty rows, and say whether all layers agree with their plain form."""
    allowed = layers.tolerance(table.spec.dtype)
    wrong = []
    for name in names:
        progress(f"{table.spec}: checking {name}")
        family = normkit.catalog.ENTRIES[name].card.family
        note = layers.refused(name, table.spec)
        table.rows.append(LayerRow(name, family, note=note and f"not measured. {note}"))
        if note:
            continue
        errors = layers.disagreement(name, table.spec)
        wrong += [
            f"{name} on {table.spec}: relative difference of {what} {error:.1e}, "
            f"rounding explains {allowed:.1e}"
            for what, error in errors.items()
            if not error <= allowed  # NaN is wrong too
        ]
    progress.clear()
    if wrong:
        print("A layer and its straightforward version disagree; nothing was measured:")
        print("\n".join(wrong))
    return not wrong


def environment(options: argparse.Namespace) -> dict[str, str | int | float]:
    """On what the numbers were taken."""
    gpu = options.device == "cuda"
    return {
        "normkit": getattr(normkit, "__version__", "unreleased"),
        "commit": report.commit(),
        "C++ part": timing.extension(),
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "device": torch.cuda.get_device_name() if gpu else f"cpu {platform.machine()}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
    }


class ProgressLine:
    """One line on stderr: how much of the work is done, and what is under way."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.start = time.perf_counter()
        self.rewrites = sys.stderr.isatty()

    def __call__(self, doing: str) -> None:
        self.done += 1
        elapsed = int(time.perf_counter() - self.start)
        line = f"[{self.done}/{self.total}, {elapsed // 60}:{elapsed % 60:02} min] {doing}"
        print(f"\r\033[K{line}" if self.rewrites else line, end="", file=sys.stderr)
        print("" if self.rewrites else "\n", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self.rewrites:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Time and memory of a training step of each layer, next to nn.BatchNorm2d, "
        "nn.GroupNorm and a straightforward version of the same formula, eager and compiled.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--layers", default="all", metavar="NAMES", help="bn,gn,… or all (default)")
    add("--shape", nargs="+", default=["64x64x32x32"], metavar="NxCxHxW", help="input shapes")
    add("--dtype", nargs="+", default=["float32"], choices=DTYPES, help="of the input")
    add("--format", nargs="+", default=[*FORMATS], choices=FORMATS, help="default: both")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--threads", type=_positive, metavar="K", help="CPU threads (default: as torch decides)")
    add("--repeats", type=_positive, default=9, metavar="R", help="turns of each (default 9)")
    add(
        "--compile",
        metavar="WHICH",
        help="all, family, none or names: for which layers torch.compile is measured (default: "
        f"those named with --layers; of all layers {', '.join(COMPILED_BY_DEFAULT)})",
    )
    add("--no-compile", action="store_const", const="none", dest="compile", help="--compile none")
    add("--json", type=Path, metavar="FILE", help="write every number")
    add("--markdown", type=Path, metavar="FILE", help="write the tables")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked: ``layers`` and ``compile`` as names, ``shape`` as tuples."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        everything = options.layers == "all"
        options.layers = _layer_names(options.layers)
        options.compile = _compiled(options.compile, options.layers, everything)
        options.shape = [_shape(text) for text in options.shape]
    except ValueError as problem:
        parser.error(str(problem))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here. Try --device cpu.")
    for path in (options.json, options.markdown):  # better now than after the run
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{path}: there is no directory {path.parent}.")
    return options


def _layer_names(text: str) -> list[str]:
    known = normkit.names("activation")
    if text == "all":
        return known
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(f"--layers: unknown layer {name!r}. {nearest(name, known)}")
    if not names:
        raise ValueError(f"--layers: no layer named. Known: {', '.join(known)}.")
    return list(dict.fromkeys(names))


def _compiled(which: str | None, named: list[str], everything: bool) -> set[str]:
    if which is None:
        return set(COMPILED_BY_DEFAULT if everything else named)
    if which == "family":
        return {name for name in named if normkit.catalog.ENTRIES[name].card.family}
    if which == "none":
        return set()
    return set(named if which == "all" else _layer_names(which))


def _shape(text: str) -> tuple[int, ...]:
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            f"--shape: expected four positive sizes NxCxHxW, got {text!r}. Try 64x64x32x32."
        )
    return tuple(map(int, parts))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
