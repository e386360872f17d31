"""A batch on its way through a device: begun, run, delivered, reported.

A job belongs to one thread or task at a time. When a caller that runs one is interrupted, a worker
goes on with it where it was.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from trims_shim.batching.protocol import Request
from trims_shim.batching.replies import FAILURES, Entry, Failure, deliver

__all__ = ["Job"]

_logger = logging.getLogger(__name__)


class Job:
    """One :class:`~trims_shim.batching.protocol.Run`."""

    __slots__ = (
        "__weakref__",
        "chosen_ns",
        "delivered",
        "device",
        "ended_ns",
        "era",
        "live",
        "requests",
        "results",
        "runner",
        "started_ns",
    )

    def __init__(self, device: int, requests: Sequence[Request], era: int) -> None:
        self.device = device
        self.requests = requests
        self.era = era
        """Of the policy that made it; a later one knows nothing of its device."""
        self.runner: object = None
        """The seat or the task that runs it; None until it has one."""
        self.live: list[Request] | None = None
        """Those that were not given up before it began; None until then."""
        self.results: list[Any] | None = None
        """Of ``live``; None until it has run."""
        self.delivered = 0
        self.chosen_ns = 0
        """When the policy said so."""
        self.started_ns = self.ended_ns = 0
        """When its thread or task began, and was done."""

    @property
    def key(self) -> Hashable:
        """That of those that are padded least."""
        return self.requests[0].key

    @property
    def is_typical(self) -> bool:
        """Whether its duration says something about others of its size, and key."""
        live = self.live
        return live is not None and live != [] and not self.failed and live[0].key == self.key

    @property
    def failed(self) -> int:
        """How many of ``live``."""
        return sum([isinstance(each, FAILURES) for each in self.results or ()])

    def begin(self, now_ns: int) -> list[Entry]:
        """The entries to run. Again, when another thread goes on with it: the same."""
        if self.live is None:
            self.started_ns = now_ns
            self.live = [each for each in self.requests if each.payload.reply.begin()]
        return [request.payload for request in self.live]

    def leave_out(self, reply: object) -> None:
        """One caller was interrupted; the others still wait."""
        if self.live is not None and self.results is None:
            self.live = [each for each in self.live if each.payload.reply is not reply]

    def end(self, now_ns: int, results: list[Any]) -> None:
        """It has run."""
        self.ended_ns = now_ns
        self.results = results

    def end_with(self, now_ns: int, error: BaseException) -> None:
        """It could not be run."""
        self.end(now_ns, [Failure(error)] * len(self.live or ()))

    def deliver(self) -> None:
        """Hand the results out; goes on where it was interrupted."""
        live, results = self.live, self.results
        assert live is not None
        assert results is not None
        while self.delivered < len(live):
            index = self.delivered
            deliver(live[index].payload.reply, results[index])
            # Counted afterwards: to hand a result out twice is harmless, not to do it is not.
            self.delivered = index + 1

    def let_go(self) -> None:
        """It was counted, and is of no use any more; see :meth:`Entry.let_go`."""
        for result in self.results or ():
            if type(result) is Failure:
                result.let_go()
        self.results = []
        for request in self.live or ():
            request.payload.let_go()

    def deliver_surely(self) -> None:
        """As :meth:`deliver`, past what callbacks raise; for threads that nobody would miss."""
        while True:
            try:
                self.deliver()
                return
            except BaseException:
                _logger.exception("a callback of a future failed")
                self.delivered += 1
