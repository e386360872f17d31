"""The directory at the end of a prepared model's weights, of weights that a device can hold.

onnxruntime reads its external weights by offset and looks at nothing else, so what a device tier
has to know of them can stand behind them::

    weights ... | JSON | its length, 8 bytes little-endian | MAGIC, 16 bytes

The JSON is one object: name of an initializer -> [dtype, shape, offset in bytes]. It lists only
initializers that a session of the model's recipe was seen to use where they are given to it. The
rest of the file (small ones, ones that stay in host memory) is outline.

Pure. Invariants of a directory that is returned: spans lie in the file before the directory, in
order of offset and without overlap, each as long as its dtype and shape say; none is empty.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from trims_shim.errors import CorruptFile, TruncatedFile, UnsupportedFormat
from trims_shim.specs import Record, Span

__all__ = [
    "DTYPES",
    "ELEMENT_BYTES",
    "MAGIC",
    "directory_of",
    "has_directory",
    "read_directory",
]

MAGIC = b"TRIMS-weights-1\n"
ELEMENT_BYTES: Mapping[str, int] = {
    "BFLOAT16": 2,
    "DOUBLE": 8,
    "FLOAT": 4,
    "FLOAT16": 2,
    "INT16": 2,
    "INT32": 4,
    "INT64": 8,
    "INT8": 1,
    "UINT16": 2,
    "UINT32": 4,
    "UINT64": 8,
    "UINT8": 1,
}
"""By name of ``TensorProto.DataType``; exactly those that DLPack can describe to onnxruntime."""
DTYPES: Mapping[int, str] = {
    1: "FLOAT",
    2: "UINT8",
    3: "INT8",
    4: "UINT16",
    5: "INT16",
    6: "INT32",
    7: "INT64",
    10: "FLOAT16",
    11: "DOUBLE",
    12: "UINT32",
    13: "UINT64",
    16: "BFLOAT16",
}
"""The numbers of these names."""

_LENGTH_BYTES = 8
_FOOTER_BYTES = _LENGTH_BYTES + len(MAGIC)
_LIMIT_BYTES = 100_000_000
"""As for the header of a safetensors file."""
_MAX_COUNT = (1 << 63) - 1


def directory_of(records: Iterable[Record]) -> bytes:
    """The bytes to append to the weights that ``records`` lie in; equal for equal records."""
    ordered = sorted(records, key=lambda each: each.span.offset_bytes)
    entries = {each.name: [each.dtype, each.shape, each.span.offset_bytes] for each in ordered}
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + len(text).to_bytes(_LENGTH_BYTES, "little") + MAGIC


def has_directory(buffer: Any) -> bool:
    """Whether the file ends as one with a directory does."""
    view = memoryview(buffer)
    return len(view) >= _FOOTER_BYTES and bytes(view[-len(MAGIC) :]) == MAGIC


def read_directory(buffer: Any) -> tuple[Record, ...]:
    """The listed initializers of the file (or its outline) that fills ``buffer``.

    Raises TruncatedFile, CorruptFile or UnsupportedFormat.
    """
    view = memoryview(buffer)
    if not has_directory(view):
        raise UnsupportedFormat("no directory of weights at the end")
    end = len(view) - _FOOTER_BYTES
    length = int.from_bytes(bytes(view[end : end + _LENGTH_BYTES]), "little")
    if length > _LIMIT_BYTES:
        raise UnsupportedFormat(f"directory of {length} bytes: more than {_LIMIT_BYTES}")
    if length > end:
        raise TruncatedFile(f"directory of {length} bytes: the file has {end} before it")
    data_bytes = end - length
    records = [_read_record(*each) for each in _parse(bytes(view[data_bytes:end])).items()]
    position = 0
    for record in records:
        if record.span.offset_bytes < position:
            raise CorruptFile(f"initializer {record.name!r}: overlaps, or is out of order")
        position = record.span.end_bytes
    if position > data_bytes:
        raise TruncatedFile(f"initializers end at {position}, the weights at {data_bytes}")
    return tuple(records)


def _parse(text: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=_unique)
    # ValueError: also bad UTF-8, or an integer of too many digits. RecursionError: nesting.
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"directory is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise CorruptFile("directory is not a JSON object")
    return parsed


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise CorruptFile("directory has a name twice")
    return unique


def _read_record(name: str, entry: Any) -> Record:
    if type(entry) is not list or len(entry) != 3:
        raise CorruptFile(f"initializer {name!r}: not described by three values")
    dtype, shape, offset = entry
    element_bytes = ELEMENT_BYTES.get(dtype) if type(dtype) is str else None
    if element_bytes is None:
        raise UnsupportedFormat(f"initializer {name!r}: dtype {reprlib.repr(dtype)} is unknown")
    if type(shape) is not list or not all(_is_count(each) for each in (*shape, offset)):
        raise CorruptFile(f"initializer {name!r}: a shape or offset that is none")
    size_bytes = element_bytes
    for length in shape:
        size_bytes *= length
        if not 0 < size_bytes <= _MAX_COUNT:
            raise CorruptFile(f"initializer {name!r}: {dtype} of shape {shape} is empty or huge")
    return Record(name, Span(offset, size_bytes), dtype, tuple(shape))


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_COUNT
