"""The copies of a load_state_dict that does nothing but copy.

For a tree of modules without hooks and overrides, whose keys are exactly those of the state dict,
``Module.load_state_dict`` does one ``copy_`` for each entry and returns two empty lists. Then the
copies can be done without running torch's Python for each module and key. Owns the proof that a
load is such a case; torch's own code does all others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import batchnorm
from torch.nn.modules import module as torch_module

from trims_shim.patches.points import is_own
from trims_shim.patches.torch_copies import is_stock_copy

__all__ = ["PLAIN_DICTS", "is_torchs_own", "registered", "stock_pairs"]

PLAIN_DICTS = frozenset({dict, OrderedDict})
_LOAD = "_load_from_state_dict"
_STOCK_LOAD = torch.nn.Module._load_from_state_dict
_NORM_LOAD = batchnorm._NormBase._load_from_state_dict
_STOCK_EXTRA_STATE = torch.nn.Module.set_extra_state
_EXTRA_STATE = torch_module._EXTRA_STATE_KEY_SUFFIX
_REGISTERED = ("_parameters", "_buffers", "_modules")
_ASSIGN_MARK = "assign_to_params_buffers"
_IS_TORCHS = all(is_own(each, torch_module.__name__) for each in (_STOCK_LOAD, _STOCK_EXTRA_STATE))
_IS_NORMS_TORCHS = is_own(_NORM_LOAD, batchnorm.__name__)
"""Whether torch's functions had not been replaced when this module was imported."""


def is_torchs_own(function: Callable[..., Any]) -> bool:
    """Whether no other tool wrapped it before us: the stock way would bypass the wrapper."""
    return is_own(function, torch_module.__name__)


def stock_pairs(
    module: torch.nn.Module, state_dict: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return destination and source of every copy, in torch's order, if a load is just copies.

    Empty when it may be more: a hook, an override, extra state, a missing or unexpected key, a
    shape that differs, an entry that is no plain tensor.
    """
    metadata = getattr(state_dict, "_metadata", None) or {}
    if type(metadata) not in PLAIN_DICTS or not all(map(_is_inert, metadata.values())):
        return []
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    if not _add_pairs(module, "", state_dict, pairs) or len(pairs) != len(state_dict):
        return []
    return list(pairs.values())


def _is_inert(local_metadata: Any) -> bool:
    # torch leaves the mark of an earlier assign=True in the state dict, and obeys it next time.
    return type(local_metadata) in PLAIN_DICTS and not local_metadata.get(_ASSIGN_MARK)


def _add_pairs(
    module: torch.nn.Module,
    prefix: str,
    state_dict: dict[str, Any],
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]],
) -> bool:
    if not _is_stock(module):
        return False
    for name, dst in _persistent(module):
        key = prefix + name
        src: Any = state_dict.get(key)
        if key in pairs or name == _EXTRA_STATE or not is_stock_copy(dst, src):
            return False
        pairs[key] = (dst, src)
    return all(
        _add_pairs(child, f"{prefix}{name}.", state_dict, pairs)
        for name, child in module._modules.items()
        if child is not None
    )


def _is_stock(module: torch.nn.Module) -> bool:
    """Whether loading this module alone runs only code of torch's, and none that adds keys."""
    kind = type(module)
    attributes = module.__dict__
    function = kind._load_from_state_dict
    return (
        all(type(attributes.get(name)) in PLAIN_DICTS for name in _REGISTERED)  # not of scripts
        and _IS_TORCHS
        and (function is _STOCK_LOAD or (function is _NORM_LOAD and _counts_batches(module)))
        and kind.set_extra_state is _STOCK_EXTRA_STATE
        and _LOAD not in attributes
        and not attributes["_load_state_dict_pre_hooks"]
        and not attributes["_load_state_dict_post_hooks"]
    )


def _counts_batches(module: torch.nn.Module) -> bool:
    # A batch norm's own loading only adds the counter, if the keys lack it.
    return _IS_NORMS_TORCHS and module._buffers.get("num_batches_tracked") is not None


def _persistent(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield parameters, then persistent buffers, in the order of torch's loading."""
    transient = module._non_persistent_buffers_set
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in transient:
            yield name, buffer


def registered(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Return every parameter and persistent buffer of the tree, by identity."""
    tensors: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    todo = [module]
    while todo:
        current = todo.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        for _, tensor in _persistent(current):
            tensors[id(tensor)] = tensor
        todo.extend(child for child in current._modules.values() if child is not None)
    return tensors
