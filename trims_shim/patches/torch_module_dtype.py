"""torch.nn.Module.float and to(torch.float32) of modules in 16 bits, without copies.

Both call ``Tensor.float`` or ``Tensor.to`` for each parameter and buffer, and do the rest
themselves: identity, gradients, hooks and ties stay torch's. Ours runs them under a function mode
that answers those calls for unwritten tensors that the cache loaded (:mod:`.torch_widening`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trims_shim import diagnostics, patches
from trims_shim.client import arenas
from trims_shim.memory.mapping import are_addresses_limited
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_copies import is_watched
from trims_shim.patches.torch_mappings import bytes_in, count_error, widened
from trims_shim.patches.torch_modes import call_under
from trims_shim.patches.torch_stock_load import registered
from trims_shim.patches.torch_widening import Widening, is_narrow

__all__ = ["POINTS"]

_TO = torch.Tensor.to
_FLOAT = torch.Tensor.float


class _ConversionMode(TorchFunctionMode):
    """Answers the conversions to float32 that a module makes of its tensors."""

    def __init__(self, widening: Widening) -> None:
        super().__init__()
        self._widening = widening

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _FLOAT or func is _TO:
            found = self._widened(func, *args, **kwargs)
            if found is not None:
                return found
        return func(*args, **kwargs)

    def _widened(self, func: Any, tensor: Any, /, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        if func is _TO and not _is_to_float32(args, kwargs):
            return None
        return self._widening.widened(tensor)


def _is_to_float32(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of ``to`` on what is in host memory gives it float32, and does only that."""
    try:
        device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    # Border: torch has its own words for arguments that it does not take.
    except (RuntimeError, TypeError) as error:
        diagnostics.pass_on(error)
        return False
    return (
        dtype is torch.float32
        and (device is None or device.type == "cpu")
        and memory_format in (None, torch.preserve_format)
    )


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # which could not compile the rest
            return original(self, *args, **kwargs)
        is_float32 = is_float or _is_to_float32(args, kwargs)
        widening = _begin(self) if is_float32 and patches.active() else None
        if widening is None:
            return original(self, *args, **kwargs)
        try:
            return call_under(_ConversionMode(widening), original, self, *args, **kwargs)
        finally:
            widening.end()

    is_float = original.__name__ == "float"
    return convert


def _begin(module: torch.nn.Module) -> Widening | None:
    try:
        if is_watched():  # who watches would see our looks
            return None
        # Most modules have none, which is seen quickly.
        values = registered(module).values()
        tensors = [each for each in values if widened(torch.float32, each.dtype)]
        if not tensors or are_addresses_limited():
            return None
        with torch.no_grad():  # as torch converts
            tensors = [each for each in tensors if is_narrow(each)]
        if tensors:
            return Widening("float32", functools.partial(_is_mostly, tensors))
    # Border: torch converts, and raises an error of its own if it fails too.
    except Exception as error:
        count_error(error, "float32")
    return None


def _is_mostly(tensors: list[torch.Tensor], image: arenas.Image, numbers: str) -> bool:
    """Whether most of an image are tensors of the module of this dtype."""
    return 2 * bytes_in(image, numbers, tensors) > image.size_bytes


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint("torch.nn.modules.module:Module.float", "2.4+", _wrap),
    PatchPoint("torch.nn.modules.module:Module.to", "2.4+", _wrap),
)
