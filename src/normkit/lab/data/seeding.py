"""Random streams that depend on what they are for, and on nothing drawn elsewhere."""

from __future__ import annotations

import hashlib

import torch


def stream(*parts: object) -> int:
    """A seed of 63 bits from any number of parts.

    >>> stream("order", 1, 0) == stream("flip", 1, 0)
    False
    """
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """A generator on the CPU: the same numbers whichever device will use them."""
    return torch.Generator().manual_seed(stream(*parts))
