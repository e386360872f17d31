"""The wire format of Protocol Buffers: where a message's fields lie, and how one is written.

Owns the encoding only, and knows no message: ``formats.onnx_structure`` does. Pure: the buffer is
read in place, and a field's content is not touched before a caller asks for it.

A message is a sequence of fields, each a key (field number and wire type in a varint) followed by a
varint, four or eight bytes, or a length and as many bytes; a nested message is such bytes. The
reader walks keys and lengths. It is at least as strict as protobuf's own parsers: a field ends
inside its message, a number has at most 64 bits, a file less than 2 GiB. Groups (wire types 3 and
4, deprecated before ONNX was designed) are not read. The number of fields that one reader walks is
bounded, and with it the time that a hostile file can take.

Source: https://protobuf.dev/programming-guides/encoding/ (2025).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from trims_shim.errors import CorruptFile, TruncatedFile, UnsupportedFormat

__all__ = [
    "MAX_DEPTH",
    "MAX_MESSAGE_BYTES",
    "WireReader",
    "delimited",
    "encode_field",
    "encode_varint",
    "signed32",
    "signed64",
    "varint",
]

MAX_MESSAGE_BYTES = (1 << 31) - 1
"""No parser of protobuf takes a longer message or field."""
MAX_DEPTH = 100
"""Messages inside messages; the default limit of protobuf's parsers."""
_MAX_FIELDS = 1 << 24
"""A graph of 50,000 nodes has about a million; this many are walked in some ten seconds."""
_MESSAGE_FIELDS = 4
"""The work of an empty message, in fields."""
_MAX_NAME_BYTES = 1 << 16
"""The limit of anything kept as text: names, paths, lists of a few numbers."""

_VARINT = 0
_DELIMITED = 2
_FIXED_BYTES = {1: 8, 5: 4}
_GROUPS = (3, 4)
_LONG_VARINT_BYTES = 10
_KEY_BYTES = 5
_FIRST_KEY = 8
"""Field numbers begin at 1."""


def varint(number: int) -> int:
    """Key of the field ``number`` when it is a varint."""
    return number << 3 | _VARINT


def delimited(number: int) -> int:
    """Key of the field ``number`` when it is a string, bytes, a message, or packed numbers."""
    return number << 3 | _DELIMITED


