"""Messages between the daemon and the processes that it starts: the uploader and the preparer.

Each process has its own socket pair; clients never see these messages. The uploader's are handover
packets, the preparer's are framed by :mod:`trims_shim.wire.frames`.
"""

from __future__ import annotations

from typing import NamedTuple

from trims_shim.specs import Identity
from trims_shim.wire.messages import SessionRecipe

__all__ = [
    "ContentWanted",
    "CopyImageRequest",
    "DownloadRequest",
    "ExternalFile",
    "ExternalSource",
    "JobRelease",
    "PlanUploadReply",
    "PlanUploadRequest",
    "PrepareReply",
    "PrepareRequest",
    "SourceHashed",
    "UploadFailed",
    "UploadPart",
    "UploadProgress",
    "UploadReply",
    "UploadRequest",
]


# --- the uploader, which fills device memory ------------------------------------------------------


class PlanUploadRequest(NamedTuple):
    """Carries the source, a file or host segment of ``size_bytes``; answered by PlanUploadReply.

    ``limit_bytes``: the device memory that may be used. ``is_hashed``: compute the digest.
    ``is_numbers``: it is no model file, and copied as it is.
    """

    job: int
    size_bytes: int
    limit_bytes: int
    is_hashed: bool
    name: str
    is_numbers: bool = False


class PlanUploadReply(NamedTuple):
    """Carries no descriptor. ``device_bytes`` is the records' size, ``layout`` its fingerprint."""

    job: int
    device_bytes: int
    layout: str


class UploadRequest(NamedTuple):
    """Continue a planned job: parts follow as :class:`UploadPart`, the outline first.

    Without ``allocations`` only the outline follows: the uploader allocates (backend ``ipc``).
    """

    job: int
    allocations: tuple[int, ...]


class UploadPart(NamedTuple):
    """Carries a descriptor; in an upload part 0 is the empty outline, the others allocations."""

    job: int
    part: int


class UploadProgress(NamedTuple):
    """The bytes of the source that were read so far."""

    job: int
    done_bytes: int


class UploadReply(NamedTuple):
    """The records are in device memory and the rest in the outline; all mappings are gone.

    ``digest`` is empty unless requested. ``allocations`` and ``handles`` are of memory that the
    uploader made and keeps until :class:`JobRelease`.
    """

    job: int
    digest: str
    allocations: tuple[int, ...] = ()
    handles: tuple[bytes, ...] = ()


class DownloadRequest(NamedTuple):
    """Write a device image back into a host segment of ``size_bytes``.

    Followed by UploadPart packets: the outline (part 0), the allocations, and last the writable
    host segment. Answered by UploadReply with the digest of the written bytes. If the uploader made
    the allocations, ``memory`` is the job that made them, and they do not follow. ``is_numbers`` as
    when it was uploaded.
    """

    job: int
    size_bytes: int
    allocations: tuple[int, ...]
    memory: int = 0
    is_numbers: bool = False


class CopyImageRequest(NamedTuple):
    """Copy an image of ``size_bytes`` out of the memory of another device.

    Followed by UploadPart packets: the image's outline (part 0), its allocations, and as many new
    ones of the same sizes. Answered by UploadReply; with ``is_hashed``, its digest is of the bytes
    read back from the new ones. ``is_numbers`` as when it was uploaded.
    """

    job: int
    size_bytes: int
    allocations: tuple[int, ...]
    is_hashed: bool
    is_numbers: bool = False


class JobRelease(NamedTuple):
    """Forget a planned job that does not continue, or free the memory made for it. Not answered."""

    job: int


class UploadFailed(NamedTuple):
    """A job ended without a result; ``error`` names a class of trims_shim.errors."""

    job: int
    error: str
    message: str


# --- the preparer, which prepares ONNX models -----------------------------------------------------


class ExternalSource(NamedTuple):
    """An inherited descriptor of a file with a model's initializers."""

    location: str
    source: int


class PrepareRequest(NamedTuple):
    """The one job of a preparer.

    ``source`` is the number of an inherited descriptor of the model, ``path`` its name or empty.
    ``package`` is the directory of the onnxruntime to use; empty for whichever is found.
    ``directory`` is a fresh directory for ``model.onnx`` and ``weights.bin``. ``externals`` are
    external files of a model that has no name here; a model of bytes has none.
    """

    protocol: int
    source: int
    path: str
    recipe: SessionRecipe
    package: str
    directory: str
    externals: tuple[ExternalSource, ...] | None = None


class ExternalFile(NamedTuple):
    """A file with a model's initializers; ``location`` is as in the model."""

    location: str
    path: str
    digest: str
    identity: Identity


class SourceHashed(NamedTuple):
    """The content that is to be prepared; answered by ContentWanted."""

    digest: str
    externals: tuple[ExternalFile, ...] = ()


class ContentWanted(NamedTuple):
    """Go on. A preparer whose content is not wanted is ended."""


class PrepareReply(NamedTuple):
    """The files are written and verified, or ``reason`` says why not.

    ``probe`` is ``equal`` if a run gave the same bits as the original model, else the reason why
    there was no run. ``is_lasting``: the reason holds for this model and recipe, not just for now.
    """

    reason: str = ""
    message: str = ""
    is_lasting: bool = True
    probe: str = ""
