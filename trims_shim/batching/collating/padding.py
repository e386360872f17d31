"""Items of different lengths in one batch: padded to the longest, or to buckets, with a mask.

The key of an item holds its bucket, or without buckets the class of its length. So a policy can let
short items share a batch with long ones only where that is quicker for all of them than one batch
after the other. With buckets the model sees few shapes (compiled models, captured graphs).
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from trims_shim.batching.buckets import Bucket, OpenBucket
from trims_shim.batching.collating.arrays import library_of
from trims_shim.batching.collating.collates import Stacking
from trims_shim.batching.collating.splitting import split
from trims_shim.batching.collating.structures import part_of, parts_of, with_parts
from trims_shim.errors import BadBatch
from trims_shim.outcomes import stands_for

__all__ = ["Pad", "Padded"]

_SHORT = 8
"""Lengths up to this are one class."""


class Padded(NamedTuple):
    """The batch that a function gets of items that are no mappings."""

    values: Any
    """``[batch, longest, ...]``, or the items' structure of such arrays."""
    mask: Any
    """``[batch, longest]``, boolean: true where a value is the item's own."""
    lengths: list[int]
    """Of each item."""


@dataclass(frozen=True)
class Pad:
    """Pads arrays (torch, numpy) or lists of numbers along ``axis`` of an item.

    Items are arrays, lists, or mappings, tuples and dataclasses of them; all padded parts of one
    item have one length. For mappings the function gets a mapping with the mask as a further field
    ``mask`` (int64, as tokenizers make it); if items bring a field of that name, it is padded with
    0 instead. For other items the function gets a :class:`Padded`. With ``mask=None`` it gets the
    padded values alone.

    ``value`` is the value to pad with, or a mapping of it by field; other fields are padded with 0
    (``{"input_ids": tokenizer.pad_token_id}``). ``fields`` names what is padded; by default all
    arrays that have the axis, and all lists. The rest is stacked. Fields of tuples, also of named
    ones, are their positions.

    Batches are padded to their longest item, rounded up to a multiple of ``multiple``. Under the
    default policies items of similar length share a batch. Others join them if more requests are in
    time then, or all waiting ones are answered sooner. Under other policies all lengths share one
    batch. So they do with ``mask=None``: give buckets for a model that sees the padding.

    ``buckets`` are the lengths to pad to; an item longer than the largest is refused with a
    ValueError. Items of one bucket share a batch. Under the default policies others join them, as
    above; never with ``mask=None``. With ``multiple``, buckets only say which items share a batch;
    fewer values are computed then, in more shapes.

    With ``unpad``, results are cut to their item's length along ``axis``: all of them, or the
    fields or positions that it names. It is a BadBatch if they do not have the padded length there.
    """

    value: float | Mapping[Any, float] = 0
    axis: int = 0
    buckets: Sequence[int] | None = None
    multiple: int | None = None
    mask: str | None = "attention_mask"
    fields: Collection[Any] | None = None
    unpad: bool | Collection[Any] = False
    _has_classes: bool = field(default=False, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        unpad = None if isinstance(self.unpad, bool) else self.unpad
        for name, names in (("fields", self.fields), ("unpad", unpad)):
            if isinstance(names, str | bytes) or not isinstance(names, Collection | None):
                raise TypeError(f"{name} is {names!r}; it has to be a list of names: [{names!r}]")
        if not isinstance(self.mask, str | None):
            raise TypeError(f"mask is {self.mask!r}; it has to be a name, or None for no mask")
        for value in self.value.values() if isinstance(self.value, Mapping) else [self.value]:
            if not isinstance(value, complex | str) and not hasattr(value, "__float__"):
                raise TypeError(f"value is {value!r}; it has to be a number to pad with")
        try:
            operator.index(self.axis)
        except TypeError:
            raise TypeError(f"axis is {self.axis!r}; it has to be a whole number") from None
        if self.axis < 0:
            raise ValueError(f"axis is {self.axis}; count it from the front of an item, from 0")
        try:
            multiples = [] if self.multiple is None else [operator.index(self.multiple)]
            buckets = [*map(operator.index, self.buckets or ())]
        except TypeError:
            raise TypeError(
                f"buckets is {self.buckets!r} and multiple {self.multiple!r}; they are lengths, "
                "whole numbers"
            ) from None
        if min(multiples + buckets, default=1) < 1 or (self.buckets is not None and not buckets):
            raise ValueError("buckets and multiple are lengths, from 1 on")
        if self.multiple is not None:
            object.__setattr__(self, "multiple", *multiples)  # numpy's are not as Python's
        if self.buckets is not None:
            object.__setattr__(self, "buckets", tuple(sorted(buckets)))

    def with_classes(self) -> Pad:
        """The same with lengths in its keys, for policies that mix lengths where it pays."""
        if type(self) is not Pad or self.buckets or self.mask is None:
            return self
        found = replace(self)
        object.__setattr__(found, "_has_classes", True)
        return found

    @property
    def has_length(self) -> bool:
        """Whether its keys hold a length."""
        return self._has_classes or self.buckets is not None

    # --- Collate ----------------------------------------------------------------------------------

    def key(self, item: Any) -> Hashable:
        """See :class:`~trims_shim.batching.collating.collate.Collate`."""
        return self._bucket(self._length(item)), self._parts_key(item)

    def _bucket(self, length: int) -> Bucket | None:
        if self._has_classes:
            return OpenBucket(_class_of(self._rounded(length)))
        if self.buckets is None:
            return None
        kind = Bucket if self.mask is None else OpenBucket
        return kind(self._bucket_length(length))

    def join(self, items: Sequence[Any]) -> Any:
        """See :class:`~trims_shim.batching.collating.collate.Collate`."""
        lengths = [self._length(item) for item in items]
        target = self._target(lengths)
        first = items[0]
        parts = parts_of(first)
        if parts is None:
            values = self._joined(None, items, target)
            like = values
        else:
            batch = {
                name: self._joined(name, [part_of(item, name) for item in items], target)
                for name in parts
            }
            like = batch[next(name for name, part in parts.items() if self._pads(name, part))]
            if isinstance(first, Mapping) and self.mask is not None and self.mask not in parts:
                batch[self.mask] = _mask(lengths, target, like, is_boolean=False)
            values = with_parts(first, batch)
        if self.mask is None or isinstance(first, Mapping):
            return values
        return Padded(values, _mask(lengths, target, like, is_boolean=True), lengths)

    def split(self, results: Any, items: Sequence[Any], padded: int | None = None) -> Sequence[Any]:
        """See :class:`~trims_shim.batching.collating.collate.Collate`.

        ``padded`` is the length to which they were padded, where more than these were joined.
        """
        found = split(results, len(items))
        if not self.splits_in_its_way:
            return found
        lengths = [self._length(item) for item in items]
        target = self._target(lengths) if padded is None else padded
        return [
            self._cut(each, length, target) for each, length in zip(found, lengths, strict=True)
        ]

    @property
    def splits_in_its_way(self) -> bool:
        """Whether results are cut."""
        return self.unpad is not False

    def padded_length(self, items: Sequence[Any]) -> int | None:
        """The length to which a batch of ``items`` is padded; None if :meth:`split` ignores it."""
        if not self.splits_in_its_way:
            return None
        return self._target([self._length(item) for item in items])

    # --- lengths ----------------------------------------------------------------------------------

    def _length(self, item: Any) -> int:
        parts = parts_of(item)
        padded = [item] if parts is None else [p for n, p in parts.items() if self._pads(n, p)]
        lengths = {self._length_of(part) for part in padded}
        if len(lengths) == 1:
            return lengths.pop()
        if not lengths:
            raise ValueError(
                f"nothing of a {type(item).__name__} can be padded along axis {self.axis}"
            )
        raise ValueError(f"parts of an item have lengths {sorted(lengths)}; name those in `fields`")

    def _length_of(self, part: Any) -> int:
        if library_of(part) is not None:
            if len(part.shape) <= self.axis:
                raise ValueError(f"shape {list(part.shape)} has no axis {self.axis} to pad")
            return int(part.shape[self.axis])
        if isinstance(part, list) and self.axis == 0:
            return len(part)
        raise TypeError(f"a {type(part).__name__} cannot be padded; arrays and lists can")

    def _target(self, lengths: Sequence[int]) -> int:
        longest = max(lengths)
        if self.buckets is None:
            return self._rounded(longest)
        bucket = self._bucket_length(longest)
        return bucket if self.multiple is None else min(bucket, self._rounded(longest))

    def _rounded(self, length: int) -> int:
        multiple = 1 if self.multiple is None else self.multiple
        return -(-length // multiple) * multiple

    def _bucket_length(self, length: int) -> int:
        assert self.buckets is not None
        index = bisect_left(self.buckets, length)
        if index == len(self.buckets):
            raise ValueError(f"length {length} is above the largest bucket, {self.buckets[-1]}")
        return self.buckets[index]

    # --- parts ------------------------------------------------------------------------------------

    def _pads(self, name: Any, part: Any) -> bool:
        if self.fields is not None:
            return name in self.fields or name == self.mask
        if library_of(part) is not None:
            return len(part.shape) > self.axis
        return isinstance(part, list) and self.axis == 0

    def _parts_key(self, item: Any) -> Hashable:
        parts = parts_of(item)
        if parts is None:
            return self._part_key(None, item)
        return type(item), frozenset((n, self._part_key(n, part)) for n, part in parts.items())

    def _part_key(self, name: Any, part: Any) -> Hashable:
        if name is not None and not self._pads(name, part):
            return _REST.key(part)
        library = library_of(part)
        if library is None:
            return list
        if (signature := library.signature(part)) is None:
            raise TypeError(f"a {type(part).__name__} of this layout cannot be padded")
        shape = part.shape
        return signature, (*shape[: self.axis], *shape[self.axis + 1 :])

    def _joined(self, name: Any, parts: Sequence[Any], target: int) -> Any:
        first = parts[0]
        if name is not None and not self._pads(name, first):
            return _REST.join(parts)
        value = self._value(name)
        library = library_of(first)
        if library is None:
            return [[*part, *[value] * (target - len(part))] for part in parts]
        return library.pad(parts, self.axis, target, value)

    def _value(self, name: Any) -> float:
        if name is not None and name == self.mask:
            return 0
        return self.value.get(name, 0) if isinstance(self.value, Mapping) else self.value

    # --- results ----------------------------------------------------------------------------------

    def _cut(self, result: Any, length: int, target: int) -> Any:
        # An item's error, or the end of its answer, in place of a result.
        if stands_for(result, BaseException):
            return result
        parts = parts_of(result)
        if self.unpad is True:
            if parts is None:
                return self._cut_array(result, length, target)
            names: Collection[Any] = list(parts)
        else:
            names = self.unpad if isinstance(self.unpad, Collection) else ()
        missing = [name for name in names if parts is None or name not in parts]
        if missing or parts is None:
            raise BadBatch(f"returned no {', '.join(map(repr, missing))}, which `unpad` names")
        cut = dict(parts)
        for name in names:
            cut[name] = self._cut_array(parts[name], length, target)
        return with_parts(result, cut)

    def _cut_array(self, result: Any, length: int, target: int) -> Any:
        if result is None:
            return None
        is_array = library_of(result) is not None
        shape = (
            list(result.shape) if is_array else [len(result)] if isinstance(result, list) else []
        )
        if len(shape) <= self.axis or shape[self.axis] != target:
            raise BadBatch(
                f"returned a result of shape {shape}, which `unpad` cannot cut: axis {self.axis} "
                f"is not of the padded length {target}"
            )
        index = (*[slice(None)] * self.axis, slice(0, length))
        return result[index] if is_array else result[:length]


_REST = Stacking()


def _class_of(length: int) -> int:
    """The largest length of the class of ``length``: 8, 12, 16, 24, 32, 48, ...

    With finer classes more has to be learned, with coarser ones more is padded
    (docs/decisions/0014).
    """
    power = 1 << (length - 1).bit_length()
    return max(_SHORT, 3 * power // 4 if length <= 3 * power // 4 else power)


def _mask(lengths: list[int], target: int, like: Any, *, is_boolean: bool) -> Any:
    library = library_of(like)
    if library is not None:
        return library.mask(lengths, target, like, is_boolean=is_boolean)
    kind = bool if is_boolean else int
    return [[kind(position < length) for position in range(target)] for length in lengths]
