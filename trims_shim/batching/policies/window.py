"""A batch size and a timeout, as in most servers (Triton, TorchServe, Ray Serve, LitServe).

Ignores deadlines and latencies, drops nothing, and serves late requests.
"""

from __future__ import annotations

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.rules import Rule, duration_ns

__all__ = ["Window"]


class Window(Rule):
    """A full batch at once, a smaller one when its oldest request has waited ``wait_ms``.

    A batch is formed only when a device is free, so requests that arrive while it is busy join. The
    default is Ray Serve's ``batch_wait_timeout_s``.
    """

    def __init__(
        self, profile: LatencyProfile, *, max_batch_size: int, wait_ms: float = 10.0
    ) -> None:
        super().__init__(profile, max_batch_size=max_batch_size)
        self._wait_ns = duration_ns("wait_ms", wait_ms)

    def choose(self, now_ns: int) -> int:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        size = self.room()
        if self.is_full(size):
            return size
        end_ns = min(request.arrival_ns for request in self.queue) + self._wait_ns
        if now_ns >= end_ns:
            return size
        self.wake_ns = end_ns
        return 0
