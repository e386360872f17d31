"""Copies of images from one device to another: which devices, by whom, and whether to trust them.

A second uploader makes the copies. It sees the target device and its peers: a fault of another
device must not cost the uploads to this one. It starts with the first copy, and
is retired when idle.

A driver calls devices peers by what the hardware could do. On machines whose IOMMU or PCIe switches
redirect the traffic, copies between them succeed and leave wrong bytes (pytorch/pytorch issue 84803
among many). So the first copy from a device is read back and hashed; the link is used from then on,
or never again. After any other failure the link is left alone for a while.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from trims_shim.daemon.device.uploading import Uploader
from trims_shim.errors import DriverFailure, NoSpace, ReadFailed, TrimsError
from trims_shim.memory.device import DeviceAllocation, DeviceSegment
from trims_shim.specs import DeviceId, Digest

__all__ = ["PeerCopies", "PeerImage"]

_logger = logging.getLogger("trims_shim.daemon")

_TRY_AGAIN_S = 60.0
"""Long enough that a link which always fails costs little, short enough for one that comes back."""


class PeerImage(NamedTuple):
    """An image on another device. The holder closes ``segment``, a hold of its own."""

    digest: Digest
    segment: DeviceSegment


class PeerCopies:
    """The copies to one device. Any thread may call."""

    def __init__(self, ranks: Mapping[DeviceId, int], uploader: Uploader) -> None:
        """``ranks``: the peers, as :meth:`~trims_shim.memory.driver.Driver.peers` returns them.

        ``uploader`` is closed by the :class:`.DeviceLoader`.
        """
        self.uploader = uploader
        self._ranks = dict(ranks)
        self._proved: set[DeviceId] = set()
        self._avoided_until_s: dict[DeviceId, float] = {}

    def rank(self, device: DeviceId) -> int | None:
        """How good the link from a device is, 0 the best; None where it is not to be used now."""
        if time.monotonic() < self._avoided_until_s.get(device, 0.0):
            return None
        return self._ranks.get(device)

    def copy(
        self, image: PeerImage, memory: DeviceAllocation, on_progress: Callable[[int], None]
    ) -> None:
        """Fill ``memory`` with an image. Blocks; after a TrimsError the memory may hold anything.

        ``on_progress`` gets the bytes done.
        """
        source = image.segment
        try:
            self._copy(image, memory, on_progress)
        except _Damaged as error:
            _logger.error("%s", error)
            self._avoided_until_s[source.device] = math.inf
            raise
        except NoSpace:
            raise  # It says nothing about the link.
        except TrimsError:
            # Not sooner because of a copy that began before another one was damaged.
            until_s = self._avoided_until_s.get(source.device, 0.0)
            again_s = time.monotonic() + _TRY_AGAIN_S
            self._avoided_until_s[source.device] = max(until_s, again_s)
            raise
        self._proved.add(source.device)

    def _copy(
        self, image: PeerImage, memory: DeviceAllocation, on_progress: Callable[[int], None]
    ) -> None:
        source = image.segment
        if source.allocations != memory.allocations:
            raise DriverFailure(f"{source.device} cuts memory up differently from {memory.device}")
        # Also if it was chosen before another copy was damaged.
        is_hashed = source.device not in self._proved or self.rank(source.device) is None
        with self.uploader.job() as job:
            # A sign of life: starting a process took time, and making its context will take more.
            on_progress(1)
            reply = job.copy(
                source.outline,
                source.descriptors,
                memory,
                size_bytes=source.size_bytes,
                is_hashed=is_hashed,
                on_progress=on_progress,
                is_numbers=source.is_numbers,
            )
        if is_hashed and reply.digest != image.digest:
            raise _Damaged(
                f"image {image.digest[:12]} arrives damaged on {memory.device} from "
                f"{source.device}: nothing is copied between them any more; `trims verify "
                f"{image.digest[:12]}` says whether its memory or the way is at fault (see "
                "docs/gpu.md, Several GPUs)"
            )


class _Damaged(ReadFailed):
    """The bytes that arrived are not those of the image."""
