"""torch.nn.Module.load_state_dict: the patch points, and the decision which way a call goes.

The first way that applies is taken:

1. torch's own, untouched: patches off, ``assign=True``, nothing in the state dict comes from the
   cache, or something watches torch's operations (:func:`torch_copies.is_watched`).
2. The stock tree: no hook, no override, keys and shapes match exactly. torch would do one ``copy_``
   for each entry and nothing else; the same is done here, each copy elided where it can be.
3. torch's own, under a mode that sees the copies: hooks, overrides and messages stay torch's.

Parameters on shared device memory become private before torch's code copies into them, also while
patches are off (:mod:`.torch_unshare`).

After an error of ours, torch's own code does the work. :mod:`.torch_elision` says when a copy is
elided, and what then differs from a copy.

Programs that need no weights for a while, such as FSDP, resize their storages to nothing and back.
Torch resizes only memory that its own allocator made, so ``resize_`` is patched to work after an
elided copy as it does after a copy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim import patches
from trims_shim.patches.points import PatchPoint

__all__ = ["POINTS"]

_ARGUMENTS = ("state_dict", "strict", "assign")


def _probe_load() -> str | None:
    from trims_shim.patches import torch_copies

    return torch_copies.missing_capability()


def _wrap_load(original: Callable[..., Any]) -> Callable[..., Any]:
    from trims_shim.patches import torch_elision, torch_unshare

    @functools.wraps(original)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        is_plain = _is_plain_call(args, kwargs) and not torch_unshare.is_assigning(args, kwargs)
        if is_plain and patches.active():
            return torch_elision.load(original, args, kwargs)
        return torch_unshare.guarded_load(original, args, kwargs)

    return load_state_dict


def _is_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """load_state_dict(module, state_dict[, strict[, assign]]), by position or by name.

    Anything else, wrong calls included, is the original's business.
    """
    has_state_dict = len(args) > 1 or (len(args) == 1 and "state_dict" in kwargs)
    return has_state_dict and len(args) <= 4 and kwargs.keys() <= {*_ARGUMENTS[len(args) - 1 :]}


def _probe_resize() -> str | None:
    from trims_shim.patches import torch_repoint

    return None if torch_repoint.has_swap() else "torch cannot swap the memory of two storages"


def _wrap_resize(original: Callable[..., Any]) -> Callable[..., Any]:
    from trims_shim.patches import torch_mappings

    @functools.wraps(original)
    def resize_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and not self.resizable():
            torch_mappings.make_resizable(self, keeps_bytes=args[0] != 0)
        return original(self, *args, **kwargs)

    return resize_


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        "torch.nn.modules.module:Module.load_state_dict", "2.4+", _wrap_load, probe=_probe_load
    ),
    PatchPoint(
        "torch.storage:UntypedStorage.resize_", "about 2.12+", _wrap_resize, probe=_probe_resize
    ),
)
