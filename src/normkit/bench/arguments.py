"""The command line of the benchmark."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

import normkit
from normkit.bench.records import FORMATS
from normkit.errors import nearest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
COMPILED_BY_DEFAULT = ("bn", "gn", "rbn", "bcn")

EXAMPLES = """\
examples:
  python -m normkit.bench
      every layer on 64x64x32x32, both memory formats, on the CPU: some minutes on two cores.
      torch.compile is slow to start, so of all layers only bn, gn, rbn and bcn are compiled.
  python -m normkit.bench --layers bn,bcn --shape 32x64x16x16 --no-compile
      two layers on a small input, in seconds
  python -m normkit.bench --layers rbn --shape 8x256x56x56 64x64x32x32 --format channels_last
      one layer on two shapes; layers chosen by name are compiled too
  python -m normkit.bench --device cuda --dtype bfloat16 --shape 128x256x56x56 --compile all
      on a GPU, which adds CUDA-graph replay, peak memory, kernels and the memory floor
  python -m normkit.bench --device cuda --dtype bfloat16 --shape 128x64x112x112 --network 256
      and images a second of a ResNet-50 with each of them
  python -m normkit.bench --json bench.json --markdown bench.md
      every number for a program, and the tables for a page

exit status: 0 measured; 1 a layer and its straightforward version disagree; 2 bad arguments"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m normkit.bench",
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
    add(
        "--network",
        type=_positive,
        metavar="BATCH",
        help="on a GPU, also train a torchvision ResNet-50 with each layer at this batch size",
    )
    add("--plain-networks", action="store_true", help="and with the straightforward versions")
    add("--json", type=Path, metavar="FILE", help="write every number")
    add("--markdown", type=Path, metavar="FILE", help="write the tables")
    return parser


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked: ``layers`` and ``compile`` as names, ``shape`` as tuples."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        everything = options.layers == "all"
        options.layers = _layers(options.layers)
        options.compile = _compiled(options.compile, options.layers, everything)
        options.shape = [_shape(text) for text in options.shape]
    except ValueError as problem:
        parser.error(str(problem))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here. Try --device cpu.")
    if options.network and options.device != "cuda":
        parser.error("--network: a ResNet-50 takes hours on a CPU. Try --device cuda.")
    for path in (options.json, options.markdown):  # better now than after the run
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{path}: there is no directory {path.parent}.")
    return options


def _layers(text: str) -> list[str]:
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


def _compiled(which: str | None, layers: list[str], everything: bool) -> set[str]:
    if which is None:
        return set(COMPILED_BY_DEFAULT if everything else layers)
    if which == "family":
        return {name for name in layers if normkit.catalog.ENTRIES[name].card.family}
    if which == "none":
        return set()
    return set(layers if which == "all" else _layers(which))


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
