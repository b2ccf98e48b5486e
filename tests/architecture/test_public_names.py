"""The public names are written down once, and importing them costs nothing."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path

import normkit
from normkit import catalog

SOURCE = Path(normkit.__file__)


def test_all_is_a_plain_list_of_strings() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    lists = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    assert len(lists) == 1
    assert ast.literal_eval(lists[0]) == normkit.__all__


def test_no_star_imports() -> None:
    tree = ast.parse(SOURCE.read_text(encoding="utf-8"))
    stars = [n for n in ast.walk(tree) if isinstance(n, ast.alias) and n.name == "*"]
    assert stars == []


def test_all_is_sorted() -> None:
    assert list(normkit.__all__) == sorted(normkit.__all__, key=str.casefold)
    assert len(set(normkit.__all__)) == len(normkit.__all__)


def test_all_is_what_is_visible() -> None:
    """Submodules become attributes when imported; they are public only if listed."""
    listed = set(normkit.__all__)
    visible = {
        name
        for name, value in vars(normkit).items()
        if not name.startswith("_")
        and (name in listed or not inspect.ismodule(value))
        and name != "annotations"  # of `from __future__ import annotations`
    }
    assert visible == {name for name in listed if not name.startswith("_")}


def test_every_listed_name_exists() -> None:
    assert [name for name in normkit.__all__ if not hasattr(normkit, name)] == []


def test_every_layer_is_exported_under_its_own_name() -> None:
    for name, layer in catalog.ENTRIES.items():
        assert getattr(normkit, layer.__name__, None) is layer, name
        assert layer.__name__ in normkit.__all__


def test_names_are_those_of_the_catalog() -> None:
    assert normkit.names() == sorted(catalog.ENTRIES)
    kinds = {kind: normkit.names(kind) for kind in ("activation", "weight")}
    assert sorted(kinds["activation"] + kinds["weight"]) == sorted(catalog.ENTRIES)
    for kind, names in kinds.items():
        assert {catalog.ENTRIES[name].card.kind for name in names} == {kind}


IMPORT_ALONE = """
import json, sys, torch
threads = torch.get_num_threads()
state = torch.get_rng_state()
before = set(sys.modules)
import normkit
assert torch.get_num_threads() == threads
assert torch.equal(torch.get_rng_state(), state)
assert not torch.cuda.is_initialized()
print(json.dumps(sorted(set(sys.modules) - before)))
"""

HEAVY = ("numpy", "scipy", "sklearn", "rich", "triton", "torch._dynamo", "torch._inductor")


def test_importing_does_no_work() -> None:
    ran = subprocess.run([sys.executable, "-c", IMPORT_ALONE], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    loaded = json.loads(ran.stdout)
    assert "normkit.layers.bn" in loaded  # else the list of modules proves nothing
    assert [m for m in loaded if m.startswith(HEAVY)] == []


WITHOUT_TORCH = """
import pickle, sys
import normkit
assert "torch" not in sys.modules
assert set(normkit.__all__) <= set(dir(normkit))
assert normkit.errors.NormkitError.__module__ == "normkit.errors"  # a part that needs no torch
assert "torch" not in sys.modules
assert not hasattr(normkit, "nothing_of_this_name")
assert "torch" not in sys.modules
from normkit import BN, recipes
assert [name for name in normkit.__all__ if name not in vars(normkit)] == []
assert BN is normkit.layers.BN
assert type(pickle.loads(pickle.dumps(BN(4)))) is BN
operators = sys.modules["torch"]._C._dispatch_get_all_op_names()
assert any(name.startswith("normkit::") for name in operators)
"""


def test_torch_is_imported_with_the_first_public_name() -> None:
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
