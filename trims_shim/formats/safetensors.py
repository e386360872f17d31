"""The header of a safetensors file, checked at least as strictly as the safetensors crate does.

Owns the layout only; no tensor is made here and the library is not imported. The rules are those of
crate 0.8 (``SafeTensors::read_metadata`` and ``Metadata::validate``), one error for each way to be
wrong. They are stricter about what the crate never writes: duplicate keys, unknown fields, JSON
escapes of half a surrogate pair. Such a file is left to the crate itself.

Invariants of what is returned: spans are absolute in the file, in order of offset, without
gap or overlap, and end with the file; each is as long as its dtype and shape say.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from trims_shim.errors import CorruptFile, TruncatedFile, UnsupportedFormat
from trims_shim.specs import Record, Span

__all__ = ["DTYPE_BITS", "read_header"]

DTYPE_BITS: Mapping[str, int] = {
    "BF16": 16,
    "BOOL": 8,
    "C64": 64,
    "F16": 16,
    "F32": 32,
    "F4": 4,
    "F64": 64,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2": 8,
    "F8_E5M2FNUZ": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "I32": 32,
    "I64": 64,
    "I8": 8,
    "U16": 16,
    "U32": 32,
    "U64": 64,
    "U8": 8,
}
"""Every dtype of the crate, with the bits of one element."""

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""``MAX_HEADER_SIZE`` of the crate."""
_MAX_COUNT = (1 << 64) - 1
"""The crate counts in ``usize``."""
_FIELDS = frozenset({"dtype", "shape", "data_offsets"})
_METADATA = "__metadata__"
_NEGATIVE_ZERO = re.compile(r"[\[,:][ \t\r\n]*-0")


def read_header(buffer: Any) -> tuple[Record, ...]:
    """The tensors of the file that fills ``buffer`` (contiguous).

    Raises TruncatedFile, CorruptFile or UnsupportedFormat.
    """
    view = memoryview(buffer).cast("B")
    text, start = _read_text(view)
    tensors = _parse(text)
    _check_metadata(tensors.pop(_METADATA, None))
    records = [_read_record(name, entry, start) for name, entry in tensors.items()]
    records.sort(key=_by_offset)
    end = start
    for record in records:
        if record.span.offset_bytes != end:
            raise CorruptFile(
                f"tensor {record.name!r}: begins at {record.span.offset_bytes}, after a gap or an "
                f"overlap: the one before ends at {end}"
            )
        end = record.span.end_bytes
    if end > len(view):
        raise TruncatedFile(f"tensors end at {end}, the file at {len(view)}")
    if end < len(view):
        raise CorruptFile(f"{len(view) - end} bytes after the last tensor")
    return tuple(records)


def _by_offset(record: Record) -> tuple[int, int]:
    return record.span.offset_bytes, record.span.size_bytes


def _read_text(view: memoryview) -> tuple[str, int]:
    """The header as text, and where it ends."""
    if len(view) < _LENGTH_BYTES:
        raise TruncatedFile(f"file of {len(view)} bytes: shorter than its header's length")
    length = int.from_bytes(bytes(view[:_LENGTH_BYTES]), "little")
    if length > _MAX_HEADER_BYTES:
        raise UnsupportedFormat(f"header of {length} bytes: more than {_MAX_HEADER_BYTES}")
    end = _LENGTH_BYTES + length
    if end > len(view):
        raise TruncatedFile(f"header of {length} bytes: the file has {len(view)}")
    try:
        text = str(view[_LENGTH_BYTES:end], "utf-8")
    except UnicodeDecodeError as error:
        raise CorruptFile(f"header is not UTF-8: {error}") from error
    if not text.startswith("{"):
        raise UnsupportedFormat(f"header begins with {text[:1]!r}, not with a brace")
    return text, end


def _parse(text: str) -> dict[str, Any]:
    # json reads -0 as the integer 0; the crate takes it for a float. In a name it is harmless, but
    # telling the two apart is not worth it.
    if "-0" in text and _NEGATIVE_ZERO.search(text):
        raise UnsupportedFormat("header may hold a negative zero")
    try:
        # It begins with a brace, so it is no other value.
        parsed: dict[str, Any] = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
        if "\\u" in text:
            json.dumps(parsed, ensure_ascii=False).encode()
    # ValueError: also an integer of more digits than Python converts, and half a surrogate pair
    # in an escape. RecursionError: nesting.
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"header is not JSON: {error}") from error
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        names = Counter(name for name, _ in pairs)
        repeated = names.most_common(1)[0][0]
        raise CorruptFile(f"header has {repeated!r} twice")
    return unique


def _refuse_constant(name: str) -> NoReturn:
    raise CorruptFile(f"header is not JSON: {name}")


def _check_metadata(value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CorruptFile(f"{_METADATA} is not a map from strings to strings")


def _read_record(name: str, entry: Any, start: int) -> Record:
    if not isinstance(entry, dict):
        raise UnsupportedFormat(f"tensor {name!r}: described by other than an object")
    if entry.keys() != _FIELDS:
        if missing := sorted(_FIELDS - entry.keys()):
            raise CorruptFile(f"tensor {name!r}: {', '.join(missing)} missing")
        raise UnsupportedFormat(f"tensor {name!r}: has unknown fields")
    dtype = entry["dtype"]
    bits = DTYPE_BITS.get(dtype) if type(dtype) is str else None
    if bits is None:
        raise UnsupportedFormat(f"tensor {name!r}: dtype {reprlib.repr(dtype)} is unknown")
    shape = _read_counts(name, "shape", entry["shape"])
    offsets = _read_counts(name, "data_offsets", entry["data_offsets"])
    if len(offsets) != 2:
        raise CorruptFile(f"tensor {name!r}: {len(offsets)} data_offsets")
    begin, end = offsets
    if end < begin:
        raise CorruptFile(f"tensor {name!r}: ends at {end}, before it begins at {begin}")
    size_bytes = _size_bytes(name, dtype, bits, shape)
    if end - begin != size_bytes:
        raise CorruptFile(
            f"tensor {name!r}: {end - begin} bytes, but {dtype} of shape {shape} has {size_bytes}"
        )
    return Record(name, Span(start + begin, size_bytes), dtype, shape)


def _read_counts(name: str, field: str, values: Any) -> tuple[int, ...]:
    if type(values) is not list:
        raise CorruptFile(f"tensor {name!r}: {field} is not a list")
    for value in values:
        if type(value) is not int or not 0 <= value <= _MAX_COUNT:
            raise CorruptFile(f"tensor {name!r}: {field} holds {reprlib.repr(value)}")
    return tuple(values)


def _size_bytes(name: str, dtype: str, bits: int, shape: tuple[int, ...]) -> int:
    """Overflow is checked factor by factor, as the crate multiplies: a later zero is no excuse."""
    count = 1
    for dimension in (*shape, bits):
        count *= dimension
        if count > _MAX_COUNT:
            raise CorruptFile(f"tensor {name!r}: {dtype} of shape {shape} overflows")
    if count % 8:
        raise CorruptFile(f"tensor {name!r}: {count} bits are not whole bytes")
    return count // 8
