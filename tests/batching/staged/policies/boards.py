"""Batches on their way, put where a test wants them, and queues of those who wait."""

from __future__ import annotations

from collections.abc import Sequence

from trims_shim.batching.protocol import NEVER_NS, Request
from trims_shim.batching.rules import Rule
from trims_shim.batching.staged.mechanism.batches import Batch, BatchTable, Part, PartState

__all__ = ["Place", "batch_at", "queue_up"]

Place = tuple[int, int, int | None]
"""(stage, how many, when they began to run there or None for those who do not)."""


def batch_at(*places: Place, stages: int = 3, deadlines_ns: Sequence[int] = ()) -> Batch:
    """A batch whose parts are there; deadlines in the order of the requests."""
    table = BatchTable(stages=stages)
    parts: list[Part] = []
    due = iter(deadlines_ns)
    number = 0
    for stage, size, started_ns in places:
        requests = [Request(number + each, 0, next(due, NEVER_NS)) for each in range(size)]
        number += size
        is_first = not parts
        part = (
            table.new(0, requests, pair=0) if is_first else table.stretch(parts[0].batch, requests)
        )
        part.stage = stage
        if started_ns is not None:
            part.running, part.state, part.started_ns = requests, PartState.RUNNING, started_ns
        parts.append(part)
    return parts[0].batch


def queue_up(rule: Rule, *deadlines_ns: int, start: int = 100) -> None:
    """One request for each deadline; they have come long ago."""
    for number, deadline_ns in enumerate(deadlines_ns, start):
        rule.queue.add(Request(number, 0, deadline_ns))
