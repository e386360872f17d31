"""torch.nn.Module.to, cuda and all else that goes through ``_apply``, without copies to a device.

An unwritten parameter in host memory of the shim gets the device image of the same bytes.
``Module._apply(fn)`` calls ``fn`` for each parameter, gradient and buffer and does the rest itself:
identity, ``requires_grad``, hooks, gradients, ``torch.__future__`` settings and ties stay torch's.
Ours gives ``_apply`` a function in place of ``fn``. For parameters that could be served, it calls
``fn`` under a function mode that answers ``fn``'s call of ``Tensor.to`` or ``Tensor.cuda`` if that

- names a CUDA device, no memory format, no forced copy, and no other dtype, unless the host tier
  has converted the numbers before (:mod:`.torch_conversion`);
- is for a plain leaf parameter, contiguous, of at least 64 KiB, in no optimizer and without
  gradient, not written by its module or one around it
  (:func:`torch_unshare.writes_own_parameters`);
- has an unwritten source in one host arena.

Torch copies buffers, so they are private.

``Tensor.to`` on a single tensor is left alone. The method of a built-in type can only be replaced
by a Python function in front of it. Every ``to`` of every tensor would pay for that (some 0.5 us
where the call itself takes 1 us), and torch.compile and ``__torch_function__`` handlers would see
it. :func:`device_tensor` is for callers that know the tensor, such as the patch of transformers.

Cost for a module without such parameters: one Python call for each tensor, see
tests/patches/test_torch_module_move.py.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from trims_shim import diagnostics, patches
from trims_shim.client import arenas
from trims_shim.client.arenas import Image
from trims_shim.client.write_check import WriteCheck
from trims_shim.patches import torch_device, torch_unshare
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_conversion import Conversions, conversions_of
from trims_shim.patches.torch_copies import is_transformed
from trims_shim.patches.torch_device import MIN_SHARED_BYTES, DevicePoint, Place
from trims_shim.patches.torch_device_load import is_of_training
from trims_shim.patches.torch_mappings import is_for_devices
from trims_shim.patches.torch_modes import call_under, has_foreign_mode

if TYPE_CHECKING:
    from trims_shim.client.device_arenas import DeviceArena

__all__ = ["POINTS", "Sources", "cuda_device", "device_tensor", "is_movable"]

_TO = torch.Tensor.to
_CUDA = torch.Tensor.cuda
_FORMATS = (None, torch.preserve_format)
_of_training: weakref.WeakKeyDictionary[Image, bool] = weakref.WeakKeyDictionary()
"""What was found out about images: transformers asks for each tensor by itself."""


class Sources:
    """Finds tensors in host memory of the shim on devices, during one load or move.

    A context manager; not for sharing between threads.
    """

    def __init__(self) -> None:
        self._write_check: WriteCheck | None = None
        self._arenas: dict[tuple[Image, str], DeviceArena | None] = {}
        self._places: dict[torch.device, Place | None] = {}

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop what was mapped and opened."""
        if self._write_check is not None:
            self._write_check.close()
        self._arenas.clear()

    def place_of(self, device: torch.device) -> Place | None:
        """As :func:`torch_device.place_of`, asked once for each device."""
        if device not in self._places:
            self._places[device] = torch_device.place_of(device)
        return self._places[device]

    def find(self, tensor: torch.Tensor, place: Place) -> tuple[DeviceArena, int] | None:
        """Load the image of an unwritten contiguous tensor; return (arena, offset) of its bytes."""
        address, size_bytes = tensor.data_ptr(), tensor.nbytes
        found = arenas.find(address, size_bytes)
        if found is None:
            return None
        image, offset_bytes = found
        if not is_for_devices(image):
            torch_device.skip("converted", what="a tensor that is moved")
            return None
        if self._write_check is None:
            self._write_check = WriteCheck()
        if not self._write_check.is_unwritten(address, size_bytes):
            torch_device.skip("written", what="a tensor that is moved")
            return None
        arena = self._arena(image, address - offset_bytes, place)
        if arena is None:
            return None
        if image.original is not None and image.original.variant.is_shifted:
            offset_bytes -= image.original.variant.lead_bytes
        offset = torch_device.record_of(arena, offset_bytes, size_bytes)
        return None if offset is None else (arena, offset)

    def _arena(self, image: Image, address: int, place: Place) -> DeviceArena | None:
        key = (image, place.id)
        if key not in self._arenas:
            is_private = _is_of_training(image, address)
            self._arenas[key] = None if is_private else torch_device.arena_of_image(image, place)
        return self._arenas[key]


def _is_of_training(image: Image, address: int) -> bool:
    """Whether an image, mapped at ``address``, is a checkpoint to train on; read only once."""
    found = _of_training.get(image)
    if found is None:
        file = (ctypes.c_char * image.size_bytes).from_address(address)
        found = _of_training[image] = is_of_training(memoryview(file).cast("B"))
    return found


