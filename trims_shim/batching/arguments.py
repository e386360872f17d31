"""Check the options that users give a batcher, and convert them to internal values."""

from __future__ import annotations

import inspect
import math
import operator
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from trims_shim import config
from trims_shim.batching.drivers.functions import without_partial
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_store import ProfileStore, load_profile
from trims_shim.batching.protocol import NEVER_NS
from trims_shim.checks import no_flag, whole
from trims_shim.errors import ConfigError

__all__ = [
    "check_name",
    "check_path",
    "choice",
    "devices_of",
    "largest_of",
    "lasting_name",
    "name_of",
    "number",
    "objective_ns",
    "open_store",
    "patience_s",
    "prior_of",
    "span_ns",
    "takes_self",
    "weight_limit",
]

_NS_PER_MS = 1_000_000
_LONGEST_NS = NEVER_NS // 4
"""73 years. A longer limit means no deadline. A time added to this one stays below NEVER_NS."""
_MAX_BATCH_SIZE = 32


def objective_ns(slo_ms: float | None) -> int:
    """A checked objective in nanoseconds; NEVER_NS for None. Raises TypeError, ValueError."""
    if slo_ms is None:
        return NEVER_NS
    limit_ns = span_ns("slo_ms", slo_ms)
    if slo_ms <= 0:
        raise ValueError(f"slo_ms is {slo_ms}; nothing could be answered in time")
    return limit_ns


def span_ns(name: str, limit_ms: float) -> int:
    """A checked span in nanoseconds, perhaps below 0; NEVER_NS for one of many years.

    ``name`` is the option's, for messages. Raises TypeError, ValueError.
    """
    try:
        is_nan = math.isnan(no_flag(limit_ms))
    except TypeError:
        raise TypeError(f"{name} is {limit_ms!r}; it has to be a number of milliseconds") from None
    if is_nan:
        raise ValueError(f"{name} is not a number")
    limit_ns = float(limit_ms) * _NS_PER_MS  # numpy's numbers may be too small for the product
    if limit_ns > _LONGEST_NS:
        return NEVER_NS
    return round(max(limit_ns, -_LONGEST_NS))


def patience_s(name: str, limit_s: float) -> float:
    """A checked timeout, at most as long as threads can wait."""
    found: float = number(name, limit_s)
    return min(found, threading.TIMEOUT_MAX)


def largest_of(max_batch_size: Any, batch_sizes: Sequence[int] | None) -> int:
    """The checked ``max_batch_size``; its default depends on ``batch_sizes``."""
    if max_batch_size is None:
        return _MAX_BATCH_SIZE if batch_sizes is None else max(batch_sizes)
    found = whole("max_batch_size", max_batch_size)
    if batch_sizes is not None and max(batch_sizes) < found:
        raise ValueError(f"max_batch_size is {found}, and no size in batch_sizes is as large")
    return found


def weight_limit(weight: object, max_batch_weight: Any) -> Any:
    """The checked ``max_batch_weight``: the most that the items of a batch weigh together."""
    if (weight is None) != (max_batch_weight is None):
        raise TypeError("weight and max_batch_weight limit batches together: give both")
    if weight is not None and not callable(weight):
        raise TypeError(f"weight is {weight!r}; it has to be a function of an item")
    return None if weight is None else number("max_batch_weight", max_batch_weight)


def devices_of(value: Any) -> int | list[str]:
    """The number of devices, or their names."""
    if isinstance(value, str):
        raise TypeError(f"devices is {value!r}; it has to be a number or a list of names")
    if not isinstance(value, Sequence):
        return whole("devices", value)
    whole("devices", len(value))
    return [*map(str, value)]  # torch.device is known by its name, too


def number(name: str, value: Any) -> Any:
    """A checked priority or weight: one that cannot be compared would fail others' requests."""
    if type(value) is int:
        return value
    if isinstance(value, float):
        if math.isnan(value):
            raise ValueError(f"{name} is not a number")
        return value
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it has to be a number") from None


def check_name(name: object) -> None:
    """Check the name of a batcher."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name is {name!r}; it has to be text")


def choice(name: str, value: str, yes: str, no: str) -> bool:
    """Whether ``value`` is ``yes``. Raises ValueError if it is not ``no`` either."""
    if value not in (yes, no):
        raise ValueError(f"{name} is {value!r}; it is {no!r} or {yes!r}")
    return value == yes


def name_of(function: Callable[..., Any]) -> str:
    """``module.name`` of a function, or of what a partial calls; else that of the type."""
    function = without_partial(function)
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{module}.{name}" if module else name


def takes_self(function: Callable[..., Any], first: object) -> bool:
    """Whether ``function`` is a method that may take ``first`` as its ``self`` or ``cls``."""
    if not inspect.isfunction(function):
        return False
    name = function.__code__.co_varnames[:1]
    return name == ("self",) or (name == ("cls",) and isinstance(first, type))


def lasting_name(function: Callable[..., Any]) -> str | None:
    """The name under which the next process finds what this one learned; None if there is none.

    Closures, lambdas and callable objects have none: different ones share a name. A script's
    functions are named by its path: all scripts are ``__main__``.
    """
    if not inspect.isfunction(function) or "<" in function.__qualname__:
        return None
    if function.__module__ != "__main__":
        return name_of(function)
    path = getattr(sys.modules["__main__"], "__file__", None)
    return path and f"{os.path.abspath(path)}:{function.__qualname__}"


def prior_of(
    profile: LatencyProfile | str | os.PathLike[str] | None,
) -> LatencyProfile | None:
    """The profile given, or read from its file. Raises TypeError, OSError, FormatError."""
    if profile is None or isinstance(profile, LatencyProfile):
        return profile
    check_path(profile, "a LatencyProfile")
    return load_profile(profile)


def check_path(profile: object, other: str) -> None:
    """Check what is given as ``profile`` and is not ``other``. Raises TypeError."""
    if not isinstance(profile, str | bytes | os.PathLike):
        raise TypeError(f"profile is {profile!r}; it has to be {other}, or the path of one")


def open_store() -> ProfileStore | None:
    """This user's learned profiles; None where settings cannot be used."""
    try:
        return ProfileStore.of(config.load())
    except ConfigError:
        return None
