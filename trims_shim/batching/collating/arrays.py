"""Stack, pad and split arrays, for each array library.

torch and numpy are imported only when one of their arrays has come as an item or a result. A batch
is always a copy, also of a single item: a function that writes into its batch must not write into a
caller's tensor. Rows of results are views of the batch, with exceptions: see :func:`_is_copied`.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any

from trims_shim.batching.torch_settings import torch_in_this_thread

__all__ = ["ArrayLibrary", "library_of"]

_SMALL_ROW_BYTES = 64 << 10
"""Copying this much takes some microseconds, less than handing a result over."""
_HELD_BYTES = 1 << 20
_HELD_TIMES = 4


class ArrayLibrary(ABC):
    """The operations of one library. Arrays given together have equal signatures."""

    @abstractmethod
    def signature(self, array: Any) -> Hashable:
        """What must be equal for arrays to share a batch, besides their shapes.

        None for arrays that cannot be stacked, or not without loss (sparse, nested and quantized
        tensors, masked arrays).
        """

    @abstractmethod
    def stack(self, arrays: Sequence[Any]) -> Any:
        """``[...]`` each -> a new array ``[batch, ...]``, without a graph."""

    @abstractmethod
    def concatenate(self, arrays: Sequence[Any]) -> Any:
        """``[n, ...]`` each -> a new array ``[sum of n, ...]``, without a graph.

        Types may differ; the result has one that holds them all.
        """

    @abstractmethod
    def pad(self, arrays: Sequence[Any], axis: int, length: int, value: float) -> Any:
        """As ``stack``, of arrays that may be shorter than ``length`` along ``axis``.

        Raises ValueError for a value that the arrays' type cannot hold.
        """

    @abstractmethod
    def mask(self, lengths: Sequence[int], length: int, like: Any, *, is_boolean: bool) -> Any:
        """``[batch, length]``, true (or int64 1) before each of ``lengths``, where ``like`` is."""

    def count(self, batch: Any) -> int | None:
        """How many rows ``batch`` has; None if it has no axis."""
        return int(batch.shape[0]) if batch.shape else None

    def is_expanded(self, batch: Any) -> bool:
        """Whether all rows share the same memory: who writes to one, writes to all of them."""
        return False

    @abstractmethod
    def parts(self, batch: Any, sizes: Sequence[int] | None) -> list[Any]:
        """The rows of ``batch``, or its slices of these sizes along the first axis."""


def library_of(item: Any) -> ArrayLibrary | None:
    """The library that ``item`` is an array of; None if it is something else."""
    kind: Any = type(item)
    return _library_of_type(kind)


# Bounded: classes may be made at run time, and are kept alive by this.
@functools.lru_cache(maxsize=512)
def _library_of_type(kind: Any) -> ArrayLibrary | None:
    names = {f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in kind.__mro__}
    if "torch.Tensor" in names:
        return _Torch()
    if "numpy.ndarray" in names or "numpy.generic" in names:
        # Sub-classes of ndarray (masked arrays, matrices, units) have meaning that stacking loses.
        own = f"{kind.__module__.partition('.')[0]}.{kind.__name__}"
        is_plain = "numpy.generic" in names or own in ("numpy.ndarray", "numpy.memmap")
        return _Numpy() if is_plain else _NumpyOfOthers()
    return _Standard() if hasattr(kind, "__array_namespace__") else None


def _is_copied(row_bytes: int, batch_bytes: int, held_bytes: int) -> bool:
    """Whether to copy a row, because a view of it would keep too much memory alive.

    ``held_bytes``, above ``_HELD_BYTES``, is the size of the batch's memory. Copied are small rows,
    and all rows of a batch that uses less than a quarter of it (the last token's logits of all
    tokens' logits).
    """
    return row_bytes <= _SMALL_ROW_BYTES or held_bytes > _HELD_TIMES * batch_bytes


def _padded_shape(array: Any, count: int, axis: int, length: int) -> tuple[int, ...]:
    shape = list(array.shape)
    shape[axis] = length
    return (count, *shape)


def _part(position: int, axis: int, length: int) -> tuple[Any, ...]:
    """The index of one padded array's own part."""
    return (position, *[slice(None)] * axis, slice(0, length))


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    bounds, start = [], 0
    for size in sizes:
        bounds.append((start, start + size))
        start += size
    return bounds


class _Torch(ArrayLibrary):
    def signature(self, array: Any) -> Hashable:
        import torch

        if array.layout is not torch.strided or array.is_quantized or array.is_nested:
            return None
        # One class alone: joined, a sub-class makes its own of the plain tensors beside it.
        kind = type(array)
        is_plain = kind in (torch.Tensor, torch.nn.Parameter)
        return (array.dtype, array.device) if is_plain else (kind, array.dtype, array.device)

    def stack(self, arrays: Sequence[Any]) -> Any:
        torch = torch_in_this_thread()
        return torch.stack([_without_graph(each) for each in arrays])

    def concatenate(self, arrays: Sequence[Any]) -> Any:
        torch = torch_in_this_thread()
        return torch.cat([_without_graph(each) for each in arrays])

    def pad(self, arrays: Sequence[Any], axis: int, length: int, value: float) -> Any:
        torch = torch_in_this_thread()
        first = _without_graph(arrays[0])
        if not first.is_floating_point() and not first.is_complex():
            _check_fits(value, first.dtype, torch.iinfo if first.dtype != torch.bool else None)
        batch = first.new_full(_padded_shape(first, len(arrays), axis, length), value)
        for position, array in enumerate(arrays):
            batch[_part(position, axis, array.shape[axis])] = _without_graph(array)
        return batch

    def mask(self, lengths: Sequence[int], length: int, like: Any, *, is_boolean: bool) -> Any:
        import torch

        ends = torch.tensor(lengths, device=like.device)[:, None]
        mask = torch.arange(length, device=like.device)[None, :] < ends
        return mask if is_boolean else mask.to(torch.int64)

    def count(self, batch: Any) -> int | None:
        return int(batch.size(0)) if batch.dim() else None  # nested tensors have no shape

    def is_expanded(self, batch: Any) -> bool:
        return bool(batch.stride(0) == 0)

    def parts(self, batch: Any, sizes: Sequence[int] | None) -> list[Any]:
        import torch

        batch = _without_graph(batch)
        if sizes is not None:
            parts = [batch[start:end] for start, end in _bounds(sizes)]
        elif batch.layout is torch.strided or batch.is_nested:
            parts = list(batch.unbind(0))
        else:
            parts = [batch[row] for row in range(batch.size(0))]
        # Detached, each part is a tensor of its own to autograd. As views of one tensor, a part
        # that joins a caller's graph would draw the others in, and views of `unbind` refuse to.
        parts = [part.detach() for part in parts]
        if batch.layout is not torch.strided or batch.is_nested:
            return parts
        if len(parts) > 1 and self.is_expanded(batch):
            return [part.clone() for part in parts]
        held_bytes = batch.untyped_storage().nbytes()
        if held_bytes <= _HELD_BYTES:
            return parts
        return [part.clone() if _is_copied(part.nbytes, batch.nbytes, held_bytes) else part
                for part in parts]  # fmt: skip


def _without_graph(tensor: Any) -> Any:
    """Detach a tensor: a batch belongs to several callers, so none can run backward through it."""
    return tensor.detach() if tensor.requires_grad else tensor


def _check_fits(value: float, dtype: Any, limits_of: Any) -> None:
    lowest, highest = (0, 1) if limits_of is None else (limits_of(dtype).min, limits_of(dtype).max)
    if not lowest <= value <= highest or int(value) != value:
        raise ValueError(f"{dtype} cannot hold the pad value {value}")


class _Numpy(ArrayLibrary):
    def signature(self, array: Any) -> Hashable:
        dtype: Hashable = array.dtype
        if array.dtype.kind not in "SU":
            return dtype
        # Stacking widens strings of different lengths, and loses null characters at their ends.
        is_changed = isinstance(array, bytes | str) and array[-1:] in ("\0", b"\0")
        return None if is_changed else array.dtype.kind

    def stack(self, arrays: Sequence[Any]) -> Any:
        import numpy

        batch = numpy.stack(arrays)
        # Stacking loses a foreign byte order.
        return batch if batch.dtype.kind in "SU" else batch.astype(arrays[0].dtype, copy=False)

    def concatenate(self, arrays: Sequence[Any]) -> Any:
        import numpy

        batch = numpy.concatenate(arrays)
        dtype = arrays[0].dtype
        if batch.dtype.kind in "SU" or any(each.dtype != dtype for each in arrays):
            return batch  # of a type that holds all of them
        return batch.astype(dtype, copy=False)

    def pad(self, arrays: Sequence[Any], axis: int, length: int, value: float) -> Any:
        import numpy

        dtype = arrays[0].dtype
        if dtype.kind not in "iubfc":
            raise ValueError(f"arrays of {dtype} cannot be padded with a number")
        if dtype.kind in "iub":
            _check_fits(value, dtype, None if dtype.kind == "b" else numpy.iinfo)
        batch = numpy.full(_padded_shape(arrays[0], len(arrays), axis, length), value, dtype=dtype)
        for position, array in enumerate(arrays):
            batch[_part(position, axis, array.shape[axis])] = array
        return batch

    def mask(self, lengths: Sequence[int], length: int, like: Any, *, is_boolean: bool) -> Any:
        import numpy

        mask = numpy.arange(length)[None, :] < numpy.array(lengths)[:, None]
        return mask if is_boolean else mask.astype(numpy.int64)

    def is_expanded(self, batch: Any) -> bool:
        return bool(batch.strides[0] == 0)

    def parts(self, batch: Any, sizes: Sequence[int] | None) -> list[Any]:
        if sizes is None:
            parts = list(batch)
            # Of one axis: scalars and objects, which keep nothing alive; records are views.
            if batch.ndim == 1 and batch.dtype.names is None:
                return parts
        else:
            parts = [batch[start:end] for start, end in _bounds(sizes)]
        if len(parts) > 1 and self.is_expanded(batch):
            return [part.copy() for part in parts]
        held_bytes = _held_bytes(batch)
        if held_bytes <= _HELD_BYTES:
            return parts
        return [part.copy() if _is_copied(part.nbytes, batch.nbytes, held_bytes) else part
                for part in parts]  # fmt: skip


class _NumpyOfOthers(_Numpy):
    def signature(self, array: Any) -> Hashable:
        return None


def _held_bytes(array: Any) -> int:
    """The size of the memory that ``array`` keeps alive, which may be a tensor's."""
    import numpy

    while isinstance(array.base, numpy.ndarray):
        array = array.base
    storage = getattr(array.base, "untyped_storage", None)
    return int(array.nbytes if storage is None else storage().nbytes())


class _Standard(ArrayLibrary):
    """Any library of the Python array API standard (JAX, CuPy): stacking and rows, no padding."""

    def signature(self, array: Any) -> Hashable:
        try:
            array.__array_namespace__()
        except NotImplementedError:  # JAX's keys of random numbers
            return None
        return type(array), str(array.dtype), str(getattr(array, "device", ""))

    def stack(self, arrays: Sequence[Any]) -> Any:
        return arrays[0].__array_namespace__().stack(list(arrays))

    def concatenate(self, arrays: Sequence[Any]) -> Any:
        return arrays[0].__array_namespace__().concat(list(arrays))

    def pad(self, arrays: Sequence[Any], axis: int, length: int, value: float) -> Any:
        raise ValueError(f"{type(arrays[0]).__name__} cannot be padded; torch and numpy can")

    def mask(self, lengths: Sequence[int], length: int, like: Any, *, is_boolean: bool) -> Any:
        raise ValueError(f"{type(like).__name__} cannot be padded; torch and numpy can")

    def parts(self, batch: Any, sizes: Sequence[int] | None) -> list[Any]:
        if sizes is None:
            return [batch[row, ...] for row in range(batch.shape[0])]
        return [batch[start:end, ...] for start, end in _bounds(sizes)]
