"""What a plan for the next batches costs: those on board, those that wait, and those to come.

A plan says when those on board are answered, and when the device is free. Its cost is the time that
all of them spend in the system together until then, and what comes after: with a queue of ``b`` at
a free device, all later ones wait ``h(b)`` longer than on average. ``h`` is the relative value of a
queue (Howard, 1960) whose batches take all that is there, ``L(b) = alpha b + beta``, with Poisson
arrivals of rate ``r``. So the plan with the lowest cost is a step of policy iteration from "run all
that is there":

    x = r beta / (1 - rho)                     the queue that reproduces itself; rho = r alpha < 1
    A = (1 + rho / 2) beta / (1 - rho)^2
    B = (1 + rho / 2) alpha / (1 - rho^2)
    h(b) = A (b - x) + B (b - x)^2
    g = 1.5 x + r B                            how many are in the system on average

which solves h(b) = b L + r L^2 / 2 - g L + E h(N), with N Poisson of mean r L and L = L(b). In a
plan of length t, the variance r t of those that come adds B r t to E h(N), which is what r B takes
off by g. With no arrivals in sight, the cost is the sum of the latencies of those that are there.

The line is that of the sizes which come at this rate. Items of large batches often cost more on a
processor, as less of them fits into its caches; a line through all sizes would say that of small
batches, too, and that the device has no time to lose where it has. And nobody has to answer those
that wait in one batch: where latencies jump (batches that are filled up to some sizes), eight take
two batches of four. A line through what one of eight takes would be steeper, and promise a queue so
long that whatever takes its time would seem to cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from trims_shim.batching.profile import LatencyProfile

__all__ = ["Answer", "Prospect"]

Answer = tuple[float, int]
"""(after how many nanoseconds, how many are answered)."""

# Nearer to 1, the future would be all that counts, and it is never known so well.
_HIGHEST_LOAD = 0.95
# Batches are seldom larger than twice those that reproduce themselves; a line needs some sizes.
_LARGER = 2
_LEAST_SIZES = 4


class Prospect:
    """What plans cost where requests come at ``rate``, in requests in a nanosecond.

    More than batches of up to ``max_batch_size`` can answer counts as nearly all that they can.
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
        """Of a plan, in requests times nanoseconds; to be compared with others from the same state.

        ``queued`` are those whom the plan does not answer; it is over after ``next_ns``.
        """
        cost = sum(after_ns * count for after_ns, count in answers)
        arriving = self._rate * next_ns
        cost += next_ns * (queued + arriving / 2 - 1.5 * self._queue)
        more = queued + arriving - self._queue
        return cost + more * (self._linear + self._quadratic * more)


def _quickest(profile: LatencyProfile, largest: int) -> LatencyProfile:
    """How long so many take in one batch, or in several one after the other if that is quicker."""
    times_ns = [0]
    for size in range(1, largest + 1):
        halves = range(1, size // 2 + 1)
        in_two = [times_ns[first] + times_ns[size - first] for first in halves]
        times_ns.append(min([profile.latency_ns(size), *in_two]))
    return LatencyProfile(times_ns[1:])
