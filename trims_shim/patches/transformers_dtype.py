"""transformers' from_pretrained of a checkpoint in 16 bits into a model in float32, without copies.

transformers converts each tensor with ``Tensor.to``, which makes a copy of the weights twice as
large as the file. Instead of the copy, the model gets memory of an image in which the numbers are
widened (:class:`.torch_mappings.FreshMappings`). Only where all of the load goes to float32 on the
CPU: a few layers that are to be more exact than the others would not be worth an image of all.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from trims_shim import patches
from trims_shim.client import arenas
from trims_shim.memory.mapping import are_addresses_limited
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_mappings import count_error
from trims_shim.patches.torch_storage import torch_dtype
from trims_shim.patches.torch_widening import Widening

__all__ = ["POINTS"]


def _is_mostly(entries: dict[str, Any], image: arenas.Image, numbers: str) -> bool:
    """Whether most of what is loaded are such numbers; all files of a model are taken as alike."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries.values():
        if isinstance(entry, torch.Tensor):
            sizes[entry.dtype] += entry.nbytes
        else:  # safetensors' slice of a file
            dtype = torch_dtype(entry.get_dtype())
            sizes[dtype] += dtype.itemsize * math.prod(entry.get_shape())
    return 2 * sizes[getattr(torch, numbers)] > sizes.total()


_widening: contextvars.ContextVar[Widening | None] = contextvars.ContextVar(
    "trims_shim_widening", default=None
)
"""Of the load that this thread is in."""


class _Entry:
    """Stands in for an entry of a file that is to be read and converted by a thread."""

    def __init__(self, entry: Any, widening: Widening) -> None:
        self._entry = entry
        self._widening = widening

    def __getitem__(self, index: Any) -> Any:
        read = self._entry[index]
        found = self._widening.widened(read) if index is ... else None
        return read if found is None else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert_and_load_state_dict_in_model(
        model: Any, state_dict: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        widening = _begin(state_dict, load_config)
        if widening is None:
            return original(model, state_dict, load_config, *args, **kwargs)
        token = _widening.set(widening)
        try:
            return original(model, state_dict, load_config, *args, **kwargs)
        finally:
            _widening.reset(token)
            widening.end()

    return convert_and_load_state_dict_in_model


def _begin(state_dict: Any, load_config: Any) -> Widening | None:
    try:
        if (
            patches.active()
            and load_config.dtype is torch.float32
            and load_config.hf_quantizer is None
            and type(state_dict) is dict
            and not are_addresses_limited()
        ):
            return Widening("from_pretrained", functools.partial(_is_mostly, state_dict))
    # Border: transformers converts, and has its own words for it.
    except Exception as error:
        count_error(error, "from_pretrained")
    return None


def _wrap_materialize(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def spawn_materialize(
        thread_pool: Any,
        tensor: Any,
        device: Any = None,
        dtype: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        widening = _widening.get()
        if (
            widening is not None
            and dtype is torch.float32
            and (device is None or str(device) == "cpu")
            and (args[0] if args else kwargs.get("sharding_op")) is None
        ):
            tensor = _Entry(tensor, widening)
        return original(thread_pool, tensor, device, dtype, *args, **kwargs)

    return spawn_materialize


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "transformers.modeling_utils:convert_and_load_state_dict_in_model", "5.0+", _wrap_load
    ),
    PatchPoint("transformers.core_model_loading:spawn_materialize", "5.0+", _wrap_materialize),
)
