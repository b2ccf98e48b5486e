"""What the normalizers of weights share: checks, attaching to a module, folding."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normkit.core.card import Card
from normkit.core.messages import title
from normkit.core.options import Configured
from normkit.core.precision import statistics_dtype
from normkit.core.trained import NOT_DECAYED, SCALES, ParameterRole
from normkit.engine.dispatch import Path, looked_into
from normkit.errors import DeviceError, DtypeError, NothingToDo, OptionError, ShapeError

AnyModule = TypeVar("AnyModule", bound=nn.Module)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class WeightNormalizer(Configured):
    """A map of each output channel's weights, to be registered as a torch parametrization.

    The weight is (O, I, *kernel), as of Linear and the convolutions but not of the transposed
    ones. It is computed in float32 or wider, anew at each use, and keeps its type and memory
    format. A subclass writes ``normalize``.

    A module with a parametrization can be copied but not pickled, a rule of torch: save its
    state_dict, or fold first. Initialise a weight before attaching: an in-place change of
    ``module.weight`` afterwards would change a result that is thrown away.
    """

    card: ClassVar[Card]
    standardizes: ClassVar[bool] = False  # whether it subtracts the mean and divides by the spread
    computed_together: ClassVar[bool] = False  # many weights can be done in one launch

    def __init__(
        self,
        channels: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = self._positive("channels", channels)
        self._factory: dict[str, Any] = {"device": device, "dtype": dtype}

    # ---------------------------------------------------------------- what a subclass writes

    def normalize(self, weight: Tensor) -> Tensor:
        """The weight (O, I, *kernel) to use, from the raw one in float32 or wider."""
        raise NotImplementedError

    def undefined(self, weight: Tensor) -> Tensor | None:
        """For which output channels the formula has no value, (O,), or None where it always has."""
        return None

    def parameter_role(self, name: str) -> ParameterRole:
        """What part a parameter of this module plays for an optimizer."""
        return ParameterRole(SCALES if name == "weight" else NOT_DECAYED)

    def path(self, weight: Tensor, *, compiled: bool | None = None) -> Path:
        """Which code computes a weight, for ``nk.why``."""
        name = "expression" if compiled or looked_into() else "torch"
        return Path(name, "there is no kernel for it")

    # ---------------------------------------------------------------- what torch calls

    def forward(self, weight: Tensor) -> Tensor:
        self.check(weight)
        return self.normalize(widened(weight)).to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Any:
        """What is trained in place of a weight: the same numbers. Torch calls it to register."""
        self.check(weight)
        bad = None if weight.is_meta else self.undefined(widened(weight))
        if bad is not None and bool(bad.any()):
            remedy = "eps=1e-5" if "eps" in self.options() else "ws or cwn"
            raise OptionError(
                f"{title(self)} would divide by zero: in output channels "
                f"{bad.nonzero().flatten().tolist()} all weights are equal or zero. "
                f"Try to initialise them again, or {remedy}."
            )
        return weight

    # ---------------------------------------------------------------- what a user calls

    @classmethod
    def attach(cls, module: AnyModule, **options: Any) -> AnyModule:
        """Normalize the weight of a convolution or Linear from now on; returns the module."""
        normalizer = cls.fitting(module, **options)
        parametrize.register_parametrization(module, "weight", normalizer)
        return module

    @classmethod
    def fitting(cls, module: nn.Module, **options: Any) -> Self:
        """A normalizer that can be registered for the module's weight: all checks are done."""
        kind = type(module).__name__
        weight = module._parameters.get("weight")
        if isinstance(module, TRANSPOSED):
            raise ShapeError(
                f"{cls.__name__} expects a weight whose first axis is the output channel; in "
                f"{kind} it is the second. Transposed convolutions are left as they are."
            )
        if weight is None:
            raise OptionError(
                f"{cls.__name__} expects a module with a plain parameter 'weight', got {kind}. "
                "Where another parametrization is in force, remove it first."
            )
        if isinstance(weight, nn.UninitializedParameter):
            raise ShapeError(f"{kind} has no weight yet. Run one batch through the model first.")
        normalizer = cls(weight.shape[0], device=weight.device, dtype=weight.dtype, **options)
        with torch.no_grad():
            normalizer.right_inverse(weight)
        return normalizer.requires_grad_(weight.requires_grad)

    @staticmethod
    def fold(module: AnyModule) -> AnyModule:
        """Make the normalized weight a plain parameter: the same function, at no cost."""
        names = normalized_tensors(module)
        if not names:
            raise NothingToDo(f"{type(module).__name__} has no weight that normkit normalizes.")
        # deepcopy leaves copies in one class, and torch takes the property from that class: without
        # a class of its own, folding a copy would break the original
        shared: Any = type(module)
        module.__class__ = type(shared.__name__, shared.__bases__, dict(vars(shared)))
        for name in names:
            originals = module.parametrizations[name].parameters(recurse=False)  # type: ignore[index, union-attr]
            trainable = any(original.requires_grad for original in originals)
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
            value = getattr(module, name)
            # torch makes a buffer of a frozen weight that was computed from two tensors
            folded = value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach())
            folded.requires_grad_(trainable)
            folded.grad = None  # it was of the raw weight
            delattr(module, name)
            # first, where torch.nn has it: the state of optimizers is matched by position
            rest = dict(module._parameters)
            module._parameters.clear()
            module.register_parameter(name, folded)
            module._parameters.update(rest)
        return module

    # ---------------------------------------------------------------- shared machinery

    def check(self, weight: Tensor) -> None:
        if weight.dim() < 2 or weight.shape[0] != self.channels:
            raise ShapeError(
                f"{title(self)} expects a weight ({self.channels}, in, *kernel), "
                f"got {tuple(weight.shape)}."
            )
        if not weight.is_floating_point():
            raise DtypeError(f"{title(self)} expects a floating-point weight, got {weight.dtype}.")
        mine = next(self.parameters(), None)
        if mine is not None and mine.device != weight.device:
            raise DeviceError(
                f"{title(self)} is on {mine.device}, the weight on {weight.device}. "
                f"Try {type(self).__name__}.attach(module), which takes the device of the weight."
            )


