"""transformers' from_pretrained onto a CUDA device: parameters over the shared image.

transformers opens safetensors files on the CPU and moves each tensor in ``_materialize_copy``. The
patch takes the device image of the same bytes there. transformers itself handles the rest, such as
another dtype or a computed tensor. When all of a model goes to one device, its files are opened for
that device (:data:`.safetensors_device.destination`) and are not loaded into host memory.

``caching_allocator_warmup`` would first reserve as much device memory for the process as the model
has, and keep it. It is left out where tensors come from shared memory. Large buffers become private
when they are put into the model, since modules write buffers.

A model that transformers puts together from the file's tensors, as it stacks experts, is left to
it: the device would have to hold the file's image beside the result.
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
from trims_shim.patches.torch_unshare import unshare_buffer

__all__ = ["POINTS"]


def _wrap_materialize(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _materialize_copy(tensor: Any, device: Any = None, dtype: Any = None) -> Any:
        place = _place(device) if patches.active() and not torch_device.is_private() else None
        moved = None if place is None else _on_device(tensor, dtype, place)
        return original(tensor, device, dtype) if moved is None else moved

    return _materialize_copy


_PLAIN_NAME = re.compile(r"[\w.]+")
_assembling: set[object] = set()
"""Loads under way of models that are put together. Threads of a load do not know which it is."""


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
        if not is_movable(tensor):
            return None
        with Sources() as sources:
            return device_tensor(tensor, place, sources)
    # Border: transformers loads it itself, and raises an error of its own if it fails too.
    except Exception as error:
        torch_device.skip.error(error, what="transformers")
        return None


def _wrap_load(original: Any) -> Any:
    inner: Callable[..., Any] = original.__func__ if hasattr(original, "__func__") else original

    @functools.wraps(inner)
    def _load_pretrained_model(*args: Any, **kwargs: Any) -> Any:
        load_config = args[3] if len(args) > 3 else kwargs.get("load_config")
        try:
            is_assembled = _is_assembled(args[0] if args else kwargs.get("model"), load_config)
        # Border: transformers has its own words for it.
        except Exception as error:
            torch_device.skip.error(error, what="transformers")
            is_assembled = True
        may_share = patches.active() and not is_assembled
        token = destination.set(_sole_device(load_config) if may_share else None)
        load = object()
        try:
            if is_assembled:
                _assembling.add(load)
            return inner(*args, **kwargs)
        finally:
            _assembling.discard(load)
            destination.reset(token)

    return staticmethod(_load_pretrained_model)


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


def _sole_device(load_config: Any) -> int | None:
    """Return the number of the one CUDA device to which a whole model goes unchanged, or None."""
    device_map = getattr(load_config, "device_map", None)
    if type(device_map) is not dict or not device_map or torch_device.is_private():
        return None
    if getattr(load_config, "hf_quantizer", 0) is not None:
        return None
    places = [_place(device) for device in device_map.values()]
    first = places[0]
    return first.index if first is not None and all(each == first for each in places) else None


def _wrap_warmup(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def caching_allocator_warmup(*args: Any, **kwargs: Any) -> Any:
        may_share = patches.active() and not _assembling
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
)
