"""Which copies a load_state_dict consists of, when it consists of nothing else.

For a tree of modules without hooks and overrides, whose keys are exactly those of the state dict,
``Module.load_state_dict`` does one ``copy_`` for each entry and returns two empty lists. Then the
copies can be done without going through torch's Python for each module and key. Owns the proof
that this is such a case; anything else is torch's own code's to do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules import batchnorm
from torch.nn.modules import module as torch_module

from trims_shim.patches.originals import is_own
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
"""Whether nobody replaced them before this module was imported."""


def is_torchs_own(function: Callable[..., Any]) -> bool:
    """Whether nobody wrapped it before us: the stock way would pass by the wrapper."""
    return is_own(function, torch_module.__name__)


def stock_pairs(
    module: torch.nn.Module, state_dict: dict[str, Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Destination and source of every copy, in torch's order, when a load is just these copies.

    Empty when it may be more: a hook, an override, extra state, a key that misses or is left over,
    a shape that differs, an entry that is no plain tensor.
    """
    metadata = getattr(state_dict, "_metadata", None) or {}
    if type(metadata) not in PLAIN_DICTS or not all(map(_is_inert, metadata.values())):
        return []
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    if not _add_pairs(module, "", state_dict, pairs) or len(pairs) != len(state_dict):
        return []
    return list(pairs.values())


def _is_inert(local_metadata: Any) -> bool:
    # torch leaves the mark of an earlier assign=True in the state dict, and obeys it again.
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
    """Whether loading this module alone runs no code but torch's, and none that adds keys."""
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
    # With the counter among the keys, a batch norm's own loading has nothing to add.
    return _IS_NORMS_TORCHS and module._buffers.get("num_batches_tracked") is not None


def _persistent(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then persistent buffers, as torch's loading goes through them."""
    transient = module._non_persistent_buffers_set
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in transient:
            yield name, buffer


def registered(module: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Every parameter and buffer of the tree, by identity."""
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
