"""Whether a module adds things up in its forward, as a residual block does."""

from __future__ import annotations

import ast
import inspect
import textwrap
from functools import cache
from typing import Any

from torch import nn


def adds(module: nn.Module) -> bool:
    """Whether ``forward`` contains a sum of two things that are not plain numbers or texts.

    Read from the source, so that it can be known without running the model. False where there is
    none, as for classes typed into a console.
    """
    kind: Any = type(module)
    return _adds(kind)


@cache
def _adds(kind: type[Any]) -> bool:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind.forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(_is_sum(node) for node in ast.walk(tree))


def _is_sum(node: ast.AST) -> bool:
    if isinstance(node, ast.AugAssign):
        return isinstance(node.op, ast.Add) and not isinstance(node.value, ast.Constant)
    if isinstance(node, ast.BinOp):
        parts = (node.left, node.right)
        return isinstance(node.op, ast.Add) and not any(isinstance(p, ast.Constant) for p in parts)
    return False
