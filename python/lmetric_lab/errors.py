"""Errors that several parts of the laboratory raise."""

from lmetric._core import LmetricError


class TraceError(LmetricError):
    """A trace cannot be read or written. The message has the file, the line and what was
    expected."""
