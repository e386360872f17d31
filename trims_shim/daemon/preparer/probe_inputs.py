"""Inputs for a run of an ONNX model, by the types and shapes that it declares.

What a dimension's or an input's name means is unknown, so these are several guesses: sizes for
dimensions that have none, and values that indices, masks or pixels may have. Equal arguments give
equal values in every process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Argument", "NoInputs", "inputs", "sizes"]

FILLINGS = ("small", "ones", "zeros", "count")
"""Kinds of values."""
SIZES = (1, 2, 8, 16, 32, 64, 128, 256, 512)
"""For dimensions without a size. From 32 on image models no longer run out of pixels, from 128 on
models of sound no longer run out of samples."""
_LIMIT_BYTES = 256 << 20

_PLAIN = {
    "float": "float32",
    "double": "float64",
    "float16": "float16",
    "int8": "int8",
    "int16": "int16",
    "int32": "int32",
    "int64": "int64",
    "uint8": "uint8",
    "uint16": "uint16",
    "uint32": "uint32",
    "uint64": "uint64",
    "bool": "bool",
    "complex64": "complex64",
    "complex128": "complex128",
}
_RAW = {
    "bfloat16": (16, "uint16", 0x3F80),
    "float8e4m3fn": (17, "uint8", 0x38),
    "float8e4m3fnuz": (18, "uint8", 0x40),
    "float8e5m2": (19, "uint8", 0x3C),
    "float8e5m2fnuz": (20, "uint8", 0x40),
}
"""Types that numpy lacks: number in TensorProto.DataType, numpy's type of its bits, bits of 1."""


class NoInputs(Exception):
    """Inputs of this signature cannot be made, or the model accepts none of them."""


@dataclass(frozen=True, slots=True)
class Argument:
    """An input or output of a model; dimensions without a size are names or None."""

    name: str
    type: str
    shape: tuple[int | str | None, ...]


def sizes(arguments: Sequence[Argument]) -> tuple[int, ...]:
    """Sizes to try for dimensions without one; a single size if there are none."""
    has_open = any(
        not isinstance(dimension, int) or dimension < 0
        for argument in arguments
        for dimension in argument.shape
    )
    is_shapeless = any(not argument.type.startswith("tensor") for argument in arguments)
    return SIZES if has_open or is_shapeless else SIZES[:1]


def inputs(arguments: Sequence[Argument], *, size: int, filling: str) -> dict[str, Any]:
    """Values for all inputs; every dimension without a size gets ``size``. Raises NoInputs."""
    total_bytes = 0
    values = {}
    for number, argument in enumerate(arguments):
        shape = tuple(_extent(dimension, size) for dimension in argument.shape)
        # The widest element has 16 bytes; shapes come from the file, and may be anything.
        total_bytes += 16 * math.prod(shape)
        if total_bytes > _LIMIT_BYTES:
            raise NoInputs(f"they would take more than {_LIMIT_BYTES >> 20} MiB")
        values[argument.name] = _value(argument.type, shape, _Filling(filling, number))
    return values


def _extent(dimension: int | str | None, size: int) -> int:
    if isinstance(dimension, int):
        return size if dimension < 0 else dimension
    # Exporters name the sum of two others "past_sequence_length + sequence_length".
    parts = [part.strip() for part in (dimension or "").split("+")]
    return sum(int(part) if part.isdecimal() and len(part) < 10 else size for part in parts)


@dataclass(frozen=True, slots=True)
class _Filling:
    kind: str
    number: int

    def array(self, dtype: str, shape: tuple[int, ...]) -> Any:
        import numpy

        if self.kind in ("ones", "zeros"):
            return numpy.full(shape, 1 if self.kind == "ones" else 0, dtype)
        if self.kind == "count":
            return (numpy.arange(math.prod(shape)) % 8).reshape(shape).astype(dtype)
        # A generator that numpy promises not to change (NEP 19).
        random = numpy.random.RandomState(self.number + 1)
        if dtype in ("int8", "uint8"):  # pixels and quantised values, not indices
            return random.randint(0, 256, shape).astype("uint8").view(dtype)
        if numpy.dtype(dtype).kind in "iub":
            return random.randint(0, 2, shape).astype(dtype)
        return numpy.asarray(random.standard_normal(shape)).astype(dtype)


def _value(kind: str, shape: tuple[int, ...], filling: _Filling) -> Any:
    outer, _, rest = kind.partition("(")
    inner = rest[:-1]
    if outer == "tensor":
        return _tensor(inner, shape, filling)
    if outer == "optional":
        return None if filling.kind == "zeros" else _value(inner, shape, filling)
    if outer == "seq" and inner.startswith("tensor"):
        return [_value(inner, shape or (2,), filling) for _ in range(2)]
    if outer == "map":
        return dict.fromkeys(("a", "b") if inner.startswith("string") else (0, 1), 1.0)
    raise NoInputs(f"an input is {kind}")


def _tensor(element: str, shape: tuple[int, ...], filling: _Filling) -> Any:
    import numpy

    if element in _PLAIN:
        return filling.array(_PLAIN[element], shape)
    if element == "string":
        texts = [str(each) for each in filling.array("int64", shape).ravel()]
        return numpy.array(texts, dtype=object).reshape(shape)
    if element in _RAW:
        from onnxruntime import OrtValue

        number, dtype, one = _RAW[element]
        bits = (filling.array("bool", shape).astype(dtype) * one).astype(dtype)
        return OrtValue.ortvalue_from_numpy_with_onnx_type(bits, number)
    raise NoInputs(f"an input is tensor({element})")
