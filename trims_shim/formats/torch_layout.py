"""Storages, tensors and parameters as plain data: what they are, and when a view is in bounds.

Pure tables and arithmetic for :mod:`trims_shim.formats.torch_recipe`; dtypes are named as
attributes of ``torch``. Only types whose tensors ``torch.save`` writes with ``_rebuild_tensor_v2``
or ``_v3`` are listed: quantized and sub-byte ones are rebuilt by other functions.
"""

from __future__ import annotations

import math
import reprlib
from typing import NamedTuple

from trims_shim.errors import UnsupportedFormat

__all__ = [
    "ELEMENT_TYPES",
    "STORAGE_TYPES",
    "UNTYPED_DTYPES",
    "ElementType",
    "ParameterSpec",
    "StorageSpec",
    "TensorSpec",
    "check_view",
]

_MAX_COUNT = (1 << 63) - 1
"""Sizes, strides and element counts are int64 in torch."""
_MAX_DIMENSIONS = 64
"""torch itself sets no limit, but parts of it (``MAX_DIMS`` of TensorIterator) stop at 64."""


# Named tuples, not dataclasses: the builder unpacks hundreds of them while a load waits.
class StorageSpec(NamedTuple):
    """A storage: the record ``data/<key>``, of ``elements`` elements of ``dtype``."""

    key: str
    storage_type: str
    dtype: str
    location: str
    elements: int
    size_bytes: int


class TensorSpec(NamedTuple):
    """A strided view of ``recipe.storages[storage]``; offset, size and stride in elements."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    requires_grad: bool
    dtype: str


class ParameterSpec(NamedTuple):
    """``torch.nn.Parameter(tensors[tensor], requires_grad)``."""

    tensor: int
    requires_grad: bool


class ElementType(NamedTuple):
    """A dtype: its name, the bytes of one element, and whether autograd takes it."""

    dtype: str
    size_bytes: int
    is_differentiable: bool


STORAGE_TYPES = {
    "BFloat16Storage": ElementType("bfloat16", 2, True),
    "BoolStorage": ElementType("bool", 1, False),
    "ByteStorage": ElementType("uint8", 1, False),
    "CharStorage": ElementType("int8", 1, False),
    "ComplexDoubleStorage": ElementType("complex128", 16, True),
    "ComplexFloatStorage": ElementType("complex64", 8, True),
    "DoubleStorage": ElementType("float64", 8, True),
    "FloatStorage": ElementType("float32", 4, True),
    "HalfStorage": ElementType("float16", 2, True),
    "IntStorage": ElementType("int32", 4, False),
    "LongStorage": ElementType("int64", 8, False),
    "ShortStorage": ElementType("int16", 2, False),
    "UntypedStorage": ElementType("uint8", 1, False),
}
"""By class name, as pickles name a storage's type."""

UNTYPED_DTYPES = {
    element.dtype: element
    for element in (
        ElementType("float8_e4m3fn", 1, True),
        ElementType("float8_e4m3fnuz", 1, True),
        ElementType("float8_e5m2", 1, True),
        ElementType("float8_e5m2fnuz", 1, True),
        ElementType("float8_e8m0fnu", 1, True),
        ElementType("uint16", 2, False),
        ElementType("uint32", 4, False),
        ElementType("uint64", 8, False),
    )
}
"""dtypes without a storage class of their own (``torch.storage._new_dtypes``)."""

ELEMENT_TYPES = {
    **{
        element.dtype: element
        for name, element in STORAGE_TYPES.items()
        if name != "UntypedStorage"
    },
    **UNTYPED_DTYPES,
}
"""Every dtype a tensor may have."""


def check_view(
    elements: int, offset: object, size: object, stride: object
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return offset, size and stride if they are a view of a storage of ``elements`` elements.

    Raises UnsupportedFormat: torch raises for, or resizes the storage under, any other view.
    """
    if type(offset) is not int or type(size) is not tuple or type(stride) is not tuple:
        odd = reprlib.repr((size, stride, offset))
        raise UnsupportedFormat(f"tensor of size, stride and offset {odd}")
    if len(size) != len(stride) or len(size) > _MAX_DIMENSIONS:
        raise UnsupportedFormat(f"tensor of {len(size)} dimensions with {len(stride)} strides")
    for number in (offset, *size, *stride):
        if type(number) is not int or not 0 <= number <= _MAX_COUNT:
            odd = reprlib.repr(number)
            raise UnsupportedFormat(f"tensor with {odd} as a size, stride or offset")
    if math.prod([n for n in size if n]) > _MAX_COUNT:
        raise UnsupportedFormat(f"tensor of size {size}: too many elements")
    end = offset
    if 0 not in size:
        end += 1 + sum([(n - 1) * step for n, step in zip(size, stride, strict=True)])
    if end > elements:
        raise UnsupportedFormat(f"tensor ends at element {end} of a storage of {elements}")
    return offset, size, stride
