"""The collates that have names, and those made of other collates."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trims_shim.batching.collating.arrays import library_of
from trims_shim.batching.collating.splitting import split
from trims_shim.batching.collating.structures import part_of, parts_of, rebuilt_mapping, with_parts
from trims_shim.late_imports import ensure_imported

if TYPE_CHECKING:
    from trims_shim.batching.collating.collate import Collate

__all__ = [
    "Columns",
    "Concatenate",
    "Fields",
    "Filling",
    "Listing",
    "Stacking",
    "cuts",
    "padded_length",
    "padded_size",
    "with_classes",
]


class Listing:
    """``"list"``: the function gets a list of the items; all may share a batch."""

    def key(self, item: Any) -> Hashable:
        """See :class:`Collate`."""
        return None

    def join(self, items: Sequence[Any]) -> Any:
        """See :class:`Collate`."""
        return list(items)

    def split(self, results: Any, items: Sequence[Any]) -> Sequence[Any]:
        """See :class:`Collate`."""
        return split(results, len(items))


class Stacking(Listing):
    """``"auto"``, and with ``converts`` ``"stack"``."""

    def __init__(self, *, converts: bool = False) -> None:
        self._converts = converts

    def key(self, item: Any) -> Hashable:
        """Library, type, device and shape of arrays, and the structure they are in."""
        library = library_of(item)
        if library is not None and (signature := library.signature(item)) is not None:
            return signature, tuple(item.shape)
        if library is not None and self._converts:
            raise _refusal(item)  # conversion would lose a mask, or a unit
        parts = parts_of(item)
        if parts is not None:
            return type(item), frozenset((name, self.key(part)) for name, part in parts.items())
        return _converted_key(item) if self._converts else None

    def join(self, items: Sequence[Any]) -> Any:
        """See :class:`Collate`."""
        first = items[0]
        library = library_of(first)
        if library is not None and library.signature(first) is not None:
            return library.stack(items)
        parts = parts_of(first)
        if parts is not None:
            return with_parts(
                first,
                {name: self.join([part_of(item, name) for item in items]) for name in parts},
            )
        return _stacked(items) if self._converts else list(items)


class Concatenate(Listing):
    """``"concatenate"``: each item is a batch itself, of any size along its first axis.

    BentoML's and Triton's clients send such items. The function gets one array
    ``[sum of sizes, ...]`` (of lists, one list); each caller gets as many rows as its item had.
    Arrays in a structure have equal sizes.
    """

    def key(self, item: Any) -> Hashable:
        """See :class:`Collate`."""
        sizes: set[int] = set()
        key = _concatenated_key(item, sizes)
        if len(sizes) != 1:
            raise ValueError(f"an item needs one size along the first axis, not {sorted(sizes)}")
        return key

    def join(self, items: Sequence[Any]) -> Any:
        """See :class:`Collate`."""
        first = items[0]
        library = library_of(first)
        if library is not None:
            return library.concatenate(items)
        parts = parts_of(first)
        if parts is None:
            return [element for item in items for element in item]
        return with_parts(
            first, {name: self.join([part_of(item, name) for item in items]) for name in parts}
        )

    def split(self, results: Any, items: Sequence[Any]) -> Sequence[Any]:
        """See :class:`Collate`."""
        sizes: list[int] = []
        for item in items:
            found: set[int] = set()
            _concatenated_key(item, found)
            sizes.extend(found)
        return split(results, len(items), sizes=sizes)


class _OfParts(ABC):
    """A collate for each part of an item.

    The collate that splits the results is that of the first part with its own way to (padding).
    """

    def __init__(self, collates: Mapping[Any, Collate]) -> None:
        self._collates: dict[Any, Collate] = dict(collates)
        self._splitting = next(
            (name for name, each in self._collates.items() if _splits_in_its_way(each)), None
        )

    def with_classes(self) -> Collate:
        """The same with classes of lengths, if then exactly one part has a length in its keys.

        Of keys with two lengths, each may be longer in one of them.
        """
        changed = {name: with_classes(each) for name, each in self._collates.items()}
        return self._with(changed) if sum(map(_has_length, changed.values())) == 1 else self

    @property
    def has_length(self) -> bool:
        """Whether its keys hold a length."""
        return any(map(_has_length, self._collates.values()))

    @abstractmethod
    def key(self, item: Any) -> Hashable:
        """See :class:`Collate`."""

    @abstractmethod
    def join(self, items: Sequence[Any]) -> Any:
        """See :class:`Collate`."""

    @abstractmethod
    def _with(self, collates: Mapping[Any, Collate]) -> Collate:
        """The same, made of these collates."""

    @property
    def splits_in_its_way(self) -> bool:
        """Whether the collate of a part has its own way to split."""
        return self._splitting is not None

    def split(self, results: Any, items: Sequence[Any], padded: int | None = None) -> Sequence[Any]:
        """See :class:`Collate`; ``padded`` goes to the collate that splits."""
        name = self._splitting
        if name is None:
            return split(results, len(items))
        more = () if padded is None else (padded,)
        return self._collates[name].split(results, [item[name] for item in items], *more)

    def padded_length(self, items: Sequence[Any]) -> int | None:
        """The :func:`padded_length` of the part whose collate splits the results."""
        name = self._splitting
        if name is None:
            return None
        return padded_length(self._collates[name], [item[name] for item in items])


class Columns(_OfParts):
    """Items are tuples; each position has its own collate."""

    def __init__(self, collates: Sequence[Collate]) -> None:
        super().__init__(dict(enumerate(collates)))
        self.collates = tuple(collates)

    def _with(self, collates: Mapping[Any, Collate]) -> Collate:
        return type(self)(list(collates.values()))

    def key(self, item: Any) -> Hashable:
        """See :class:`Collate`. Raises ValueError for another number of positions."""
        given = len(item) if isinstance(item, tuple | list) else 1
        if given != len(self.collates):
            raise ValueError(
                f"collate is for {len(self.collates)} arguments, and there are {given}"
            )
        return tuple(each.key(part) for each, part in zip(self.collates, item, strict=True))

    def join(self, items: Sequence[Any]) -> tuple[Any, ...]:
        """A tuple of batches."""
        return tuple(
            each.join([item[position] for item in items])
            for position, each in enumerate(self.collates)
        )


class Fields(_OfParts):
    """Items are mappings; some fields have their own collate, the others are stacked."""

    def __init__(self, collates: Mapping[str, Collate]) -> None:
        super().__init__(collates)
        self._default: Collate = Stacking()

    def _with(self, collates: Mapping[Any, Collate]) -> Collate:
        return type(self)(collates)

    def _of(self, name: str) -> Collate:
        return self._collates.get(name, self._default)

    def key(self, item: Any) -> Hashable:
        """See :class:`Collate`. Raises TypeError for no mapping, ValueError for a missing field."""
        if not isinstance(item, Mapping):
            raise TypeError(f"the item is of type {type(item).__name__}, not a mapping of fields")
        missing = [name for name in self._collates if name not in item]
        if missing:
            raise ValueError(f"the item has no {', '.join(map(repr, missing))}")
        return frozenset((name, self._of(name).key(part)) for name, part in item.items())

    def join(self, items: Sequence[Any]) -> Any:
        """A mapping of batches."""
        names = items[0].keys()
        batch = {name: self._of(name).join([item[name] for item in items]) for name in names}
        return rebuilt_mapping(items[0], batch)


class Filling(Listing):
    """Batches of some sizes only, by repeating the last item."""

    def __init__(self, collate: Collate, batch_sizes: Sequence[int]) -> None:
        if not batch_sizes or min(batch_sizes) < 1:
            raise ValueError(f"batch_sizes is {list(batch_sizes)}; sizes from 1 on are needed")
        self._collate = collate
        self._sizes = tuple(sorted(batch_sizes))

    def _filled(self, items: Sequence[Any]) -> list[Any]:
        # Not zeros, which a model may refuse: it accepts the original, so also the repetition.
        missing = padded_size(len(items), self._sizes) - len(items)
        return [*items, *[items[-1]] * missing]

    def key(self, item: Any) -> Hashable:
        return self._collate.key(item)

    def join(self, items: Sequence[Any]) -> Any:
        return self._collate.join(self._filled(items))

    def split(self, results: Any, items: Sequence[Any]) -> Sequence[Any]:
        return self._collate.split(results, self._filled(items))[: len(items)]


def _splits_in_its_way(collate: Any) -> bool:
    """Whether ``collate`` has its own way to split; a user's collate counts as one."""
    if type(collate) in (Listing, Stacking):
        return False
    found: bool = getattr(collate, "splits_in_its_way", True)
    return found


