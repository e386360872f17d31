"""Messages that inspect and steer the daemon: from the command line, tests and monitoring.

They use the control channel. They are apart from :mod:`trims_shim.wire.messages` so that programs
that only load models need not import them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
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


@dataclass(frozen=True, slots=True)
class PinImageRequest:
    """Keep an image resident (``is_pinned``), or let it be evicted again."""

    image: str
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class PinImageReply:
    """Response for PinImageRequest."""

    digest: str


@dataclass(frozen=True, slots=True)
class EvictImageRequest:
    """Drop an unleased image, or every unleased and unpinned one when ``image`` is empty.

    ``tier`` limits it to one tier; empty means all.
    """

    image: str = ""
    tier: str = ""


@dataclass(frozen=True, slots=True)
class EvictImageReply:
    """Response for EvictImageRequest."""

    digests: tuple[str, ...]
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyImageRequest:
    """Hash a resident image again, at every tier or only at ``tier``."""

    image: str
    tier: str = ""


@dataclass(frozen=True, slots=True)
class TierCheck:
    """One tier's part of VerifyImageReply; ``error`` says why nothing could be ``computed``."""

    tier: str
    computed: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class VerifyImageReply:
    """Response for VerifyImageRequest.

    ``computed`` equals ``digest`` unless memory was damaged, or could not be read (then empty);
    ``tiers`` says at which tier.
    """

    digest: str
    computed: str
    tiers: tuple[TierCheck, ...] = ()


# --- prepared ONNX models -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EvictPreparedRequest:
    """Forget a prepared model by key or name, or every unleased one when ``model`` is empty.

    Refusals are forgotten as well, and such models are tried again on the next load.
    """

    model: str = ""


@dataclass(frozen=True, slots=True)
class EvictPreparedReply:
    """Response for EvictPreparedRequest."""

    keys: tuple[str, ...]
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class PreparedStatus:
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


@dataclass(frozen=True, slots=True)
class PreparedStorage:
    """The directory and accounting of prepared models; part of GetStatusReply.

    ``problem`` says why there can be none; empty if there can.
    """

    directory: str
    budget_bytes: int
    resident_bytes: int
    problem: str = ""


# --- the daemon -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GetStatusRequest:
    """Ask for everything that ``trims status`` shows."""


@dataclass(frozen=True, slots=True)
class ImageStatus:
    """One image in GetStatusReply. ``names`` are paths, shown to their own users only."""

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


@dataclass(frozen=True, slots=True)
class ClientStatus:
    """One connection in GetStatusReply."""

    pid: int
    user: int
    package: str
    leases: int
    requests: int
    connected_ns: int


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """The host tier's accounting. ``lingering_bytes``: evicted but still mapped; -1 if unknown."""

    kind: str
    reason: str
    budget_bytes: int
    resident_bytes: int
    reserved_bytes: int
    lingering_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceStatus:
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


@dataclass(frozen=True, slots=True)
class GetStatusReply:
    """Response for GetStatusRequest."""

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
    counters: dict[str, int] = field(default_factory=dict)
    devices: tuple[DeviceStatus, ...] = ()
    prepared: tuple[PreparedStatus, ...] = ()
    storage: PreparedStorage | None = None


@dataclass(frozen=True, slots=True)
class StopDaemonRequest:
    """Finish requests in flight and exit."""


@dataclass(frozen=True, slots=True)
class StopDaemonReply:
    """Response for StopDaemonRequest; the process is gone when the handover socket closes."""


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageEvent:
    """Published on the event socket: ``loaded``, ``evicted``, ``pinned`` or ``unpinned``."""

    event: str
    digest: str
    size_bytes: int
    at_ns: int
