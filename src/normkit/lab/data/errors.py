"""What can be wrong with files of data."""

from __future__ import annotations

from normkit.errors import NormkitError


class MissingData(NormkitError, FileNotFoundError):
    """A data set, or one of its files, is not where it was looked for."""


class CorruptData(NormkitError, ValueError):
    """A file is not what was published: another checksum, a wrong size, or unreadable."""
