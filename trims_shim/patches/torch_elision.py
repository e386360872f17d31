"""Replace the copies of a load_state_dict by fresh mappings of the bytes they would have copied.

Instead of ``parameter.copy_(entry)``, the parameter's storage takes over a slice of a fresh private
mapping of the image in which the entry lies. Both sides stay independent, as after a copy, because
both are copy-on-write mappings of immutable bytes; nothing is read and nothing is written. Each
call maps one arena for each image, and gives each byte of it to one parameter only.

Bytes off a 64-byte border of the file, as in most safetensors files, are taken from a second image
with the same bytes after some zeros, so that kernels see the alignment of a copy. Numbers of 16
bits for parameters of 32 are taken from one in which they are widened, which is exact. The daemon
makes such a variant at the second request for it; until then the bytes are copied.

A copy is elided only where the result cannot be told from a copy's:

- the call (:func:`is_watched`): no foreign function or dispatch mode, no tracing or compiling, no
  functorch level, forward-mode level, profiler or inference mode, no setting that swaps parameters,
  no deterministic algorithms;
- the pair (:func:`is_stock_copy`, :func:`is_ordered_copy`): exactly Tensor or Parameter, CPU,
  strided, same shape, same dtype or one that is widened to float32, contiguous, no conjugate or
  negative bit, no inference tensor, no graph behind the destination, autograd would not record the
  copy;
- the destination: a parameter or buffer of the module tree that is all of its storage and that
  nothing else can reach (:func:`is_exclusive`), in memory of torch's allocator or of an earlier
  elision and not written since;
- the source: at least 64 KiB inside a live arena, and pristine. Where the kernel does not tell, its
  bytes are compared with those that the destination would get: that reads what a copy would read,
  but writes nothing, and leaves one copy in memory.

:mod:`.torch_device_elision` is asked first; it elides copies within a device and onto one.

Some differences from a copy remain. The parameter's memory is elsewhere, so an address kept as a
number (``data_ptr()``, ctypes, registered I/O) is stale; a copy would have kept it valid. A storage
in an image is not resizable, and gets other memory when it is resized (:func:`make_resizable`). The
first write to a page costs a page fault.
"""

from __future__ import annotations

import ctypes
import enum
import logging
import weakref
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from trims_shim import diagnostics
from trims_shim.client import arenas
from trims_shim.memory.mapping import are_addresses_limited
from trims_shim.memory.pages import PageScanner, are_equal
from trims_shim.memory.reclaim import RetiredBlock, is_much, retire
from trims_shim.patches import torch_device, torch_repoint, torch_unshare
from trims_shim.patches.asking import variant_image
from trims_shim.patches.torch_copies import (
    PLAIN_TYPES,
    has_views,
    held_aliases,
    is_exclusive,
    is_ordered_copy,
    is_sole_owner,
    is_stock_copy,
    is_watched,
)
from trims_shim.patches.torch_device_elision import Adopter, adopter_for
from trims_shim.patches.torch_modes import has_foreign_mode, unseen
from trims_shim.patches.torch_stock_load import (
    PLAIN_DICTS,
    is_torchs_own,
    registered,
    stock_pairs,
)
from trims_shim.patches.torch_storage import storage_of
from trims_shim.specs import AS_IS, WIDENED, Variant

__all__ = ["ALIGNMENT_BYTES", "MIN_SIZE_BYTES", "load", "make_resizable"]

MIN_SIZE_BYTES = 64 << 10
"""Below this a copy is as cheap as the checks."""
ALIGNMENT_BYTES = 64
"""The alignment of torch's allocator. Kernels choose their loops by alignment: with MKL on x86-64 a
matrix at 8 modulo 16 gives other last bits than the same matrix at 0."""

_VARIANTS_FROM_BYTES = 8 << 20
_VARIANTS_LIMIT = 8
_WIDENED = {getattr(torch, name): name for name in WIDENED}
_COPY = torch.Tensor.copy_

_own_arenas: weakref.WeakValueDictionary[int, ctypes.Array[ctypes.c_char]] = (
    weakref.WeakValueDictionary()
)
"""Arenas mapped here, by address. Only parameters hold slices of them, each a slice of its own."""


class _Way(enum.Enum):
    """How a call goes on after :meth:`_Call.begin`."""

    TORCHS_OWN = enum.auto()
    TORCHS_OWN_WITH_MODE = enum.auto()
    DONE = enum.auto()