def normalized_tensors(module: nn.Module) -> list[str]:
    """The names of the tensors of a module that a weight normalizer computes."""
    if not parametrize.is_parametrized(module):
        return []
    lists = dict(module.parametrizations.items())  # type: ignore[operator, union-attr]
    names = [n for n, steps in lists.items() if any(isinstance(s, WeightNormalizer) for s in steps)]
    for name in names:
        others = [type(s).__name__ for s in lists[name] if not isinstance(s, WeightNormalizer)]
        if others:
            raise OptionError(
                f"{type(module).__name__}.{name} is also parametrized by {', '.join(others)}, "
                "which folding would make final. Remove that first."
            )
    return names


def widened(weight: Tensor) -> Tensor:
    return weight.to(statistics_dtype(weight.dtype))


def fan_in(weight: Tensor) -> int:
    """How many weights an output channel has."""
    return math.prod(weight.shape[1:])


def centred(weight: Tensor) -> Tensor:
    """The weight minus its mean over each output channel."""
    return weight - weight.mean(_filter(weight), keepdim=True)


def energy(weight: Tensor) -> Tensor:
    """The sum of squares of each output channel, (O, 1, …)."""
    return weight.square().sum(_filter(weight), keepdim=True)


def length(weight: Tensor) -> Tensor:
    """The Euclidean norm of each output channel, (O, 1, …); its gradient at zero is zero."""
    return torch.linalg.vector_norm(weight, dim=_filter(weight), keepdim=True)


def constant(weight: Tensor) -> Tensor:
    """Which output channels have equal weights only, but for the rounding of their mean, (O,)."""
    middle = centred(weight).flatten(1)
    rounding = torch.finfo(weight.dtype).eps * weight.flatten(1).abs().amax(1)
    return middle.abs().amax(1) <= rounding


def _filter(weight: Tensor) -> tuple[int, ...]:
    """The axes of one output channel. Not a flat view: channels_last weights are to stay so."""
    return tuple(range(1, weight.dim()))