def with_classes(collate: Collate) -> Collate:
    """``collate``, or the same with classes of lengths (``Pad.with_classes``) if it pads."""
    change = getattr(collate, "with_classes", None)
    return collate if change is None else change()


def _has_length(collate: Any) -> bool:
    found: bool = getattr(collate, "has_length", False)
    return found


def cuts(collate: Any) -> bool:
    """Whether ``collate`` cuts results to their item's length (``Pad(unpad=True)``)."""
    while isinstance(collate, _OfParts):
        collate = collate._collates.get(collate._splitting)
    return hasattr(collate, "padded_length") and _splits_in_its_way(collate)


def padded_length(collate: Any, items: Sequence[Any]) -> int | None:
    """The length to which ``collate`` pads a batch of ``items``, if splitting depends on it.

    None for most collates, and for those of users.
    """
    found = getattr(collate, "padded_length", None)
    return None if found is None else found(items)


def padded_size(count: int, batch_sizes: Sequence[int] | None) -> int:
    """The size at which a batch of ``count`` runs. Raises ValueError above the largest size."""
    if batch_sizes is None:
        return count
    fitting = [size for size in batch_sizes if size >= count]
    if not fitting:
        raise ValueError(f"a batch of {count} is larger than the largest of batch_sizes")
    return min(fitting)


