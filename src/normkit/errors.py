"""Every error normkit raises on purpose.

    NormkitError
    ├── ShapeError (ValueError)      a tensor of the wrong rank, size or memory
    ├── DtypeError (TypeError)       a tensor of the wrong number type
    ├── DeviceError (RuntimeError)   tensors on different devices
    ├── TransformError (RuntimeError)  statistics that a transform of torch.func cannot change
    ├── OptionError (ValueError)     an option that does not exist or cannot be
    ├── UnknownName (LookupError)    a name that is not in the catalog
    ├── RankError (RuntimeError)     processes that train together and do not agree
    ├── NothingToDo (ValueError)     a call that would have changed nothing
    └── MissingExtra (ImportError)   an optional package that is not installed

    NonFiniteWarning (RuntimeWarning)   a batch was kept out of the running statistics

Each also derives from the built-in class that torch.nn would have raised, so code that
catches ``ValueError`` keeps working. Messages say what came, what was expected and what to try.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class NormkitError(Exception):
    """Base of all errors raised by normkit."""


class ShapeError(NormkitError, ValueError):
    """A tensor has the wrong rank or size."""


class DtypeError(NormkitError, TypeError):
    """A tensor has a number type that cannot be normalized."""


class DeviceError(NormkitError, RuntimeError):
    """Tensors of one call are on different devices."""


class TransformError(NormkitError, RuntimeError):
    """A layer would have to change statistics that a transform of torch.func does not know."""


class OptionError(NormkitError, ValueError):
    """An option is unknown or has an impossible value."""


class UnknownName(NormkitError, LookupError):
    """A name is not in the catalog."""


class RankError(NormkitError, RuntimeError):
    """Processes that train one model together do not agree, or one of them did not come."""


class NothingToDo(NormkitError, ValueError):
    """A call found nothing to work on."""


class MissingExtra(NormkitError, ImportError):
    """A package that the library does without is needed for what was asked."""


class NonFiniteWarning(RuntimeWarning):
    """A batch with infinite or NaN statistics was kept out of the running statistics."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence that suggests the nearest known name, or lists them all."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(known)}."
