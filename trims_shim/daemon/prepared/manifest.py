"""What is written down beside a prepared model, and instead of one that cannot be prepared.

Owns the form of ``entry.json`` and of refusals: JSON objects of the dataclasses here, and of what
they hold. Pure. What is read back was perhaps damaged or written by another version, so every field
is checked; anything odd is CorruptFile, and its reader starts afresh.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from dataclasses import dataclass
from typing import Any, TypeVar

from trims_shim.daemon.prepared.events import Content, Known
from trims_shim.errors import CorruptFile
from trims_shim.specs import Identity
from trims_shim.wire.messages import SessionRecipe

__all__ = ["FileStamp", "Manifest", "RefusalRecord", "parse", "render", "with_source"]

_SOURCES_LIMIT = 8
_Record = TypeVar("_Record")


@dataclass(frozen=True, slots=True)
class FileStamp:
    """What tells a file from any other in one file system; device numbers may change at a boot."""

    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, identity: Identity) -> FileStamp:
        """The stamp in an identity."""
        return cls(identity.inode, identity.size_bytes, identity.mtime_ns, identity.ctime_ns)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A prepared model.

    ``layout`` is :data:`trims_shim.daemon.prepared.key.LAYOUT_VERSION`, ``sources`` are files that
    are known to hold its model. ``weights`` is None where there is no such file.
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


@dataclass(frozen=True, slots=True)
class RefusalRecord:
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


_WithSources = TypeVar("_WithSources", bound=Manifest | RefusalRecord)


def render(record: Manifest | RefusalRecord) -> bytes:
    """As it is written."""
    return json.dumps(dataclasses.asdict(record), indent=1).encode() + b"\n"


def parse(kind: type[_Record], data: bytes) -> _Record:
    """As it was written. Raises CorruptFile."""
    try:
        value = json.loads(data)
    # RecursionError: brackets without end.
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{kind.__name__}: {error}") from error
    record: _Record = _checked(kind, value, kind.__name__)
    return record


def with_source(record: _WithSources, known: Known) -> _WithSources:
    """The same with one more source, the newest first; the oldest of too many is forgotten."""
    others = [each for each in record.sources if _place(each) != _place(known)]
    return dataclasses.replace(record, sources=(known, *others)[:_SOURCES_LIMIT])


def _place(known: Known) -> tuple[int, int, str]:
    """A file that was replaced in place has another identity; its old one will not come back."""
    return known.identity.device, known.identity.inode, known.directory


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind)}


def _checked(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if type(None) in arguments:
        return None if value is None else _checked(arguments[0], value, where)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and type(value) is dict:
        try:
            return hint(
                **{
                    name: _checked(kind, value[name], f"{where}.{name}")
                    for name, kind in _fields(hint).items()
                }
            )
        except KeyError as error:
            raise CorruptFile(f"{where} has no {error}") from error
    if origin is tuple and type(value) is list:
        if arguments[-1] is Ellipsis:
            return tuple(_checked(arguments[0], each, where) for each in value)
        if len(arguments) == len(value):
            pairs = zip(arguments, value, strict=True)
            return tuple(_checked(each, item, where) for each, item in pairs)
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise CorruptFile(f"{where}: {value!r:.60} where {hint} is expected")
