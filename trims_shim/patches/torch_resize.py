"""torch.UntypedStorage.resize_: works after an elided copy as it does after a copy.

Programs that need no weights for a while, such as FSDP, resize their storages to nothing and back.
Torch resizes only memory that its own allocator made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint

__all__ = ["POINTS"]


def _probe() -> str | None:
    from trims_shim.patches import torch_repoint

    return None if torch_repoint.has_swap() else "torch cannot swap the memory of two storages"


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    from trims_shim.patches import torch_elision

    @functools.wraps(original)
    def resize_(self: Any, *args: Any, **kwargs: Any) -> Any:
        if args and not self.resizable():
            torch_elision.make_resizable(self, keeps_bytes=args[0] != 0)
        return original(self, *args, **kwargs)

    return resize_


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        name="torch.UntypedStorage.resize_",
        target="torch.storage:UntypedStorage.resize_",
        supported="about 2.12 and newer",
        probe=_probe,
        wrap=_wrap,
    ),
)
