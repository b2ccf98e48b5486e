"""Time a training step of layers on this machine, beside torch's own and compiled by torch.compile.

Forward, and backward to the input and all parameters. All take turns in one run, so that a busy
machine slows them alike: compare the ratios, not the milliseconds of different runs."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from normkit.commands.output import STANDARD_OUTPUT, add_json, check_json, write_json
from normkit.errors import OptionError, UnknownName

if TYPE_CHECKING:
    from torch import nn

    from normkit.timing import InputSpec

NAME = "bench"
HELP = "time layers on this machine, beside torch's own"
EXAMPLES = """\
examples:
  normkit bench                                   every layer, not compiled: a minute or two
  normkit bench bn bcn ubn                        these, also compiled by torch.compile
  normkit bench gn --shape 8x256x56x56 --format channels_last --no-compile
  normkit bench ubn --device cuda --dtype bfloat16 --shape 128x256x56x56

"Times" is the time divided by that of nn.BatchNorm2d. Parameters are float32, as under autocast."""
DTYPES = ("float32", "bfloat16", "float16")
FORMATS = ("contiguous", "channels_last")
BASELINE = "nn.BatchNorm2d"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("layers", nargs="*", metavar="LAYER", help="see normkit list (default: all)")
    add("--shape", type=_shape, default="64x64x32x32", metavar="NxCxHxW", help="of the input")
    add("--dtype", choices=DTYPES, default="float32", help="of the input (float32)")
    add("--format", choices=FORMATS, default="contiguous", help="of its memory (contiguous)")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default cpu")
    add("--threads", type=_positive, metavar="K", help="CPU threads (default: as torch decides)")
    add("--repeats", type=_positive, default=9, metavar="R", help="turns of each (9)")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="also compiled (default: if layers are named)",
    )
    add_json(parser)


def run(options: argparse.Namespace) -> int:
    import torch

    from normkit import timing

    check_json(options)
    names = _names(options.layers)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise OptionError("--device cuda: torch finds no CUDA device here. Try --device cpu.")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    timing.keep_memory()
    extension = timing.extension()
    device, dtype = torch.device(options.device), timing.DTYPES[options.dtype]
    spec = timing.InputSpec(options.shape, options.format, dtype, device)
    modules, refused = _contestants(names, spec)
    compiled: dict[str, nn.Module] = {}
    remarks = refused
    if options.compile or (options.compile is None and options.layers):
        compiled, reasons = _compile(modules, spec)
        remarks += reasons
    steps = [timing.training_step(m, *timing.tensors(spec)) for m in modules.values()]
    steps += [timing.training_step(m, *timing.tensors(spec)) for m in compiled.values()]
    seconds = timing.seconds(steps, options.repeats, device)
    eager = dict(zip(modules, seconds, strict=False))
    fast = dict(zip(compiled, seconds[len(modules) :], strict=True))
    machine = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    threads = torch.get_num_threads()
    head = [
        f"{spec} · {machine}",
        f"torch {torch.__version__}, {threads} threads, C++ part of layers {extension}",
    ]
    out = sys.stderr if options.json == STANDARD_OUTPUT else sys.stdout
    print("\n".join([*head, "", *_table(eager, fast), *remarks]), file=out)
    facts = {
        "input": str(spec),
        "device": machine,
        "torch": torch.__version__,
        "threads": threads,
        "extension": extension,
        "seconds": eager,
        "seconds_compiled": fast,
        "remarks": remarks,
    }
    write_json(options, facts)
    return 0


def _names(chosen: list[str]) -> list[str]:
    from normkit import catalog

    known = catalog.names("activation")
    resolved = {name: catalog.meant(name, known) for name in chosen}
    for name, layer in resolved.items():
        if layer is None:
            raise UnknownName(
                f"There is no activation layer {name!r}. {catalog.suggestion(name, known)}"
            )
    return list(dict.fromkeys(filter(None, resolved.values()))) or known


def _contestants(names: list[str], spec: InputSpec) -> tuple[dict[str, nn.Module], list[str]]:
    """Torch's layers and those of the catalog; and which of them refuse the input, and why."""
    from math import gcd

    from torch import nn

    from normkit import catalog
    from normkit.errors import NormkitError
    from normkit.timing import tensors

    channels, device = spec.shape[1], spec.device
    groups = gcd(32, channels)
    modules: dict[str, nn.Module] = {
        BASELINE: nn.BatchNorm2d(channels, device=device),
        # its kernels want parameters of the input's type
        f"nn.GroupNorm({groups})": nn.GroupNorm(groups, channels, device=device, dtype=spec.dtype),
    }
    refused = []
    for name in names:
        try:
            layer = catalog.make(name, channels, device=device)
            layer(tensors(spec)[0])
        except NormkitError as error:
            refused.append(f"{name} is left out. {error}")
        else:
            modules[name] = layer
    return modules, refused


def _compile(
    modules: dict[str, nn.Module], spec: InputSpec
) -> tuple[dict[str, nn.Module], list[str]]:
    """Those that torch.compile takes as one graph; and why the others are missing."""
    import torch._dynamo

    from normkit.timing import Compiler

    # all layers share their forward, of which dynamo would keep eight versions
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    compiler = Compiler()
    compiled = {name: compiler(module, name, spec) for name, module in modules.items()}
    return {name: m for name, m in compiled.items() if m is not None}, compiler.reasons


def _table(eager: dict[str, float], compiled: dict[str, float]) -> list[str]:
    """A line a layer: milliseconds and times the baseline, eager and compiled."""
    base = eager[BASELINE]
    width = max(map(len, eager))
    head = f"{'':<{width}}  {'ms':>9}  {'times':>6}"
    lines = [head + (f"  {'compiled':>9}  {'times':>6}" if compiled else "")]
    for name, seconds in eager.items():
        line = f"{name:<{width}}  {1000 * seconds:9.3f}  {seconds / base:6.2f}"
        if name in compiled:
            line += f"  {1000 * compiled[name]:9.3f}  {compiled[name] / base:6.2f}"
        lines.append(line)
    return lines


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split("x")
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) for size in sizes):
        raise argparse.ArgumentTypeError(f"expected four sizes such as 64x64x32x32, got {text!r}")
    return tuple(map(int, sizes))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a positive whole number, got {text!r}")
    return int(text)