def signed32(value: int) -> int:
    """A varint's value as an ``int32`` or an enum: the lower half of it."""
    return ((value & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000


def signed64(value: int) -> int:
    """A varint's value as an ``int64``."""
    return (value ^ (1 << 63)) - (1 << 63)


def encode_varint(value: int) -> bytes:
    """A number from 0 to 2^64-1 in its shortest form."""
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_field(key: int, content: bytes) -> bytes:
    """A field of the key that :func:`delimited` gives."""
    return encode_varint(key) + encode_varint(len(content)) + content


class WireReader:
    """Reads the messages in one contiguous buffer, which it does not copy.

    A context manager: afterwards the buffer is free and a mapping can be closed, even while an
    error's traceback is held. Raises UnsupportedFormat for a buffer of 2 GiB and more.
    """

    __slots__ = ("_fields_left", "view")

    def __init__(self, buffer: Any, *, max_fields: int = _MAX_FIELDS) -> None:
        with memoryview(buffer) as view:
            if view.nbytes > MAX_MESSAGE_BYTES:
                raise UnsupportedFormat(f"{view.nbytes} bytes: protobuf's messages are below 2 GiB")
            self.view = view.cast("B")
        self._fields_left = max_fields

    def __enter__(self) -> WireReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.view.release()

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """The fields of the message in ``[start, end)``: (key, first, stop), in order.

        ``first`` is where the content begins, or the value of a varint. The field ends, and the
        next one begins, at ``stop``. Raises TruncatedFile, CorruptFile or UnsupportedFormat.
        """
        view = self.view
        position = start
        self._fields_left -= _MESSAGE_FIELDS
        while position < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise UnsupportedFormat("more fields than any model is known to have")
            key = view[position]
            position += 1
            if key > 0x7F:
                key, position = self._read_varint(position - 1, end, _KEY_BYTES)
            wire = key & 7
            if wire == _DELIMITED and key >= _FIRST_KEY:
                if position < end and (size := view[position]) <= 0x7F:
                    position += 1
                else:
                    size, position = self._read_varint(position, end, _LONG_VARINT_BYTES)
                first = position
                position += size
                if position > end:
                    self._refuse_size(first, size, end)
                yield key, first, position
            elif wire == _VARINT and key >= _FIRST_KEY:
                if position < end and (value := view[position]) <= 0x7F:
                    position += 1
                else:
                    value, position = self._read_varint(position, end, _LONG_VARINT_BYTES)
                yield key, value, position
            else:
                first = position
                position += self._size_of_fixed(key, position)
                if position > end:
                    self._refuse_size(first, position - first, end)
                yield key, first, position

    def varints(self, start: int, end: int) -> Iterator[int]:
        """The numbers of a packed field. Raises TruncatedFile or CorruptFile."""
        while start < end:
            value, start = self._read_varint(start, end, _LONG_VARINT_BYTES)
            yield value

    def copy(self, start: int, end: int) -> bytes:
        """A copy of ``[start, end)``."""
        return bytes(self.view[start:end])

    def name(self, start: int, end: int) -> bytes:
        """A copy of ``[start, end)``, a name. Raises UnsupportedFormat for more than 64 KiB."""
        if end - start > _MAX_NAME_BYTES:
            raise UnsupportedFormat(f"a name of {end - start} bytes at {start}")
        return bytes(self.view[start:end])

    def name_in(self, start: int, end: int, wanted: int) -> bytes:
        """The name in the field with this key of a message: the last one, as protobuf has it.

        Empty if there is none. Raises as :meth:`fields` and :meth:`name`.
        """
        found = b""
        for key, first, stop in self.fields(start, end):
            if key == wanted:
                found = self.name(first, stop)
        return found

    def text(self, start: int, end: int) -> str:
        """A name as text. Raises UnsupportedFormat also if it is not UTF-8."""
        try:
            return self.name(start, end).decode()
        except UnicodeDecodeError as error:
            raise UnsupportedFormat(f"a name at {start} is not UTF-8: {error.reason}") from error

    def _read_varint(self, start: int, end: int, max_bytes: int) -> tuple[int, int]:
        """(value, where it ends)."""
        view = self.view
        value = 0
        for count in range(min(end - start, max_bytes)):
            byte = view[start + count]
            value |= (byte & 0x7F) << 7 * count
            if byte <= 0x7F:
                if value >> (32 if max_bytes == _KEY_BYTES else 64):
                    raise CorruptFile(f"number at {start}: {value:#x} is out of range")
                return value, start + count + 1
        if end - start < max_bytes:
            self._refuse_end(f"number at {start}", end)
        raise CorruptFile(f"number at {start}: does not end after {max_bytes} bytes")

    def _size_of_fixed(self, key: int, position: int) -> int:
        wire = key & 7
        if key < _FIRST_KEY:
            raise CorruptFile(f"field before {position}: has the number 0")
        if wire in _GROUPS:
            raise UnsupportedFormat(f"field before {position}: is a group")
        if wire not in _FIXED_BYTES:
            raise CorruptFile(f"field before {position}: wire type {wire} does not exist")
        return _FIXED_BYTES[wire]

    def _refuse_size(self, first: int, size: int, end: int) -> NoReturn:
        if size > MAX_MESSAGE_BYTES:
            raise UnsupportedFormat(f"field at {first}: {size} bytes, more than 2 GiB")
        self._refuse_end(f"field of {size} bytes at {first}", end)

    def _refuse_end(self, what: str, end: int) -> NoReturn:
        if end == len(self.view):
            raise TruncatedFile(f"{what}: the file ends at {end}")
        raise CorruptFile(f"{what}: its message ends at {end}")
