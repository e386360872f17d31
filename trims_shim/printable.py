"""Text from elsewhere, to be shown. Pure."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""A text that others chose, without characters that steer a terminal: ``\n`` is escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
