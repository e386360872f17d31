"""Replace the copies of a load_state_dict by fresh mappings of the bytes they would have copied.

Instead of ``parameter.copy_(entry)``, the parameter's storage takes over a slice of a fresh private
mapping of the image in which the entry lies. Both sides stay independent, as after a copy, because
both are copy-on-write mappings of immutable bytes; nothing is read and nothing is written.

Bytes off a 64-byte border of the file, and numbers for parameters of another dtype, come from other
images than the source's (:meth:`.torch_mappings.FreshMappings.image_for`); until there is one, they
are copied.

A copy is elided only where the result cannot be told from a copy's:

- the call (:func:`is_watched`): no foreign function or dispatch mode, no tracing or compiling, no
  functorch level, forward-mode level, profiler or inference mode, no setting that swaps parameters,
  no deterministic algorithms;
- the pair (:func:`is_stock_copy`, :func:`is_ordered_copy`): exactly Tensor or Parameter, CPU,
  strided, same shape, same dtype or both of float32, float16 and bfloat16, contiguous, no conjugate
  or negative bit, no inference tensor, no graph behind the destination, autograd would not record
  the copy;
- the destination: a parameter or buffer of the module tree that is all of its storage and that
  nothing else can reach (:func:`is_exclusive`), in memory of torch's allocator or of an earlier
  elision and not written since;
- the source: at least 64 KiB inside a live arena, and not written since.

What was written the kernel tells (:class:`.write_check.WriteCheck`). Where it does not, bytes are
compared: that reads what a copy would read, but writes nothing, and leaves one copy in memory.

:mod:`.torch_device_elision` is asked first; it elides copies within a device and onto one.

Some differences from a copy remain. The parameter's memory is elsewhere, so an address kept as a
number (``data_ptr()``, ctypes, registered I/O) is stale; a copy would have kept it valid. A storage
in an image is not resizable, and gets other memory when it is resized
(:func:`.torch_mappings.make_resizable`). The first write to a page costs a page fault.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode

from trims_shim import diagnostics
from trims_shim.client import arenas
from trims_shim.client.write_check import WriteCheck
from trims_shim.memory.mapping import are_addresses_limited
from trims_shim.memory.reclaim import RetiredBlock, is_much, retire
from trims_shim.patches import torch_device, torch_repoint, torch_unshare
from trims_shim.patches.torch_copies import (
    PLAIN_TYPES,
    held_aliases,
    is_exclusive,
    is_ordered_copy,
    is_sole_owner,
    is_stock_copy,
    is_watched,
)
from trims_shim.patches.torch_device_elision import Adopter, adopter_for
from trims_shim.patches.torch_mappings import (
    MIN_SIZE_BYTES,
    FreshMappings,
    bytes_in,
    count_error,
    image_of,
    is_fresh,
)
from trims_shim.patches.torch_modes import call_under, has_foreign_mode
from trims_shim.patches.torch_rounding import conversion_of
from trims_shim.patches.torch_stock_load import (
    PLAIN_DICTS,
    is_torchs_own,
    registered,
    stock_pairs,
)
from trims_shim.specs import Conversion

__all__ = ["load"]

_COPY = torch.Tensor.copy_


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
        way = call.begin(original, args[0], args[1] if args[1:] else kwargs["state_dict"])
        if way is _Way.DONE:
            return torch_module._IncompatibleKeys([], [])
        if way is _Way.TORCHS_OWN:
            return torch_unshare.guarded_load(original, args, kwargs)
        return call_under(_CopyMode(call), torch_unshare.guarded_load, original, args, kwargs)
    finally:
        call.end()


class _Call:
    """One load_state_dict: its mappings, and the memory it replaced."""

    def __init__(self) -> None:
        self.destinations: dict[int, torch.Tensor] = {}
        self._adopter: Adopter | None = None
        self._write_check: WriteCheck | None = None
        self._mappings: FreshMappings | None = None
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
            self._write_check = WriteCheck()
            self._mappings = FreshMappings(partial(_is_mostly, module, state_dict))
            self._aliases = held_aliases(module)
            if is_torchs_own(original) and (pairs := stock_pairs(module, state_dict)):
                self._copy_all(pairs)
                return _Way.DONE
            self.destinations = registered(module)
        # Border: copies elided so far have a copy's result. Torch does them all again, and raises
        # an error that belongs to the load with its own text.
        except Exception as error:
            count_error(error, "load_state_dict")
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
            count_error(error, "load_state_dict")

    def _end(self) -> None:
        if self._adopter is not None:
            self._adopter.close()
        if self._write_check is None:
            return
        self._write_check.close()
        self._mappings = None  # a traceback may keep this object
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
        size, mappings, conversion = dst.nbytes, self._mappings, None
        if mappings is None or src.nbytes < MIN_SIZE_BYTES:
            return False
        if src.dtype is not dst.dtype:
            conversion = conversion_of(src.dtype, dst.dtype)
            if conversion is None:
                return False
        if not is_ordered_copy(dst, src):
            return False
        found = arenas.find(src.data_ptr(), src.nbytes)
        there = arenas.find(dst.data_ptr(), size)
        if found is not None and (conversion or there != found):
            found = mappings.image_for(*found, conversion)
        if found is None:
            return False
        if there == found:  # tied entries, a second load
            return self._are_unwritten(dst, src) and self._shows(dst, size)
        if not (self._is_replaceable(dst, size) and self._are_unwritten(src)):
            return False
        fresh = mappings.take(*found, size)
        # Other threads ran during the system calls since, and may look at the memory by now.
        if fresh is None or not self._is_exclusive(dst, size):
            return False
        self._swap(dst, fresh, size)
        return self._shows(dst, size)

    def _shows(self, dst: torch.Tensor, size: int) -> bool:
        """Bump the version of ``dst``, as a copy does, now that it has the bytes; count."""
        torch.autograd.graph.increment_version(dst)
        self._count(size)
        return True

    def _count(self, size: int) -> None:
        self._elided_copies += 1
        self._elided_bytes += size

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
        return is_fresh(dst.data_ptr(), size) and self._are_unwritten(dst)

    def _is_exclusive(self, dst: torch.Tensor, size: int) -> bool:
        return is_exclusive(dst, size, aliases=self._aliases[id(dst)])

    def _are_unwritten(self, *tensors: torch.Tensor) -> bool:
        check = self._write_check
        return check is not None and all(
            check.is_unwritten(each.data_ptr(), each.nbytes) for each in tensors
        )

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
            count_error(error, "load_state_dict")
            return False


def _holds_cached_bytes(state_dict: Any) -> bool:
    """Whether a plain dict has entries worth eliding; other mappings may compute their entries.

    False where address space is limited, or much waits to be freed: a module needs twice as much
    until the replaced memory has been given back.
    """
    if type(state_dict) not in PLAIN_DICTS or are_addresses_limited() or is_much():
        return False
    return any(image_of(value) is not None for value in state_dict.values())


def _is_mostly(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    image: arenas.Image,
    conversion: Conversion,
) -> bool:
    """Whether most of an image are entries that a load converts so."""
    # Names do not tell where entries go: hooks may change them.
    room: int = sum(
        each.numel() * conversion.source_bytes
        for each in registered(module).values()
        if type(each) in PLAIN_TYPES and str(each.dtype) == f"torch.{conversion.target}"
    )
    found = bytes_in(image, conversion.source, state_dict.values())
    return 2 * min(found, room) > image.size_bytes
