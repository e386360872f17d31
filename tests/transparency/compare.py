"""Compares two observations and says in which leaf they differ.

``DIFFERENCES`` is the table of what may differ between a program with the shim and without, each
with its reason. It should be empty; an entry that no longer differs fails the suite.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["COMPARED", "DIFFERENCES", "differences", "expectation_errors", "readable"]

_MAPPED = (
    "a parameter that took cached bytes over lies in a mapping, which is not resizable for torch "
    "until it is resized (docs/transparency.md)"
)
_OPTIMISED = (
    "onnxruntime warns of an initializer that nothing uses when it optimises a model, and that was "
    "done before, when the model was prepared (docs/transparency.md)"
)
DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    "ort_models.kinds[unused]": {"output.1": _OPTIMISED},
    "module_later.storages_of_parameters": {"value.items.0.items.2": _MAPPED},
}
"""case name -> {leaf, as printed by :func:`differences`: why it may differ}."""

COMPARED = ("value", "warnings", "output")
_MISSING = "(absent)"


def differences(expected: Mapping[str, Any], actual: Mapping[str, Any]) -> dict[str, str]:
    """Leaves that differ, ``{"value.weight.dtype": "torch.float32 -> torch.float64"}``."""
    left = _leaves("", {key: expected.get(key, _MISSING) for key in COMPARED})
    right = _leaves("", {key: actual.get(key, _MISSING) for key in COMPARED})
    found = {}
    for path in [*left, *(path for path in right if path not in left)]:
        # By their text: True equals 1 and 1 equals 1.0 for Python, not for a program's reader.
        before, after = repr(left.get(path, _MISSING)), repr(right.get(path, _MISSING))
        if before != after:
            found[path] = f"{before} -> {after}"
    return found


def readable(found: Mapping[str, str], most: int = 12) -> list[str]:
    """The first differences as lines; one that raises instead of returning differs in hundreds."""
    lines = [f"{path}: {text}" for path, text in found.items()]
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"... and {more} more"]


def _leaves(path: str, value: Any) -> dict[str, Any]:
    """Every scalar of a JSON value under its path; empty containers are leaves, too."""
    if isinstance(value, dict) and value:
        return _join(path, value.items())
    if isinstance(value, list) and value:
        if all(_is_pair(item) for item in value) and len({item[0] for item in value}) == len(value):
            return {f"{path}.order": [item[0] for item in value]} | _join(path, value)
        return {f"{path}.length": len(value)} | _join(path, enumerate(value))
    return {path: value}


def _is_pair(item: Any) -> bool:
    return isinstance(item, list) and len(item) == 2 and isinstance(item[0], str)


def _join(path: str, items: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in items:
        found |= _leaves(f"{path}.{key}" if path else str(key), item)
    return found


def expectation_errors(
    counters: Mapping[str, int], served: bool | None, elided: bool | None, reason: str = ""
) -> list[str]:
    """What the counters contradict: a case that the cache did not serve proves nothing."""
    from .shim import count

    errors = []
    for event, expected in (("served", served), ("elided", elided)):
        seen = count(counters, event)
        if expected is not None and expected != (seen > 0):
            wanted = "at least one" if expected else "none"
            errors.append(f"{event}: {wanted} expected, counted {seen} in {dict(counters)}")
    if reason and not count(counters, reason):
        errors.append(f"no fallback with the reason {reason} in {dict(counters)}")
    return errors
