"""The images of a daemon that is not what it should be; tests/daemon has lists of a real one."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest

from trims_shim.client.cache import Cache
from trims_shim.client.listing import every_image
from trims_shim.errors import WireError
from trims_shim.wire.admin import ImageStatus, ListImagesReply


def image(digest: str) -> ImageStatus:
    return ImageStatus(digest, 1, 1, 0, False, 0, 0, 0, 0, (), "host")


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
