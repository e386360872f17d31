"""Whether results that were computed in two ways are equal, apart from rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from trims_shim.batching.collating.arrays import library_of
from trims_shim.batching.collating.structures import parts_of
from trims_shim.diagnostics import pass_on

__all__ = ["is_close"]

_TOLERANCE = 1e-3
"""Of the largest magnitude: rounding error of deep models in float32 with another summing order."""


def is_close(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether the results of several items are equal, item by item.

    Floating-point arrays and numbers may differ by a thousandth of the largest magnitude at the
    same place in all items of ``ones``. Everything else has to be equal. What cannot be compared,
    such as sparse tensors and data frames, is not.
    """
    try:
        return _are_close(ones, others)
    except Exception as error:
        pass_on(error)  # a time limit of the thread says nothing about the results
        return False


def _are_close(ones: Sequence[Any], others: Sequence[Any]) -> bool:
    columns: dict[tuple[Any, ...], list[tuple[Any, Any]]] = {}
    if len(ones) != len(others):
        return False
    for one, other in zip(ones, others, strict=True):
        leaves, rivals = dict(_leaves(one, ())), dict(_leaves(other, ()))
        if leaves.keys() != rivals.keys():
            return False
        for path, leaf in leaves.items():
            columns.setdefault(path, []).append((leaf, rivals[path]))
    return all(_is_close(pairs) for pairs in columns.values())


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    parts = None if library_of(value) is not None else parts_of(value)
    if parts is None and isinstance(value, list):
        parts = dict(enumerate(value))
    if parts is None:
        yield (*path, type(value)), value
        return
    yield (*path, type(value), len(parts)), None
    for name, part in parts.items():
        yield from _leaves(part, (*path, name))


def _is_close(pairs: Sequence[tuple[Any, Any]]) -> bool:
    scale = max((_magnitude(one) for one, _ in pairs), default=0.0)
    return all(_is_within(one, other, _TOLERANCE * scale) for one, other in pairs)


def _magnitude(value: Any) -> float:
    if isinstance(value, float):
        return abs(value) if value - value == 0 else 0.0
    if library_of(value) is None or not _is_inexact(value):
        return 0.0
    magnitudes = abs(value)
    finite = magnitudes[magnitudes < math.inf]
    return float(finite.max()) if finite.shape[0] else 0.0


def _is_within(one: Any, other: Any, limit: float) -> bool:
    if isinstance(one, float):
        is_nan = one != one and other != other
        return is_nan or one == other or bool(abs(one - other) <= limit)
    if library_of(one) is None:
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    same = one == other
    if not _is_inexact(one):
        return bool(same.all())
    # Skip equal elements: subtracting infinities warns and gives NaN.
    differs = ~(same | ((one != one) & (other != other)))
    return bool((abs(one[differs] - other[differs]) <= limit).all())


def _is_inexact(array: Any) -> bool:
    kind = getattr(array.dtype, "is_floating_point", None)
    if kind is not None:  # a torch dtype
        return bool(kind or array.dtype.is_complex)
    return any(name in str(array.dtype) for name in ("float", "complex"))
