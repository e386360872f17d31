"""transformers' from_pretrained of mixtures of experts, without the copies that stack experts.

Files hold each expert's matrices. Models hold one tensor of them all: transformers stacks those of
a layer (``MergeModulelist``), and puts two such stacks side by side (``Concatenate``), so that each
expert's rows of the one come before its rows of the other. Either result is the files' tensors one
behind the other, which an image can hold (:mod:`.torch_stacking`).

A first stack that is only put beside another is not made: :class:`_Unstacked` stands for it.
"""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable
from typing import Any

import torch
from transformers import core_model_loading as core

from trims_shim import patches
from trims_shim.patches.points import PatchPoint
from trims_shim.patches.torch_mappings import count_error
from trims_shim.patches.torch_stacking import are_alike, stacked

__all__ = ["POINTS"]

_operations: contextvars.ContextVar[tuple[Any, ...]] = contextvars.ContextVar(
    "trims_shim_operations", default=()
)
"""Of the converter that is at work."""


class _Unstacked(list[Any]):
    """Tensors that are alike, instead of their stack."""


def _wrap_convert(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(self: Any, *args: Any, **kwargs: Any) -> Any:
        token = _operations.set(tuple(self.operations) if patches.active() else ())
        try:
            return original(self, *args, **kwargs)
        finally:
            _operations.reset(token)

    return convert


def _wrap_merge(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(
        self: Any, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any
    ) -> Any:
        try:
            merged = _merged(self, input_dict, target_patterns)
        # Border: tensors that do not even tell their shape are transformers' business.
        except Exception as error:
            count_error(error, "stack")
            merged = None
        if merged is None:
            return original(self, input_dict, source_patterns, target_patterns, **kwargs)
        input_dict.clear()
        return merged

    return convert


def _merged(merge: Any, lists: dict[str, Any], target_patterns: list[str]) -> dict[str, Any] | None:
    """What ``MergeModulelist`` returns, by its names, if that takes no copy now."""
    first, *others = _operations.get() or (None,)
    if first is not merge or type(merge) is not core.MergeModulelist or merge.dim != 0:
        return None
    if not all(type(each) is list and each and are_alike(each) for each in lists.values()):
        return None
    if not others and len(lists) == len(target_patterns) == 1:
        (tensors,) = lists.values()
        stack = stacked(tensors, (len(tensors), *tensors[0].shape))
        return None if stack is None else {target_patterns[0]: stack}
    if [type(each) for each in others] == [core.Concatenate] and others[0].dim == 1:
        return {name: _Unstacked(each) for name, each in lists.items()} if len(lists) > 1 else None
    return None


def _wrap_concatenate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def convert(
        self: Any, input_dict: Any, source_patterns: Any, target_patterns: Any, **kwargs: Any
    ) -> Any:
        stacks = [input_dict[each] for each in dict.fromkeys(source_patterns) if each in input_dict]
        if not any(type(each) is _Unstacked for each in stacks):
            return original(self, input_dict, source_patterns, target_patterns, **kwargs)
        result = _side_by_side(stacks) if len(target_patterns) == 1 else None
        if result is not None:
            input_dict.clear()
            return {target_patterns[0]: result}
        del stacks  # Each list goes when it is stacked: it may be in memory of its own.
        for pattern in input_dict:
            if type(input_dict[pattern]) is _Unstacked:
                input_dict[pattern] = torch.stack(input_dict[pattern], dim=0)
        return original(self, input_dict, source_patterns, target_patterns, **kwargs)

    return convert


def _side_by_side(stacks: list[Any]) -> torch.Tensor | None:
    """Concatenate stacks of matrices by dimension 1, if they are alike."""
    if not all(type(each) is _Unstacked and len(each) == len(stacks[0]) for each in stacks):
        return None
    first = stacks[0][0]
    if first.dim() == 0 or not are_alike([each[0] for each in stacks]):
        return None
    tensors = [stack[number] for number in range(len(stacks[0])) for stack in stacks]
    shape = (len(stacks[0]), len(stacks) * first.shape[0], *first.shape[1:])
    return stacked(tensors, shape)


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint("transformers.core_model_loading:WeightConverter.convert", "5.0+", _wrap_convert),
    PatchPoint("transformers.core_model_loading:MergeModulelist.convert", "5.0+", _wrap_merge),
    PatchPoint("transformers.core_model_loading:Concatenate.convert", "5.0+", _wrap_concatenate),
)
