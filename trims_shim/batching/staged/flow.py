"""Activations: take rows of them, and join rows of several batches.

An *activation* is what a stage returns and the next one gets:

=============================  ===================================================================
a tensor or array              ``[batch, ...]``: the batch is its first axis
a list                         one element for each row; no element is an array
a tuple, named tuple, mapping  several activations of one batch
or dataclass                   (of a dataclass, also attributes that are no fields)
a :class:`Shared`              anything without a batch axis, equal in all batches that are joined
None, text, bools, floats      treated like a Shared; arrays without axes as well
=============================  ===================================================================

Two kinds are refused because they are ambiguous: bare integers (one could be the batch size, which
a join would make wrong) and lists of arrays (several activations, or one array for each row). The
error messages say how to express either meaning. This module knows neither stages nor requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from trims_shim.batching.collating.arrays import ArrayLibrary, library_of
from trims_shim.batching.collating.structures import others_of, part_of, parts_of, with_parts
from trims_shim.batching.staged.activations import Shared
from trims_shim.errors import BadBatch

__all__ = ["NotJoinable", "join", "own", "rows_of", "take"]

_WITHOUT_ROWS = (type(None), Shared, str, bytes, bool, float, complex)


class NotJoinable(Exception):
    """These activations cannot be joined, for example because they are padded to other lengths.

    Not a fault: they run one after the other.
    """


def rows_of(value: Any) -> int | None:
    """Return the number of rows of an activation; None if no part of it has rows.

    Raises BadBatch for parts whose numbers of rows differ, and for values that no activation may
    hold. The message starts with a verb; callers put the name of the stage before it.
    """
    return _rows_of(value, "")


def take(value: Any, rows: Sequence[int]) -> Any:
    """Return these rows of an activation, in this order, each at most once.

    All rows in order give the activation itself, neighbouring rows a view (where the library has
    views), others, and rows that share their memory, a copy. Raises BadBatch as
    :func:`rows_of`, and NotJoinable for arrays that cannot be taken apart (sparse, nested).
    """
    count = rows_of(value)
    if count is None or (len(rows) == count and _is_range(rows) and (not count or rows[0] == 0)):
        return value
    return _take(value, rows, _runs(rows))


def join(values: Sequence[Any]) -> Any:
    """Return the rows of all activations, in order, as one activation; a single one as it is.

    Arrays are copied, without a graph. A :class:`Shared` is taken from the first activation. Raises
    NotJoinable if structures, dtypes, devices, shapes beyond the first axis, or parts without rows
    differ.
    """
    if len(values) == 1:
        return values[0]
    return _join(values, "")


def own(value: Any) -> Any:
    """Return arrays with rows, and tuples, mappings and dataclasses of them, as copies.

    Anything else as it is: lists, and arrays that cannot be joined (sparse).
    """
    library = library_of(value)
    if library is not None:
        is_whole = library.count(value) is None or library.signature(value) is None
        return value if is_whole else library.concatenate([value])
    parts = None if isinstance(value, list) else parts_of(value)
    if parts is None:
        return value
    return with_parts(value, {name: own(part) for name, part in parts.items()})


# --- rows -----------------------------------------------------------------------------------------


def _rows_of(value: Any, where: str) -> int | None:
    library = library_of(value)
    if library is not None:
        return library.count(value)
    if isinstance(value, list):
        _check_list(value, where)
        return len(value)
    if isinstance(value, _WITHOUT_ROWS):
        return None
    if isinstance(value, int):
        raise BadBatch(
            f"returned the number {value}{where}: the size of a batch changes between stages; wrap "
            "it into Shared if it is the same for every batch, or else take it from the tensors"
        )
    parts = _parts_of(value)
    if parts is None:
        raise BadBatch(
            f"returned an object of type {type(value).__name__}{where}, whose rows are not known; "
            "return tensors, or wrap it into Shared if it is the same for every batch"
        )
    return _rows_of_parts(parts, where)


def _rows_of_parts(parts: Mapping[Any, Any], where: str) -> int | None:
    count: int | None = None
    first = ""
    for name, part in parts.items():
        there = f"{where or ' at '}[{name!r}]"
        found = _rows_of(part, there)
        if count is None and found is not None:
            count, first = found, there
        elif found is not None and found != count:
            raise BadBatch(
                f"returned {count} rows{first} and {found}{there}; every array needs the batch as "
                "its first axis; wrap what has none into Shared"
            )
    return count


def _check_list(value: list[Any], where: str) -> None:
    if any(library_of(element) is not None for element in value):
        raise BadBatch(
            f"returned a list of arrays{where}; put several activations into a tuple; one array "
            "for each row, which cannot be stacked, into a tuple of its own: [(a,), (b,)]"
        )


# --- taking ---------------------------------------------------------------------------------------


def _take(value: Any, rows: Sequence[int], runs: Sequence[slice]) -> Any:
    library = library_of(value)
    if library is not None:
        return _taken(library, value, runs)
    if isinstance(value, list):
        return [value[row] for row in rows]
    parts = None if isinstance(value, Shared) else _parts_of(value)
    if parts is None:
        return value
    return with_parts(value, {name: _take(part, rows, runs) for name, part in parts.items()})


def _taken(library: ArrayLibrary, array: Any, runs: Sequence[slice]) -> Any:
    if library.count(array) is None:
        return array
    if library.signature(array) is None:
        raise NotJoinable(f"a {type(array).__name__} of this kind cannot be taken apart")
    if len(runs) == 1 and not library.is_expanded(array):  # a stage may write to its rows
        return array[runs[0], ...]
    return library.concatenate([array[run, ...] for run in runs])


def _is_range(rows: Sequence[int]) -> bool:
    return all(row == rows[0] + index for index, row in enumerate(rows))


def _runs(rows: Sequence[int]) -> list[slice]:
    """Return the rows as slices of neighbours; no rows give one empty slice."""
    if not rows:
        return [slice(0, 0)]
    runs: list[slice] = []
    start = rows[0]
    for before, row in itertools.pairwise(rows):
        if row != before + 1:
            runs.append(slice(start, before + 1))
            start = row
    return [*runs, slice(start, rows[-1] + 1)]


# --- joining --------------------------------------------------------------------------------------


def _join(values: Sequence[Any], where: str) -> Any:
    first = values[0]
    if any(type(each) is not type(first) for each in values):
        raise NotJoinable(f"types differ{where}")
    library = library_of(first)
    if library is not None and library.count(first) is not None:
        return _joined(library, values, where)
    if isinstance(first, list):
        return [element for each in values for element in each]
    if isinstance(first, Shared) or library is not None:
        _check_alike(values, where)
        return first
    parts = _parts_of(first)
    if parts is None:
        _check_alike(values, where)
        return first
    every = [_parts_of(each) or {} for each in values]
    if any(each.keys() != parts.keys() for each in every):
        raise NotJoinable(f"structures differ{where}")
    joined = {
        name: _join([part_of(each, name) for each in values], f"{where or ' at '}[{name!r}]")
        for name in parts
    }
    return with_parts(first, joined)


def _joined(library: ArrayLibrary, arrays: Sequence[Any], where: str) -> Any:
    kind = library.signature(arrays[0])
    if kind is None or any(library.signature(each) != kind for each in arrays):
        raise NotJoinable(f"kinds of arrays differ, or cannot be joined{where}")
    shape = arrays[0].shape[1:]
    if any(library.count(each) is None or each.shape[1:] != shape for each in arrays):
        raise NotJoinable(f"shapes differ{where}: {', '.join(str(a.shape) for a in arrays)}")
    return library.concatenate(arrays)


def _check_alike(values: Sequence[Any], where: str) -> None:
    """Raise NotJoinable if parts without rows differ, as far as that is cheap to check.

    For arrays with axes only shapes and types are compared: the stage promises equal contents, and
    comparing them would wait for the device.
    """
    first = values[0]
    if not all(_is_alike(first, each) for each in values[1:]):
        raise NotJoinable(f"what has no rows differs{where}")


def _is_alike(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Shared):
        return _is_alike(one.value, other.value)
    library = library_of(one)
    if library is not None:
        if library.signature(one) != library.signature(other) or one.shape != other.shape:
            return False
        return bool(one.shape) or bool(one == other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_is_alike, one, other))
    parts, others = _parts_of(one), _parts_of(other)
    if parts is None or others is None:
        return bool(one == other)
    return parts.keys() == others.keys() and all(_is_alike(parts[n], others[n]) for n in parts)


# --- parts ----------------------------------------------------------------------------------------


def _parts_of(value: Any) -> Mapping[Any, Any] | None:
    """The parts of a structure; a dataclass may have computed more of its rows than its fields."""
    parts = parts_of(value)
    if parts is None or isinstance(value, Mapping | tuple):
        return parts
    return {**parts, **others_of(value)}
