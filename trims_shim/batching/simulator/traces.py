"""Traces of arrivals as text, in the format of Proteus' artefact (ASPLOS'24).

One request to a line: its arrival in milliseconds, then, both optional, a level of quality (1
everywhere in the artefact, and ignored) and its objective in milliseconds::

    0.731
    12.44,1,300

Pure: the caller opens the file.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from trims_shim.batching.protocol import NEVER_NS, Request

__all__ = ["read_trace"]

_NS_PER_MS = 1_000_000
_LATEST_MS = 4e12
"""More than a century, or a time since 1970 that ends in 2096; in nanoseconds below NEVER_NS."""
_SHOWN = 80
"""Characters of a line that is wrong: other kinds of files have a single one."""


def read_trace(
    lines: Iterable[str], *, slo_ms: float | None = None, key: Hashable = None, speed: float = 1.0
) -> Iterator[Request]:
    """The requests of a trace, numbered from 0.

    ``slo_ms`` replaces the trace's own objectives; a request with neither has no deadline.
    ``speed`` 2 means twice as many in the same time. Empty lines and those that begin with ``#``
    are skipped. Raises ValueError, with the number of the line, for a line that is no request or is
    earlier than the one before.
    """
    if not speed > 0:
        raise ValueError(f"a speed of {speed} is not positive")
    number = last_ns = 0
    for count, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        arrival_ns, objective_ms = _parsed(line, count)
        arrival_ns = round(arrival_ns / speed)
        if arrival_ns < last_ns:
            raise ValueError(
                f"line {count} of the trace is earlier than the one before: {line[:_SHOWN]!r}"
            )
        chosen_ms = objective_ms if slo_ms is None else slo_ms
        deadline_ns = NEVER_NS if chosen_ms is None else arrival_ns + round(chosen_ms * _NS_PER_MS)
        yield Request(number, arrival_ns, deadline_ns, 0, key)
        number += 1
        last_ns = arrival_ns


def _parsed(line: str, count: int) -> tuple[float, float | None]:
    """(arrival in ns, objective in ms)."""
    try:
        values = [float(part) for part in line.split(",")]
        is_sound = 1 <= len(values) <= 3 and 0 <= values[0] <= _LATEST_MS
        if not is_sound or (len(values) == 3 and not 0 < values[2] <= _LATEST_MS):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"line {count} of the trace is not 'arrival_ms', 'arrival_ms,level' or "
            f"'arrival_ms,level,slo_ms', up to {_LATEST_MS:g} ms: {line.strip()[:_SHOWN]!r}"
        ) from None
    return values[0] * _NS_PER_MS, values[2] if len(values) == 3 else None
