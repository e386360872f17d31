"""Samples and results on their way between processes: rows of them, and bytes.

A value is an array or tensor ``[n, ...]``, a list of n things, or a mapping, tuple or dataclass of
such values. Bytes are those of pickle, protocol 5: the contents of arrays and tensors stay apart
from the rest, so that they are copied once, to where they go. They travel between a program and
workers that it has started itself, so unpickling them trusts nobody else.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trims_shim.batching.collating.arrays import library_of
from trims_shim.batching.collating.structures import part_of, parts_of, with_parts

__all__ = ["count_of", "dumped", "joined", "loaded", "rows_of"]


def count_of(value: Any) -> int:
    """How many rows a value has. Raises ValueError if its parts differ, or it has no rows."""
    counts = set(_counts(value))
    if len(counts) != 1:
        found = "have " + " and ".join(map(str, sorted(counts))) if counts else "are missing"
        raise ValueError(f"the first axes of all parts need one size, and they {found}")
    return counts.pop()


def _counts(value: Any) -> Iterable[int]:
    library = library_of(value)
    if library is not None:
        count = library.count(value)
        if count is None:
            raise ValueError(f"a {type(value).__name__} without axes has no rows")
        if library.signature(value) is None:
            raise ValueError(
                f"a {type(value).__name__} of this kind (masked, sparse, nested, quantized, or a "
                "subclass with a meaning of its own) cannot be cut into rows without loss; give a "
                "plain one"
            )
        return [count]
    if isinstance(value, list):
        return [len(value)]
    parts = parts_of(value)
    if parts is None:
        raise ValueError(
            f"a {type(value).__name__} has no rows; arrays, tensors, lists, and mappings, tuples "
            "and dataclasses of them have"
        )
    return [count for part in parts.values() for count in _counts(part)]


def rows_of(value: Any, start: int, stop: int, *, is_copied: bool = False) -> Any:
    """Some rows of a value; with ``is_copied`` all that is in them has memory of its own."""
    library = library_of(value)
    if library is None and not isinstance(value, list):
        parts = parts_of(value) or {}
        return with_parts(
            value,
            {name: rows_of(part, start, stop, is_copied=is_copied) for name, part in parts.items()},
        )
    rows = value[start:stop]
    if not is_copied:
        return rows
    if library is None or getattr(rows.dtype, "hasobject", False):
        # Things in a list may be arrays, or have some.
        return loaded([bytearray(part) for part in dumped(rows)])
    return library.concatenate([rows])


def joined(values: Sequence[Any]) -> Any:
    """One value with the rows of all, in their order. Raises ValueError if their parts differ."""
    first = values[0]
    if len(values) == 1:
        return first
    library = library_of(first)
    if library is not None:
        return library.concatenate(values)
    if isinstance(first, list):
        return [row for value in values for row in value]
    parts = parts_of(first) or {}
    for value in values:
        if (found := (parts_of(value) or {}).keys()) != parts.keys():  # else some would be lost
            raise ValueError(
                f"the parts of one batch are {list(parts)}, and of another one {list(found)}: all "
                "need the same ones"
            )
    return with_parts(
        first, {name: joined([part_of(value, name) for value in values]) for name in parts}
    )


# --- bytes ----------------------------------------------------------------------------------------


def dumped(value: Any) -> list[memoryview]:
    """The bytes of a value: first the pickle, then the contents of its arrays."""
    contents: list[pickle.PickleBuffer] = []
    file = io.BytesIO()
    _Pickler(file, contents.append).dump(value)
    return [file.getbuffer(), *(each.raw() for each in contents)]


def loaded(parts: Sequence[Any]) -> Any:
    """The value of :func:`dumped`; its arrays use the memory of ``parts``."""
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    """Leaves the contents of torch's tensors apart, too; its own way copies them several times."""

    def __init__(self, file: io.BytesIO, keep: Callable[[pickle.PickleBuffer], object]) -> None:
        super().__init__(file, 5, buffer_callback=keep)

    def reducer_override(self, value: Any) -> Any:
        if not _is_plain_tensor(value):
            return NotImplemented
        whole = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        name = str(value.dtype).partition(".")[2]
        return _tensor, (_content(whole), name, tuple(value.shape))


def _is_plain_tensor(value: Any) -> bool:
    kind = type(value)
    if (kind.__module__, kind.__name__) not in (
        ("torch", "Tensor"),
        ("torch.nn.parameter", "Parameter"),
    ):
        return False
    library = library_of(value)
    return library is not None and library.signature(value) is not None


def _content(whole: Any) -> pickle.PickleBuffer:
    """The memory of a tensor, without numpy, which may not be there; keeps the tensor."""
    address = whole.data_ptr()
    if whole.nbytes and not address:  # one of forward-mode AD, or of a storage resized to 0
        raise ValueError(f"a tensor {list(whole.shape)} has no memory that could be sent")
    memory: Any = (ctypes.c_char * whole.nbytes).from_address(address)
    memory.owner = whole
    return pickle.PickleBuffer(memory)


def _tensor(content: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if 0 in shape:  # frombuffer refuses an empty buffer
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(content, dtype=torch.uint8).view(kind).reshape(shape)
