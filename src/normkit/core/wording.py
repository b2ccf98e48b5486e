"""Words for numbers of things, in messages and reports."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """1 seed, 2 batches.

    >>> counted(1, "seed"), counted(20, "epoch"), counted(2_000, "batch")
    ('1 seed', '20 epochs', '2,000 batches')
    """
    many = f"{noun}es" if noun.endswith("tch") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else many}"
