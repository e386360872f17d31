"""The length to which the items of a key are padded, and which keys may share a batch.

Requests of equal key share a batch. Those whose keys differ in nothing but the length of a bucket
may too, padded to the longest of them, if the collate allows it (:class:`OpenBucket`): a *family*.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

__all__ = ["Bucket", "Family", "OpenBucket", "bucket_in", "family_of", "may_share"]


class Bucket(int):
    """In a key: the length to which all of its items are padded."""

    __slots__ = ()


class OpenBucket(Bucket):
    """A bucket whose items may also be padded further: what they are padded with is masked."""

    __slots__ = ()


class Family(NamedTuple):
    """Where a key stands among those that may share a batch with it."""

    rest: Hashable
    """Equal for all of them."""
    length: int
    """Items of the longest stay as they are; all others are padded to it."""


def bucket_in(key: Hashable) -> int | None:
    """The longest in a key, wherever it is; None where nothing is padded to buckets."""
    return max(_buckets_in(key), default=None)


def family_of(key: Hashable) -> Family | None:
    """None for a key that shares a batch with no other one.

    Also with several buckets: of two such keys, each may be the longer one in one of them.
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
