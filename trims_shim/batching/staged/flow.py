"""What goes from stage to stage: taking rows of it, joining rows of several batches.

An *activation* is what a stage returns and the next one gets:

=============================  ===================================================================
a tensor or array              ``[batch, ...]``: the batch is its first axis
a list                         one element for each row; no element is an array
a tuple, named tuple, mapping  several activations of one batch
or dataclass
a :class:`Shared`              anything without a batch axis, equal in all batches it is joined with
None, text, bools, floats      the same; also arrays without axes
=============================  ===================================================================

Two kinds are refused, because they may mean something else than what would be done with them: bare
whole numbers (one could be the size of the batch, and be wrong after a join) and lists of arrays
(several activations, or one array for each row). Both have a way to be said, which the messages
give. Callers: the driver of staged batches; nothing here knows stages or requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from trims_shim.batching.arrays import ArrayLibrary, library_of
from trims_shim.batching.staged.activations import Shared
from trims_shim.batching.structures import part_of, parts_of, with_parts
from trims_shim.errors import BadBatch

__all__ = ["NotJoinable", "join", "rows_of", "take"]

_WITHOUT_ROWS = (type(None), Shared, str, bytes, bool, float, complex)


class NotJoinable(Exception):
    """These activations cannot become one, for example because they are padded to other lengths.

    No fault: they are run one after the other.
    """


def rows_of(value: Any) -> int | None:
    """How many rows an activation has; None if no part of it has any.

    Raises BadBatch for parts that disagree, and for what no activation may hold; the message starts
    with a verb, for the name of the stage to be put before it.
    """
    return _rows_of(value, "")


def take(value: Any, rows: Sequence[int]) -> Any:
    """These rows of an activation, in this order, each at most once.

    All of them in order: the activation itself. Neighbouring ones: a view, where the library has
    views. Others: a copy. Raises BadBatch as :func:`rows_of`, and NotJoinable for arrays that
    cannot be taken apart (sparse, nested).
    """
    count = rows_of(value)
    if count is None or (len(rows) == count and _is_range(rows) and (not count or rows[0] == 0)):
        return value
    return _take(value, rows, _runs(rows))


def join(values: Sequence[Any]) -> Any:
    """The rows of all of them, in their order, as one activation; a single one as it is.

    Arrays are copied, without a graph. A :class:`Shared` is the first one's. Raises NotJoinable
    where structures, dtypes, devices, shapes beyond the first axis, or parts without rows differ.
    """
    if len(values) == 1:
        return values[0]
    return _join(values, "")


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
    parts = parts_of(value)
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
    parts = None if isinstance(value, Shared) else parts_of(value)
    if parts is None:
        return value
    return with_parts(value, {name: _take(part, rows, runs) for name, part in parts.items()})


def _taken(library: ArrayLibrary, array: Any, runs: Sequence[slice]) -> Any:
    if library.count(array) is None:
        return array
    if library.signature(array) is None:
        raise NotJoinable(f"a {type(array).__name__} of this kind cannot be taken apart")
    if len(runs) == 1:
        return array[runs[0], ...]
    return library.concatenate([array[run, ...] for run in runs])


def _is_range(rows: Sequence[int]) -> bool:
    return all(row == rows[0] + index for index, row in enumerate(rows))


def _runs(rows: Sequence[int]) -> list[slice]:
    """Rows as slices of neighbours; one, empty, of no rows."""
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
    parts = parts_of(first)
    if parts is None:
        _check_alike(values, where)
        return first
    every = [parts_of(each) or {} for each in values]
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
    """For what is not joined: all have to be the first one again, as far as that is cheap to see.

    Of arrays shapes and types are compared only: the contents are promised, and looking at them
    would wait for the device.
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
    parts, others = parts_of(one), parts_of(other)
    if parts is None or others is None:
        return bool(one == other)
    return parts.keys() == others.keys() and all(_is_alike(parts[n], others[n]) for n in parts)
