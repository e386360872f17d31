"""transformers' from_pretrained onto a CUDA device: parameters over the shared image.

transformers opens safetensors files on the CPU and moves each tensor in ``_materialize_copy``. The
patch takes the device image of the same bytes there. transformers itself handles the rest, such as
another dtype or a computed tensor. When all of a model goes to one device, its files are opened for
that device (:data:`.safetensors_device.destination`) and are not loaded into host memory.

``caching_allocator_warmup`` would first reserve as much device memory for the process as the model
has, and keep it. It is left out where tensors come from shared memory. Large buffers become private
when they are put into the model, since modules write buffers.

A model of another dtype than its files is read through the host tier, which converts it once for
all (:mod:`.transformers_dtype`): the device would have to hold both. So the tensors of such a model
that keep their dtype are copied.

A model that transformers puts together from the file's tensors is left to it: the device would have
to hold the file's image beside the result. Only stacks of experts, which are nearly all of such a
model, are put together in the host tier (:mod:`.transformers_experts`) and shared from there.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch

from trims_shim import diagnostics, patches
from trims_shim.patches import torch_device
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.safetensors_device import DeferredSlice, destination
from trims_shim.patches.torch_device import DevicePoint, Place
from trims_shim.patches.torch_module_move import Sources, cuda_device, device_tensor, is_movable
from trims_shim.patches.torch_stacking import is_stackable
from trims_shim.patches.torch_unshare import unshare_buffer
from trims_shim.patches.transformers_dtype import ConvertedEntry, is_converted
from trims_shim.patches.transformers_experts import Placement, is_stacking, placement

__all__ = ["POINTS"]


def _wrap_materialize(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _materialize_copy(tensor: Any, device: Any = None, dtype: Any = None) -> Any:
        may_share = not _converting
        if type(tensor) is ConvertedEntry:
            tensor = tensor[...]  # once: it gives the converted memory away
            may_share = type(tensor) is torch.Tensor and tensor.dtype is dtype
        may_share = may_share and patches.active() and not torch_device.is_private()
        place = _place(device) if may_share else None
        moved = None if place is None else _on_device(tensor, dtype, place)
        result = original(tensor, device, dtype) if moved is None else moved
        # Unless it is in an image, host memory would fill: threads read faster than experts leave.
        if type(device) is _HostFirst and not is_stackable(result):
            return result.to(device.then)
        return result

    return _materialize_copy


class _HostFirst(str):
    """The CPU, for a tensor that goes on from there."""

    then: Any

    def __new__(cls, then: Any) -> _HostFirst:
        self = super().__new__(cls, "cpu")
        self.then = then
        return self


_ARGUMENTS = ("model", "state_dict", "checkpoint_files", "load_config")
_PLAIN_NAME = re.compile(r"[\w.]+")
_assembling: set[object] = set()
"""Loads under way of models that are put together. Threads of a load do not know which it is."""
_converting: set[object] = set()
"""Loads under way of models that get another dtype than their files have."""


def _place(device: Any) -> Place | None:
    found = cuda_device(device)
    return None if found is None else torch_device.place_of(found)


def _on_device(source: Any, dtype: Any, place: Place) -> torch.Tensor | None:
    if _assembling:
        return None
    try:
        if isinstance(source, DeferredSlice):
            return source.on_device(place.index, dtype)
        tensor = source[...]
        if type(tensor) is not torch.Tensor or dtype not in (None, tensor.dtype):
            return None
        return _shared(tensor, place)
    # Border: transformers loads it itself, and raises an error of its own if it fails too.
    except Exception as error:
        torch_device.skip.error(error, what="transformers")
        return None


def _shared(tensor: torch.Tensor, place: Place) -> torch.Tensor | None:
    if not is_movable(tensor):
        return None
    with Sources() as sources:
        return device_tensor(tensor, place, sources)


def _share_stack(stack: torch.Tensor, device: Any) -> torch.Tensor | None:
    try:
        place = _place(device)
        return None if place is None else _shared(stack, place)
    # Border: as above.
    except Exception as error:
        torch_device.skip.error(error, what="transformers")
        return None


def _wrap_load(original: Any) -> Any:
    kind = type(original)  # a static method; before transformers 5.1, one of the class
    inner: Callable[..., Any] = original.__func__
    names = ("cls", *_ARGUMENTS) if kind is classmethod else _ARGUMENTS

    @functools.wraps(inner)
    def _load_pretrained_model(*args: Any, **kwargs: Any) -> Any:
        call = {**dict(zip(names, args, strict=False)), **kwargs}
        files, load_config = call.get("checkpoint_files"), call.get("load_config")
        index, is_changed, stacks = None, False, None
        try:
            is_assembled = _is_assembled(call.get("model"), load_config)
            if patches.active():
                places = _places(load_config)
                if is_assembled:
                    stacks = _placement(load_config) if any(places) else None
                else:
                    is_changed = any(places) and _is_changed(load_config, files)
                    index = None if is_changed else _sole_device(places)
        # Border: transformers has its own words for it.
        except Exception as error:
            torch_device.skip.error(error, what="transformers")
            is_assembled = True
        tokens = destination.set(index), placement.set(stacks)
        load = object()
        try:
            if is_assembled:
                _assembling.add(load)
            if is_changed:
                _converting.add(load)
            return inner(*args, **kwargs)
        finally:
            _assembling.discard(load)
            _converting.discard(load)
            placement.reset(tokens[1])
            destination.reset(tokens[0])

    return kind(_load_pretrained_model)


def _is_assembled(model: Any, load_config: Any) -> bool:
    """Whether transformers makes tensors of the file into others; renaming alone is none.

    Its mapping may be for all models of a family. One without what a converter makes is as saved.
    """
    mapping = getattr(load_config, "weight_mapping", None)
    if type(mapping) is not list:
        return False
    converters = [each for each in mapping if hasattr(each, "operations")]
    made = [name for each in converters for name in getattr(each, "target_patterns", [""])]
    if not made or not all(_PLAIN_NAME.fullmatch(name) for name in made):
        return bool(made)
    names = [name for name, _ in itertools.chain(model.named_parameters(), model.named_buffers())]
    return any(part in name for part in made for name in names)


def _placement(load_config: Any) -> Placement | None:
    """Return where experts go that are stacked; None for a model without such.

    Each process reads others of a model that is split among processes, and copies parts of them.
    """
    if getattr(load_config, "device_mesh", None) is not None:
        return None
    names = [
        each.target_patterns[0]
        for each in load_config.weight_mapping
        if hasattr(each, "operations")
        and is_stacking(each)
        and not getattr(each, "force_cpu", False)
        and _PLAIN_NAME.fullmatch(each.target_patterns[0])
    ]
    return Placement(load_config.device_map, names, _share_stack) if names else None


def _wrap_get_device(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def get_device(device_map: Any, param_name: Any, valid_torch_device: Any = False) -> Any:
        device, stacks = original(device_map, param_name, valid_torch_device), placement.get()
        if valid_torch_device and stacks is not None and stacks.takes(param_name):
            return _HostFirst(device)  # What makes the parameter of the experts moves it.
        return device

    return get_device


def _places(load_config: Any) -> list[Place | None]:
    """Return where each part of a model goes; None for other than CUDA devices.

    Empty for models whose weights are not moved as they are.
    """
    device_map = getattr(load_config, "device_map", None)
    if type(device_map) is not dict or torch_device.is_private():
        return []
    if getattr(load_config, "hf_quantizer", 0) is not None:
        return []
    return [_place(device) for device in device_map.values()]


def _is_changed(load_config: Any, files: Any) -> bool:
    """Whether a model gets another dtype than its files have, which are taken as alike."""
    return bool(files) and is_converted(files[0], load_config.dtype)


def _sole_device(places: list[Place | None]) -> int | None:
    """Return the number of the one CUDA device to which a whole model goes, or None."""
    first = places[0] if places else None
    return first.index if first is not None and all(each == first for each in places) else None


def _wrap_warmup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def caching_allocator_warmup(*args: Any, **kwargs: Any) -> Any:
        may_share = patches.active() and not (_assembling and placement.get() is None)
        if may_share and len(args) == 3 and args[2] is None and _is_served(args[1]):
            diagnostics.count("skipped", "caching_allocator_warmup")
            return None
        return original(*args, **kwargs)

    return caching_allocator_warmup


def _is_served(device_map: Any) -> bool:
    """Whether memory can be shared on every accelerator of a device map."""
    if type(device_map) is not dict or torch_device.is_private():
        return False
    devices = {str(each) for each in device_map.values()} - {"cpu", "disk", "meta"}
    return all(_place(int(each) if each.isdecimal() else each) is not None for each in devices)


def _wrap_set_param(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def set_param_for_module(model: Any, target_name: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(model, target_name, *args, **kwargs)
        if torch_device.is_any_shared():
            path, _, name = target_name.rpartition(".")
            unshare_buffer(model.get_submodule(path), name)
        return result

    return set_param_for_module


POINTS: tuple[PatchPoint, ...] = (
    DevicePoint("transformers.core_model_loading:_materialize_copy", "5.0+", _wrap_materialize),
    DevicePoint(
        "transformers.modeling_utils:PreTrainedModel._load_pretrained_model", "5.0+", _wrap_load
    ),
    DevicePoint("transformers.modeling_utils:caching_allocator_warmup", "5.0+", _wrap_warmup),
    DevicePoint("transformers.core_model_loading:set_param_for_module", "5.0+", _wrap_set_param),
    DevicePoint("transformers.core_model_loading:get_device", "5.0+", _wrap_get_device),
)
