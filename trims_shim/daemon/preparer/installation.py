"""Which onnxruntime this process has: both ends of a preparation must have the same one.

The client puts it into its recipes, and the preparer refuses if it has found another one. Not for
the daemon itself, which never imports onnxruntime.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from typing import NamedTuple

__all__ = ["Installation", "installation"]


class Installation(NamedTuple):
    """As a :class:`SessionRecipe` names it; ``package`` is its directory.

    Equal builds compute equal bits on one machine, whatever directory or container they are in.
    """

    package: str
    runtime: str
    build: str


@functools.cache
def installation() -> Installation:
    """Identify the loaded onnxruntime. Imports it: raises whatever that raises.

    To be called when onnxruntime is imported: later, another one may have been installed in its
    place, while this process still runs the one that it has loaded.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as binding

    library = os.path.abspath(binding.__file__)
    status = os.stat(library)
    # Without an ID, a library that was built anew in its place is told by its time.
    made = _build_id(library) or status.st_mtime_ns
    # Constants are computed with the functions of the C library's version.
    libc = os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else ""
    return Installation(
        package=os.path.dirname(os.path.dirname(library)),
        # Not the package's version: that of some builds is another, and changes amid the import.
        runtime=binding.get_version_string(),
        build=f"{binding.get_build_info()}; {status.st_size} bytes of {made}; {libc}",
    )


_HEADERS = struct.Struct("<32xQ14xHH")
"""Of an ELF file of 64 bits: where the program headers are, their size and number (elf.h)."""
_SEGMENT = struct.Struct("<I4xQ16xQ")
"""A program header: type, offset, size in the file."""
_NOTE = struct.Struct("<III")
_PT_NOTE = 4
_NT_GNU_BUILD_ID = 3
_NOTES_LIMIT_BYTES = 4096


def _build_id(library: str) -> str:
    """The linker's ID of what is in a library, as hexadecimal digits; empty if it has none."""
    with contextlib.suppress(OSError, struct.error), open(library, "rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\2\1":  # of 64 bits, little endian
            return ""
        start, size, number = _HEADERS.unpack_from(head)
        file.seek(start)
        headers = file.read(size * number)
        for place in range(0, len(headers), size):
            kind, offset, length = _SEGMENT.unpack_from(headers, place)
            if kind == _PT_NOTE:
                file.seek(offset)
                found = _id_in(file.read(min(length, _NOTES_LIMIT_BYTES)))
                if found:
                    return found
    return ""


def _id_in(notes: bytes) -> str:
    place = 0
    while place + _NOTE.size <= len(notes):
        name_size, size, kind = _NOTE.unpack_from(notes, place)
        name = place + _NOTE.size
        content = name + (name_size + 3) // 4 * 4
        if kind == _NT_GNU_BUILD_ID and notes[name : name + name_size] == b"GNU\0":
            return notes[content : content + size].hex()
        place = content + (size + 3) // 4 * 4
    return ""