def load(original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``original(*args, **kwargs)``, a load_state_dict with ``assign`` off, without copies.

    Returns and raises what the original does.
    """
    call = _Call()
    try:
        way = call.begin(original, args[0], args[1])
        if way is _Way.DONE:
            return torch_module._IncompatibleKeys([], [])
        if way is _Way.TORCHS_OWN:
            return torch_unshare.guarded_load(original, args, kwargs)
        with _CopyMode(call):
            return torch_unshare.guarded_load(original, args, kwargs)
    finally:
        call.end()


class _Call:
    """One load_state_dict: its arenas, its scanner, and the memory it replaced."""

    def __init__(self) -> None:
        self.destinations: dict[int, torch.Tensor] = {}
        self._adopter: Adopter | None = None
        self._scanner: PageScanner | None = None
        self._targets: dict[arenas.Image, _Target] = {}
        self._variants: dict[tuple[arenas.Image, Variant], arenas.Image | None] = {}
        self._state_dict: Any = None
        self._aliases: Counter[int] = Counter()
        self._replaced: list[RetiredBlock] = []
        self._elided_copies = 0
        self._elided_bytes = 0

    def begin(self, original: Callable[..., Any], module: Any, state_dict: Any) -> _Way:
        """Do all that can be done before, or instead of, torch's own code."""
        try:
            if is_watched(has_foreign_mode):  # the watcher would see our checks too
                return _Way.TORCHS_OWN
            self._adopter = adopter_for(module, state_dict)
            if self.is_watched() or not (self._adopter or _holds_cached_bytes(state_dict)):
                return _Way.TORCHS_OWN
            self._scanner, self._state_dict = PageScanner(), state_dict
            self._aliases = held_aliases(module)
            if is_torchs_own(original) and (pairs := stock_pairs(module, state_dict)):
                self._copy_all(pairs)
                return _Way.DONE
            self.destinations = registered(module)
        # Border: copies elided so far have a copy's result. Torch does them all again, and raises
        # an error that belongs to the load with its own text.
        except Exception as error:
            _count_error(error)
            return _Way.TORCHS_OWN
        return _Way.TORCHS_OWN_WITH_MODE

    def is_watched(self) -> bool:
        """Whether something else sees the copies; an adopter ignores the default device."""
        return is_watched() if self._adopter is None else is_watched(has_foreign_mode)

    def end(self) -> None:
        """Close, count, and have the replaced memory freed. Raises nothing of its own."""
        try:
            self._end()
        # Border: what torch was to do has been done.
        except Exception as error:
            _count_error(error)

    def _end(self) -> None:
        if self._adopter is not None:
            self._adopter.close()
        if self._scanner is None:
            return
        self._scanner.close()
        self._targets.clear()  # a traceback may keep this object
        self._variants.clear()
        self._state_dict = None
        if self._elided_copies:
            diagnostics.count("elided_bytes", "load_state_dict", self._elided_bytes)
            diagnostics.count("elided", "load_state_dict", self._elided_copies)
        retire(self._replaced)

    def elide(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        """Give ``dst`` the bytes of ``src`` as ``dst.copy_(src)`` would; False: nothing is done."""
        if self._adopter is not None and self._adopter.adopt(dst, src):
            self._count(src.nbytes)
            return True
        return is_stock_copy(dst, src) and self._elide_in_host(dst, src)

    def _elide_in_host(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        size, widened = dst.nbytes, _widened(dst, src)
        if src.nbytes < MIN_SIZE_BYTES or widened is None or not is_ordered_copy(dst, src):
            return False
        found = arenas.find(src.data_ptr(), src.nbytes)
        if found is None:
            return False
        is_told = self._is_pristine(src, src.nbytes)  # which may just have made us blind
        if not is_told and (widened or not self._is_blind()):
            return False
        image, offset = found
        if not widened and self._is_there_already(dst, src, image, offset):
            return self._shows(dst, size)
        if widened and offset % 2:  # The daemon widens whole numbers only.
            return False
        variant = Variant(-offset % ALIGNMENT_BYTES, widened)
        if variant != AS_IS:
            made = self._variant(image, variant)
            if made is None:
                return False
            image, offset = made, variant.offset_bytes(offset)
            if self._is_there_already(dst, src, image, offset):
                return self._shows(dst, size)
        if not self._is_replaceable(dst, size):
            return False
        target = self._targets.get(image)
        if target is None:
            if not image.is_open:
                return False
            target = self._targets[image] = _Target.of(image)
        if not target.take(offset, offset + size):
            return False
        fresh = target.storage[offset : offset + size]
        if not is_told and not are_equal(src.data_ptr(), fresh.data_ptr(), size):
            return False
        # Other threads ran during the system calls since, and may look at the memory by now.
        if not self._is_exclusive(dst, size):
            return False
        self._swap(dst, fresh, size)
        return self._shows(dst, size)

    def _shows(self, dst: torch.Tensor, size: int) -> bool:
        """Bump the version of ``dst``, as a copy does, now that it has the bytes; count."""
        torch.autograd.graph.increment_version(dst)
        self._count(size)
        return True

    def _variant(self, image: arenas.Image, variant: Variant) -> arenas.Image | None:
        """Return a variant of an image; None where its bytes must be copied."""
        key = (image, variant)
        if key not in self._variants:
            self._variants[key] = None
            # An ordinary file needs only one. Asking takes as long as copying 2 MB.
            if (
                image.size_bytes >= _VARIANTS_FROM_BYTES
                and sum(each is image for each, _ in self._variants) <= _VARIANTS_LIMIT
                and (not variant.widened or self._is_mostly(image, variant.widened))
            ):
                self._variants[key] = variant_image(image, variant)
        return self._variants[key]

    def _is_mostly(self, image: arenas.Image, numbers: str) -> bool:
        """Whether most of an image are entries of this dtype: all of it would be widened."""
        dtype = getattr(torch, numbers)
        sizes: dict[int, int] = {  # tied entries once
            value.data_ptr(): value.nbytes
            for value in self._state_dict.values()
            if _image_of(value) is image and value.dtype is dtype
        }
        return 2 * sum(sizes.values()) > image.size_bytes

    def _count(self, size: int) -> None:
        self._elided_copies += 1
        self._elided_bytes += size

    def _is_there_already(
        self, dst: torch.Tensor, src: torch.Tensor, image: arenas.Image, offset: int
    ) -> bool:
        """Whether ``dst`` already shows these bytes of the image: tied entries, a second load."""
        size = dst.nbytes
        if arenas.find(dst.data_ptr(), size) != (image, offset):
            return False
        if self._is_blind():
            return are_equal(dst.data_ptr(), src.data_ptr(), size)
        return self._is_pristine(dst, size)

    def _is_replaceable(self, dst: torch.Tensor, size: int) -> bool:
        """Whether moving ``dst`` off its memory is unnoticeable, and worth it.

        Memory that cannot be resized is borrowed (from numpy, a file, a DLPack producer, a state
        dict that was assigned) unless an earlier elision put the tensor there. A tensor written
        since then will be written again. Mapping it anew would cost a page fault each time, and
        more memory than a copy until the written pages are given back.
        """
        if not self._is_exclusive(dst, size):
            return False
        if dst.untyped_storage().resizable():
            return True
        if not _is_ours(dst.data_ptr(), size):
            return False
        return self._is_blind() or self._is_pristine(dst, size)

    def _is_exclusive(self, dst: torch.Tensor, size: int) -> bool:
        return is_exclusive(dst, size, aliases=self._aliases[id(dst)])

    def _is_pristine(self, tensor: torch.Tensor, size: int) -> bool:
        return self._scanner is not None and self._scanner.is_pristine(tensor.data_ptr(), size)

    def _is_blind(self) -> bool:
        return self._scanner is not None and self._scanner.is_blind

    def _swap(self, dst: torch.Tensor, fresh: torch.UntypedStorage, size: int) -> None:
        old = torch_repoint.replace(dst, fresh)
        self._replaced.append(RetiredBlock(old, old.data_ptr(), size))

    def _copy_all(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        with torch.no_grad():
            for index, (dst, src) in enumerate(pairs):
                if src.nbytes < MIN_SIZE_BYTES or not self.elide(dst, src):
                    if torch_unshare.is_shared(dst):
                        torch_unshare.unshare(_to_be_copied(pairs[index:]), "load_state_dict")
                    dst.copy_(src)


def _to_be_copied(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield the first destination, and the others that are sure not to take over shared memory."""
    yield pairs[0][0]
    for dst, src in pairs[1:]:
        if torch_unshare.is_shared(dst):
            found = torch_device.find(src)
            if found is None or (
                found != torch_device.find(dst) and not is_sole_owner(dst, src.nbytes)
            ):
                yield dst


class _Target(NamedTuple):
    """A fresh arena of one image, and the ranges of it that have been given away."""

    storage: torch.UntypedStorage
    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, image: arenas.Image) -> _Target:
        arena = image.map()
        _own_arenas[arena.address] = arena.buffer
        return cls(storage_of(arena), [], [])

    def take(self, start: int, end: int) -> bool:
        """Reserve ``[start, end)``; return False when any of it is taken."""
        index = bisect_left(self.starts, end)
        if index and self.ends[index - 1] > start:
            return False
        self.starts.insert(index, start)
        self.ends.insert(index, end)
        return True


class _CopyMode(TorchFunctionMode):
    """Sees every torch call of a load_state_dict, and elides the copies that can be elided."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _COPY and len(args) == 2 and not kwargs and self._elide(*args):
            return args[0]
        return func(*args, **(kwargs or {}))

    def _elide(self, dst: Any, src: Any) -> bool:
        if id(dst) not in self._call.destinations:  # kept alive there: no id is used twice
            return False
        try:
            return not self._call.is_watched() and self._call.elide(dst, src)
        # Border: the caller then copies, also over a half-made replacement.
        except Exception as error:
            _count_error(error)
            return False


def _count_error(error: Exception) -> None:
    diagnostics.pass_on(error)
    diagnostics.log(logging.DEBUG, "load_state_dict: copying, elision failed", error=error)
    diagnostics.count("elision_error", type(error).__name__)


def _holds_cached_bytes(state_dict: Any) -> bool:
    """Whether a plain dict has entries worth eliding; other mappings may compute their entries.

    False where address space is limited, or much waits to be freed: a module needs twice as much
    until the replaced memory has been given back.
    """
    if type(state_dict) not in PLAIN_DICTS or are_addresses_limited() or is_much():
        return False
    return any(_image_of(value) is not None for value in state_dict.values())


def _image_of(value: Any) -> arenas.Image | None:
    """The image with the bytes of an entry, if there are enough of them."""
    is_large = (
        type(value) in PLAIN_TYPES
        and value.layout is torch.strided
        and value.is_cpu
        and value.nbytes >= MIN_SIZE_BYTES
    )
    found = arenas.find(value.data_ptr(), value.nbytes) if is_large else None
    return None if found is None else found[0]


def _widened(dst: torch.Tensor, src: torch.Tensor) -> str | None:
    """The numbers that a copy widens, "" if it converts none; None if it converts otherwise."""
    if dst.dtype is src.dtype:
        return ""
    return _WIDENED.get(src.dtype) if dst.dtype is torch.float32 else None


def _is_ours(address: int, size_bytes: int) -> bool:
    """Whether an earlier elision mapped this memory."""
    found = arenas.find(address, size_bytes)
    return found is not None and address - found[1] in _own_arenas


def make_resizable(storage: torch.UntypedStorage, *, keeps_bytes: bool) -> None:
    """Give the storage of a parameter whose copy was elided memory of torch's allocator.

    Tensors on the storage stay on it. A numpy array does not follow (torch would refuse to resize
    a storage that has had one): where there may be one, the mapping stays as long as the storage.
    Does nothing to other storages. Needs a torch that can swap.
    """
    try:
        if storage.device.type != "cpu" or not _is_ours(storage.data_ptr(), storage.nbytes()):
            return
        with unseen():
            # Equally large, or empty: torch swaps no others.
            size = storage.nbytes() if keeps_bytes else 0
            own = torch.empty(size, dtype=torch.uint8, device="cpu").untyped_storage()
        # Not by torch, which may use its threads: a forked child would wait for its parent's.
        ctypes.memmove(own.data_ptr(), storage.data_ptr(), size)
        torch_repoint.move([storage], [own], ())
        if has_views(storage):
            storage._trims_mapping = own  # type: ignore[attr-defined]
    # Border: torch says that the storage is not resizable.
    except Exception as error:
        _count_error(error)
