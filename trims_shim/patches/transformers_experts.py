"""transformers' from_pretrained of mixtures of experts, without the copies that stack experts.

Files hold each expert's matrices. Models hold one tensor of them all: transformers stacks those of
a layer (``MergeModulelist``), and puts two such stacks side by side (``Concatenate``), so that each
expert's rows of the one come before its rows of the other. Either result is the files' tensors one
behind the other, which an image can hold (:mod:`.torch_stacking`).

It is taken as soon as the experts of a layer are read. Operations let it through.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from transformers import core_model_loading as core

from trims_shim import patches
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_mappings import count_error
from trims_shim.patches.torch_stacking import are_alike, stacked

__all__ = ["POINTS", "Placement", "is_stacking", "placement"]


class Placement:
    """Where the parameters of a load go that are stacked in host memory first.

    Args:
        device_map: The load's: devices by the names of modules.
        names: Parts of the names of such parameters.
        share: Returns a tensor on a device, over memory of all processes, or None.
    """

    def __init__(
        self,
        device_map: dict[str, Any],
        names: list[str],
        share: Callable[[torch.Tensor, Any], torch.Tensor | None],
    ) -> None:
        self._device_map = device_map
        self._names = names
        self._share = share

    def takes(self, name: str) -> bool:
        """Whether a parameter is such a one."""
        return any(part in name for part in self._names)

    def moved(
        self, name: str, stack: torch.Tensor | None, lists: dict[str, Any], n_threads: int
    ) -> torch.Tensor | None:
        """Return the stack of a parameter on its device. If it would have to be copied, None: then
        the lists are there, for transformers to stack.
        """
        device = core.get_device(self._device_map, name)
        if device == "disk" or str(device) == "cpu":
            return stack
        if stack is not None:
            stack = self._share(stack, device)
        if stack is None:
            _move(lists, device, n_threads)
        return stack


placement: contextvars.ContextVar[Placement | None] = contextvars.ContextVar(
    "trims_shim_placement", default=None
)
"""Of the load that this thread is in."""


class _Stacked:
    """Experts that are stacked before the operations which would do it."""

    def __init__(self, tensor: torch.Tensor, last: Any) -> None:
        self.tensor = tensor
        self.last = last  # of the operations


def is_stacking(converter: Any) -> bool:
    """Whether all that a converter does is to stack tensors, for one parameter."""
    merge, *others = converter.operations
    return (
        type(converter) is core.WeightConverter
        and len(converter.target_patterns) == 1
        and type(merge) is core.MergeModulelist
        and merge.dim == 0
        and (not others or [type(each) for each in others] == [core.Concatenate])
        and all(each.dim == 1 for each in others)
    )


def _wrap_materialize(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def materialize_tensors(self: Any) -> Any:
        target, name = placement.get(), next(iter(self.layer_targets), "")
        is_placed = target is not None and target.takes(name)
        is_threaded = is_placed and isinstance(
            next(iter(self.collected_tensors.values()))[0], Future
        )
        lists = original(self)
        stack = _stack(self, lists) if patches.active() else None
        if target is not None and is_placed:
            n_threads = core.GLOBAL_WORKERS if is_threaded else 1
            stack = target.moved(name, stack, lists, n_threads)
        return lists if stack is None else {"": _Stacked(stack, self.operations[-1])}

    return materialize_tensors


def _move(lists: dict[str, list[torch.Tensor]], device: Any, n_threads: int) -> None:
    """Move tensors to their device, with as many threads as transformers takes for it."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(device)

    with ThreadPoolExecutor(n_threads) as pool:
        for name, tensors in list(lists.items()):
            lists[name] = list((pool.map if n_threads > 1 else map)(move, tensors))


def _stack(converter: Any, lists: dict[str, Any]) -> torch.Tensor | None:
    """What a converter makes of the tensors of its patterns, if that takes no copy now."""
    try:
        if not hasattr(converter, "operations") or not is_stacking(converter):
            return None
        patterns = converter.source_patterns
        if lists.keys() != set(patterns) or (len(lists) > 1) != (len(converter.operations) > 1):
            return None
        found = [lists[each] for each in dict.fromkeys(patterns)]
        first = found[0]
        if any(type(each) is not list or len(each) != len(first) for each in found):
            return None
        tensors = [each[number] for number in range(len(first)) for each in found]
        if not are_alike(tensors) or (len(found) > 1 and first[0].dim() == 0):
            return None
        shape = first[0].shape
        if len(found) > 1:
            shape = torch.Size((len(found) * shape[0], *shape[1:]))
        return stacked(tensors, (len(first), *shape))
    # Border: tensors that do not even tell their shape are transformers' business.
    except Exception as error:
        count_error(error, "stack")
        return None


def _wrap_operation(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(
        self: Any, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any
    ) -> Any:
        stack = input_dict.get("") if type(input_dict) is dict else None
        if type(stack) is not _Stacked:
            return original(self, input_dict, source_patterns, target_patterns, **kwargs)
        return {target_patterns[0]: stack.tensor} if stack.last is self else input_dict

    return convert


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "transformers.core_model_loading:WeightTransform.materialize_tensors",
        "5.0+",
        _wrap_materialize,
    ),
    PatchPoint("transformers.core_model_loading:MergeModulelist.convert", "5.0+", _wrap_operation),
    PatchPoint("transformers.core_model_loading:Concatenate.convert", "5.0+", _wrap_operation),
)
