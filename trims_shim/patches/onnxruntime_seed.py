"""onnxruntime.set_seed: from then on, sessions of this process are left to onnxruntime.

A random node without a seed of its own starts from the process's seed plus its number in the graph,
and nodes of a prepared model have other numbers. As long as nobody has set a seed it is the time,
so that no program can tell the difference; afterwards it could.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trims_shim.patches.points import PatchPoint

__all__ = ["POINTS", "is_set"]

_calls: list[bool] = []


def is_set() -> bool:
    """Whether the program has set a seed since the patches were applied."""
    return bool(_calls)


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    _calls.clear()

    @functools.wraps(original)
    def set_seed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if not _calls:
            _calls.append(True)
        return result

    return set_seed


def _probe() -> str | None:
    return None


POINTS: tuple[PatchPoint, ...] = (
    PatchPoint(
        name="onnxruntime.set_seed",
        library="onnxruntime",
        targets=("onnxruntime.capi.onnxruntime_pybind11_state:set_seed",),
        supported="1.19 and newer",
        probe=_probe,
        wrap=_wrap,
        has_holders=True,
    ),
)
