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

from trims_shim.specs import Identity

__all__ = [
    "CONTROL_MESSAGE_LIMIT_BYTES",
    "HANDOVER_PACKET_LIMIT_BYTES",
    "PROTOCOL_VERSION",
    "ClientStatus",
    "CopyImageRequest",
    "DeviceGrant",
    "DeviceStatus",
    "DownloadRequest",
    "DrainRequest",
    "ErrorReply",
    "EvictImageReply",
    "EvictImageRequest",
    "EvictPreparedReply",
    "EvictPreparedRequest",
    "ExternalFile",
    "FileOffer",
    "GetStatusReply",
    "GetStatusRequest",
    "Goodbye",
    "Hello",
    "ImageEvent",
    "ImageStatus",
    "JobRelease",
    "LeaseRelease",
    "MemoryStatus",
    "OfferReply",
    "OpenImageReply",
    "OpenImageRequest",
    "OpenPreparedReply",
    "OpenPreparedRequest",
    "PinImageReply",
    "PinImageRequest",
    "PlanUploadReply",
    "PlanUploadRequest",
    "PrepareReply",
    "PrepareRequest",
    "PrepareVerdict",
    "PreparedStatus",
    "PreparedStorage",
    "Progress",
    "SegmentGrant",
    "SessionRecipe",
    "SourceHashed",
    "StatsReport",
    "StopDaemonReply",
    "StopDaemonRequest",
    "TierCheck",
    "UploadFailed",
    "UploadPart",
    "UploadProgress",
    "UploadReply",
    "UploadRequest",
    "VerifyImageReply",
    "VerifyImageRequest",
    "Welcome",
]

PROTOCOL_VERSION = 3
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
    """Carries an open, readable descriptor of a model file; ``ticket`` is quoted by the request.

    With a ``tier``, the image is leased at once where it is resident there; answered by OfferReply.
    ``name`` is that of OpenImageRequest, and may be cut short.
    """

    ticket: int
    tier: str = ""
    name: str = ""


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
    """Carries a descriptor of a segment, just before the OpenImageReply or OfferReply.

    On the host tier there is one, read-only. On a device tier part 0 is the outline (see
    :class:`DeviceGrant`), and the parts from 1 on are the device's allocations in order of address.
    """

    ticket: int
    lease: int
    part: int = 0


@dataclass(frozen=True, slots=True)
class OfferReply:
    """Answers a FileOffer that names a tier, after the grants of what was leased.

    ``opened`` is None where the image is not resident: the offer stands, for OpenImageRequest.
    """

    ticket: int
    opened: OpenImageReply | None = None


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Last packet of the daemon: why it closes the connection."""

    reason: str


# --- control: images ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenImageRequest:
    """Lease the image of the file offered under ``ticket``; loads it when it is not resident.

    ``tier`` is ``host`` or the id of a device.
    """

    ticket: int
    name: str
    tier: str = "host"


@dataclass(frozen=True, slots=True)
class DeviceGrant:
    """How an image lies in device memory; part of OpenImageReply.

    ``allocations`` are the sizes in bytes of the parts that were granted; they are mapped one after
    another. ``layout`` is the fingerprint of where each record is
    (:mod:`trims_shim.formats.device_layout`): both sides work it out from the outline, a file of
    the image's size with everything but the records' bytes, holes in their place. ``handles``
    replace descriptors where the backend is ``ipc``.
    """

    backend: str
    layout: str
    allocations: tuple[int, ...]
    handles: tuple[bytes, ...] = ()


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
    device: DeviceGrant | None = None


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

    ``tier`` limits it to one tier; empty: all of them.
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
    """Hash a resident image again, at every tier or (``tier``) at one."""

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

    ``computed`` equals ``digest`` unless memory was damaged, or could not be read (then empty):
    at which tier is in ``tiers``.
    """

    digest: str
    computed: str
    tiers: tuple[TierCheck, ...] = ()


# --- handover or control: prepared ONNX models ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class SessionRecipe:
    """Everything but the model that decides what onnxruntime makes of it.

    ``build`` tells builds of one version apart. ``providers``: for each its name, then option,
    value, option, value... ``entries`` are the session's config entries (key, value), sorted;
    ``free_dimensions`` are (``name`` or ``denotation``, dimension, value). ``prepack`` is ``share``
    or ``off``. Equal recipes give equal results on one machine.
    """

    runtime: str
    build: str
    providers: tuple[tuple[str, ...], ...]
    level: str
    entries: tuple[tuple[str, ...], ...] = ()
    free_dimensions: tuple[tuple[str, ...], ...] = ()
    disabled_optimizers: tuple[str, ...] = ()
    is_deterministic: bool = False
    prepack: str = "share"


