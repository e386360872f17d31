"""The images of a daemon that answers in pages, and of one that is not what it should be."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from trims_shim.client.cache import Cache
from trims_shim.client.listing import every_image
from trims_shim.errors import WireError
from trims_shim.wire.admin import ImageStatus, ListImagesReply, ListImagesRequest


def image(digest: str) -> ImageStatus:
    return ImageStatus(digest, 1, 1, 0, False, 0, 0, 0, 0, (), "host")


class Paging:
    """A cache whose daemon has two images in a reply."""

    def __init__(self, *images: ImageStatus) -> None:
        self.images = sorted(images, key=lambda each: (each.digest, each.tier))

    def request(self, message: ListImagesRequest) -> ListImagesReply:
        behind = [each for each in self.images if (each.digest, each.tier) > message]
        return ListImagesReply(tuple(behind[:2]))


@pytest.mark.parametrize("count", range(6))
def test_all_replies_are_one_list_with_the_last_used_first(count: int) -> None:
    """A reply may end between the tiers that have the same image."""
    places = [("c", "host"), ("a", "gpu"), ("b", "host"), ("b", "gpu"), ("a", "host")][:count]
    images = [
        image(digest)._replace(tier=tier, used_ns=-index)
        for index, (digest, tier) in enumerate(places)
    ]
    assert every_image(cast(Cache, Paging(*images))) == images


class Repeating:
    """A cache whose daemon goes on with the same replies for ever."""

    def __init__(self, *digests: str) -> None:
        replies = [ListImagesReply((image(each),)) for each in digests]
        self.replies = itertools.islice(itertools.cycle(replies), 100)

    def request(self, _: Any) -> ListImagesReply:
        return next(self.replies)


@pytest.mark.parametrize("digests", ["a", "ab", "cb"])
def test_a_list_without_an_end(digests: str) -> None:
    """Found: it was asked for until memory ran out."""
    with pytest.raises(WireError, match="would never end"):
        every_image(cast(Cache, Repeating(*digests)))
