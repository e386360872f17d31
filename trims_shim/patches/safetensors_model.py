"""safetensors.torch.load_model: declares the aliases that it holds while it loads.

``load_model`` keeps ``model.state_dict()`` while it calls ``load_state_dict``. So no parameter has
its memory to itself, and every load would copy. Instead, exactly these aliases are allowed for: one
for each name of a parameter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim import patches
from trims_shim.patches.points import PatchPoint

__all__ = ["POINTS"]


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    from trims_shim.patches.torch_copies import holding_state_dict

    @functools.wraps(original)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        if not patches.active():
            return original(*args, **kwargs)
        with holding_state_dict():
            return original(*args, **kwargs)

    return load_model


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint("safetensors.torch:load_model", "0.4+", _wrap, has_holders=True),
)
