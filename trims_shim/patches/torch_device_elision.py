"""load_state_dict into a module on a device: parameters take over shared memory, without copying.

Instead of ``parameter.copy_(entry)``, the parameter is put on the device image in which the entry
lies or, for an entry in host memory of the shim, on the device image of the same bytes. Both sides
may share the memory because it is read-only; whoever is about to write gets private memory first
(:mod:`.torch_unshare`). Buffers are always copied, because modules write them.

As in host memory (:mod:`.torch_elision`), a copy is elided only where it moves bytes in order and
leaves no other trace. On a device it is elided only while, in addition,

- the parameter has no gradient, is in no optimizer, and its module's forward does not write it;
- no CUDA graph has been captured in this process: graphs know weights by address, and a load
  into the same memory is how a captured graph gets new ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from trims_shim.client import arenas
from trims_shim.patches import torch_device, torch_unshare
from trims_shim.patches.torch_copies import (
    PLAIN_TYPES,
    held_aliases,
    is_byte_copy,
    is_sole_owner,
)
from trims_shim.patches.torch_device import ALIGNMENT_BYTES, MIN_SHARED_BYTES
from trims_shim.patches.torch_module_move import Sources
from trims_shim.patches.torch_stock_load import PLAIN_DICTS

if TYPE_CHECKING:
    from trims_shim.client.device_arenas import DeviceArena

__all__ = ["Adopter", "adopter_for"]


def adopter_for(module: Any, state_dict: Any) -> Adopter | None:
    """Return the adopter for a load onto a device; None where there is nothing to elide."""
    if torch_device.missing_capability() is not None or torch_device.is_private():
        return None
    if not isinstance(module, torch.nn.Module) or type(state_dict) not in PLAIN_DICTS:
        return None
    if torch_device.are_addresses_kept():
        return None
    is_on_device = any(map(_is_on_device, module.parameters()))
    if not any(_is_cached(value, is_on_device) for value in state_dict.values()):
        return None
    return Adopter(module)


def _is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def _is_cached(value: Any, is_on_device: bool) -> bool:
    if type(value) not in PLAIN_TYPES or value.layout is not torch.strided:
        return False
    if value.nbytes < MIN_SHARED_BYTES:
        return False
    if torch_device.find(value) is not None:
        return True
    return is_on_device and arenas.find(value.data_ptr(), value.nbytes) is not None


class Adopter:
    """Elides the copies of one load_state_dict."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._sources = Sources()
        self._aliases = held_aliases(module)
        self._written = torch_unshare.trained() | {
            id(parameter)
            for each in module.modules()
            if torch_unshare.writes_own_parameters(each)
            for parameter in each.parameters()
        }

    def close(self) -> None:
        """Drop the scanner and the device arenas of the load."""
        self._sources.close()

    def adopt(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        """Give ``dst`` the bytes of ``src`` as ``dst.copy_(src)`` would; False: nothing is done."""
        if not self._may_adopt(dst, src):
            return False
        found = self._find(dst, src)
        if found is None or found[1] % ALIGNMENT_BYTES:
            return False
        arena, offset = found
        if dst.data_ptr() != arena.address + offset:
            if not is_sole_owner(dst, src.nbytes, aliases=self._aliases.get(id(dst), 0)):
                return False
            torch_device.lend(dst, arena, offset)
        torch.autograd.graph.increment_version(dst)
        return True

    def _may_adopt(self, dst: torch.Tensor, src: torch.Tensor) -> bool:
        return (
            type(dst) is torch.nn.Parameter
            and type(src) in PLAIN_TYPES
            and dst.layout is torch.strided
            and src.layout is torch.strided
            and src.nbytes >= MIN_SHARED_BYTES
            and dst.shape == src.shape
            and not dst.is_inference()
            and id(dst) not in self._written
            and is_byte_copy(dst, src)
            and dst.grad is None
        )

    def _find(self, dst: torch.Tensor, src: torch.Tensor) -> tuple[DeviceArena, int] | None:
        found = torch_device.find(src)
        if found is not None:
            is_there = torch_device.runtime.device(found[0].index) == dst.device
            return found if is_there else None
        place = self._sources.place_of(dst.device) if _is_on_device(dst) else None
        return None if place is None else self._sources.find(src, place)
