"""Models that must not be changed from the inside."""

from __future__ import annotations

from typing import Any

from normkit.errors import OptionError
from normkit.inspection import refuse_wrapped


def refuse_unchangeable(model: Any) -> None:
    """An error, with the fix, for a model that something has taken note of."""
    refuse_wrapped(model)
    for path, module in model.named_modules():
        if module._compiled_call_impl is not None:
            raise OptionError(
                f"{path or 'The model'} is compiled in place, and would not notice a change. "
                "Convert it before calling compile()."
            )
