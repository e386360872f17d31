"""All messages of the protocol, and nothing else.

Two channels carry them (see :mod:`trims_shim.wire.handover` and docs/protocol.md):

* *handover*: a UNIX SEQPACKET socket; one message a packet, with at most one descriptor.
* *control*: ZeroMQ DEALER to ROUTER; one message a request, answered by ``<Verb><Object>Reply``,
  ``Progress`` (any number, before the reply) or ``ErrorReply``.

Fields are named, never positional; a receiver ignores fields it does not know and refuses verbs it
does not know. Sizes are bytes, times nanoseconds of CLOCK_REALTIME. ``Hello``, ``Welcome``,
``DrainRequest`` and ``Goodbye`` never change: they are how versions that cannot talk part company.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "CONTROL_MESSAGE_LIMIT_BYTES",
    "HANDOVER_PACKET_LIMIT_BYTES",
    "PROTOCOL_VERSION",
    "ClientStatus",
    "DrainRequest",
    "ErrorReply",
    "EvictImageReply",
    "EvictImageRequest",
    "FileOffer",
    "GetStatusReply",
    "GetStatusRequest",
    "Goodbye",
    "Hello",
    "ImageEvent",
    "ImageStatus",
    "LeaseRelease",
    "MemoryStatus",
    "OpenImageReply",
    "OpenImageRequest",
    "PinImageReply",
    "PinImageRequest",
    "Progress",
    "SegmentGrant",
    "StatsReport",
    "StopDaemonReply",
    "StopDaemonRequest",
    "VerifyImageReply",
    "VerifyImageRequest",
    "Welcome",
]

PROTOCOL_VERSION = 1
"""Raised by every change that an older peer would misread; tests/wire guards the golden bytes."""

CONTROL_MESSAGE_LIMIT_BYTES = 1 << 20
"""Longest control message: a status reply of some thousand images; requests are far smaller."""

HANDOVER_PACKET_LIMIT_BYTES = 4096
"""Longest handover packet; the longest legitimate one is under 300 bytes."""


# --- handover: client to daemon -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First packet of a client."""

    protocol: int
    package: str
    pid: int
    config_hash: str = ""


@dataclass(frozen=True, slots=True)
class FileOffer:
    """Carries an open, readable descriptor of a model file; ``ticket`` is quoted by the request."""

    ticket: int


@dataclass(frozen=True, slots=True)
class LeaseRelease:
    """The client holds no mapping of this lease any more. Not answered."""

    lease: int


@dataclass(frozen=True, slots=True)
class StatsReport:
    """Counters of a client since its last report, added up by the daemon. Not answered."""

    counters: dict[str, int]


@dataclass(frozen=True, slots=True)
class DrainRequest:
    """A newer client asks the daemon to make room: finish what is in flight, then exit."""

    package: str


# --- handover: daemon to client -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answers Hello. ``token`` authenticates the client's control requests.

    ``instance`` names the daemon's control and event sockets in the socket directory.
    """

    protocol: int
    package: str
    pid: int
    instance: str
    token: bytes
    config_hash: str = ""


@dataclass(frozen=True, slots=True)
class SegmentGrant:
    """Carries the read-only descriptor of a segment, just before the OpenImageReply."""

    ticket: int
    lease: int


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Last packet of the daemon: why it closes the connection."""

    reason: str


# --- control: images ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenImageRequest:
    """Lease the image of the file offered under ``ticket``; loads it when it is not resident."""

    ticket: int
    name: str


@dataclass(frozen=True, slots=True)
class OpenImageReply:
    """Response for OpenImageRequest.

    ``outcome`` is ``hit``, ``miss`` (this request caused the load) or ``joined`` (it waited for
    one). ``is_settled``: an equal identity (fstat) means equal content from now on.
    """

    lease: int
    digest: str
    size_bytes: int
    outcome: str
    is_settled: bool


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
    """Drop an unleased image, or every unleased and unpinned one when ``image`` is empty."""

    image: str = ""


@dataclass(frozen=True, slots=True)
class EvictImageReply:
    """Response for EvictImageRequest."""

    digests: tuple[str, ...]
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class VerifyImageRequest:
    """Hash a resident image again."""

    image: str


@dataclass(frozen=True, slots=True)
class VerifyImageReply:
    """Response for VerifyImageRequest. ``computed`` equals ``digest`` unless memory was damaged."""

    digest: str
    computed: str


# --- control: daemon ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GetStatusRequest:
    """Ask for everything ``trims status`` shows."""


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


@dataclass(frozen=True, slots=True)
class StopDaemonRequest:
    """Finish requests in flight and exit."""


@dataclass(frozen=True, slots=True)
class StopDaemonReply:
    """Response for StopDaemonRequest; the process is gone when the handover socket closes."""

    pid: int


# --- control: any request -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """The request is alive: bytes read so far. Sent at least once a second while a load runs."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """Response for a request that was refused. ``error`` names a class of trims_shim.errors."""

    error: str
    message: str


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageEvent:
    """Published on the event socket: ``loaded``, ``evicted``, ``pinned`` or ``unpinned``."""

    event: str
    digest: str
    size_bytes: int
    at_ns: int
