"""What the dispatches of a batcher have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trims_shim.batching.drivers.learning import Learning

__all__ = ["Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """See :class:`trims_shim.batching.Batcher`, whose options these are."""

    learning: Learning
    devices: int
    queue_size: int
    rejects_when_full: bool
    serves_late: bool
    caller_runs: bool
    clock_ns: Callable[[], int]

    def __post_init__(self) -> None:
        if not isinstance(self.clock_ns(), int):
            raise TypeError("clock_ns has to return whole nanoseconds, as time.monotonic_ns does")
