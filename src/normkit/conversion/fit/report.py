"""What a fit has come to: layer by layer, at the outputs, and whether the images were right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from normkit.conversion.forward_probe import leaves

UNLIKE, UNLIKE_FIRST = 0.12, 0.2
"""How large the error of the old running statistics, relative to the signal, may be in the median
norm and in the first one. docs/fitted-conversion.md has what was measured."""

UNMEASURED = (
    "outputs were not measured: they have no row for each image, as those of a detector, or "
    "another shape than before"
)


@dataclass(frozen=True)
class FittedLayer:
    """One norm that was fitted."""

    path: str
    r2: float
    """Of what the old norm gave on the held-out images, how much the new one explains; after the
    activation, where one follows."""
    plain_r2: float
    """The same with scale and shift as carried over, from the same inputs."""
    note: str = ""
    """Why it was not fitted, or the like."""


@dataclass(frozen=True)
class FitReport:
    """The evidence of a fit; every number was measured on the images that were held out.

    These enter no equation and no gradient, but they choose: between numbers of groups, between
    fitted and old weights, when distilling stops. So the numbers are slightly kind."""

    images: int
    held_out: int
    layers: tuple[FittedLayer, ...] = ()
    output_error: float | None = None
    """‖new − old‖ / ‖old‖ of the outputs; None if they cannot be compared."""
    agreement: float | None = None
    """How often the largest output is the same one: top-1 agreement where outputs are logits."""
    unlike: float | None = None
    """Mean square of what the old running statistics add to the standardized input, by mistake, on
    these images (the doctor's output error), in the median norm; None without such norms."""
    unlike_first: float | None = None
    """The same in the first norm, which sees another scale or mean of the images best."""
    computed_weights: bool = False
    """Whether weights of the old network are computed, as ``standardize`` makes them."""
    distilled: int | None = None
    """After how many steps of distilling it was best; None if there were none."""
    notes: tuple[str, ...] = ()

    @property
    def agreement_interval(self) -> tuple[float, float] | None:
        """Wilson's interval of the agreement, 95 %, for as many images as are held out."""
        if self.agreement is None or not self.held_out:
            return None
        n, z = self.held_out, 1.96
        middle = self.agreement + z * z / (2 * n)
        half = z * math.sqrt(self.agreement * (1 - self.agreement) / n + z * z / (4 * n * n))
        whole = 1 + z * z / n
        return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)

    @property
    def worst(self) -> FittedLayer | None:
        """The layer where most is lost: where R² falls most from the layer before it."""
        drops = {}
        before = 1.0
        for layer in self.layers:
            if math.isfinite(layer.r2):
                drops[layer] = before - layer.r2
                before = layer.r2
        return max(drops, key=lambda layer: drops[layer], default=None)

    @property
    def verdict(self) -> str:
        steps = "" if self.distilled is None else f" and distilled in {self.distilled} steps"
        parts = [f"Fitted on {self.images - self.held_out} images{steps}"]
        if self.agreement is not None:
            low, high = self.agreement_interval or (0.0, 1.0)
            parts.append(
                f"on {self.held_out} held-out ones the top output agrees in {self.agreement:.1%} "
                f"(95 % interval {low:.1%} to {high:.1%})"
            )
        if self.output_error is not None:
            parts.append(f"the output differs by {self.output_error:.1%} (norm)")
        else:
            parts.append(UNMEASURED)
        if self.worst is not None:
            parts.append(f"most is lost at {self.worst.path} (R² {self.worst.r2:.3f})")
        return ", ".join(parts[:2]) + "".join(f"; {part}" for part in parts[2:]) + "."

    def __str__(self) -> str:
        return "\n".join([self.verdict, *self.notes])

    def table(self) -> str:
        """R² of each layer, fitted and as carried over."""
        width = max((len(layer.path) for layer in self.layers), default=0)
        lines = [f"{'layer':{width}}     R²  carried"]
        lines += [
            f"{f.path:{width}} {f.r2:6.3f}   {f.plain_r2:6.3f}  {f.note}".rstrip()
            for f in self.layers
        ]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Everything, in plain values."""
        return {
            **asdict(self),
            "agreement_interval": self.agreement_interval,
            "verdict": self.verdict,
        }


def unlike_note(unlike: float | None, first: float | None, computed_weights: bool = False) -> str:
    """A warning, if the images seem unlike those the network was trained on; else empty."""
    told = [
        f"{value:.2f} of the signal's power in the {which} norm (expected below {bound})"
        for value, which, bound in ((unlike, "median", UNLIKE), (first, "first", UNLIKE_FIRST))
        if value is not None and value > bound
    ]
    if not told:
        return ""
    if computed_weights:
        return (
            f"The old running statistics are off by {' and '.join(told)}. Weights of the model are "
            "standardized: if it was trained without, it is fitted to what standardizing "
            'made of it. Convert the plain network with nk.Fit(images, standardize="ws") instead. '
            "Else check scale, mean, channel order and kind of the images."
        )
    return (
        "The images seem unlike those the network was trained on: the old running statistics "
        f"are off by {' and '.join(told)}. Check their scale, mean, channel order and kind; the "
        "fit holds for such images only."
    )


def output_error(old: Sequence[Tensor], new: Sequence[Tensor]) -> float | None:
    """‖new − old‖ / ‖old‖ over all outputs that have one shape."""
    pairs = [(a, b) for a, b in zip(old, new, strict=False) if a.shape == b.shape and a.numel()]
    if not pairs:
        return None
    gap = sum(float((b.double() - a.double()).square().sum()) for a, b in pairs)
    size = sum(float(a.double().square().sum()) for a, _ in pairs)
    return math.sqrt(gap / size) if size else None


def agreement(old: Sequence[Tensor], new: Sequence[Tensor]) -> float | None:
    """How often the channel with the largest number is the same, in the first output."""
    if not old or not new or old[0].shape != new[0].shape:
        return None
    a, b = old[0], new[0]
    if a.dim() < 2 or a.shape[1] < 2 or not a.numel():
        return None
    return float((a.argmax(1) == b.argmax(1)).double().mean())


def output_leaves(output: Any) -> list[Tensor]:
    return [t.detach() for t in leaves(output)]
