"""The cost of a plan for the next batches: to requests that run, that wait, and that will arrive.

A plan says when running requests are answered and when the device is free. Its cost has two parts:
the total time that all requests spend in the system until the device is free, and the effect of the
queue that is left then. With a queue of ``b`` at a free device, all later requests together wait
``h(b)`` longer than on average. ``h`` is the relative value of a queue (Howard, 1960) that always
runs as one batch, with latency ``L(b) = alpha b + beta`` and Poisson arrivals of rate ``r``. So
choosing the plan with the lowest cost is a step of policy iteration from "run the whole queue":

    x = r beta / (1 - rho)                     the queue that reproduces itself; rho = r alpha < 1
    A = (1 + rho / 2) beta / (1 - rho)^2
    B = (1 + rho / 2) alpha / (1 - rho^2)
    h(b) = A (b - x) + B (b - x)^2
    g = 1.5 x + r B                            the mean number of requests in the system

These solve h(b) = b L + r L^2 / 2 - g L + E h(N), with N Poisson of mean r L and L = L(b). In a
plan of length t, the variance r t of the arrivals adds B r t to E h(N); the term r B in g cancels
it. With a rate of 0, the cost is the sum of the latencies of the requests that are there.

The line is fitted to the sizes that occur at this rate. On a CPU, items of large batches often cost
more, since the caches hold less of them. A line through all sizes would extend that to small
batches, and would say that the device has no time to spare where it has. Nor does a queue have to
be answered in one batch: where latencies jump (batches padded to some sizes), eight requests may
run as two batches of four. A line through the latency of one batch of eight would be steeper, and
would predict a queue so long that time on the device seems to cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from trims_shim.batching.profiles.profile import LatencyProfile

__all__ = ["Answer", "Prospect"]

Answer = tuple[float, int]
"""(after how many nanoseconds, how many are answered)."""

# Nearer to 1 only the future would count, and it is never known that well.
_HIGHEST_LOAD = 0.95
# Batches are seldom larger than twice the size that reproduces itself; a line needs some sizes.
_LARGER = 2
_LEAST_SIZES = 4


class Prospect:
    """The costs of plans where requests arrive at ``rate``, in requests per nanosecond.

    The rate is limited to 0.95 of the best throughput of batches up to ``max_batch_size``.
    """

    __slots__ = ("_linear", "_quadratic", "_queue", "_rate")

    def __init__(self, profile: LatencyProfile, *, max_batch_size: int, rate: float) -> None:
        self._rate = rate = min(rate, _HIGHEST_LOAD * profile.best_rate(max_batch_size))
        sizes = range(1, max_batch_size + 1)
        usual = next(size for size in sizes if rate * profile.latency_ns(size) <= size)
        largest = min(max_batch_size, max(_LEAST_SIZES, _LARGER * usual))
        alpha, beta = _quickest(profile, largest).line_ns()
        load = min(self._rate * alpha, _HIGHEST_LOAD)
        pressure = 1 + load / 2
        self._queue = self._rate * beta / (1 - load)
        self._linear = pressure * beta / (1 - load) ** 2
        self._quadratic = pressure * alpha / (1 - load * load)

    def cost_ns(self, answers: Iterable[Answer], *, next_ns: float, queued: int) -> float:
        """Return the cost of a plan in requests x ns, to compare with plans from the same state.

        ``next_ns``: how long the plan takes; ``queued``: how many waiting requests it leaves.
        """
        cost = sum(after_ns * count for after_ns, count in answers)
        arriving = self._rate * next_ns
        cost += next_ns * (queued + arriving / 2 - 1.5 * self._queue)
        more = queued + arriving - self._queue
        return cost + more * (self._linear + self._quadratic * more)


def _quickest(profile: LatencyProfile, largest: int) -> LatencyProfile:
    """Return for each size the time in one batch, or in several in turn if that is faster."""
    times_ns = [0]
    for size in range(1, largest + 1):
        halves = range(1, size // 2 + 1)
        in_two = [times_ns[first] + times_ns[size - first] for first in halves]
        times_ns.append(min([profile.latency_ns(size), *in_two]))
    return LatencyProfile(times_ns[1:])
