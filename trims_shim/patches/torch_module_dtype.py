"""torch.nn.Module.float, half, bfloat16 and to(dtype), without the copies of a conversion.

All call a method of ``Tensor`` for each parameter and buffer, and do the rest themselves: identity,
gradients, hooks and ties stay torch's. Ours runs them under a function mode that answers those
calls for unwritten tensors that the cache loaded (:mod:`.torch_conversion`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trims_shim import diagnostics, patches
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_conversion import Conversions, conversions_of
from trims_shim.patches.torch_modes import call_under

__all__ = ["POINTS"]

_TO = torch.Tensor.to
_DTYPES = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}
"""Of the methods of a module that convert to one dtype. A tensor's have the same names."""
_METHODS: dict[Any, torch.dtype] = {
    getattr(torch.Tensor, name): dtype for name, dtype in _DTYPES.items()
}


class _ConversionMode(TorchFunctionMode):
    """Answers the conversions that a module makes of its tensors."""

    def __init__(self, conversions: Conversions) -> None:
        super().__init__()
        self._conversions = conversions

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _TO or func in _METHODS:
            found = self._converted(func, *args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def _converted(
        self, func: Any, tensor: Any, /, *args: Any, **kwargs: Any
    ) -> torch.Tensor | None:
        if func is _TO:
            dtype = _dtype_of_to(args, kwargs)
        else:
            dtype = None if args or kwargs else _METHODS[func]  # a memory format
        return self._conversions.converted(tensor) if dtype is self._conversions.dtype else None


def _dtype_of_to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype | None:
    """The dtype that a call of ``to`` gives what is in host memory, if it does only that."""
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    # Border: torch has its own words for arguments that it does not take.
    except (RuntimeError, TypeError) as error:
        diagnostics.pass_on(error)
        return None
    is_only_that = (device is None or device.type == "cpu") and memory_format in (
        None,
        torch.preserve_format,
    )
    return dtype if is_only_that else None


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which could not compile the rest
            return original(self, *args, **kwargs)
        dtype = own_dtype or _dtype_of_to(args, kwargs)
        conversions = conversions_of(self, dtype) if dtype and patches.active() else None
        if conversions is None:
            return original(self, *args, **kwargs)
        try:
            return call_under(_ConversionMode(conversions), original, self, *args, **kwargs)
        finally:
            conversions.end()

    own_dtype = _DTYPES.get(original.__name__)
    return convert


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint("torch.nn.modules.module:Module.float", "2.4+", _wrap),
    PatchPoint("torch.nn.modules.module:Module.half", "2.4+", _wrap),
    PatchPoint("torch.nn.modules.module:Module.bfloat16", "2.4+", _wrap),
    PatchPoint("torch.nn.modules.module:Module.to", "2.4+", _wrap),
)
