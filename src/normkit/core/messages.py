"""Words for messages: which layer is meant, how many of a thing there are, aligned tables."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from torch import nn


def path_of(layer: nn.Module) -> str:
    """The layer's path in the model whose forward is running, such as 'layer3.0.bn2', or ''.

    Modules do not know their parents, so the outermost module on the call stack that contains
    the layer is asked. Only messages pay for this.
    """
    path = ""
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and owner is not layer:
            for name, module in owner.named_modules():
                if module is layer:
                    path = name
                    break
        if frame.f_back is None:
            break
        frame = frame.f_back
    return path


def title(layer: nn.Module) -> str:
    """How messages name a layer: its class, and its path where there is one."""
    path = path_of(layer)
    return f"{type(layer).__name__} ({path})" if path else type(layer).__name__


def channel_hint(shape: Sequence[int], channels: int) -> str:
    """What may have been meant by an input whose axis 1 has not so many channels."""
    if len(shape) in (1, 3) and shape[0] == channels:
        return " Try x.unsqueeze(0): the batch axis is missing."
    if len(shape) > 2 and shape[-1] == channels:
        return " Try x.movedim(-1, 1): the channels seem to be last."
    return ""


def first_line(error: BaseException) -> str:
    """The message of an error, on one line and without a full stop; its kind if it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")


def error_words(error: BaseException) -> str:
    """The kind of an error and the first line of its message.

    >>> error_words(ValueError("no such axis.\\nTry another."))
    'ValueError: no such axis'
    """
    kind = type(error).__name__
    return f"{kind}: {first_line(error)}" if str(error).strip() else kind


def counted(count: int, noun: str) -> str:
    """1 seed, 2 batches.

    >>> counted(1, "seed"), counted(20, "epoch"), counted(2_000, "batch")
    ('1 seed', '20 epochs', '2,000 batches')
    """
    many = f"{noun}es" if noun.endswith("tch") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else many}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """The lines of a table: columns as wide as their widest cell, some of them flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(range(len(row)), row, widths, strict=True)
        padded = [c.rjust(width) if i in right else c.ljust(width) for i, c, width in cells]
        lines.append("  ".join(padded).rstrip())
    return lines
