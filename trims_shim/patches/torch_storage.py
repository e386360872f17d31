"""Torch storages over arenas, and the one way from an open file to an arena for all torch patches.

A storage keeps its arena's buffer alive; slices of it (``storage[a:b]``) are storages of their own
that keep the whole alive, so that a record is saved, pickled and shared by itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trims_shim import diagnostics
from trims_shim.client.cache import cache
from trims_shim.errors import TrimsError, UnsupportedFormat

if TYPE_CHECKING:
    import torch

    from trims_shim.client.arenas import Arena, Image

__all__ = [
    "absolute",
    "aligned_image",
    "arena_of_file",
    "bytes_over",
    "opened",
    "storage_of",
    "torch_dtype",
    "unseen",
]

_TORCH_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "U64": "uint64",
    "I32": "int32",
    "U32": "uint32",
    "I16": "int16",
    "U16": "uint16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""By the name safetensors gives them."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that safetensors calls ``name``. Raises UnsupportedFormat."""
    import torch

    dtype: torch.dtype | None = getattr(torch, _TORCH_DTYPES.get(name, ""), None)
    if dtype is None:
        raise UnsupportedFormat(f"this torch has no dtype {name}")
    return dtype


def storage_of(arena: Arena) -> torch.UntypedStorage:
    """A storage over the whole mapping."""
    import torch

    with unseen():
        return torch.frombuffer(arena.buffer, dtype=torch.uint8).untyped_storage()


def bytes_over(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of bytes over all of a storage."""
    import torch

    with unseen():
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


_NO_MODES = contextlib.nullcontext()


def unseen() -> contextlib.AbstractContextManager[object]:
    """Hide what we do from modes of the program, the default device and functorch among them.

    torch's own reader makes storages in C++, where no mode looks; a tensor that functorch wraps has
    no storage to give.
    """
    import torch

    if not (
        torch._C._len_torch_function_stack()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return _NO_MODES
    from torch.utils import _python_dispatch

    stack = contextlib.ExitStack()
    stack.enter_context(torch._C.DisableTorchFunction())
    stack.enter_context(_python_dispatch._disable_current_modes())
    stack.enter_context(torch._C._DisableFuncTorch())
    return stack


@contextlib.contextmanager
def opened(filename: str | os.PathLike[str]) -> Iterator[int | None]:
    """A descriptor of a file, closed after the block; None where it cannot be opened.

    Whoever opens it next, the original loader, has its own words for that.
    """
    try:
        descriptor = os.open(filename, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def aligned_image(image: Image, lead_bytes: int) -> Image | None:
    """The image with the same bytes behind ``lead_bytes`` zeros, where there is one (counted)."""
    try:
        found = cache().aligned(image, lead_bytes)
    except TrimsError as error:
        diagnostics.pass_on(error)
        diagnostics.count("aligned", error.reason)
        return None
    diagnostics.count("aligned", "copied" if found is None else "served")
    return found


def absolute(name: Any) -> str:
    """What the cache calls a file that the program calls ``name``: its absolute path.

    So that ``trims pin PATH`` means the same file in every directory.
    """
    if isinstance(name, int):
        return f"file descriptor {name}"
    try:
        return os.path.abspath(os.fsdecode(name))
    except (OSError, TypeError):  # The working directory is gone; an object with a name of its own.
        return str(name)


def arena_of_file(descriptor: int, name: object) -> Arena | None:
    """The arena of an open file, or None (counted) when the framework has to load it itself."""
    shared = cache()
    try:
        return shared.open(descriptor, name=absolute(name))
    except TrimsError as error:
        if shared.config.strict and error.reason not in diagnostics.EXPECTED_REASONS:
            raise
        diagnostics.fallback(error.reason, error, what=str(name))
    # Border: the shim never makes a load fail; whatever it was, the original loader runs.
    except Exception as error:
        if shared.config.strict:
            raise
        diagnostics.fallback("internal_error", error, what=str(name))
    return None
