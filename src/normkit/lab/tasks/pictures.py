"""Pictures that a run leaves for the report: small PNG files as text."""

from __future__ import annotations

import base64
import struct
import zlib

from torch import Tensor

from normkit.errors import ShapeError


def encoded(image: Tensor) -> str:
    """An image (3, H, W) or (1, H, W) of values from 0 to 1 as a PNG in base 64."""
    if image.dim() != 3 or image.shape[0] not in (1, 3):
        raise ShapeError(
            f"A picture is a tensor {tuple(image.shape)}, expected (3, H, W) or (1, H, W)."
        )
    pixels = image.detach().float().clamp(0, 1).mul(255).round().byte().cpu()
    rows = pixels.expand(3, -1, -1).permute(1, 2, 0)  # (H, W, 3)
    height, width, _ = rows.shape
    lines = b"".join(b"\0" + bytes(row.flatten().tolist()) for row in rows)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in parts
    )
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"".join(chunks)).decode()
