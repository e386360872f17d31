"""Where each tensor of a model file lies in device memory.

In device memory an image is its tensors only, packed at the alignment that torch's own allocator
gives. The rest of the file (directory, header, pickle) is the *outline*: a file of the same size
with holes where the tensors were. Daemon and clients compute the same layout from the same outline,
and compare fingerprints. An image that is no model file, but all numbers, is laid out as it is
(:func:`layout_of_numbers`).

Pure. Source: DESIGN "Device tier"; alignment: ``kMinBlockSize`` of torch's CUDACachingAllocator.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from trims_shim.errors import FormatError, UnsupportedFormat
from trims_shim.formats.onnx_directory import has_directory, read_directory
from trims_shim.formats.safetensors import read_header
from trims_shim.formats.torch_zip import TorchArchive, read_archive
from trims_shim.specs import Record, Span

__all__ = [
    "ALIGNMENT_BYTES",
    "Contents",
    "DeviceLayout",
    "Placed",
    "layout_of",
    "layout_of_numbers",
    "read_contents",
]

Contents: TypeAlias = TorchArchive | tuple[Record, ...]
"""What a model file, or its outline, says of its tensors: a torch archive, or named records."""

ALIGNMENT_BYTES = 512
"""The alignment of torch's allocator; kernels choose their loops by alignment."""
_ZIP_MAGIC = b"PK\x03\x04"
_ZIP_RECORDS = "data/"


class Placed(NamedTuple):
    """One tensor's bytes: where they are in the file, and where in device memory."""

    source: Span
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """All placed spans, in order of both offsets; ``size_bytes`` of device memory in all.

    ``contents`` is what was read to find them, so that it need not be read again.
    """

    placed: tuple[Placed, ...]
    size_bytes: int
    file_bytes: int
    contents: Contents = field(default=(), repr=False, compare=False)
    _starts: list[int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        starts = [each.source.offset_bytes for each in self.placed]
        object.__setattr__(self, "_starts", starts)

    def find(self, offset_bytes: int, size_bytes: int) -> int | None:
        """Device offset of file bytes ``[offset, offset + size)``; None unless in one tensor."""
        index = bisect_right(self._starts, offset_bytes) - 1
        if index < 0:
            return None
        each = self.placed[index]
        if offset_bytes + size_bytes > each.source.end_bytes:
            return None
        return each.offset_bytes + offset_bytes - each.source.offset_bytes

    def outline(self) -> list[Span]:
        """The file's bytes that belong to no tensor, in order."""
        spans = []
        position = 0
        for each in self.placed:
            if each.source.offset_bytes > position:
                spans.append(Span(position, each.source.offset_bytes - position))
            position = each.source.end_bytes
        if position < self.file_bytes:
            spans.append(Span(position, self.file_bytes - position))
        return spans

    def fingerprint(self) -> str:
        """Equal for equal layouts; no protection against malice."""
        spans = (
            f"{each.source.offset_bytes},{each.source.size_bytes},{each.offset_bytes}"
            for each in self.placed
        )
        text = ";".join((str(self.file_bytes), *spans))
        return f"{zlib.crc32(text.encode()):08x}-{len(self.placed)}-{self.size_bytes}"


def layout_of(buffer: Any) -> DeviceLayout:
    """The layout of the model file (or outline) that fills ``buffer``.

    Raises FormatError as :func:`read_contents`, and for a file that holds no tensor.
    """
    view = memoryview(buffer)
    contents = read_contents(view)
    if isinstance(contents, TorchArchive):
        records = contents.records.items()
        spans = [span for name, span in records if name.startswith(_ZIP_RECORDS)]
    else:
        spans = [record.span for record in contents]
    return _packed(spans, len(view), contents)


def layout_of_numbers(size_bytes: int) -> DeviceLayout:
    """The layout of an image that is copied as it is; no model file has it."""
    return DeviceLayout((Placed(Span(0, size_bytes), 0),), size_bytes, size_bytes)


def read_contents(view: memoryview) -> Contents:
    """What the model file (or outline) that fills ``view`` holds.

    Raises FormatError: UnsupportedFormat for a file that is neither a torch zip archive nor
    safetensors nor a prepared model's weights.
    """
    if bytes(view[:4]) == _ZIP_MAGIC:
        return read_archive(view)
    try:
        return read_header(view)
    except FormatError as error:
        # Checked last: a safetensors outline ends with a hole, which reading would fill.
        if not has_directory(view):
            text = f"no zip archive of torch, and read as safetensors: {error}"
            raise type(error)(text) from error
    return read_directory(view)


def _packed(spans: Iterable[Span], file_bytes: int, contents: Contents) -> DeviceLayout:
    placed = []
    end = 0
    for span in sorted(spans, key=lambda each: each.offset_bytes):
        if not span.size_bytes:
            continue
        offset = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        placed.append(Placed(span, offset))
        end = offset + span.size_bytes
    if not placed:
        raise UnsupportedFormat("the file holds no tensor")
    return DeviceLayout(tuple(placed), end, file_bytes, contents)