@dataclass(frozen=True, slots=True)
class OpenPreparedRequest:
    """Lease the prepared model of an ONNX model; has it made where there is none.

    ``ticket``: of the model's open file, or of a memfd with its bytes (``path`` is empty then).
    0: only look, for the content of ``digest``. ``path`` is absolute, as the client found the file.
    ``package`` is the directory of the client's onnxruntime and ``search_path`` its ``sys.path``,
    from which the process that prepares imports it.
    """

    ticket: int
    path: str
    digest: str
    recipe: SessionRecipe
    package: str
    search_path: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpenPreparedReply:
    """Response for OpenPreparedRequest; never waits for a preparation.

    ``outcome`` is ``hit``, ``unknown`` (nothing was started), ``preparing`` (by this request or an
    earlier one) or ``refused``, with a short stable ``reason`` and a ``message`` for people. The
    files of a hit are ``model`` and the weights beside it, as they were when they were verified.
    """

    outcome: str
    lease: int = 0
    key: str = ""
    model: str = ""
    model_identity: Identity | None = None
    weights: str = ""
    weights_identity: Identity | None = None
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class EvictPreparedRequest:
    """Forget a prepared model by key or name, or every unleased one when ``model`` is empty.

    What was found not to be servable is forgotten with it, and tried again on the next load.
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
    """Where prepared models are, and their accounting; part of GetStatusReply.

    ``problem``: why there are none; empty if there can be.
    """

    directory: str
    budget_bytes: int
    resident_bytes: int
    problem: str = ""


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

    ``lingering_bytes``: evicted but still mapped by somebody, as far as can be told; -1 if not.
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


# --- uploader: the daemon and the process that fills device memory --------------------------------


@dataclass(frozen=True, slots=True)
class PlanUploadRequest:
    """Carries the source, a file or host segment of ``size_bytes``; answered by PlanUploadReply.

    ``limit_bytes``: the device memory that may be used. ``is_hashed``: work out the digest.
    """

    job: int
    size_bytes: int
    limit_bytes: int
    is_hashed: bool
    name: str


@dataclass(frozen=True, slots=True)
class PlanUploadReply:
    """Carries nothing; ``device_bytes`` is what the records need, ``layout`` its fingerprint."""

    job: int
    device_bytes: int
    layout: str


@dataclass(frozen=True, slots=True)
class UploadRequest:
    """Go on with a planned job: parts follow as :class:`UploadPart`, the outline first.

    No ``allocations``: the uploader makes them itself (backend ``ipc``), only the outline comes.
    """

    job: int
    allocations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UploadPart:
    """Carries a descriptor; in an upload part 0 is the empty outline, the others allocations."""

    job: int
    part: int


@dataclass(frozen=True, slots=True)
class UploadProgress:
    """Bytes of the source that were read so far."""

    job: int
    done_bytes: int


@dataclass(frozen=True, slots=True)
class UploadReply:
    """The records are in device memory and the rest in the outline; all mappings are gone.

    ``digest`` is empty unless it was asked for. ``allocations`` and ``handles`` are of memory that
    the uploader made and keeps until :class:`JobRelease`.
    """

    job: int
    digest: str
    allocations: tuple[int, ...] = ()
    handles: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True)
class DownloadRequest:
    """Write a device image back into a host segment of ``size_bytes``.

    Followed by UploadPart packets: part 0 is the outline, the allocations, and last the writable
    host segment. Answered by UploadReply with the digest of what was written. ``memory`` is the
    upload that made the allocations, where the uploader did; they do not follow then.
    """

    job: int
    size_bytes: int
    allocations: tuple[int, ...]
    memory: int = 0


@dataclass(frozen=True, slots=True)
class CopyImageRequest:
    """Copy an image of ``size_bytes`` out of the memory of another device.

    Followed by UploadPart packets: part 0 is the image's outline, then its allocations, then as
    many new ones of the same sizes. Answered by UploadReply; with ``is_hashed`` its digest is of
    what can be read from the new ones.
    """

    job: int
    size_bytes: int
    allocations: tuple[int, ...]
    is_hashed: bool


@dataclass(frozen=True, slots=True)
class JobRelease:
    """Forget a job that was planned and is not gone on with, or free the memory made for it.

    Not answered.
    """

    job: int


@dataclass(frozen=True, slots=True)
class UploadFailed:
    """A job ended without a result; ``error`` names a class of trims_shim.errors."""

    job: int
    error: str
    message: str


# --- preparer: the daemon and the process that prepares ONNX models -------------------------------


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """The one job of a preparer.

    ``source`` is the number of an inherited descriptor of the model, ``path`` its name or empty.
    ``directory`` is a fresh directory for ``model.onnx`` and ``weights.bin``.
    """

    protocol: int
    source: int
    path: str
    recipe: SessionRecipe
    package: str
    directory: str


@dataclass(frozen=True, slots=True)
class ExternalFile:
    """A file that a model's initializers are in; ``location`` is as the model gives it."""

    location: str
    path: str
    digest: str
    identity: Identity


@dataclass(frozen=True, slots=True)
class SourceHashed:
    """What is to be prepared, by content; answered by PrepareVerdict."""

    digest: str
    externals: tuple[ExternalFile, ...] = ()


@dataclass(frozen=True, slots=True)
class PrepareVerdict:
    """``is_wanted``: go on; otherwise it has been prepared already, and the preparer ends."""

    is_wanted: bool


@dataclass(frozen=True, slots=True)
class PrepareReply:
    """The files are written and verified, or ``reason`` says why they never will be.

    ``probe`` is ``equal`` where a run gave the same bits as the original model, else why there was
    none. ``is_lasting``: the reason holds for this model and recipe, not just for now.
    """

    reason: str = ""
    message: str = ""
    is_lasting: bool = True
    probe: str = ""


# --- events ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ImageEvent:
    """Published on the event socket: ``loaded``, ``evicted``, ``pinned`` or ``unpinned``."""

    event: str
    digest: str
    size_bytes: int
    at_ns: int
