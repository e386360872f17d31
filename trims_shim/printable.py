"""What people read: text from elsewhere, and sizes. Pure."""

from __future__ import annotations

__all__ = ["first_line", "printable", "size"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def printable(text: str) -> str:
    r"""A text that others chose, without characters that steer a terminal: ``\n`` is escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def first_line(error: BaseException) -> str:
    """The first line of what an error says, or its type."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


def size(size_bytes: float) -> str:
    """``0 B``, ``1.5 GiB``."""
    value = float(size_bytes)
    for unit in _UNITS:
        if abs(value) < 1024 or unit == _UNITS[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
