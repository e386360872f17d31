"""onnxruntime.set_seed: once it is called, sessions of this process are left to onnxruntime.

A random node without a seed of its own starts from the process's seed plus its number in the graph,
and nodes of a prepared model have other numbers. Until somebody sets a seed, it is the time. Then
only two sessions of one process, one of them of the prepared model, can be told apart: with
onnxruntime alone they draw the same numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint

__all__ = ["POINTS", "is_set"]

_is_set = False


def is_set() -> bool:
    """Whether the program has set a seed since the patches were applied."""
    return _is_set


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    global _is_set
    _is_set = False

    @functools.wraps(original)
    def set_seed(*args: Any, **kwargs: Any) -> Any:
        global _is_set
        result = original(*args, **kwargs)
        _is_set = True
        return result

    return set_seed


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        name="onnxruntime.set_seed",
        target="onnxruntime.capi.onnxruntime_pybind11_state:set_seed",
        supported="1.19 and newer",
        wrap=_wrap,
        has_holders=True,
    ),
)
