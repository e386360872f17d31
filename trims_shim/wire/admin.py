"""Messages that inspect and steer the daemon: from the command line, tests and monitoring.

They use the control channel. They are apart from :mod:`trims_shim.wire.messages` so that programs
that only load models need not import them.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "IMAGES_IN_REPLY",
    "PREPARED_IN_REPLY",
    "ClientStatus",
    "DeviceStatus",
    "EvictImageReply",
    "EvictImageRequest",
    "EvictPreparedReply",
    "EvictPreparedRequest",
    "GetStatusReply",
    "GetStatusRequest",
    "ImageEvent",
    "ImageStatus",
    "ListImagesReply",
    "ListImagesRequest",
    "MemoryStatus",
    "PinImageReply",
    "PinImageRequest",
    "PreparedStatus",
    "PreparedStorage",
    "StopDaemonReply",
    "StopDaemonRequest",
    "TierCheck",
    "VerifyImageReply",
    "VerifyImageRequest",
]


# --- images ---------------------------------------------------------------------------------------


class PinImageRequest(NamedTuple):
    """Keep an image resident (``is_pinned``), or let it be evicted again.

    It stays while any user has pinned it; the daemon's own user and root unpin for all.
    """

    image: str
    is_pinned: bool


class PinImageReply(NamedTuple):
    """Response for PinImageRequest."""

    digest: str


class EvictImageRequest(NamedTuple):
    """Drop an unleased image, or every unleased and unpinned one when ``image`` is empty.

    ``tier`` limits it to one tier; empty means all.
    """

    image: str = ""
    tier: str = ""


class EvictImageReply(NamedTuple):
    """Response for EvictImageRequest."""

    digests: tuple[str, ...]
    freed_bytes: int


class VerifyImageRequest(NamedTuple):
    """Hash a resident image again, at every tier or only at ``tier``."""

    image: str
    tier: str = ""


class TierCheck(NamedTuple):
    """One tier's part of VerifyImageReply; ``error`` says why nothing could be ``computed``."""

    tier: str
    computed: str
    error: str = ""


class VerifyImageReply(NamedTuple):
    """Response for VerifyImageRequest.

    ``computed`` equals ``digest`` unless memory was damaged, or could not be read (then empty);
    ``tiers`` says at which tier.
    """

    digest: str
    computed: str
    tiers: tuple[TierCheck, ...] = ()


# --- prepared ONNX models -------------------------------------------------------------------------


class EvictPreparedRequest(NamedTuple):
    """Forget a prepared model by key or name, or every unleased one when ``model`` is empty.

    Refusals are forgotten as well, and such models are tried again on the next load.
    """

    model: str = ""


class EvictPreparedReply(NamedTuple):
    """Response for EvictPreparedRequest."""

    keys: tuple[str, ...]
    freed_bytes: int


class PreparedStatus(NamedTuple):
    """One prepared model in GetStatusReply.

    ``state`` is ``ready``, ``preparing`` or ``refused`` (with ``reason``).
    """

    key: str
    state: str
    size_bytes: int
    leases: int
    hits: int
    used_ns: int
    prepare_ns: int
    names: tuple[str, ...]
    runtime: str
    reason: str = ""


class PreparedStorage(NamedTuple):
    """The directory and accounting of prepared models; part of GetStatusReply.

    ``problem`` says why there can be none; empty if there can.
    """

    directory: str
    budget_bytes: int
    resident_bytes: int
    problem: str = ""


# --- the daemon -----------------------------------------------------------------------------------


class GetStatusRequest(NamedTuple):
    """Ask for everything that ``trims status`` shows."""


IMAGES_IN_REPLY = 1000
"""The most images that a reply names; then there may be more."""
PREPARED_IN_REPLY = 200
"""The same, of prepared models; those that are refused are left out first."""


class ImageStatus(NamedTuple):
    """One image in a reply. ``names`` are paths, shown to their own users only."""

    digest: str
    size_bytes: int
    resident_bytes: int
    leases: int
    is_pinned: bool
    loaded_ns: int
    used_ns: int
    hits: int
    load_ns: int
    names: tuple[str, ...]
    tier: str = "host"


class ClientStatus(NamedTuple):
    """One connection in GetStatusReply."""

    pid: int
    user: int
    package: str
    leases: int
    requests: int
    connected_ns: int


class MemoryStatus(NamedTuple):
    """The host tier's accounting. ``lingering_bytes``: evicted but still mapped; -1 if unknown."""

    kind: str
    reason: str
    budget_bytes: int
    resident_bytes: int
    reserved_bytes: int
    lingering_bytes: int


class DeviceStatus(NamedTuple):
    """A device tier's accounting. ``free_bytes``: of the device, by NVML; -1 if unknown.

    ``lingering_bytes``: evicted but still mapped, as far as is known; -1 if unknown.
    """

    device: str
    name: str
    backend: str
    total_bytes: int
    free_bytes: int
    budget_bytes: int
    headroom_bytes: int
    resident_bytes: int
    reserved_bytes: int
    lingering_bytes: int


class GetStatusReply(NamedTuple):
    """Response for GetStatusRequest. ``images`` were used last: IMAGES_IN_REPLY at most.

    ``prepared`` has PREPARED_IN_REPLY at most. ``clients`` begin with who asks; there may be
    ``more_clients`` that are not named.
    """

    package: str
    protocol: int
    pid: int
    started_ns: int
    now_ns: int
    idle_exit_s: float
    config_hash: str
    memory: MemoryStatus
    images: tuple[ImageStatus, ...]
    clients: tuple[ClientStatus, ...]
    counters: dict[str, int]
    devices: tuple[DeviceStatus, ...] = ()
    prepared: tuple[PreparedStatus, ...] = ()
    storage: PreparedStorage | None = None
    more_clients: int = 0


class ListImagesRequest(NamedTuple):
    """Ask for images in the order of digest and tier, from behind this one on."""

    digest: str = ""
    tier: str = ""


class ListImagesReply(NamedTuple):
    """Response for ListImagesRequest: IMAGES_IN_REPLY at most; none behind the last one."""

    images: tuple[ImageStatus, ...]


class StopDaemonRequest(NamedTuple):
    """Finish requests in flight and exit."""


class StopDaemonReply(NamedTuple):
    """Response for StopDaemonRequest; the process is gone when the handover socket closes."""


# --- events ---------------------------------------------------------------------------------------


class ImageEvent(NamedTuple):
    """Published on the event socket: ``loaded``, ``evicted``, ``pinned`` or ``unpinned``."""

    event: str
    digest: str
    size_bytes: int
    at_ns: int
