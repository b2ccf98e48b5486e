"""The C++ part: compiled once for each version of torch and Python, where there is a compiler.

Nothing depends on it: without it layers start their kernels from Python, and on a CPU compute by
operations of torch. It is built beside the first training steps, in a process of its own, and kept
in a cache, ``$XDG_CACHE_HOME/normkit``. ``NORMKIT_CPP=0`` switches it off; ``nk.build_extension()``
builds it now and says what is wrong.

On a GPU it starts the same kernels, and is used as soon as it is there. On a CPU its sums are
rounded in another order than torch's, so a process uses it from its first step on or not at all:
what is built beside one serves the next.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from normkit.errors import DeviceError

FOLDER = Path(__file__).parent
LOOPS = FOLDER.parent / "cpu"
SOURCES = FOLDER / "replay.cpp", *sorted(LOOPS.glob("*.cpp"))
HEADERS = sorted(LOOPS.glob("*.h"))
FLAGS = "-O3", "-fPIC", "-fvisibility=hidden", "-std=c++20", "-w", "-fno-math-errno"
INSTRUCTIONS = {  # of the machine, as torch tells them
    "AVX2": ("-mavx2", "-mfma"),
    "AVX512": ("-mavx2", "-mfma", *(f"-mavx512{part}" for part in ("f", "bw", "dq", "vl"))),
}
STEPS = 100  # on a CPU: shorter programs do not start a compiler
LONGEST = 900  # seconds: a build that was begun before is not waited for
NAME = "normkit_replay"
SWITCH = "NORMKIT_CPP"


class _Extension:
    """The module once it is there; why not, if it will not be."""

    def __init__(self) -> None:
        self.module: Any = None
        self.reason = "its C++ part has not been built yet"
        self.started = False
        self.built: list[Path] = []  # aside, to be loaded by whoever asks next
        self.from_start = False  # whether it was there at the first step
        self.asked = 0  # by layers on a CPU


_extension = _Extension()
_starting = threading.RLock()  # two threads may come to their first step at once


def extension(wanted: bool = True) -> Any:
    """The compiled module, or None. Where it is ``wanted``, a first call looks for it, and starts
    to build it."""
    if wanted and not _extension.started:
        with _starting:
            _start()
    if _extension.built and _extension.module is None:
        with suppress(IndexError):  # another thread was faster
            _extension.built.pop()
            _load()
    return _extension.module


def _start() -> None:
    if _extension.started:
        return
    _extension.started = True
    if os.environ.get(SWITCH) == "0":
        _extension.reason = f"{SWITCH}=0 is set"
    elif _is_there():
        _load()
        _extension.from_start = True
    else:
        # it only builds: a thread that is in C++ code when Python ends ends it with an abort
        threading.Thread(target=_build_aside, daemon=True).start()


def extension_on_cpu() -> Any:
    """The same for layers on a CPU: None for good, unless it was there at their first step."""
    if _extension.from_start:
        return _extension.module
    with _starting:
        if not _extension.asked and not _extension.started and _is_there():
            _start()
        if _extension.from_start:
            return _extension.module
        _extension.asked += 1
        if _extension.asked == STEPS:
            extension()  # for the next process
    return None


def reason() -> str:
    """Why there is no module, as a part of a sentence; empty if there is one."""
    return "" if _extension.module is not None else _extension.reason


def reason_on_cpu() -> str:
    """The same for layers on a CPU."""
    if _extension.module is None:
        return _extension.reason
    return "" if _extension.from_start else "its C++ part was built after the first step"


def build_extension() -> Path:
    """Build the C++ part of layers, if it is not there, and return where it is.

    On a GPU it starts steps that were recorded, on a CPU it computes them: a small layer then costs
    about as much as one of torch.nn. Layers use it by themselves, once it has been built beside a
    training; this builds it now, for an image of a machine, or to see why it cannot be built.
    """
    _extension.started = _extension.from_start = True
    if _extension.module is None:
        _build_aside(alone=False)
        extension()
    if _extension.module is None and _is_there():  # what is there cannot be loaded
        library().unlink()
        _build_aside(alone=False)
        extension()
    if _extension.module is None:
        raise DeviceError(
            f"The C++ part of normkit is not used: {_extension.reason}. Layers work without it; "
            "to have it, install a C++ compiler and the headers of Python."
        )
    return library()


def library() -> Path:
    """Where the module is, or will be: a file for each source, torch, Python and machine."""
    sources = [(file.name, file.read_bytes()) for file in (*SOURCES, *HEADERS)]
    machine = sysconfig.get_platform(), torch.backends.cpu.get_cpu_capability()
    made_for = (sources, FLAGS, torch.__version__, sys.version, *machine)
    key = hashlib.sha256(repr(made_for).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "normkit" / key / f"{NAME}.so"


def _is_there() -> bool:
    try:
        return library().exists()
    except (OSError, RuntimeError) as error:  # a folder of somebody else, or no home at all
        _extension.reason = f"its cache cannot be looked into ({error})"
        return False


def _compiler() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def commands(target: Path, parts: Path) -> tuple[list[list[str]], list[str]]:
    """What compiles each source into a part, and what makes the module of them."""
    logger = logging.getLogger("torch.utils.cpp_extension")  # which misses a GPU
    logger.addFilter(lambda _: False)
    from torch.utils.cpp_extension import include_paths, library_paths

    folders = [*include_paths(), sysconfig.get_paths()["include"]]
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    compile = [
        *(*_compiler(), *FLAGS),
        *INSTRUCTIONS.get(torch.backends.cpu.get_cpu_capability(), ()),
        *(f"-DTORCH_EXTENSION_NAME={NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
        *(f"-I{folder}" for folder in folders),
    ]
    made = {source: str(parts / f"{source.stem}.o") for source in SOURCES}
    link = [
        *(*_compiler(), *FLAGS, "-shared", *made.values(), "-o", str(target)),
        *(part for folder in library_paths() for part in (f"-L{folder}", f"-Wl,-rpath,{folder}")),
        *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
    ]
    return [[*compile, "-c", str(source), "-o", part] for source, part in made.items()], link


def script(target: Path) -> str:
    """For a shell, which ends what it began also where Python ends before. Three compilers at once:
    the first source takes about as long as all others, and four fifths of the memory of all."""
    own = f"{os.getpid()}-{threading.get_ident()}"  # others may build too
    mine, parts = target.with_name(f"{own}.so"), target.with_name(f"{own}.parts")
    compile, link = commands(mine, parts)
    quoted = {"mine": mine, "parts": parts, "target": target, "begun": target.with_name("begun")}
    at = {name: shlex.quote(str(path)) for name, path in quoted.items()}
    lanes = compile[:1], compile[1::2], compile[2::2]
    in_turn = [" && ".join(shlex.join(each) for each in lane) for lane in lanes]
    return "\n".join(
        [
            f"ended=0; mkdir -p {at['parts']}",
            *(f"{{ {each}; }} & p{i}=$!" for i, each in enumerate(in_turn)),
            *(f"wait $p{i} || ended=$?" for i in range(len(in_turn))),
            f"[ $ended = 0 ] && {{ {shlex.join(link)} && mv -f {at['mine']} {at['target']}"
            " || ended=$?; }",
            f"rm -rf {at['mine']} {at['parts']} {at['begun']}; exit $ended",
        ]
    )


def _build_aside(alone: bool = True) -> None:
    """Build it, if it is not there; ``alone``: not if another process is about to."""
    try:
        if not _is_there():
            _build(library(), alone)
        _extension.built.append(library())
    except (OSError, RuntimeError, ImportError, ValueError) as error:  # ValueError: of CXX
        _extension.reason = f"it could not be built ({error})"


def _build(target: Path, alone: bool) -> None:
    if shutil.which(_compiler()[0]) is None:
        raise FileNotFoundError(f"there is no compiler ({_compiler()[0]})")
    target.parent.mkdir(parents=True, exist_ok=True)
    begun = target.with_name("begun")
    with suppress(FileNotFoundError):
        if alone and time.time() - begun.stat().st_mtime < LONGEST:
            raise ImportError("another process builds it now")
    for left in target.parent.glob("*-*.*"):  # by builds that were killed
        with suppress(FileNotFoundError):
            if time.time() - left.stat().st_mtime > LONGEST:
                shutil.rmtree(left) if left.is_dir() else left.unlink()
    shell = ["sh", "-c", script(target)]
    begun.touch()
    # in a session of its own: Ctrl-C in a terminal ends Python, and not the shell before it has
    # cleared up; nor does anything here kill it
    process = subprocess.Popen(
        shell,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _, said = process.communicate()
    if process.returncode:
        said = said.strip()[:500] or f"nothing, exit status {process.returncode}"
        raise ImportError(f"the compiler said: {said}")


def _load() -> None:
    try:
        spec = importlib.util.spec_from_file_location(NAME, library())
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        _extension.reason = f"it could not be loaded ({error})"
        return
    _extension.module = module
