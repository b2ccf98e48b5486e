"""Packages that the library does without, but not everything that can be asked of it."""

from __future__ import annotations

import importlib
from typing import Any

from normkit.errors import MissingExtra


def require(package: str, extra: str, what: str) -> Any:
    """An optional package, or an error that says how to get it."""
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        missing = (error.name or package).partition(".")[0]
        raise MissingExtra(
            f"{what} needs {missing}, which is not installed. Try: pip install 'normkit[{extra}]'"
        ) from error
