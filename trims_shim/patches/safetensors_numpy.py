"""safetensors.numpy.load_file: arrays over the arena instead of a private copy of the file.

The compiled ``safe_open(framework="np")`` copies every tensor, so there is no deeper seam. The
function is replaced, and known holders of its name are rebound; other users (``flax``) call it
through the module. Arrays are writable, as the original's are, and writes stay private.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from trims_shim import diagnostics, patches
from trims_shim.errors import FormatError
from trims_shim.formats import read_header
from trims_shim.patches.asking import arena_of_file, opened, or_none
from trims_shim.patches.points import PatchPoint, is_own
from trims_shim.specs import Record

__all__ = ["NUMPY_DTYPES", "POINTS"]

NUMPY_DTYPES = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "I64": "<i8",
    "U64": "<u8",
    "I32": "<i4",
    "U32": "<u4",
    "I16": "<i2",
    "U16": "<u2",
    "I8": "i1",
    "U8": "u1",
    "BOOL": "?",
    "C64": "<c8",
}


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    is_librarys_own = is_own(original, "safetensors.numpy")
    by_default: list[dict[str, Any]] = [{}]
    if "backend" in inspect.signature(original).parameters:  # since 0.8
        by_default.append({"backend": "mmap"})

    @functools.wraps(original)
    def load_file(filename: Any, **kwargs: Any) -> Any:
        if is_librarys_own and patches.active() and kwargs in by_default:
            arrays = _serve(filename)
            if arrays is not None:
                return arrays
        return original(filename, **kwargs)

    return load_file


@or_none
def _serve(filename: Any) -> dict[str, Any] | None:
    path = _path_of(filename)
    if path is None:
        return None
    with opened(path) as descriptor:
        if descriptor is None:
            return None
        arena = arena_of_file(descriptor, path)
    if arena is None:
        return None
    try:
        arrays = _arrays(arena.buffer, read_header(arena.buffer))
    # ValueError: of numpy, for a shape that it refuses the library, too.
    except (FormatError, ValueError) as error:
        diagnostics.fallback("unsupported_format", error, what=path)
        return None
    if arrays is not None:
        diagnostics.count("served", "safetensors_numpy")
    return arrays


def _path_of(filename: Any) -> str | None:
    """Return ``filename`` as safetensors' path; None where it refuses it, as it does bytes."""
    try:
        path = os.fspath(filename)
    except TypeError:
        return None
    return path if isinstance(path, str) else None


def _arrays(buffer: Any, records: tuple[Record, ...]) -> dict[str, Any] | None:
    import numpy
    import safetensors.numpy as library

    known = vars(library).get("_TYPES", NUMPY_DTYPES)  # C64 since 0.7
    whole = numpy.frombuffer(buffer, dtype=numpy.uint8)
    arrays = {}
    for record in _in_order(records, library):
        dtype = NUMPY_DTYPES.get(record.dtype) if record.dtype in known else None
        if dtype is None:
            diagnostics.fallback("unsupported_format", what=f"dtype {record.dtype}")
            return None
        if not record.span.size_bytes:
            # As the library makes them: these have other strides than views of no bytes.
            arrays[record.name] = numpy.zeros(record.shape, dtype).reshape(record.shape)
            continue
        part = whole[record.span.offset_bytes : record.span.end_bytes]
        array = part.view(numpy.dtype(dtype)).reshape(record.shape)
        # Compiled code may refuse unaligned arrays. The original's are always views of copies.
        arrays[record.name] = array if array.flags.aligned else array.copy()[...]
    return arrays


def _in_order(records: tuple[Record, ...], library: Any) -> Sequence[Record]:
    """Return records in load_file's order: by offset since safetensors 0.6, by name before."""
    if hasattr(library.safe_open, "offset_keys"):
        return records
    return sorted(records, key=lambda record: record.name)


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint("safetensors.numpy:load_file", "0.4+", _wrap, has_holders=True),
)
