"""When requests arrive: the renewal and burst processes that serving papers measure with.

A process is an endless iterator of times in nanoseconds; :func:`requests` cuts it off and makes
requests of it, :func:`merged` mixes several. Randomness is a generator that the caller seeds, so a
stream is the same for every policy that is compared.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator
from itertools import accumulate, count, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from trims_shim.batching.protocol import NEVER_NS, Request

if TYPE_CHECKING:
    from random import Random
else:
    Random = Any  # annotations can be evaluated

__all__ = ["bursty", "gamma", "merged", "poisson", "requests", "uniform"]

_NS_PER_MS = 1_000_000
_NS_PER_S = 1_000_000_000


def uniform(rate_qps: float) -> Iterator[int]:
    """Arrivals with equal gaps; the first after one gap."""
    gap_ns = _NS_PER_S / _positive(rate_qps)
    return (_at_most_never(number * gap_ns) for number in count(1))


def poisson(rate_qps: float, random: Random) -> Iterator[int]:
    """Independent arrivals: gaps are exponential, their coefficient of variation is 1."""
    _positive(rate_qps)
    return _renewals(map(random.expovariate, repeat(rate_qps)))


def gamma(rate_qps: float, cv: float, random: Random) -> Iterator[int]:
    """Gaps from a gamma distribution; ``cv``: their standard deviation over their mean.

    1 is Poisson, less is more regular, more comes in bursts (Clockwork, OSDI'20; AlpaServe,
    OSDI'23; Shepherd, NSDI'23 use 1 to 8).
    """
    shape = 1 / _positive(cv) ** 2
    scale_s = 1 / (shape * _positive(rate_qps))
    return _renewals(map(random.gammavariate, repeat(shape), repeat(scale_s)))


def bursty(
    rate_qps: float, random: Random, *, peak: float = 3.0, share: float = 0.2, burst_s: float = 1.0
) -> Iterator[int]:
    """A Poisson process that is modulated by two states (MMPP), with ``rate_qps`` on average.

    For ``share`` of the time, in bursts of ``burst_s`` on average, the rate is ``peak`` times as
    high; in the rest it is lower, so that the average holds. Raises ValueError if the bursts alone
    would exceed it.
    """
    if not (0 < share < 1 and 0 < share * peak <= 1):
        raise ValueError(f"bursts with {peak} x the rate for {share} of the time: more than all")
    calm_qps = _positive(rate_qps) * (1 - share * peak) / (1 - share)
    calm_s = _positive(burst_s) * (1 - share) / share
    return _modulated(((rate_qps * peak, burst_s), (calm_qps, calm_s)), share, random)


def requests(
    times_ns: Iterable[int],
    *,
    slo_ms: float | None,
    count: int | None = None,
    duration_s: float | None = None,
    key: Hashable = None,
    priority: int = 0,
) -> Iterator[Request]:
    """Requests at ascending ``times_ns``, numbered from 0, each with a deadline ``slo_ms`` later.

    Ends after ``count`` requests or at ``duration_s``, whichever comes first; with neither, with
    ``times_ns``. ``slo_ms=None``: without a deadline.
    """
    slo_ns = None if slo_ms is None else round(slo_ms * _NS_PER_MS)
    end_ns = NEVER_NS if duration_s is None else round(duration_s * _NS_PER_S)
    for number, arrival_ns in enumerate(times_ns):
        if arrival_ns >= end_ns or number == count:
            return
        deadline_ns = NEVER_NS if slo_ns is None else arrival_ns + slo_ns
        yield Request(number, arrival_ns, deadline_ns, priority, key)


def merged(*streams: Iterable[Request]) -> Iterator[Request]:
    """All streams as one, in the order of arrival; their requests are numbered anew."""
    mixed = heapq.merge(*streams, key=attrgetter("arrival_ns"))
    for number, each in enumerate(mixed):
        each.number = number
        yield each


def _renewals(gaps_s: Iterable[float]) -> Iterator[int]:
    return (_at_most_never(time_s * _NS_PER_S) for time_s in accumulate(gaps_s))


def _at_most_never(time_ns: float) -> int:
    """Gaps of a very low rate may add up to infinity."""
    return round(min(time_ns, NEVER_NS))


def _modulated(
    states: tuple[tuple[float, float], tuple[float, float]], share: float, random: Random
) -> Iterator[int]:
    """``states`` are (rate, mean length in s); ``share`` is the chance to begin in the first."""
    end_s = 0.0
    state = int(random.random() >= share)
    while True:
        now_s = end_s
        rate_qps, mean_s = states[state]
        end_s = now_s + random.expovariate(1 / mean_s)
        while rate_qps:
            now_s += random.expovariate(rate_qps)
            if now_s >= end_s:
                break
            yield round(now_s * _NS_PER_S)
        state = 1 - state


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError(f"{value} is not positive")
    return value
