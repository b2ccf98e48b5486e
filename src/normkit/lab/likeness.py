"""Whether what is compared differs in more than it should."""

from __future__ import annotations

from normkit.lab.experiment import Experiment, Variant

# of two settings that differ in these, a norm is not what makes the difference
FIXED = (("data", "name"), ("data", "train"), ("data", "subset"), ("model", "name"))


def unlike(experiment: Experiment) -> list[str]:
    """A caution for each variant that is not compared with the baseline on the same ground.

    A cell of the grid has a baseline of its own; variants of one cell share it.
    """
    found: dict[str, None] = {}
    for variant in experiment.variants:
        keys = _different(variant, experiment.variant(experiment.baseline, variant.cell))
        if keys:
            found[
                f"{variant.name!r} is compared with {experiment.baseline!r}, which has another "
                f"{' and '.join(keys)}. For a baseline of its own, try "
                + " and ".join(f'"{key}"' for key in keys)
                + " as an axis of [grid]."
            ] = None
    return list(found)


def _different(variant: Variant, base: Variant) -> list[str]:
    def value(of: Variant, section: str, key: str) -> object:
        return getattr(getattr(of.setting, section), key)

    return [f"{s}.{k}" for s, k in FIXED if value(variant, s, k) != value(base, s, k)]
