"""Imports point downwards, and the library needs torch only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import normkit

ROOT = Path(normkit.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
PROJECT = Path(__file__).parents[2]

# from the bottom to the top; parts on one line do not know each other.
# "normkit" is the package's own __init__.py, the list of public names.
ORDER = (
    {"errors"},
    {"core"},
    {"engine"},
    {"layers"},
    {"catalog"},
    {"inspection", "reporting"},
    {"conversion", "diagnosis", "calibration", "distributed"},
    {"normkit"},
    {"integrations"},
    {"models"},
    {"checkpoints"},
    {"lab"},
    {"timing"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
RANK = {part: rank for rank, parts in enumerate(ORDER) for part in parts}
COMMAND_LINE = {"models", "checkpoints", "commands", "cli", "__main__"}
WITH_EXTRAS = {"integrations", "lab", *COMMAND_LINE}


def part_of(module: str) -> str:
    """normkit.core.moments -> core; normkit itself -> normkit."""
    names = module.split(".")
    return names[1] if len(names) > 1 else names[0]


def module_of(file: Path) -> str:
    names = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imported(source: str, package: str) -> Iterator[str]:
    """Every module that a source file imports, at its top, in functions, or for types only."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            if base == "normkit":  # `from normkit import core` reaches the part, not the package
                yield from (f"normkit.{a.name}" if a.name in RANK else base for a in node.names)
            else:
                yield base


@cache
def imports_of(file: Path) -> list[str]:
    module = module_of(file)
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    return list(imported(file.read_text(encoding="utf-8"), package))


def allowed(own: str, other: str) -> bool:
    return other == own or RANK[other] < RANK[own]


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_imports_point_downwards() -> None:
    upwards = {}
    for file in FILES:
        own = part_of(module_of(file))
        assert own in RANK, f"{own} has no place in ORDER: give it one, and change ARCHITECTURE.md"
        others = {part_of(m) for m in imports_of(file) if m.split(".")[0] == "normkit"}
        if wrong := {other for other in others if not allowed(own, other)}:
            upwards[name(file)] = wrong
    assert upwards == {}


def test_the_library_imports_torch_only() -> None:
    foreign = {}
    for file in FILES:
        known = {"torch", "normkit", *sys.stdlib_module_names}
        if part_of(module_of(file)) in WITH_EXTRAS:
            known |= {"rich", "sklearn", "numpy", "scipy", "torchvision"}
        if module_of(file).startswith(("normkit.engine.triton", "normkit.engine.families")):
            known.add("triton")
        if wrong := {m.split(".")[0] for m in imports_of(file)} - known:
            foreign[name(file)] = wrong
    assert foreign == {}


def test_the_reader_of_imports_sees_all_forms() -> None:
    source = (
        "import normkit.layers.bn as b\n"
        "def f():\n    from normkit import core, BN\n"
        "from . import moments\n"
        "from ..engine.normalize import normalize\n"
    )
    assert set(imported(source, "normkit.core")) == {
        "normkit.layers.bn",
        "normkit.core",
        "normkit",
        "normkit.engine.normalize",
    }
    assert not allowed("core", "engine")
    assert not allowed("conversion", "diagnosis")
    assert allowed("engine", "core")


def test_the_oldest_torch_is_tested_with_all_that_its_tests_import() -> None:
    """make test-oldest installs packages by name: one that is missing ends the run."""
    recipe = (
        (PROJECT / "Makefile").read_text(encoding="utf-8").partition("$(OLDEST)/.installed:")[2]
    )
    installed = set(recipe.replace("\\", " ").split()) | {"torch", "triton", "normkit"}
    tests = PROJECT / "tests"
    own = {file.stem for file in tests.glob("*")} | {"benchmarks", "tools", "tests"}
    files = [*tests.glob("*.py")]
    for folder in ("engine", "layers", "properties"):
        files += (tests / folder).rglob("*.py")
    imported = set()
    for file in files:
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
                if node.module.startswith("torch.testing._internal"):
                    imported.add("expecttest")  # which torch needs there, and does not install
    foreign = imported - own - set(sys.stdlib_module_names)
    assert "pytest" in foreign  # else nothing was read
    assert foreign - installed == set()