def is_movable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is no more than its bytes in order, cached and worth sharing. Cheap."""
    return (
        tensor.layout is torch.strided
        and tensor.nbytes >= MIN_SHARED_BYTES
        and tensor.is_contiguous()
        and not (tensor.is_neg() or tensor.is_conj() or tensor.is_inference())
        and arenas.find(tensor.data_ptr(), tensor.nbytes) is not None
    )


def device_tensor(tensor: torch.Tensor, place: Place, sources: Sources) -> torch.Tensor | None:
    """Return ``tensor.to(place.device)`` over shared memory; None where it has to be copied."""
    found = sources.find(tensor, place)
    if found is None:
        return None
    diagnostics.count("moved", "shared")
    moved = torch_device.tensor_at(*found, tensor.dtype, tuple(tensor.shape))
    if moved.stride() == tensor.stride():
        return moved
    # Those of dimensions of size 1 differ. They tell channels_last from contiguous.
    return moved.as_strided(tensor.shape, tensor.stride()).data


class _Mover:
    """The function that ``_apply`` gets in place of the program's."""

    def __init__(
        self, function: Callable[[Any], Any], sources: Sources, module: torch.nn.Module
    ) -> None:
        self.function = function
        self._sources = sources
        self._module = module
        self._conversions: dict[torch.dtype, Conversions | None] = {}
        self._trained: frozenset[int] | None = None
        self._is_watched = is_transformed() or has_foreign_mode()

    def __call__(self, tensor: Any) -> Any:
        if self._is_watched or not self._may_share(tensor):
            return self.function(tensor)
        return call_under(_ToMode(tensor, self.move), self.function, tensor)

    def _may_share(self, tensor: Any) -> bool:
        return (
            type(tensor) is torch.nn.Parameter
            and tensor.is_leaf
            and tensor.grad is None
            and is_movable(tensor)
            and not self._is_trained(tensor)
        )

    def _is_trained(self, tensor: torch.Tensor) -> bool:
        if self._trained is None:
            self._trained = torch_unshare.trained()
        return id(tensor) in self._trained

    def move(
        self, tensor: torch.Tensor, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> torch.Tensor | None:
        """Return the result of ``func(tensor, *args, **kwargs)`` on shared memory, or None."""
        target = _target(func, args, kwargs)
        if target is None:
            return None
        device, dtype = target
        try:
            place = self._sources.place_of(device)
            found = None if place is None else self._converted(tensor, dtype)
            if place is None or found is None:
                return None
            moved = device_tensor(found, place, self._sources)
            if moved is None and found is not tensor:  # already converted, it is only copied
                moved = func(found, *args, **kwargs)
            return moved
        # Border: torch copies instead.
        except Exception as error:
            torch_device.skip.error(error, what="torch.nn.Module.to")
            return None

    def _converted(self, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
        """The tensor in a dtype, in host memory of the shim; None if only torch can convert it."""
        if dtype is None or dtype is tensor.dtype:
            return tensor
        if dtype not in self._conversions:
            self._conversions[dtype] = conversions_of(self._module, dtype)
        conversions = self._conversions[dtype]
        return None if conversions is None else conversions.converted(tensor)

    def end(self) -> None:
        """Close what was opened for conversions."""
        for each in self._conversions.values():
            if each is not None:
                each.end()


class _Copier:
    """The program's function, for a module that writes its parameters and for those in it."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function

    def __call__(self, tensor: Any) -> Any:
        return self._function(tensor)


class _ToMode(TorchFunctionMode):
    """Answers the calls of ``to`` and ``cuda`` that the program's function makes on one tensor."""

    def __init__(self, tensor: torch.Tensor, move: Callable[..., torch.Tensor | None]) -> None:
        super().__init__()
        self._tensor = tensor
        self._move = move

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (func is _TO or func is _CUDA) and args and args[0] is self._tensor:
            moved = self._move(self._tensor, func, args[1:], kwargs)
            if moved is not None:
                return moved
        return func(*args, **kwargs)


def _target(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.device, torch.dtype | None] | None:
    """The CUDA device to which a call of ``to`` or ``cuda`` moves, and the dtype that it names.

    None if it does more than that.
    """
    names = ("device", "non_blocking") if func is _CUDA else ("device", "dtype", "non_blocking")
    if len(args) > len(names) or set(names[: len(args)]) & kwargs.keys():
        return None
    call = {**dict(zip(names, args, strict=False)), **kwargs}
    if not call.keys() <= {"device", "dtype", "non_blocking", "copy", "memory_format"}:
        return None
    if call.get("copy") or call.get("memory_format") not in _FORMATS:
        return None
    device = cuda_device(call.get("device"), is_default=func is _CUDA)
    return None if device is None else (device, call.get("dtype"))


def cuda_device(device: Any, *, is_default: bool = False) -> torch.device | None:
    """Return the CUDA device that an argument names; None for others and for wrong arguments.

    With ``is_default``, None means the current device.
    """
    if type(device) is int or (device is None and is_default):
        return torch.device("cuda") if device is None else torch.device("cuda", device)
    if type(device) is str:
        try:
            device = torch.device(device)
        except RuntimeError as error:  # torch has its own words for it
            diagnostics.pass_on(error)
            return None
    return device if type(device) is torch.device and device.type == "cuda" else None


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _apply(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(fn, (_Mover, _Copier)) and not _may_apply():
            return original(self, fn, *args, **kwargs)
        if torch_unshare.writes_own_parameters(self):
            fn = _Copier(fn.function if isinstance(fn, _Mover) else fn)
        if isinstance(fn, (_Mover, _Copier)):
            return original(self, fn, *args, **kwargs)
        with Sources() as sources:
            mover = _Mover(fn, sources, self)
            try:
                return original(self, mover, *args, **kwargs)
            finally:
                mover.end()

    return _apply


def _may_apply() -> bool:
    # Compiled code would run ours, which torch.compile cannot compile.
    return not torch.compiler.is_compiling() and patches.active() and not torch_device.is_private()


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("torch.nn.modules.module:Module._apply", "2.4+", _wrap),
)
