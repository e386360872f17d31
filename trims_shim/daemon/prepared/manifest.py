"""The records of a prepared model, and of a model that cannot be prepared.

Owns the form of ``entry.json`` and of refusals: JSON objects of the named tuples here, and of
those that they hold. Pure. A record may be damaged or written by another version, so every field is
checked; anything odd is CorruptFile, and its reader starts afresh.
"""

from __future__ import annotations

import json
from typing import NamedTuple, TypeVar

from trims_shim.daemon.prepared.values import Content, KeepRefusal, Known
from trims_shim.errors import CorruptFile, MalformedMessage
from trims_shim.specs import Identity
from trims_shim.wire import codec
from trims_shim.wire.messages import SessionRecipe

__all__ = [
    "AnyManifest",
    "FileStamp",
    "Manifest",
    "RefusalRecord",
    "parse",
    "render",
    "with_source",
]

_SOURCES_LIMIT = 8
_Record = TypeVar("_Record")


class FileStamp(NamedTuple):
    """Identifies a file within one file system; device numbers may change at a boot."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, identity: Identity) -> FileStamp:
        """The stamp in an identity."""
        return cls(identity.inode, identity.size_bytes, identity.mtime_ns, identity.ctime_ns)


class Manifest(NamedTuple):
    """A prepared model.

    ``layout`` is :data:`trims_shim.daemon.prepared.key.LAYOUT_VERSION`; ``sources`` are files known
    to hold its model. ``weights`` is None if there is no such file.
    """

    layout: int
    key: str
    package: str
    content: Content
    recipe: SessionRecipe
    probe: str
    made_ns: int
    prepare_ns: int
    names: tuple[str, ...]
    sources: tuple[Known, ...]
    model: FileStamp
    weights: FileStamp | None


class AnyManifest(NamedTuple):
    """What manifests of all layouts have."""

    layout: int


class RefusalRecord(NamedTuple):
    """A model that cannot be prepared, as this version of the package and its settings see it."""

    layout: int
    key: str
    package: str
    reason: str
    message: str
    runtime: str
    refused_ns: int
    names: tuple[str, ...]
    sources: tuple[Known, ...]
    judgement: str = ""

    @property
    def refusal(self) -> KeepRefusal:
        """What the store was told, or will be."""
        return KeepRefusal(self.key, self.reason, self.message, self.runtime, self.names)


_WithSources = TypeVar("_WithSources", Manifest, RefusalRecord)


def render(record: Manifest | RefusalRecord) -> bytes:
    """The bytes to write."""
    return json.dumps(codec.plain(record), indent=1).encode() + b"\n"


def parse(kind: type[_Record], data: bytes) -> _Record:
    """Read a written record. Raises CorruptFile."""
    try:
        record: _Record = codec.checked(kind, json.loads(data))
    # RecursionError: brackets without end.
    except (ValueError, RecursionError, MalformedMessage) as error:
        raise CorruptFile(f"{kind.__name__}: {error}") from error
    return record


def with_source(record: _WithSources, known: Known) -> _WithSources:
    """The same record with one more source, the newest first; beyond a limit the oldest goes."""
    return record._replace(sources=_with(record.sources, known))


def _with(sources: tuple[Known, ...], known: Known) -> tuple[Known, ...]:
    others = [each for each in sources if _place(each) != _place(known)]
    return (known, *others)[:_SOURCES_LIMIT]


def _place(known: Known) -> tuple[int, int, str]:
    """A file that was replaced in place has a new identity, and its old one will not come back."""
    return known.identity.device, known.identity.inode, known.directory
