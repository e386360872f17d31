"""Fingerprints of the outputs of an ONNX model: of their type, their shape and every bit.

Payloads of NaN and signs of zero count; how a value lies in memory does not. Values are what
onnxruntime's ``run`` returns: arrays, lists, dictionaries, sparse tensors, OrtValues, None.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator
from typing import Any

__all__ = ["fingerprint"]


def fingerprint(value: Any) -> str:
    """Equal for equal bits, types and shapes of an output. Raises TypeError for a foreign type."""
    hasher = hashlib.blake2b(digest_size=16)
    for part in _parts(value):
        hasher.update(struct.pack("<Q", len(part)))
        hasher.update(part)
    return hasher.hexdigest()


def _parts(value: Any) -> Iterator[bytes | memoryview]:
    """A unique sequence of byte strings for each value."""
    if value is None:
        yield b"none"
    elif isinstance(value, str):
        yield b"str"
        yield value.encode(errors="surrogatepass")
    elif isinstance(value, bytes):
        yield b"bytes"
        yield value
    elif isinstance(value, bool | int):
        yield type(value).__name__.encode()
        yield b"%d" % value
    elif isinstance(value, float):
        yield b"float"
        yield struct.pack("<d", value)
    elif isinstance(value, list | tuple):
        yield b"list %d" % len(value)
        for each in value:
            yield from _parts(each)
    elif isinstance(value, dict):
        yield b"dict %d" % len(value)
        for key in sorted(value, key=repr):
            yield from _parts(key)
            yield from _parts(value[key])
    elif hasattr(value, "dense_shape"):
        yield from _sparse_parts(value)
    elif hasattr(value, "data_ptr"):
        yield from _value_parts(value)
    else:
        yield from _array_parts(value)


def _array_parts(value: Any) -> Iterator[bytes | memoryview]:
    import numpy

    if not isinstance(value, numpy.ndarray | numpy.generic):
        raise TypeError(f"an output is a {type(value).__name__}")
    array = numpy.asarray(value)
    yield f"array {array.dtype.str} {array.dtype.name} {array.shape}".encode()
    if array.dtype == object:
        yield from _parts(array.ravel().tolist())
    else:
        yield array.tobytes()


def _value_parts(value: Any) -> Iterator[bytes | memoryview]:
    """The parts of a tensor in an OrtValue of onnxruntime's binding."""
    import ctypes

    if not value.is_tensor():
        raise TypeError(f"an output is {value.data_type()}")
    yield f"value {value.data_type()} {list(value.shape())}".encode()
    yield ctypes.string_at(value.data_ptr(), value.tensor_size_in_bytes())


def _sparse_parts(value: Any) -> Iterator[bytes | memoryview]:
    """The parts of a SparseTensor of onnxruntime's binding."""
    yield f"sparse {value.format}".encode()
    yield from _parts([int(each) for each in value.dense_shape()])
    yield from _array_parts(value.values())
    for view, members in (
        ("get_coo_data", ("indices",)),
        ("get_csrc_data", ("inner", "outer")),
        ("get_blocksparse_data", ("indices",)),
    ):
        # It raises for every format but its own.
        with contextlib.suppress(Exception):
            data = getattr(value, view)()
            for member in members:
                yield from _array_parts(getattr(data, member)())
