"""Check numbers that users give: an error says which one it is, and what it has to be."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

__all__ = ["check_amount", "check_limit", "no_flag", "sizes", "whole"]

_MOST = 1 << 20
"""Bounds memory: a profile has a latency for each batch size, a queue a token for each place."""


def whole(name: str, value: Any, *, least: int = 1, most: float = _MOST) -> int:
    """A checked count, from ``least`` to ``most``. Raises TypeError, ValueError."""
    try:
        found = operator.index(no_flag(value))
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it has to be a whole number") from None
    if found < least:
        raise ValueError(f"{name} is {value}; it has to be {least} or more")
    if found > most:
        raise ValueError(f"{name} is {value}; it has to be {most} or less")
    return found


def check_limit(name: str, value: Any, *, least: int = 1) -> None:
    """Check a count that may be of any size, also infinite. Raises TypeError, ValueError."""
    if not (isinstance(value, float) and value == math.inf):
        whole(name, value, least=least, most=math.inf)


def sizes(name: str, values: Any) -> list[int]:
    """A list of checked counts."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise TypeError(f"{name} is {values!r}; it has to be a list of whole numbers")
    found = [whole(name, each) for each in values]
    if not found:
        raise ValueError(f"{name} is empty")
    return found


def check_amount(
    name: str, value: Any, *, positive: bool = False, may_be_infinite: bool = False
) -> None:
    """Check a number of 0 or more; with ``positive``, of more. Raises TypeError, ValueError."""
    try:
        is_finite = math.isfinite(no_flag(value))
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it has to be a number") from None
    except OverflowError:  # no float is as large
        is_finite = False
    if not (value > 0 if positive else value >= 0):
        least = "more than 0" if positive else "0 or more"
        raise ValueError(f"{name} is {value}; it has to be {least}")
    if not is_finite and not (may_be_infinite and value == math.inf):
        raise ValueError(f"{name} is {value}, which is too much")


def no_flag(value: Any) -> Any:
    """Return ``value``. Raises TypeError for a boolean, which Python takes for a number."""
    if isinstance(value, bool):
        raise TypeError("a boolean")
    return value