def _converted_key(item: Any) -> Hashable:
    array = _as_array(item)
    kind = array.dtype.kind
    return kind if kind in "SU" else array.dtype, array.shape


def _as_array(item: Any) -> Any:
    ensure_imported("numpy")
    import numpy

    try:
        array = numpy.asarray(item)
    except ValueError:
        array = None  # rows of different lengths
    if array is None or array.dtype.kind == "O":
        raise _refusal(item)
    # Arrays lose null characters at the end of a text, and make texts of the numbers beside it.
    if array.dtype.kind in "SU" and not numpy.array_equal(
        array.astype(object), numpy.asarray(item, dtype=object)
    ):
        raise _refusal(item)
    return array


def _refusal(item: Any) -> TypeError:
    return TypeError(
        f"a {type(item).__name__} cannot be stacked; with collate='auto' the function gets a list "
        "of such items"
    )


def _stacked(items: Sequence[Any]) -> Any:
    import numpy

    return numpy.stack([_as_array(item) for item in items])


def _concatenated_key(item: Any, sizes: set[int]) -> Hashable:
    """The key of an item that is a batch; adds its size along the first axis to ``sizes``."""
    library = library_of(item)
    if library is not None and (signature := library.signature(item)) is not None:
        if not item.shape:
            raise ValueError("an item of no axis is no batch; use collate='stack'")
        sizes.add(item.shape[0])
        return signature, tuple(item.shape[1:])
    parts = parts_of(item)
    if parts is not None:
        return type(item), frozenset(
            (name, _concatenated_key(part, sizes)) for name, part in parts.items()
        )
    if not isinstance(item, list):
        raise TypeError(f"a {type(item).__name__} cannot be concatenated; arrays and lists can")
    sizes.add(len(item))
    return list
