"""Moves the external data of an optimised ONNX model to where onnxruntime can use it in place.

Theory of operation. onnxruntime (1.21 and later) saves an optimised model with
``session.optimized_model_external_initializers_file_name`` as a pair of files: the model, and one
file that holds the bytes of every initializer above a size. With
``session.save_external_prepacked_constant_initializers`` each initializer in that file is followed
by what the kernels made of it if it is constant (weights packed for matrix products, convolutions,
...). Besides ``location``, ``offset`` and ``length``, the tensor's ``external_data`` then has an
entry for each kernel that packed it::

    prepacked_<number>   <key>|<offset>;<length>;<checksum>[|<offset>;<length>;<checksum>...]

``key`` is the operator and a hash of the packed bytes. There is one blob for each buffer that the
kernel keeps, of no bytes if that buffer is absent. The checksum is always 0. onnxruntime maps the
file and gives kernels pointers into it, but aligns only large blobs: the others follow without
padding, and kernels that load aligned vectors then crash.

:func:`relayout` keeps the order of the data and begins each piece at a multiple of 64 bytes (a
cache line, the widest vector), from 64 KiB on at a page. It rewrites offsets in the model, and the
lengths of all messages around them. Nothing else changes: fields keep their order, and bytes that
are not external data are copied as they are. The same input gives the same output.

Pure: the data file is not read here; the copies to make are returned. The form is checked, not
trusted: every span lies inside the file, spans are equal or do not overlap, lengths agree with
dtypes and shapes, and there is one file. Any other form is a FormatError.

Source: ``ExternalDataInfo`` of onnxruntime (core/framework/tensor_external_data_info.cc); files of
1.21, 1.24 and 1.31 looked at. The two earlier versions list initializers of sub-graphs both inside
and outside, and do not load such models again, moved or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trims_shim.errors import CorruptFile, TruncatedFile, UnsupportedFormat
from trims_shim.formats.onnx_structure import (
    ENTRY_KEY,
    ENTRY_VALUE,
    TENSOR_EXTERNAL_DATA,
    Message,
    TensorHeader,
    read_children,
    read_external,
    read_number,
    read_tensor,
    size_of,
)
from trims_shim.formats.protobuf import MAX_MESSAGE_BYTES, WireReader, encode_field
from trims_shim.specs import Span

__all__ = [
    "ALIGNMENT_BYTES",
    "PAGE_BYTES",
    "PREPACKED",
    "Copy",
    "Relayout",
    "external_tensors",
    "relayout",
]

ALIGNMENT_BYTES = 64
PAGE_BYTES = 4096
_LARGE_BYTES = 64 << 10
"""From this size on the padding to a page does not matter."""
PREPACKED = "prepacked_"
"""The key of an entry is this and a number."""
_PLAIN_KEYS = frozenset({"location", "offset", "length"})


@dataclass(frozen=True, slots=True)
class Copy:
    """Bytes of the data file that go to another offset of the new one."""

    source_offset: int
    target_offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Relayout:
    """The new model, and how its data file of ``size_bytes`` comes about.

    ``copies`` are in order of both offsets and do not overlap; the gaps between them are zero.
    """

    model: bytes
    copies: tuple[Copy, ...]
    size_bytes: int


def relayout(model: Any, *, data_size_bytes: int, location: str) -> Relayout:
    """``model`` (a buffer) with its external data aligned, in a file that it calls ``location``.

    ``data_size_bytes`` is the size of the data file that onnxruntime wrote beside it. A model
    without external data stays as it is. Raises TruncatedFile, CorruptFile or UnsupportedFormat.
    """
    with WireReader(model) as reader:
        spans: set[Span] = set()
        locations = set()
        for tensor in external_tensors(reader, Message.MODEL, 0, len(reader.view), depth=0):
            locations.add(read_external(tensor).location)
            spans.update(_spans_of(tensor))
        if len(locations) > 1:
            raise UnsupportedFormat(f"external data in {len(locations)} files")
        copies, size = _place(spans, data_size_bytes)
        targets = {(each.source_offset, each.size_bytes): each.target_offset for each in copies}
        writer = _Writer(reader, targets, location)
        moved = writer.rewrite(Message.MODEL, 0, len(reader.view), depth=0)
        result = reader.copy(0, len(reader.view)) if moved is None else moved
    if len(result) > MAX_MESSAGE_BYTES:
        raise UnsupportedFormat(f"the model would have {len(result)} bytes, more than 2 GiB")
    return Relayout(result, copies, size)


def external_tensors(
    reader: WireReader, message: Message, start: int, end: int, *, depth: int
) -> Iterator[TensorHeader]:
    """All external tensors in the message in ``[start, end)``, which is inside ``depth`` others."""
    for _, child, first, stop in read_children(reader, message, start, end, depth=depth):
        if child is Message.TENSOR:
            tensor = read_tensor(reader, first, stop)
            if tensor.is_external:
                yield tensor
        elif child is not None:
            yield from external_tensors(reader, child, first, stop, depth=depth + 1)


def _spans_of(tensor: TensorHeader) -> list[Span]:
    """All spans of a tensor in the data file, after a check of its form."""
    if tensor.raw is not None:
        raise UnsupportedFormat(f"tensor {tensor.name!r}: its data is both inside and external")
    data = read_external(tensor)
    expected = size_of(tensor)
    if expected is None or data.size_bytes is None:
        raise UnsupportedFormat(f"tensor {tensor.name!r}: external, of dtype {tensor.dtype}")
    if data.size_bytes != expected:
        raise CorruptFile(
            f"tensor {tensor.name!r}: {data.size_bytes} bytes, but dtype {tensor.dtype} of shape "
            f"{list(tensor.shape)} takes {expected}"
        )
    if "offset" not in dict(tensor.entries):
        raise UnsupportedFormat(f"tensor {tensor.name!r}: external data without an offset")
    spans = [Span(data.offset_bytes, data.size_bytes)]
    for key, value in tensor.entries:
        if key.startswith(PREPACKED):
            spans.extend(_read_prepacked(tensor, value)[1])
        elif key not in _PLAIN_KEYS:
            raise UnsupportedFormat(f"tensor {tensor.name!r}: external data has a {key[:64]!r}")
    return spans


def _read_prepacked(tensor: TensorHeader, value: str) -> tuple[str, list[Span]]:
    """(key, blobs) of one entry."""
    key, *blobs = value.split("|")
    if not key or not blobs:
        raise UnsupportedFormat(f"tensor {tensor.name!r}: prepacked as {value[:64]!r}")
    spans = []
    for blob in blobs:
        offset, _, rest = blob.partition(";")
        size, _, checksum = rest.partition(";")
        if checksum != "0":
            raise UnsupportedFormat(f"tensor {tensor.name!r}: prepacked blob {blob[:64]!r}")
        spans.append(Span(read_number(tensor, offset), read_number(tensor, size)))
    return key, spans


def _place(spans: Iterable[Span], data_size_bytes: int) -> tuple[tuple[Copy, ...], int]:
    """(copies, size of the new file)."""
    copies = []
    source_end = target_end = 0
    for span in sorted(spans, key=lambda each: (each.offset_bytes, each.size_bytes)):
        if span.end_bytes > data_size_bytes:
            raise TruncatedFile(
                f"external data of {span.size_bytes} bytes at {span.offset_bytes}: "
                f"its file has {data_size_bytes}"
            )
        if not span.size_bytes:
            continue
        if span.offset_bytes < source_end:
            raise CorruptFile(
                f"external data of {span.size_bytes} bytes at {span.offset_bytes} overlaps what "
                f"ends at {source_end}"
            )
        alignment = PAGE_BYTES if span.size_bytes >= _LARGE_BYTES else ALIGNMENT_BYTES
        target = -(-target_end // alignment) * alignment
        copies.append(Copy(span.offset_bytes, target, span.size_bytes))
        source_end, target_end = span.end_bytes, target + span.size_bytes
    return tuple(copies), target_end


class _Writer:
    """Rewrites the messages of a model in which something moves."""

    def __init__(
        self, reader: WireReader, targets: Mapping[tuple[int, int], int], location: str
    ) -> None:
        self._reader = reader
        self._targets = targets
        self._location = location

    def rewrite(self, message: Message, start: int, end: int, *, depth: int) -> bytes | None:
        """The message in ``[start, end)``; None if nothing in it changes."""
        reader = self._reader
        parts: list[bytes] = []
        kept = position = start
        for key, child, first, stop in read_children(reader, message, start, end, depth=depth):
            if child is not None:
                if child is Message.TENSOR:
                    content = self._rewrite_tensor(first, stop)
                else:
                    content = self.rewrite(child, first, stop, depth=depth + 1)
                if content is not None:
                    parts += (reader.copy(kept, position), encode_field(key, content))
                    kept = stop
            position = stop
        if not parts:
            return None
        parts.append(reader.copy(kept, end))
        return b"".join(parts)

    def _rewrite_tensor(self, start: int, end: int) -> bytes | None:
        tensor = read_tensor(self._reader, start, end)
        if not tensor.is_external:
            return None
        entries = iter(self._moved_entries(tensor))
        parts = []
        position = start
        for key, _, stop in self._reader.fields(start, end):
            if key == TENSOR_EXTERNAL_DATA:
                name, value = next(entries)
                content = encode_field(ENTRY_KEY, name.encode())
                content += encode_field(ENTRY_VALUE, value.encode())
                parts.append(encode_field(key, content))
            else:
                parts.append(self._reader.copy(position, stop))
            position = stop
        return b"".join(parts)

    def _moved_entries(self, tensor: TensorHeader) -> Iterator[tuple[str, str]]:
        data = read_external(tensor)
        for key, value in tensor.entries:
            if key == "location":
                yield key, self._location
            elif key == "offset":
                yield key, str(self._target(data.offset_bytes, data.size_bytes or 0))
            elif key == "length":
                yield key, value
            else:
                prepacked, blobs = _read_prepacked(tensor, value)
                places = (
                    f"{self._target(each.offset_bytes, each.size_bytes)};{each.size_bytes};0"
                    for each in blobs
                )
                yield key, "|".join((prepacked, *places))

    def _target(self, offset_bytes: int, size_bytes: int) -> int:
        """Where bytes go; no bytes are at the start of the file, even of an empty one."""
        return self._targets[offset_bytes, size_bytes] if size_bytes else 0
