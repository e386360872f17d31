"""Messages to bytes and back: msgpack maps, every field checked on the way in.

Pure. A message travels as ``{"verb": <class name>, **fields}``; control messages carry ``id`` and
``token`` beside it (:class:`Envelope`). Decoding never builds anything but the named tuples of
:mod:`trims_shim.wire.messages`, :mod:`~trims_shim.wire.admin` and :mod:`~trims_shim.wire.duties`,
and its cost is bounded by the length limit. Programs that load models never need the last two; the
first verb that is not in ``messages`` imports them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import types
import typing
from typing import Any

import msgpack

from trims_shim.errors import MalformedMessage, MessageTooLarge, UnknownMessage
from trims_shim.late_imports import ensure_imported
from trims_shim.wire import messages

__all__ = [
    "Envelope",
    "checked",
    "decode",
    "decode_envelope",
    "encode",
    "encode_envelope",
    "plain",
    "prepare",
]

_TOKEN_BYTES_LIMIT = 64
_FIELDS: dict[Any, tuple[tuple[str, Any], ...]] = {}
_PLAIN_TYPES = (int, float, bool, str, bytes)
_Kind = typing.TypeVar("_Kind")


class Envelope(typing.NamedTuple):
    """A control message with its routing: the sender's request number and session token."""

    request_id: int
    token: bytes
    message: Any


def encode(message: Any) -> bytes:
    """Encode a handover message or event."""
    return _pack(_to_map(message))


def decode(data: bytes, *, limit_bytes: int = messages.HANDOVER_PACKET_LIMIT_BYTES) -> Any:
    """Decode the message in a handover packet.

    Raises MessageTooLarge, UnknownMessage (verb) or MalformedMessage (anything else).
    """
    return _from_map(_unpack(data, limit_bytes))


def encode_envelope(envelope: Envelope) -> bytes:
    """Encode a control message."""
    body = _to_map(envelope.message)
    body["id"] = envelope.request_id
    body["token"] = envelope.token
    return _pack(body)


def decode_envelope(
    data: bytes | memoryview, *, limit_bytes: int = messages.CONTROL_MESSAGE_LIMIT_BYTES
) -> Envelope:
    """Decode the message in a control frame; raises as :func:`decode` does."""
    body = _unpack(data, limit_bytes)
    request_id, token = body.get("id"), body.get("token", b"")
    if type(request_id) is not int or type(token) is not bytes or len(token) > _TOKEN_BYTES_LIMIT:
        raise MalformedMessage("control message without a valid id and token")
    return Envelope(request_id, token, _from_map(body))


def plain(value: Any) -> Any:
    """Named tuples and dataclasses as maps of their fields, tuples as lists; all else as it is."""
    if type(value) in _PLAIN_TYPES:
        return value
    if _has_fields(type(value)):
        return {name: plain(getattr(value, name)) for name, _ in _fields(type(value))}
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def checked(kind: type[_Kind], value: Any) -> _Kind:
    """Make a named tuple or dataclass from :func:`plain` data. Raises MalformedMessage."""
    built: _Kind = _checked(kind, value, kind.__name__)
    return built


def prepare() -> None:
    """Inspect the fields of all messages of a load now, so that the first load does not have to."""
    for kind in _kinds(messages).values():
        _fields(kind)


def _pack(body: dict[str, Any]) -> bytes:
    # A path may hold bytes that are not UTF-8 (surrogates in Python); they are sent as escapes.
    packed: bytes = msgpack.packb(body, use_bin_type=True, unicode_errors="backslashreplace")
    return packed


def _unpack(data: bytes | memoryview, limit_bytes: int) -> dict[str, Any]:
    if len(data) > limit_bytes:
        raise MessageTooLarge(f"message of {len(data)} bytes; the limit is {limit_bytes}")
    try:
        _check_complete(data)
        body = msgpack.unpackb(data, raw=False, strict_map_key=True)
    # msgpack raises its own errors, ValueError, TypeError and UnicodeDecodeError: all malformed.
    except Exception as error:
        raise MalformedMessage(f"message of {len(data)} bytes is not msgpack: {error}") from error
    if type(body) is not dict:
        raise MalformedMessage(f"message is a {type(body).__name__}, not a map")
    return body


def _check_complete(data: bytes | memoryview) -> None:
    """Raise msgpack's error for a message that ends too early, at a small cost.

    msgpack makes room for as many items as an array claims to have, before it reads them: a
    thousand arrays within each other, each as long as the packet, take tens of milliseconds.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    unpacker.skip()  # builds nothing


def _to_map(message: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"verb": type(message).__name__}
    for name, _ in _fields(type(message)):
        body[name] = plain(getattr(message, name))
    return body


def _from_map(body: dict[str, Any]) -> Any:
    verb = body.get("verb")
    if not isinstance(verb, str):  # It is not shown: lists can nest deeper than repr() can follow.
        raise UnknownMessage(f"message of the kind {type(verb).__name__}, not a name")
    kind = _kind(verb)
    if kind is None:
        raise UnknownMessage(f"unknown message {verb!r:.60}; is the other side newer?")
    return _build(kind, body)


def _kind(verb: str) -> Any:
    return _kinds(messages).get(verb) or _rare_kinds().get(verb)


@functools.cache
def _kinds(module: types.ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if _has_fields(value)}


@functools.cache
def _rare_kinds() -> dict[str, Any]:
    kinds: dict[str, Any] = {}
    for name in ("trims_shim.wire.admin", "trims_shim.wire.duties"):
        ensure_imported(name)
        kinds.update(_kinds(importlib.import_module(name)))
    return kinds


def _build(kind: Any, body: dict[str, Any]) -> Any:
    values = {}
    for name, hint in _fields(kind):
        if name in body:
            values[name] = _checked(hint, body[name], f"{kind.__name__}.{name}")
    try:
        return kind(**values)
    except TypeError as error:
        raise MalformedMessage(f"{kind.__name__}: {error}") from error


def _checked(hint: Any, value: Any, where: str) -> Any:
    if type(value) is hint:  # of one of the plain types; first, because it is the most frequent
        if hint is int and not -(1 << 63) <= value < 1 << 64:
            raise MalformedMessage(f"{where}: {value} does not fit 64 bits")
        if hint is float and not math.isfinite(value):
            raise MalformedMessage(f"{where}: {value} is no finite number")
        return value
    origin = typing.get_origin(hint)
    if origin is types.UnionType:  # of a type and None
        return None if value is None else _checked(typing.get_args(hint)[0], value, where)
    if _has_fields(hint) and type(value) is dict:
        return _build(hint, value)
    if origin is tuple and type(value) is list:
        items = typing.get_args(hint)
        if items[-1] is Ellipsis:
            return tuple(_checked(items[0], each, where) for each in value)
        if len(items) == len(value):
            pairs = zip(items, value, strict=True)
            return tuple(_checked(item, each, where) for item, each in pairs)
    if origin is dict and type(value) is dict:
        key, item = typing.get_args(hint)
        return {_checked(key, k, where): _checked(item, v, where) for k, v in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    raise MalformedMessage(f"{where}: {type(value).__name__} where {hint} is expected")


def _has_fields(kind: Any) -> bool:
    return hasattr(kind, "_fields") or dataclasses.is_dataclass(kind)


def _fields(kind: Any) -> tuple[tuple[str, Any], ...]:
    found = _FIELDS.get(kind)
    if found is None:
        found = _FIELDS[kind] = tuple(typing.get_type_hints(kind).items())
    return found
