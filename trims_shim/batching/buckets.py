"""The length to which the items of a key are padded, and which keys may share a batch.

Requests of equal key share a batch. Keys that differ only in the length of their bucket form a
*family* if the collate allows it (:class:`OpenBucket`). Requests of one family may share a batch,
too, padded to the longest.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

__all__ = ["Bucket", "Family", "OpenBucket", "bucket_in", "family_of", "may_share"]


class Bucket(int):
    """In a key: the length to which all of its items are padded."""

    __slots__ = ()


class OpenBucket(Bucket):
    """A bucket whose items may be padded further, because the padding is masked."""

    __slots__ = ()


class Family(NamedTuple):
    """The keys that may share a batch with a key, and its length among theirs."""

    rest: Hashable
    """Equal for all keys of the family."""
    length: int
    """In a batch, items of shorter keys are padded to the longest."""


def bucket_in(key: Hashable) -> int | None:
    """The longest bucket anywhere in a key; None if it has none."""
    return max(_buckets_in(key), default=None)


def family_of(key: Hashable) -> Family | None:
    """The family of a key; None if no other key may share its batch.

    None also for a key with several buckets: of two such keys, each may be longer in one bucket.
    """
    buckets = list(_buckets_in(key))
    if len(buckets) != 1 or not isinstance(buckets[0], OpenBucket):
        return None
    return Family(_without_bucket(key), int(buckets[0]))


def may_share(keys: Iterable[Hashable]) -> bool:
    """Whether requests of these keys may be one batch."""
    different = set(keys)
    if len(different) < 2:
        return True
    families = {None if family is None else family.rest for family in map(family_of, different)}
    return len(families) == 1 and families != {None}


def _buckets_in(key: Hashable) -> Iterator[Bucket]:
    if isinstance(key, Bucket):
        yield key
    elif isinstance(key, tuple | frozenset):
        for part in key:
            yield from _buckets_in(part)


def _without_bucket(key: Hashable) -> Hashable:
    if isinstance(key, Bucket):
        return Bucket
    if isinstance(key, tuple | frozenset):
        parts = map(_without_bucket, key)
        return frozenset(parts) if isinstance(key, frozenset) else tuple(parts)
    return key
