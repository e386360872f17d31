"""Split what a batch function returned into one result for each item.

The kind of the return value decides, never its length, so that what works for a batch of one works
for every batch:

===================================  =============================================================
returned                             each item gets
===================================  =============================================================
a tensor or array ``[batch, ...]``   its row
a list, another sequence, an         its element
iterator
a tuple, named tuple, mapping,       one of the same kind, with its share of every part
dataclass: several outputs
``None``                             ``None``
===================================  =============================================================

Anything else, and every wrong number, is a BadBatch. It says what was found and what was expected;
:func:`trims_shim.batching.collating.collate.answers` adds which function it was.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from trims_shim.batching.collating.arrays import library_of
from trims_shim.batching.collating.structures import (
    parts_of,
    rebuilt_dataclass,
    rebuilt_mapping,
    rebuilt_tuple,
)
from trims_shim.errors import BadBatch

__all__ = ["split"]


def split(
    results: Any, count: int, *, sizes: Sequence[int] | None = None, where: str = ""
) -> list[Any]:
    """The results of ``count`` items, in their order.

    ``sizes``: how many rows (of arrays) or elements (of sequences) each item gets, as a slice.
    ``where`` is the path to a part of several outputs. Raises BadBatch.
    """
    if results is None:
        return [None] * count
    if type(results) is list:
        return _split_sequence(results, count, sizes, where)
    library = library_of(results)
    if library is not None:
        expected = count if sizes is None else sum(sizes)
        if library.count(results) != expected:
            raise BadBatch(_wrong_rows(results, library.count(results), expected, where))
        return library.parts(results, sizes)
    if isinstance(results, Mapping):
        return _split_mapping(results, count, sizes, where)
    if isinstance(results, tuple):
        return _split_tuple(results, count, sizes, where)
    if dataclasses.is_dataclass(results) and not isinstance(results, type):
        return _split_dataclass(results, count, sizes, where)
    return _split_sequence(results, count, sizes, where)


def _wrong_rows(results: Any, found: int | None, expected: int, where: str) -> str:
    kind = type(results).__name__
    if found is None:
        return f"returned a {kind} without axes{where}, where its batch of {expected} needs rows"
    return f"returned a {kind} of {found} rows{where} for a batch of {expected} items"


def _split_sequence(results: Any, count: int, sizes: Sequence[int] | None, where: str) -> list[Any]:
    kind = type(results).__name__
    expected = count if sizes is None else sum(sizes)
    if isinstance(results, Iterator):
        # One more than expected is enough to know: it may be endless.
        results = list(islice(results, expected + 1))
    elif isinstance(results, Awaitable):
        raise BadBatch(f"returned a {kind}{where}; a function that is awaited is an `async def`")
    elif not isinstance(results, Sequence) or isinstance(results, str | bytes | bytearray):
        raise BadBatch(
            f"returned an object of type {kind}{where}, which is not a result for each of "
            f"{expected} items; return a list, a tensor, an array, or a mapping, tuple or "
            "dataclass of them"
        )
    if len(results) != expected:
        found = len(results) if len(results) < expected or kind == "list" else "too many"
        raise BadBatch(f"returned {found} results ({kind}){where} for a batch of {expected} items")
    if sizes is None:
        return list(results)
    if isinstance(results, deque):  # the sequence that has no slices
        results = list(results)
    parts, start = [], 0
    for size in sizes:
        parts.append(results[start : start + size])
        start += size
    return parts


def _split_mapping(
    results: Mapping[Any, Any], count: int, sizes: Sequence[int] | None, where: str
) -> list[Any]:
    columns = {
        name: split(part, count, sizes=sizes, where=f"{where or ' at '}[{name!r}]")
        for name, part in results.items()
    }
    return [
        rebuilt_mapping(results, {name: column[index] for name, column in columns.items()})
        for index in range(count)
    ]


def _split_tuple(
    results: tuple[Any, ...], count: int, sizes: Sequence[int] | None, where: str
) -> list[Any]:
    columns = [
        split(part, count, sizes=sizes, where=f"{where or ' at '}[{index}]")
        for index, part in enumerate(results)
    ]
    rows = zip(*columns, strict=True) if columns else ((),) * count
    return [rebuilt_tuple(results, row) for row in rows]


def _split_dataclass(
    results: Any, count: int, sizes: Sequence[int] | None, where: str
) -> list[Any]:
    columns = {
        name: split(part, count, sizes=sizes, where=f"{where or ' at '}.{name}")
        for name, part in (parts_of(results) or {}).items()
    }
    return [
        rebuilt_dataclass(results, {name: column[index] for name, column in columns.items()})
        for index in range(count)
    ]
