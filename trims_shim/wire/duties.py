"""Messages between the daemon and the processes that it starts: the uploader and the preparer.

On a socket pair of their own, framed by :mod:`trims_shim.wire.frames`; clients never see them.
"""

from __future__ import annotations

from dataclasses import dataclass

from trims_shim.specs import Identity
from trims_shim.wire.messages import SessionRecipe

__all__ = [
    "CopyImageRequest",
    "DownloadRequest",
    "ExternalFile",
    "JobRelease",
    "PlanUploadReply",
    "PlanUploadRequest",
    "PrepareReply",
    "PrepareRequest",
    "PrepareVerdict",
    "SourceHashed",
    "UploadFailed",
    "UploadPart",
    "UploadProgress",
    "UploadReply",
    "UploadRequest",
]


# --- the uploader, which fills device memory ------------------------------------------------------


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


# --- the preparer, which prepares ONNX models -----------------------------------------------------


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
