"""A layer owns its knowledge: no file outside layers/ names a layer or asks whether it has one.

What is peculiar to a layer is a method of it or a field of its card, so that a new layer has its
measures, conversions and warnings without anybody remembering a table. Exempt are the files whose
business is names: the export page of the package and the recipes, each of which is a paper's own
choice of layers. Norms of other libraries have kinds, such as "bn" for nn.BatchNorm2d: two files of
inspection know which class has which kind, and what a foreign norm of a kind computes. All others
ask the site, or what answers for its norm.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import normkit
from normkit import catalog

ROOT = Path(normkit.__file__).parent
EXEMPT = ("__init__.py", "layers/", "conversion/recipes/")
# they name kinds, but no class of a layer
FOREIGN_NORMS = ("inspection/kinds.py", "inspection/foreign.py")

NAMES = set(catalog.ENTRIES)
CLASSES = {layer.__name__ for layer in catalog.ENTRIES.values()}
LAYER_FILES = {layer.__module__ for layer in catalog.ENTRIES.values()}
FAMILIES = {"BatchNormalizer", "Gated"}  # bases that stand for "one of these layers"

# still to be moved into layers: file -> how often it names one. A count may only become smaller,
# and an entry that is no longer needed must go.
ALLOWED: dict[str, int] = {}


def name(file: Path) -> str:
    return file.relative_to(ROOT).as_posix()


FILES = [file for file in sorted(ROOT.rglob("*.py")) if not name(file).startswith(EXEMPT)]


def violations(source: str, kinds_allowed: bool = False) -> Iterator[str]:
    """Every place in a source file that names a layer, with its line."""
    tree = ast.parse(source)
    skipped = {id(node) for node in _docstrings_and_text(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            module = node.module or ""
            for alias in node.names:
                whole = f"{module}.{alias.name}"
                if alias.name in CLASSES | FAMILIES or {module, whole} & LAYER_FILES:
                    yield f"line {node.lineno}: imports {whole}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in LAYER_FILES:
                    yield f"line {node.lineno}: imports {alias.name}"
        elif isinstance(node, ast.Attribute) and node.attr in CLASSES | FAMILIES:
            yield f"line {node.lineno}: uses {ast.unparse(node)}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            asked = {n.id for n in ast.walk(node.args[1]) if isinstance(n, ast.Name)}
            for one in sorted(asked & (CLASSES | FAMILIES)):
                yield f"line {node.lineno}: asks {ast.unparse(node.func)} of {one}"
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value in NAMES
            and id(node) not in skipped
            and not kinds_allowed
        ):
            yield f"line {node.lineno}: the name {node.value!r}"


def _docstrings_and_text(tree: ast.AST) -> Iterator[ast.AST]:
    """Strings that are no values: docstrings, and the pieces of formatted text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield from node.values


def test_no_file_outside_layers_names_a_layer() -> None:
    wrong = []
    for file in FILES:
        source = file.read_text(encoding="utf-8")
        found = list(violations(source, kinds_allowed=name(file) in FOREIGN_NORMS))
        allowed = ALLOWED.get(name(file), 0)
        if len(found) > allowed:
            wrong.append(
                f"{name(file)} names layers ({allowed} are still allowed). Give the layer a method "
                "or its card a field, with a default in the base class:\n" + "\n".join(found)
            )
        if len(found) < allowed:
            wrong.append(
                f"{name(file)} has become better: change its entry in ALLOWED of this test from "
                f"{allowed} to {len(found)}" + (", that is, remove it." if not found else ".")
            )
    assert not wrong, "\n\n".join(wrong)


def test_allowed_files_exist() -> None:
    assert set(ALLOWED) <= {name(file) for file in FILES}, "remove entries of files that are gone"


SAMPLE = '''
"""bn"""
from normkit.layers import UBN, Normalizer
from normkit.layers.bcn import BCN as Something
from normkit.layers.batch import BatchNormalizer
from normkit.layers.base import Normalizer
from normkit.layers import gn
import normkit.layers.ws
import normkit as nk

def f(site, layer):
    "ubn"
    text = f"{site} in {layer}in"
    if site.kind == "bn" or layer.card.name in ("gn", "group"):
        return isinstance(layer, (Normalizer, UBN)), nk.BCN(3)
    match site.kind:
        case "ln":
            return {"sn": 1, "other": 2}
'''


def test_the_reader_sees_all_forms() -> None:
    found = [line.partition(": ")[2] for line in violations(SAMPLE)]
    assert sorted(found) == sorted(
        [
            "imports normkit.layers.UBN",
            "imports normkit.layers.bcn.BCN",
            "imports normkit.layers.batch.BatchNormalizer",
            "imports normkit.layers.gn",
            "imports normkit.layers.ws",
            "the name 'bn'",
            "the name 'gn'",
            "asks isinstance of UBN",
            "uses nk.BCN",
            "the name 'ln'",
            "the name 'sn'",
        ]
    )
    kinds_allowed = [line.partition(": ")[2] for line in violations(SAMPLE, kinds_allowed=True)]
    assert sorted(kinds_allowed) == sorted(line for line in found if "the name" not in line)
