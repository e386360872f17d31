"""torch.UntypedStorage.from_file, with which ``torch.load(mmap=True)`` and safetensors map files.

safetensors' compiled ``safe_open`` looks this method up on torch for each file. So everything built
on it (``load_file``, ``load_model``, transformers) is served without touching names that programs
import directly. A private mapping of a whole model file becomes a private mapping of its segment;
shared and partial mappings and files that are no models stay the original's. A mapping that
torch.load makes before it knows where its tensors go is served later, if at all
(:mod:`.torch_load`).
"""

from __future__ import annotations

import functools
import os
import stat
import threading
import types
from collections.abc import Callable
from typing import Any, Protocol

import torch

from trims_shim import diagnostics, patches
from trims_shim.patches.asking import arena_of_file, opened
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_modes import uncompiled
from trims_shim.patches.torch_storage import storage_of

__all__ = ["POINTS", "loads", "served"]


class _Load(Protocol):
    def defer(self, filename: str) -> bool:
        """Whether the load will ask again for this file's mapping once it knows the device."""


class _Loads(threading.local):
    """This thread's calls of torch.load that may map their file next, innermost last."""

    def __init__(self) -> None:
        self.open: list[_Load] = []


loads = _Loads()


def _probe() -> str | None:
    buffer = bytearray(64)
    storage = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
    part = storage[8:16]
    if type(part) is not torch.UntypedStorage or part.data_ptr() != storage.data_ptr() + 8:
        return "slices of a storage are not storages over the same memory"
    return None


def _wrap(original: Any) -> Any:
    inner: Callable[..., Any] = original.__func__ if hasattr(original, "__func__") else original
    # What a program put in its place runs, and may call ours.
    is_torchs_own = isinstance(inner, types.BuiltinFunctionType)

    @uncompiled
    @functools.wraps(inner)
    def from_file(*args: Any, **kwargs: Any) -> Any:
        if is_torchs_own and patches.active():
            storage = _serve(args, kwargs)
            if storage is not None:
                return storage
        return bound(*args, **kwargs)

    bound = original.__get__(None, torch.UntypedStorage)
    return staticmethod(from_file)


def _serve(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_call = len(args) <= len(_NAMES) and kwargs.keys() <= set(_NAMES[len(args) :])
    call = _arguments(*args, **kwargs) if is_call else None
    if call is None:
        return None
    filename, shared, size_bytes = call
    if shared:
        diagnostics.fallback("shared_mapping", what=filename)
        return None
    if loads.open and loads.open[-1].defer(filename):
        return None
    return served(filename, size_bytes)


def served(filename: str, size_bytes: int) -> Any:
    """Return a storage over the whole cached file; None (counted) where torch has to map it."""
    with opened(filename) as descriptor:
        if descriptor is None:
            return None
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            diagnostics.fallback("not_regular", what=filename)
            return None
        if status.st_size != size_bytes:
            diagnostics.fallback("partial_file", what=filename)
            return None
        if not _is_model(os.pread(descriptor, 9, 0)):
            diagnostics.fallback("not_a_model", what=filename)
            return None
        arena = arena_of_file(descriptor, filename)
    if arena is None:
        return None
    diagnostics.count("served", "from_file")
    return storage_of(arena)


def _is_model(head: bytes) -> bool:
    """Whether a file begins as a torch zip archive, or as safetensors: a length, then JSON."""
    return head[:4] == b"PK\x03\x04" or head[8:9] == b"{"


_NAMES = ("filename", "shared", "nbytes")


def _arguments(
    filename: Any = None, shared: Any = False, nbytes: Any = 0
) -> tuple[str, bool, int] | None:
    if not isinstance(filename, str) or type(shared) is not bool or type(nbytes) is not int:
        return None
    return (filename, shared, nbytes) if nbytes > 0 else None


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint("torch.storage:UntypedStorage.from_file", "2.4+", _wrap, probe=_probe),
)
