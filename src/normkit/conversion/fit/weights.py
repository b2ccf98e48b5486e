"""Convolutions whose weights are standardized in the new network, and plain in the old one."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normkit.conversion.edits import Edit, check_all
from normkit.conversion.fit.data import UNTOUCHED, ImageRun
from normkit.conversion.standardize import Standardize, refuse_shared, standardizable, standardizing
from normkit.errors import NothingToDo
from normkit.inspection import convolutions_before_norms
from normkit.inspection.run import replaced_forward
from normkit.layers.weight import WeightNormalizer


@dataclass(eq=False)
class StandardizedSite:
    """A convolution before a norm, and what will compute its weight."""

    path: str
    module: nn.Module
    normalizer: WeightNormalizer

    def forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The convolution's own forward, whatever it does beside, with the computed weight."""
        held, weight = self.module._parameters, self.module.weight
        assert isinstance(weight, Tensor)
        kept = self.normalizer.right_inverse(weight)  # as if it were registered now
        value: Any = self.normalizer(*(kept if isinstance(kept, tuple) else (kept,)))
        before, held["weight"] = held["weight"], value
        try:
            return original(*args, **kwargs)
        finally:
            held["weight"] = before


def standardized_sites(
    model: nn.Module, norms: Container[str], method: str, run: ImageRun
) -> tuple[list[StandardizedSite], list[Edit]]:
    """The convolutions that feed these norms, with the edits that will standardize them."""
    feeding = convolutions_before_norms(model, run.first(2))
    layers = {path: model.get_submodule(path) for path, norm in feeding.items() if norm in norms}
    wide = {path: conv for path, conv in layers.items() if standardizable(conv)}
    if not wide:
        raise NothingToDo(
            f"Fit(standardize={method!r}) found no convolution to standardize: none with a plain "
            f"weight of several numbers an output channel feeds a norm that is converted. What is "
            f"standardized already is fitted as it is, without this option. {UNTOUCHED}"
        )
    refuse_shared(model, wide)
    edits = standardizing(wide, method)
    check_all(model, edits)  # which also makes what will compute the weights
    sites = [
        StandardizedSite(edit.path, wide[edit.path], edit.normalizer)
        for edit in edits
        if isinstance(edit, Standardize)
    ]
    return sites, edits


@contextmanager
def standardized(
    sites: Sequence[StandardizedSite], when: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Inside, these convolutions compute with standardized weights, in calls where ``when()``."""
    with ExitStack() as stack:
        for site in sites:

            def forward(
                *args: Any, site: Any = site, original: Any = site.module.forward, **kwargs: Any
            ) -> Any:
                if when():
                    return site.forward(original, *args, **kwargs)
                return original(*args, **kwargs)

            stack.enter_context(replaced_forward(site.module, forward))
        yield
