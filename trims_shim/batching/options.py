"""What the dispatches of a batcher have in common."""

from __future__ import annotations

from collections.abc import Callable

from trims_shim.batching.learning import Learning

__all__ = ["Options"]


class Options:
    """See :class:`trims_shim.batching.Batcher`, whose options these are."""

    __slots__ = (
        "caller_runs",
        "clock_ns",
        "devices",
        "learning",
        "queue_size",
        "rejects_when_full",
        "serves_late",
    )

    def __init__(
        self,
        learning: Learning,
        *,
        devices: int,
        queue_size: int,
        rejects_when_full: bool,
        serves_late: bool,
        caller_runs: bool,
        clock_ns: Callable[[], int],
    ) -> None:
        if not isinstance(clock_ns(), int):
            raise TypeError("clock_ns has to return whole nanoseconds, as time.monotonic_ns does")
        self.learning = learning
        self.devices = devices
        self.queue_size = queue_size
        self.rejects_when_full = rejects_when_full
        self.serves_late = serves_late
        self.caller_runs = caller_runs
        self.clock_ns = clock_ns
