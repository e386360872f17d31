"""Plain data that passes between layers: identities, records, image and segment descriptions.

Pure: no I/O, no clock, no third-party import. Everything is frozen. Sizes are bytes, times are
nanoseconds.
"""

from __future__ import annotations

import enum
import os
import struct
from typing import NamedTuple

__all__ = [
    "AS_IS",
    "HOST_TIER",
    "PIECES_LIMIT",
    "PREPARED_MODEL",
    "PREPARED_WEIGHTS",
    "Conversion",
    "DeviceId",
    "Digest",
    "Identity",
    "Record",
    "SegmentKind",
    "Span",
    "Variant",
]

Digest = str
"""BLAKE3 of an image's bytes, 64 lower-case hexadecimal digits: the truth about content."""


DeviceId = str
"""A device as the driver names it: ``GPU-`` or ``MIG-`` and a UUID, the same in every process."""

HOST_TIER = "host"
"""Name of the host tier; a device's tier is named by its :data:`DeviceId`."""

PREPARED_MODEL = "model.onnx"
PREPARED_WEIGHTS = "weights.bin"
"""The files of a prepared ONNX model: the preparer writes them, the daemon publishes their
directory, and onnxruntime finds the second file beside the first."""


class Identity(NamedTuple):
    """A file's ``fstat`` fields: enough to look up an image, never proof of content."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def from_stat(cls, status: os.stat_result) -> Identity:
        """Return the identity in a stat result of an open descriptor."""
        return cls(
            device=status.st_dev,
            inode=status.st_ino,
            size_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
        )


class Span(NamedTuple):
    """A half-open byte range ``[offset_bytes, offset_bytes + size_bytes)`` of an image."""

    offset_bytes: int
    size_bytes: int

    @property
    def end_bytes(self) -> int:
        """First byte after the range."""
        return self.offset_bytes + self.size_bytes


class Record(NamedTuple):
    """A named tensor inside an image.

    ``dtype`` is the format's own name (``F32`` in safetensors), or empty if the file gives none, as
    for the records of a torch zip archive, whose shape is their size in bytes.
    """

    name: str
    span: Span
    dtype: str
    shape: tuple[int, ...]


PIECES_LIMIT = 1024
"""Of a :class:`Variant`. An offer of one with more would not fit its packet."""

_NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class Conversion(NamedTuple):
    """From which dtype numbers are converted into which, by torch's names."""

    source: str
    target: str

    @property
    def is_possible(self) -> bool:
        """Whether it is between two of float32, float16 and bfloat16. Nothing else holds if not."""
        return self.source != self.target and {self.source, self.target} <= _NUMBER_BYTES.keys()

    @property
    def source_bytes(self) -> int:
        """Size of a number that is converted."""
        return _NUMBER_BYTES[self.source]

    @property
    def target_bytes(self) -> int:
        """Size of a number that results."""
        return _NUMBER_BYTES[self.target]


class Variant(NamedTuple):
    """How an image differs from its file.

    ``lead_bytes`` zeros come first, so that tensors unaligned in the file are aligned in the image.
    Or it is only what lies at the offsets ``pieces`` of the file, each time ``piece_bytes`` bytes,
    one after the other: tensors as a program stacks them.

    Then all is converted as if it were numbers of one dtype, whatever the bytes really are; a last
    part of a number is left out.
    """

    lead_bytes: int
    conversion: Conversion | None = None
    piece_bytes: int = 0
    pieces: tuple[int, ...] = ()

    @classmethod
    def in_one_piece(cls, size_bytes: int) -> Variant:
        """All of a file, as one tensor: what a device may hold of an image that is a variant."""
        return cls(0, None, size_bytes, (0,))

    @property
    def is_shifted(self) -> bool:
        """Whether the image is the file's bytes in their order, behind the lead."""
        return not (self.conversion or self.pieces)

    @property
    def key(self) -> Variant:
        """A small stand-in: equal where variants are. Tables of many hold it."""
        if not self.pieces:
            return self
        from hashlib import blake2b  # only the daemon's, and slow to import

        packed = struct.pack(f"={len(self.pieces)}q", *self.pieces)
        hashed = blake2b(packed, digest_size=16).digest()
        return self._replace(pieces=(int.from_bytes(hashed, "big"),))

    def size_bytes(self, file_bytes: int) -> int:
        """The size of the image of a file."""
        if self.pieces:
            return self._converted_bytes(len(self.pieces) * self.piece_bytes)
        return self._converted_bytes(self.lead_bytes + file_bytes)

    def offset_bytes(self, file_offset: int) -> int:
        """Where the byte at an offset of the file is in the image, if there are no pieces.

        It has to be the first of a number where numbers are converted.
        """
        return self._converted_bytes(self.lead_bytes + file_offset)

    def _converted_bytes(self, size_bytes: int) -> int:
        if self.conversion is None:
            return size_bytes
        return size_bytes // self.conversion.source_bytes * self.conversion.target_bytes

    def __str__(self) -> str:
        """What people are told: ``aligned``, ``stacked``, or the dtype (``float32``)."""
        if self.pieces:
            return "stacked"
        return "aligned" if self.conversion is None else self.conversion.target


AS_IS = Variant(0)
"""The file's own bytes."""


class SegmentKind(enum.Enum):
    """Kinds of memory for host segments, best first."""

    MEMFD_HUGE = "memfd-huge"
    TMPFS_HUGE = "tmpfs-huge"
    TMPFS_HUGE_USERNS = "tmpfs-huge-userns"
    MEMFD = "memfd"
