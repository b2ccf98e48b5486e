"""python -m normkit.bench: see --help."""

from __future__ import annotations

import argparse
import itertools
import platform
import sys
import time
from collections.abc import Sequence

import torch

import normkit
from normkit.bench import contest, measure, network, report
from normkit.bench.arguments import DTYPES, parse
from normkit.bench.records import Row, Run, Setting, Table


class Progress:
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


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    run = Run(environment(options))
    run.environment["freed memory"] = "kept" if measure.keep_memory() else "returned"
    device = torch.device(options.device)
    settings = [
        Setting(shape, memory, DTYPES[dtype], device)
        for shape, dtype, memory in itertools.product(options.shape, options.dtype, options.format)
    ]
    networks = 3 + len(options.layers) * (2 + options.plain_networks) if options.network else 0
    progress = Progress(2 * len(settings) * len(options.layers) + networks)
    compiler = contest.Compiler()
    rate = measure.copy_rate(device) if device.type == "cuda" else None
    if rate is not None:
        run.environment["copy rate in TB/s"] = round(rate / 1e12, 2)
    print(report.environment(run), flush=True)
    for setting in settings:
        table = Table(setting, floor=None if rate is None else 8 * setting.input_bytes / rate)
        if not check(table, options.layers, progress):
            return 1
        for i, (name, refused) in enumerate([(row.layer, row.note) for row in table.rows]):
            progress(f"{setting}: measuring {name}")
            if not refused:
                wanted = compiler if name in options.compile else None
                table.rows[i] = contest.row(name, setting, options.repeats, wanted)
        progress.clear()
        run.tables.append(table)
        save(run, options)  # now: whoever stops a long run keeps what it has
        print(f"\n{report.text(table)}", flush=True)
    if options.network:
        for speed in network.speeds(
            options.layers,
            options.network,
            device,
            compiled=bool(options.compile),
            written_plainly=options.plain_networks,
        ):
            progress(f"ResNet-50: {speed.network}")
            run.speeds.append(speed)
            save(run, options)
        progress.clear()
        print(f"\n{report.speed_text(run)}", flush=True)
    run.remarks += compiler.reasons
    for remark in run.remarks:
        print(remark)
    save(run, options)
    print(run.summary())
    return 0


def save(run: Run, options: argparse.Namespace) -> None:
    if options.json is not None:
        options.json.write_text(report.as_json(run), encoding="utf-8")
    if options.markdown is not None:
        options.markdown.write_text(report.markdown(run), encoding="utf-8")


def check(table: Table, layers: Sequence[str], progress: Progress) -> bool:
    """Fill the table with empty rows, and say whether all layers agree with their plain form."""
    allowed = contest.tolerance(table.setting.dtype)
    wrong = []
    for name in layers:
        progress(f"{table.setting}: checking {name}")
        family = normkit.catalog.ENTRIES[name].card.family
        note = contest.refused(name, table.setting)
        table.rows.append(Row(name, family, note=note and f"not measured. {note}"))
        if note:
            continue
        errors = contest.disagreement(name, table.setting)
        wrong += [
            f"{name} on {table.setting}: relative difference of {what} {error:.1e}, "
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
        "torch": torch.__version__,
        "Python": platform.python_version(),
        "device": torch.cuda.get_device_name() if gpu else f"cpu {platform.machine()}",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "repeats": options.repeats,
    }


if __name__ == "__main__":
    sys.exit(main())
