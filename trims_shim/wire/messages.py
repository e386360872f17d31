"""Messages between programs that load models and the daemon, and nothing else.

Every program with a model imports this file and pays for each class in it. So messages are named
tuples, which are made in a sixth of a dataclass's time (one without fields is false: compare with
None), those of the command line are in :mod:`trims_shim.wire.admin`, and those between the daemon
and its own processes in :mod:`trims_shim.wire.duties`. Two channels carry the messages here (see
:mod:`trims_shim.wire.handover` and docs/protocol.md):

* *handover*: a UNIX SEQPACKET socket; one message a packet, with at most one descriptor.
* *control*: ZeroMQ DEALER to ROUTER; one message a request, answered by ``<Verb><Object>Reply``,
  ``Progress`` (any number, before the reply) or ``ErrorReply``.

Fields are named, never positional; a receiver ignores unknown fields and refuses unknown verbs.
Sizes are bytes, times nanoseconds of CLOCK_REALTIME. ``Hello``, ``Welcome``, ``DrainRequest`` and
``Goodbye`` never change: with them, incompatible versions take leave of each other.
"""

from __future__ import annotations

from typing import NamedTuple

from trims_shim.specs import Identity, Variant

__all__ = [
    "CONTROL_MESSAGE_LIMIT_BYTES",
    "COUNTER_NAME_LIMIT",
    "HANDOVER_PACKET_LIMIT_BYTES",
    "LEAD_LIMIT_BYTES",
    "NAME_LIMIT_BYTES",
    "PROTOCOL_VERSION",
    "DeviceGrant",
    "DrainRequest",
    "ErrorReply",
    "FileOffer",
    "Goodbye",
    "Hello",
    "LeaseRelease",
    "OfferReply",
    "OfferWithdrawal",
    "OfferedExternal",
    "OpenImageReply",
    "OpenImageRequest",
    "OpenPreparedReply",
    "OpenPreparedRequest",
    "Progress",
    "SegmentGrant",
    "SessionRecipe",
    "StatsReport",
    "Welcome",
]

PROTOCOL_VERSION = 11
"""Raised with every change that an older peer would misread; tests/wire guards the golden bytes."""

CONTROL_MESSAGE_LIMIT_BYTES = 1 << 20
"""Longest control message: a status reply of some thousand images; requests are far smaller."""

LEAD_LIMIT_BYTES = 1024
"""The zeros before a file's bytes in an image (``lead_bytes``) are fewer than this: they bring
results of a conversion from 32 to 16 bits to a multiple of 512."""

HANDOVER_PACKET_LIMIT_BYTES = 16384
"""Longest handover packet. A longer OpenPreparedRequest takes the control channel."""

NAME_LIMIT_BYTES = 3800
"""Longest name in an offer, which is clipped: with the other fields it fits a handover packet."""

COUNTER_NAME_LIMIT = 100
"""In bytes. The daemon refuses a StatsReport with a longer name."""


# --- handover: client to daemon -------------------------------------------------------------------


class Hello(NamedTuple):
    """First packet of a client."""

    protocol: int
    package: str
    pid: int


class FileOffer(NamedTuple):
    """Carries an open, readable descriptor of a model file; the request quotes ``ticket``.

    With a ``tier``, which is ``host`` or the id of a device, it asks for the image of the file: one
    that is resident there is leased at once; answered by OfferReply. On the host tier it may be a
    ``variant`` of the file: with fewer than 1024 ``lead_bytes``, or of pieces that are together no
    longer than the file. What is converted begins at multiples of a number's size. A device holds
    a file by its tensors, or, as a variant, in one piece.
    ``name`` is for people, and may be cut short to fit the packet.
    """

    ticket: int
    tier: str = ""
    name: str = ""
    variant: Variant = Variant(0)


class LeaseRelease(NamedTuple):
    """The client no longer holds a mapping of this lease. Not answered."""

    lease: int


class OfferWithdrawal(NamedTuple):
    """The client gives up what it has asked for under a ticket, and all that came of it.

    So nobody waits for the image any more, and the lease ends if it was granted meanwhile (it was
    the session's last one then). A load under way goes on. Not answered.
    """

    ticket: int


