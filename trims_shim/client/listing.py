"""All images of the daemon, asked for in as many replies as they take."""

from __future__ import annotations

from trims_shim.client.cache import Cache
from trims_shim.errors import WireError
from trims_shim.wire.admin import ImageStatus, ListImagesRequest

__all__ = ["every_image"]


def every_image(cache: Cache) -> list[ImageStatus]:
    """Return the images of each tier, the last used ones first. Starts no daemon.

    One that comes meanwhile may be missing. Raises DaemonUnavailable when none runs, WireError for
    replies that go on for ever.
    """
    found: list[ImageStatus] = []
    request = ListImagesRequest()
    while page := cache.request(request).images:
        found += page
        before, request = request, ListImagesRequest(page[-1].digest, page[-1].tier)
        if request <= before:
            raise WireError("the daemon's list of images goes back, and would never end")
    return sorted(found, key=lambda each: -each.used_ns)
