"""torch.UntypedStorage.from_file, with which ``torch.load(mmap=True)`` and safetensors map files.

safetensors' compiled ``safe_open`` looks this method up on torch for each file. So everything built
on it (``load_file``, ``load_model``, transformers) is served without touching names that programs
import directly. Private mappings of whole model files are served; shared and partial mappings and
files that are no models stay the original's.

- A torch archive becomes a private mapping of its segment at once: ``torch.load`` needs addresses.
  A mapping that it makes before it knows where its tensors go is served later, if at all
  (:mod:`.torch_load`).
- A safetensors file is mapped by torch, which reads nothing, and the cache is asked at the first
  tensor: names, shapes and metadata of a large file that nobody has loaded cost what they cost
  without the cache.
"""

from __future__ import annotations

import functools
import os
import stat
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from trims_shim import diagnostics, patches
from trims_shim.patches.asking import arena_of_file, from_anywhere, opened, or_none
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_modes import uncompiled
from trims_shim.patches.torch_storage import storage_of
from trims_shim.specs import Identity

__all__ = ["POINTS", "file_at", "loads", "served"]

_PATIENCE_S = 0.25
"""How long threads that want a tensor of a file wait for one that asks for it already."""


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
    try:
        part.__getitem__ = weakref.ref(part)  # type: ignore[method-assign]
    except (AttributeError, TypeError):
        return "a storage can have no attributes, or no weak references"
    return None


def _wrap(original: Any) -> Any:
    inner: Callable[..., Any] = original.__func__ if hasattr(original, "__func__") else original
    # What a program put in its place runs, and may call ours.
    is_torchs_own = isinstance(inner, types.BuiltinFunctionType)

    @uncompiled
    @functools.wraps(inner)
    def from_file(*args: Any, **kwargs: Any) -> Any:
        if not (is_torchs_own and patches.active()):
            return bound(*args, **kwargs)
        file = _file(args, kwargs)
        # Now, whatever the cache says: torch.load has read which bytes of this file are which
        # tensors, and while the cache is asked another file may get its name.
        mapping = bound(*args, **kwargs)
        if file is None:
            return mapping
        if file.is_archive:
            storage = served(file)
            return mapping if storage is None else storage
        _serve_later(mapping, file)
        return mapping

    bound = original.__get__(None, torch.UntypedStorage)
    return staticmethod(from_file)


class _File(NamedTuple):
    """A model file that is to be mapped."""

    path: str
    identity: Identity
    is_archive: bool


@or_none
def _file(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _File | None:
    """Return the file of which a call maps all; None (counted) where torch has to map it."""
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
    return file_at(filename, size_bytes)


def file_at(filename: str, size_bytes: int) -> _File | None:
    """Return the model file of this size; None (counted) if it is something else."""
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
        head = os.pread(descriptor, 9, 0)
    is_archive = head[:4] == b"PK\x03\x04"
    # safetensors: a length, then JSON.
    if not is_archive and head[8:9] != b"{":
        diagnostics.fallback("not_a_model", what=filename)
        return None
    return _File(from_anywhere(filename), Identity.from_stat(status), is_archive)


@or_none
def served(file: _File) -> Any:
    """Return a storage over the whole cached file; None (counted) where torch has to map it."""
    with opened(file.path) as descriptor:
        if descriptor is None or Identity.from_stat(os.fstat(descriptor)) != file.identity:
            diagnostics.fallback("model_changed", what=file.path)
            return None
        arena = arena_of_file(descriptor, file.path)
    if arena is None:
        return None
    # Its bytes would not be where the caller has read that they are, or not be there.
    if arena.size_bytes != file.identity.size_bytes:
        diagnostics.fallback("model_changed", what=file.path)
        return None
    diagnostics.count("served", "from_file")
    return storage_of(arena)


@or_none
def _serve_later(mapping: Any, file: _File) -> None:
    mapping.__getitem__ = _first_slice(mapping, file)


def _first_slice(mapping: Any, file: _File) -> Callable[[Any], Any]:
    """Return a ``__getitem__`` for a mapping: its first call decides what memory slices are of.

    safetensors looks the method up on the object; ``mapping[a:b]`` of a program looks it up on the
    class, and is of torch's mapping, as are all other uses.
    """
    own = weakref.ref(mapping)  # the mapping holds this function
    found: dict[str, Any] = {}
    asking = threading.Lock()

    @uncompiled
    def first_slice(index: Any) -> Any:
        if "storage" not in found:
            # Once for all threads; but a forked child may find the lock held by nobody.
            is_held = asking.acquire(timeout=_PATIENCE_S)
            try:
                if "storage" not in found:
                    # Of threads that asked after all, one decides: a write to a tensor is seen in
                    # another of the same bytes.
                    found.setdefault("storage", served(file) if patches.active() else None)
            finally:
                if is_held:
                    asking.release()
        storage: Any = own() if found["storage"] is None else found["storage"]
        return storage[index]

    return first_slice


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
