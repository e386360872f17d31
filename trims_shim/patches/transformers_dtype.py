"""transformers' from_pretrained of a checkpoint into a model of another dtype, without copies.

transformers converts each tensor with ``Tensor.to``, which makes a copy of the weights. Instead of
the copy, the model gets memory of an image in which the numbers are converted
(:class:`.torch_mappings.FreshMappings`), or what goes to a device is moved from there. Only to the
dtype of the load: a few layers that are to be more exact than the others would not be worth an
image of all.
"""

from __future__ import annotations

import contextvars
import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import safetensors
import torch

from trims_shim import patches
from trims_shim.client import arenas
from trims_shim.errors import UnsupportedFormat
from trims_shim.memory.mapping import are_addresses_limited
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_conversion import DTYPES, Conversions
from trims_shim.patches.torch_mappings import count_error
from trims_shim.patches.torch_module_move import cuda_device
from trims_shim.patches.torch_rounding import conversion_of
from trims_shim.patches.torch_storage import torch_dtype
from trims_shim.specs import Conversion

__all__ = ["POINTS", "ConvertedEntry", "is_converted"]


def _is_mostly(entries: dict[str, Any], image: arenas.Image, conversion: Conversion) -> bool:
    """Whether most of what is loaded are such numbers; all files of a model are taken as alike."""
    sizes: Counter[torch.dtype] = Counter()
    for entry in entries.values():
        _add(sizes, entry)
    return 2 * sizes[getattr(torch, conversion.source)] > sizes.total()


def is_converted(file: Any, dtype: Any) -> bool:
    """Whether most of a safetensors file has to be converted for a load into ``dtype``.

    ``file`` is a name. Raises what safetensors raises.
    """
    if type(file) is not str or not file.endswith(".safetensors") or dtype not in DTYPES:
        return False
    sizes: Counter[torch.dtype] = Counter()
    with patches.inactive(), safetensors.safe_open(file, framework="pt") as opened:
        for name in opened.keys():  # noqa: SIM118
            try:
                _add(sizes, opened.get_slice(name))
            except UnsupportedFormat:  # a dtype that this torch does not have
                return False
    return any(
        conversion_of(source, dtype) is not None and 2 * size > sizes.total()
        for source, size in sizes.items()
    )


def _dtype(entry: Any) -> torch.dtype:
    """The dtype of an entry of a checkpoint, which is a tensor or safetensors' slice."""
    return entry.dtype if isinstance(entry, torch.Tensor) else torch_dtype(entry.get_dtype())


def _is_of_another_dtype(entry: Any, dtype: torch.dtype) -> bool:
    try:
        return conversion_of(_dtype(entry), dtype) is not None
    # Border: entries of what kind ever are transformers' business.
    except Exception as error:
        count_error(error, "from_pretrained")
        return False


def _add(sizes: Counter[torch.dtype], entry: Any) -> None:
    shape = entry.shape if isinstance(entry, torch.Tensor) else entry.get_shape()
    sizes[_dtype(entry)] += _dtype(entry).itemsize * math.prod(shape)


_conversions: contextvars.ContextVar[Conversions | None] = contextvars.ContextVar(
    "trims_shim_conversions", default=None
)
"""Of the load that this thread is in."""


class ConvertedEntry:
    """Stands in for an entry of a file that is to be read and converted by a thread."""

    def __init__(self, entry: Any, conversions: Conversions) -> None:
        self._entry = entry
        self._conversions = conversions

    def __getitem__(self, index: Any) -> Any:
        read = self._entry[index]
        found = self._conversions.converted(read) if index is ... else None
        return read if found is None else found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._entry, name)


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert_and_load_state_dict_in_model(
        model: Any, state_dict: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        conversions = _begin(state_dict, load_config)
        if conversions is None:
            return original(model, state_dict, load_config, *args, **kwargs)
        token = _conversions.set(conversions)
        try:
            return original(model, state_dict, load_config, *args, **kwargs)
        finally:
            _conversions.reset(token)
            conversions.end()

    return convert_and_load_state_dict_in_model


def _begin(state_dict: Any, load_config: Any) -> Conversions | None:
    try:
        if (
            patches.active()
            and load_config.dtype in DTYPES
            and load_config.hf_quantizer is None
            and type(state_dict) is dict
            and not are_addresses_limited()
        ):
            is_mostly = functools.partial(_is_mostly, state_dict)
            return Conversions(load_config.dtype, "from_pretrained", is_mostly)
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
        conversions = _conversions.get()
        if (
            conversions is not None
            and dtype is conversions.dtype
            and (str(device) in ("None", "cpu") or cuda_device(device) is not None)
            and (args[0] if args else kwargs.get("sharding_op")) is None
            and _is_of_another_dtype(tensor, conversions.dtype)
        ):
            tensor = ConvertedEntry(tensor, conversions)
        return original(thread_pool, tensor, device, dtype, *args, **kwargs)

    return spawn_materialize


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "transformers.modeling_utils:convert_and_load_state_dict_in_model", "5.0+", _wrap_load
    ),
    PatchPoint("transformers.core_model_loading:spawn_materialize", "5.0+", _wrap_materialize),
)
