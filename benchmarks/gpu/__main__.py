"""Everything that docs/benchmark-gpu.md says, measured: python -m benchmarks.gpu --help"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import normkit as nk
from benchmarks import report, step_cost
from benchmarks.gpu import page, parts
from benchmarks.gpu.compiled import CompiledNetworks
from benchmarks.gpu.networks import first_line
from benchmarks.gpu.parts import Machine
from benchmarks.gpu.preparing import prepare
from normkit.core.atomic_write import write_text
from normkit.errors import NormkitError, OptionError, nearest

ROOT = Path(__file__).parents[2]
EPILOG = """\
parts:
  {parts}

A part that the file has already is not measured again, so that a run that was stopped, by --seconds
or otherwise, goes on where it was; a file of another version, torch or device is refused.

  python -m benchmarks.gpu                  measure what docs/benchmark-gpu.json lacks
  python -m benchmarks.gpu --again          measure everything again
  python -m benchmarks.gpu --page           write the pages from the file, on any machine
  python -m benchmarks.gpu --trial --parts host --json trial.json
                                            tiny shapes, to see that it runs; on a CPU too

exit status: 0 all there; 1 parts are missing, or a layer is wrong; 2 bad arguments"""


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.page:
        for path in page.write_pages(options.json, ROOT):
            print(f"wrote {path}")
        return 0
    begin = time.perf_counter()
    left = lambda: options.seconds - (time.perf_counter() - begin)  # noqa: E731

    def log(text: str) -> None:
        print(f"[{time.perf_counter() - begin:4.0f} s] {text}", file=sys.stderr, flush=True)

    machine = Machine(torch.device(options.device), options.turns, options.trial)
    document = {} if options.again else read(options.json)
    version = versions(machine, options.commit)
    if problem := other_version(document, version):
        print(f"{options.json}: {problem} Try --again, or another --json.", file=sys.stderr)
        return 2
    document = {"parts": {}, **document, **version}
    wanted = [part for part in options.parts if part not in document["parts"]]
    together = None
    if parts.COMPILED in wanted:
        together = CompiledNetworks(machine.compiled_case(), machine.device)
    try:
        if machine.device.type == "cuda":
            jobs = parts.all_jobs(wanted, machine)
            prepare(jobs, machine, options.processes, min(options.prepare, left()), log)
            late = {part for part, _ in jobs}  # would be compiled one kernel after the other
            wanted = [part for part in wanted if part not in late]
            document["cpp"] = _with_extension()
            if "copy_rate" not in document:
                document["copy_rate"] = step_cost.copy_rate(machine.device)
            log("prepared")
        for part in wanted:
            if left() < parts.estimate(part):
                log(f"{part}: no time left for it")
                continue
            start = time.perf_counter()
            try:
                if part == parts.COMPILED and together is not None:
                    rows = together.measure(machine.turns, min(600, 0.15 * left()), log)
                    together.close()
                else:
                    rows = parts.measure(part, machine, log)
            except Exception as error:  # the other parts are measured all the same
                log(f"{part}: {first_line(error)}")
                continue
            taken = round(time.perf_counter() - start, 1)
            document["parts"][part] = {"seconds": taken, "rows": rows}
            write_text(options.json, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
            log(f"{part}: {taken} s")
    finally:
        if together is not None:
            together.close()
    missing = [part for part in options.parts if part not in document["parts"]]
    if missing:
        print(f"Not measured: {', '.join(missing)}. The same command goes on.", file=sys.stderr)
    wrong = [
        f"{part}: {row['layer']} {row['error']}"
        for part, result in document["parts"].items()
        for row in result["rows"]
        if "differs" in row.get("error", "")
    ]
    print("\n".join(wrong), file=sys.stderr, end="\n" * bool(wrong))
    return 1 if missing or wrong else 0


def _with_extension() -> bool:
    try:
        return bool(nk.build_extension())
    except NormkitError as problem:
        print(problem, file=sys.stderr)
        return False


def read(path: Path) -> dict[str, Any]:
    """The file of a run, if there is one."""
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise OptionError(f"--json: {path} cannot be read: {error}.") from None
    if not isinstance(found, dict) or not isinstance(found.get("parts"), dict):
        raise OptionError(f"--json: {path} is not the file of a run. Try another name.")
    return found


def versions(machine: Machine, commit: str | None) -> dict[str, Any]:
    """Of what the numbers are: they are never mixed with those of something else."""
    import triton

    cuda = machine.device.type == "cuda"
    return {
        "commit": commit or report.commit(),
        "source": source_hash(),
        "trial": machine.trial,
        "environment": {
            "normkit": nk.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "Python": platform.python_version(),
            "device": torch.cuda.get_device_name() if cuda else f"cpu {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)),
        },
    }


def source_hash() -> str:
    """Of what is measured and what measures it; a copy without a history has it, too."""
    files = [file for kind in ("py", "cpp", "h") for file in (ROOT / "src").rglob(f"*.{kind}")]
    files += (ROOT / "benchmarks").rglob("*.py")
    total = hashlib.sha256()
    for file in sorted(file for file in files if file.name != "page.py"):
        total.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return total.hexdigest()[:16]


def other_version(document: dict[str, Any], version: dict[str, Any]) -> str:
    """Why what is in the file cannot be gone on with, or ''."""
    if not document:
        return ""
    for name in ("source", "trial", "environment"):
        if document.get(name) != version[name]:
            return f"its {name} is {document.get(name)}, here it is {version[name]}."
    return ""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    known = parts.names()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=__doc__,
        epilog=EPILOG.format(parts="\n  ".join(known)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--json", type=Path, default=ROOT / "docs" / "benchmark-gpu.json", metavar="FILE")
    add("--parts", nargs="+", default=known, metavar="PART", help="of those below (all)")
    add("--seconds", type=duration, default=1e9, help="start no part that would take longer")
    add("--processes", type=count, default=max(1, (os.cpu_count() or 2) - 2), help="that compile")
    add("--prepare", type=duration, default=1e9, metavar="S", help="for compiling kernels")
    add("--turns", type=count, default=15, help="at most, where times differ by 2 %% (%(default)s)")
    here = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=("cuda", "cpu"), default=here)
    add("--commit", help="what this is, where git cannot tell")
    add("--again", action="store_true", help="leave nothing of the file")
    add("--trial", action="store_true", help="tiny shapes")
    add("--page", action="store_true", help="only write the pages from the file")
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in known:
            parser.error(f"--parts: unknown part {part!r}. {nearest(part, known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here. Try --trial on a CPU.")
    if options.device == "cpu" and not (options.trial or options.page):
        parser.error("these shapes take hours on a CPU. Try --trial, or python -m benchmarks.")
    if options.page and not options.json.exists():
        parser.error(f"--page: there is no {options.json}.")
    if not options.json.parent.is_dir():
        parser.error(f"--json: there is no folder {options.json.parent}.")
    try:
        read(options.json)
    except OptionError as error:
        parser.error(str(error))
    return options


def count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text}, expected a whole number from 1 on")
    return int(text)


def duration(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds, from 0 on")
    return value


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NormkitError as error:
        sys.exit(f"{error}")
