"""torch.nn.Module.load_state_dict: the patch point, and the decision which way a call goes.

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
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim import patches
from trims_shim.patches.points import PatchPoint

__all__ = ["POINTS"]


def _probe() -> str | None:
    from trims_shim.patches import torch_copies

    return torch_copies.missing_capability()


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    from trims_shim.patches import torch_elision, torch_unshare

    @functools.wraps(original)
    def load_state_dict(*args: Any, **kwargs: Any) -> Any:
        if not patches.active() or not _is_plain_call(args, kwargs):
            return torch_unshare.guarded_load(original, args, kwargs)
        return torch_elision.load(original, args, kwargs)

    return load_state_dict


def _is_plain_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """load_state_dict(module, state_dict[, strict[, assign=False]]), by position or by name.

    Anything else, wrong calls included, is the original's business.
    """
    if len(args) not in (2, 3, 4) or not kwargs.keys() <= {"strict", "assign"}:
        return False
    return not (kwargs.get("assign") or args[3:4] not in ((), (False,)))


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        name="torch.nn.Module.load_state_dict",
        target="torch.nn.modules.module:Module.load_state_dict",
        supported="2.4 and newer",
        probe=_probe,
        wrap=_wrap,
    ),
)