class StatsReport(NamedTuple):
    """Counters of a client since its last report, added up by the daemon. Not answered."""

    counters: dict[str, int]


class DrainRequest(NamedTuple):
    """A newer client asks the daemon to make room: finish requests in flight, then exit."""

    package: str


# --- handover: daemon to client -------------------------------------------------------------------


class Welcome(NamedTuple):
    """Answers Hello. ``token`` authenticates the client's control requests.

    ``instance`` names the daemon's control and event sockets in the socket directory.
    """

    protocol: int
    package: str
    pid: int
    instance: str
    token: bytes
    config_hash: str = ""


class SegmentGrant(NamedTuple):
    """Carries a descriptor of a segment, just before the OpenImageReply or OfferReply.

    The host tier has one part, read-only. On a device tier, part 0 is the outline (see
    :class:`DeviceGrant`), and the parts from 1 on are allocations in order of address.
    """

    ticket: int
    lease: int
    part: int = 0


class OfferReply(NamedTuple):
    """Answers a FileOffer that names a tier, after the grants for the leased image.

    ``opened`` is None where the image is not resident: the offer stands, for OpenImageRequest. An
    offer for a variant stands only where the image ``is_loading``.
    """

    ticket: int
    opened: OpenImageReply | None = None
    is_loading: bool = False


class Goodbye(NamedTuple):
    """Last packet of the daemon: why it closes the connection."""

    reason: str


# --- control: images ------------------------------------------------------------------------------


class OpenImageRequest(NamedTuple):
    """Lease the image that was asked for under ``ticket``; loads it when it is not resident."""

    ticket: int


class DeviceGrant(NamedTuple):
    """How an image lies in device memory; part of OpenImageReply.

    ``allocations`` are the sizes in bytes of the granted parts; they are mapped back to back.
    ``layout`` is the fingerprint of the records' places (:mod:`trims_shim.formats.device_layout`).
    Both sides derive it from the outline, a file of the image's size with holes in place of the
    records' bytes. ``handles`` replace descriptors where the backend is ``ipc``.
    """

    backend: str
    layout: str
    allocations: tuple[int, ...]
    handles: tuple[bytes, ...] = ()


class OpenImageReply(NamedTuple):
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


# --- handover or control: prepared ONNX models ----------------------------------------------------


class SessionRecipe(NamedTuple):
    """Everything besides the model that decides onnxruntime's prepared form of it.

    ``build`` tells builds of one version apart. ``providers``: for each, its name, then option,
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


class OfferedExternal(NamedTuple):
    """A file with a model's initializers; ``location`` is as in the model."""

    location: str
    ticket: int


class OpenPreparedRequest(NamedTuple):
    """Lease the prepared form of an ONNX model; orders it where there is none.

    ``ticket`` is of the model's open file, or of a sealed memfd of bytes (then ``path`` is empty).
    0: only look up the content of ``digest``. ``path`` is absolute, as the client found the file.
    ``package`` is the directory of the client's onnxruntime and ``search_path`` its ``sys.path``,
    from which the preparing process imports it.

    The rest is for a client that sees other files than the daemon: ``directory`` is the ticket of
    the directory of prepared models, to show that it sees the same one, and ``externals`` are the
    model's other files, which it would not find.
    """

    ticket: int
    path: str
    digest: str
    recipe: SessionRecipe
    package: str
    search_path: tuple[str, ...] = ()
    directory: int = 0
    externals: tuple[OfferedExternal, ...] = ()


class OpenPreparedReply(NamedTuple):
    """Response for OpenPreparedRequest; never waits for a preparation.

    ``outcome`` is ``hit``, ``unknown`` (nothing was started), ``preparing`` (by this request or an
    earlier one) or ``refused``, with a short stable ``reason`` and a ``message`` for people. The
    files of a hit are ``model`` and the weights beside it, as the daemon sees them, with their
    identities when verified.
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


# --- control: any request -------------------------------------------------------------------------


class Progress(NamedTuple):
    """The request is alive: bytes read so far. Sent at least once a second while a load runs.

    They may be more than the file's: it is read again where the first reading does not suffice.
    """

    done_bytes: int


class ErrorReply(NamedTuple):
    """Response for a request that was refused. ``error`` names a class of trims_shim.errors."""

    error: str
    message: str
