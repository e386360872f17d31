"""A batch on its way through a device: begun, run, delivered, reported.

A job belongs to one thread or task at a time. If the caller that runs it is interrupted, a worker
continues it where it stopped.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from typing import Any

from trims_shim.batching.drivers.replies import Entry, Failure, deliver, is_failure
from trims_shim.batching.protocol import Request

__all__ = ["Job"]

_logger = logging.getLogger(__name__)


class Job:
    """One :class:`~trims_shim.batching.protocol.Run`."""

    stage = 0
    """The first stage that it runs; a function is one stage."""

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
        """That of the policy that made it; a later policy does not know that its device is busy."""
        self.runner: object = None
        """The seat or the task that runs it; None until it has one."""
        self.live: list[Request] | None = None
        """The requests that were not given up before it began; None until then."""
        self.results: list[Any] | None = None
        """One for each of ``live``; None until it has run."""
        self.delivered = 0
        self.chosen_ns = 0
        """When the policy decided to run it."""
        self.started_ns = self.ended_ns = 0
        """When its thread or task began, and ended."""

    @property
    def key(self) -> Hashable:
        """The key of the requests that are padded least."""
        return self.requests[0].key

    @property
    def is_typical(self) -> bool:
        """Whether its duration is evidence for other batches of its size and key."""
        live = self.live
        return live is not None and live != [] and not self.failed and live[0].key == self.key

    @property
    def size(self) -> int:
        """The number of rows it ran with."""
        return len(self.live or ())

    @property
    def durations_ns(self) -> Sequence[int]:
        """How long it took, by stage."""
        return (self.ended_ns - self.started_ns,)

    @property
    def failed(self) -> int:
        """How many of ``live`` failed."""
        return sum(map(is_failure, self.results or ()))

    def begin(self, now_ns: int) -> list[Entry]:
        """The entries to run; the same ones when another thread continues the job."""
        if self.live is None:
            self.started_ns = now_ns
            self.live = [each for each in self.requests if each.payload.reply.begin()]
        return [request.payload for request in self.live]

    def leave_out(self, reply: object) -> None:
        """Leave out the request of an interrupted caller, unless the job has run."""
        if self.live is not None and self.results is None:
            self.live = [each for each in self.live if each.payload.reply is not reply]

    def end(self, now_ns: int, results: list[Any]) -> None:
        """Note that it has run."""
        self.ended_ns = now_ns
        self.results = results

    def end_with(self, now_ns: int, error: BaseException) -> None:
        """Note that it could not be run: all its requests fail."""
        self.end(now_ns, [Failure(error)] * len(self.live or ()))

    def deliver(self) -> None:
        """Hand the results out, from where an interrupt stopped it."""
        live, results = self.live, self.results
        assert live is not None
        assert results is not None
        while self.delivered < len(live):
            index = self.delivered
            deliver(live[index].payload.reply, results[index])
            # Counted afterwards: a result that is handed out twice is harmless, a lost one is not.
            self.delivered = index + 1

    def let_go(self) -> None:
        """Drop the results, once it was counted; see :meth:`Entry.let_go`."""
        for result in self.results or ():
            if type(result) is Failure:
                result.let_go()
        self.results = []
        for request in self.live or ():
            request.payload.let_go()

    def deliver_surely(self) -> None:
        """As :meth:`deliver`, past what callbacks raise: the runner must not die of that."""
        while True:
            try:
                self.deliver()
                return
            except BaseException:
                _logger.exception("a callback of a future failed")
                self.delivered += 1
