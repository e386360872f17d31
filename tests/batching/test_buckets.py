"""Which keys may share a batch, and which is the longer one of two."""

from __future__ import annotations

from collections.abc import Hashable

import pytest

from trims_shim.batching.buckets import (
    Bucket,
    Family,
    OpenBucket,
    bucket_in,
    family_of,
    may_share,
)


def nested(bucket: Hashable) -> Hashable:
    return "signature", frozenset([("ids", (bucket, list)), ("size", 3)])


def test_keys_that_differ_in_the_length_alone_are_a_family() -> None:
    short, long = family_of(nested(OpenBucket(8))), family_of(nested(OpenBucket(32)))
    assert short is not None
    assert long is not None
    assert (short.rest, short.length, long.length) == (long.rest, 8, 32)
    assert family_of(OpenBucket(8)) == Family(Bucket, 8)
    other = family_of(("other", nested(OpenBucket(8))))
    assert other is not None
    assert other.rest != short.rest
    ahead, behind = family_of((OpenBucket(8), "a")), family_of(("a", OpenBucket(8)))
    assert ahead != behind


@pytest.mark.parametrize(
    "key",
    [None, "a", 8, (8, 16), Bucket(8), nested(Bucket(8)), (OpenBucket(8), OpenBucket(8))],
    ids=["none", "text", "number", "shape", "closed", "closed, nested", "several"],
)
def test_others_share_a_batch_with_their_own_only(key: Hashable) -> None:
    assert family_of(key) is None
    assert may_share([key, key])
    assert not may_share([key, OpenBucket(16)])
    assert not may_share([key, "b"])


def test_who_may_share_a_batch() -> None:
    assert may_share([])
    assert may_share(map(OpenBucket, (8, 16, 8)))
    assert not may_share([OpenBucket(8), nested(OpenBucket(8))])


def test_the_longest_bucket_of_a_key() -> None:
    assert bucket_in((nested(Bucket(8)), (OpenBucket(16), 64))) == 16
    assert bucket_in(nested(8)) is None
