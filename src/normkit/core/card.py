"""The card of a normalizer: facts that tests verify and tools read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Card:
    """What a normalizer promises.

    Every field is either text for people or a claim that the tests check for every layer.
    """

    name: str
    """The name in the catalog."""
    title: str
    """The name in words."""
    paper: str
    """Where the method comes from."""
    kind: Literal["activation", "weight"] = "activation"
    """What is normalized."""
    family: bool = True
    """y = a·x + b with tables from the moments: three passes forward, five backward."""
    statistics: Literal["input", "stored", "none"] = "input"
    """Whose statistics are used: those of the input, stored ones, or none. Without the input's, a
    value of y depends on one value of x alone, and ``uses_moments`` is False."""
    pools_samples: bool = False
    """Training statistics of one sample depend on the others in the batch."""
    same_in_eval: bool = False
    """train() and eval() compute the same function."""
    exact_from_bn: bool = False
    """from_batch_norm gives a layer that equals the given BN in eval mode, with default options."""
    links_samples: bool = False
    """Training batches must be multiples of ``batch_multiple`` samples."""
    normalizes_input: bool = False
    """It stands before the network and belongs to its data: conversions of a network leave it."""
    aliases: tuple[str, ...] = ()
    """Other names that people type, beside the title: answered with the name."""
    cures: tuple[str, ...] = ()
    """Kinds of findings for which diagnosis advises to convert to this layer."""
    experimental: bool = False
    """A reconstruction: the special cases are tested, the published results are not claimed."""

    @property
    def shared_by(self) -> str:
        """Whose values share the statistics in training, in words."""
        if self.kind == "weight":
            return "each filter"
        if self.statistics != "input":
            return self.statistics
        return "the batch" if self.pools_samples else "each sample"
