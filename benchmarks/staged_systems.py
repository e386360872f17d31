"""The systems that :mod:`benchmarks.staged_policies` compares, all in our own code."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.staged_scenes import Way
from trims_shim.batching.policies import Auto, Immediate, Window
from trims_shim.batching.rules import RuleMaker
from trims_shim.batching.staged.policies import (
    DVABatch,
    InputDiversity,
    LoadDiversity,
    OperatorDiversity,
)
from trims_shim.batching.staged.policies.paper import PaperDVABatch

__all__ = ["OURS", "PEAK_SYSTEMS", "SYSTEMS", "is_of"]

OURS = "dvabatch"
_WAITS_MS = (2, 5, 10, 20)


def _whole(
    maker: RuleMaker, setting: str = "", *, is_bucketed: bool = False, lanes: int = 1
) -> Way:
    return Way(maker, setting, is_staged=False, is_bucketed=is_bucketed, lanes=lanes)


SYSTEMS: dict[str, Sequence[Way]] = {
    "immediate": [_whole(Immediate)],
    "window": [_whole(partial(Window, wait_ms=each), f"{each} ms") for each in _WAITS_MS],
    "immediate, own lengths": [_whole(Immediate, is_bucketed=True)],
    "immediate, two at once": [_whole(Immediate, is_bucketed=True, lanes=2)],
    "auto": [_whole(Auto, is_bucketed=True)],
    "stages alone": [Way(Immediate)],
    "split only": [Way(OperatorDiversity)],
    "stretch only": [Way(LoadDiversity)],
    "windows only": [Way(InputDiversity)],
    "as published": [Way(partial(PaperDVABatch, wait_ms=each), f"{each} ms") for each in _WAITS_MS],
    OURS: [Way(DVABatch)],
}
"""By name. Of several ways, the best in each cell counts, chosen on the same requests.

First whole models: one batch at a time, padded to its longest input; with a batch for each length;
with two batches at once. Then stages: without meta-operations, with one of them, as in DVABatch,
and the default.
"""

_ONLY_FOR = {
    "immediate, own lengths": "input",
    "windows only": "input",
    "split only": "operator",
}
_TUNED = ("2 ms", "20 ms")
PEAK_SYSTEMS = {
    name: [way for way in SYSTEMS[name] if way.setting in ("", *_TUNED)]
    for name in (
        "immediate",
        "window",
        "immediate, own lengths",
        "immediate, two at once",
        "auto",
        "as published",
        OURS,
    )
}
"""With fewer settings, because a search for each takes long."""


def is_of(system: str, diversity: str) -> bool:
    """Whether the system differs from others for models of this diversity."""
    return diversity == "measured" or _ONLY_FOR.get(system, diversity) == diversity
