"""Methods that a subclass overrides, or that are set on one layer: no kernel goes past them.

Kernels know a layer's map by a description (``fusion``), loops and graphs for coefficients alone by
``compute``, and a step that was recorded does none of what a forward calls before it. Each of these
is left out where a method that it would skip is not of normkit.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, ClassVar

from normkit.core.options import Configured
from normkit.layers.converted import Converted
from normkit.layers.from_training import FromTraining
from normkit.layers.measured import Measured

# methods that have no part in the map: what is called around it, and what other verbs ask
AROUND = {"forward", "normalize", "normalize_masked", "check", "check_size", "varies", "fixed_map"}
AROUND |= {"description", "write", "report", "train", "path", "with_moments", "set_radius"}
AROUND |= {"_apply", "from_batch_norm", "from_trained", "as_batch_norm", "synchronise"}
AROUND |= {"reset_running_stats", "channel_statistics", "_load_from_state_dict", "named_children"}
AROUND |= {"register_buffer", "register_parameter"}
ASKED = Configured, Converted, FromTraining, Measured
PASSES = {"mapped", "run", "_heard"}  # which ``compute`` alone would skip
CALLED = {"normalize", "check", "check_size", "run"}  # in each forward, which a replay would skip


class Overriding:
    """What a normalizer knows of methods that are not of normkit."""

    own_methods: ClassVar[tuple[str, ...]] = ()  # of the map: ``fusion`` is not true of the class
    own_calls: bool = False  # there is one that each forward has to call

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.own_methods = _own_methods(cls)
        cls.own_calls = any(_is_foreign(cls, name) for name in CALLED)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if callable(value) and isinstance(getattr(type(self), name, None), FunctionType):
            own = self.__dict__  # a method of this layer alone
            own["own_calls"] = self.own_calls or name in CALLED
            if _is_part_of_map(name, type(self).__mro__):
                own["_own_here"] = (*own.get("_own_here", ()), name)

    def overridden(self) -> tuple[str, ...]:
        """Methods of the map that are not those which ``fusion`` describes."""
        return (*self.own_methods, *self.__dict__.get("_own_here", ()))

    def has_own_passes(self) -> bool:
        """Whether there is more to the output than the coefficients."""
        return not PASSES.isdisjoint(self.overridden())

    def what_is_its_own(self) -> str:
        """In words, for a layer that is not as normkit has it."""
        own = self.__dict__.get("_own_here", ()) if _is_ours(type(self)) else self.overridden()
        return f"it has its own {', '.join(own)}" if own else ""


def _own_methods(cls: type) -> tuple[str, ...]:
    """What a class overrides below the one whose ``fusion`` describes the map. Of classes of
    normkit ``coefficients`` alone: tests compare these."""
    below: dict[str, None] = {}
    for place, base in enumerate(cls.__mro__):
        if "fusion" in vars(base):
            if _is_ours(base):
                break
            continue  # it speaks for its own methods
        above = cls.__mro__[place + 1 :]
        for name in vars(base):
            if name == "coefficients" or (not _is_ours(base) and _is_part_of_map(name, above)):
                below[name] = None
    return tuple(below)


def _is_ours(cls: type) -> bool:
    return cls.__module__.split(".")[0] == __name__.split(".")[0]


def _is_foreign(cls: type, name: str) -> bool:
    """Whether a method comes from a class that is not of normkit."""
    having = next((base for base in cls.__mro__ if name in vars(base)), cls)
    return not _is_ours(having)


def _is_part_of_map(name: str, bases: tuple[type, ...]) -> bool:
    """Whether layers have a method of this name that may have a part in their map."""
    having = [c for c in bases if name in vars(c) and (_is_ours(c) or issubclass(c, Overriding))]
    if name.startswith("__") or name in AROUND or any(base in ASKED for base in having):
        return False
    return any(isinstance(vars(base)[name], FunctionType | property) for base in having)
