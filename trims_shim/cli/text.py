"""Plain text for people: sizes, times, bars and tables. No colour, no third-party import."""

from __future__ import annotations

import json
import math
import shutil
import sys
import unicodedata
from collections.abc import Collection, Sequence
from typing import Any

from trims_shim.printable import printable, size

__all__ = [
    "ago",
    "bar",
    "behind_name",
    "counted",
    "duration",
    "end_of",
    "print_json",
    "printable",
    "size",
    "table",
    "terminal_width",
]

_LEAST_OF_A_CELL = 12


def counted(number: int, noun: str) -> str:
    """``1 image``, ``2 images``, ``2 misses``."""
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def behind_name(message: str, *names: str) -> str:
    """A message as it is shown behind what it is about: without the name that it begins with."""
    for name in (*names, *map(printable, names)):
        if message.startswith((f"{name}: ", f"{name} ")):
            return message.removeprefix(name).removeprefix(":").lstrip()
    return message


def duration(seconds: float) -> str:
    """``4 s``, ``12 min``, ``3 h 5 min``, ``2 d 1 h``."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole} s"
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if minutes < 60:
        return f"{minutes} min"
    if hours < 24:
        return f"{hours} h {minutes % 60} min"
    return f"{days} d {hours % 24} h"


def ago(then_ns: int, now_ns: int) -> str:
    """``4 s ago``."""
    return f"{duration((now_ns - then_ns) / 1e9)} ago"


def bar(parts: Sequence[tuple[float, str]], whole: float, *, width: int = 30) -> str:
    """``[####~~....]``: each part as its character; parts beyond the whole are cut off."""
    drawn = ""
    total = 0.0
    for amount, character in parts:
        total += max(0.0, amount)
        end = round(width * min(1.0, total / whole)) if whole > 0 else 0
        drawn += character * (end - len(drawn))
    return f"[{drawn.ljust(width, '.')}]"


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: Collection[str] = (),
    width: int | None = None,
) -> str:
    """Columns padded to their widest cell; those with a title in ``right`` are right-aligned.

    If there is a ``width``, the last column is the :func:`end_of` its cells, as far as it has room.
    What would steer a terminal is escaped: many cells are names out of files.
    """
    aligned_right = [title in right for title in titles]
    titles, *rows = [[*map(printable, row)] for row in (titles, *rows)]
    if width is not None:
        others = list(zip(titles, *rows, strict=True))[:-1]
        room = width - sum(2 + max(map(len, column)) for column in others)
        room = max(_LEAST_OF_A_CELL, room)
        rows = [(*row[:-1], end_of(row[-1], room)) for row in rows]
    widths = [max(len(row[i]) for row in (titles, *rows)) for i in range(len(titles))]
    lines = []
    for row in (titles, *rows):
        cells = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(row, widths, aligned_right, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def terminal_width() -> int | None:
    """Columns of the terminal that stdout is; None if it is none, as files and pipes have room."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def end_of(text: str, room: int) -> str:
    """The text if it has so many columns at most, else its end: paths begin alike."""
    if sum(map(_columns, text)) <= room:
        return text
    text = text[-room:]
    while sum(map(_columns, text)) >= room > 0:
        text = text[1:]
    return f"…{text}"


def _columns(character: str) -> int:
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def print_json(value: Any) -> None:
    """One JSON document on stdout; what JSON has no number for is null."""
    print(json.dumps(_with_nulls(value), indent=1))


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_nulls(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
