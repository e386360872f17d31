"""How Flex forms the batch it would run for one model, without changing the queue.

A :class:`Generation` takes a model's requests in queue order and the time at which a batch could
start, and returns the batch. :class:`trims_shim.batching.policies.flex.Flex` decides whether it
runs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Request

__all__ = ["Generation", "by_earliest", "by_largest"]


class Generation(Protocol):
    """A rule of batch generation (Shepherd, NSDI'23, section 5, ``BatchGen``).

    ``requests`` are in queue order and may be the queue itself; the batch is a slice of them or a
    new list. It would start at ``start_ns``, and answers all its requests in time;
    ``max_batch_size`` is at least 1. It is empty only if no request can be in time.
    """

    def __call__(
        self,
        start_ns: int,
        requests: Sequence[Request],
        profile: LatencyProfile,
        max_batch_size: int,
    ) -> Sequence[Request]: ...


def by_earliest(
    start_ns: int, requests: Sequence[Request], profile: LatencyProfile, max_batch_size: int
) -> Sequence[Request]:
    """Take requests in order while the earliest deadline among them can be met.

    The paper's listing, with line 10 as Nexus' authors corrected it: the batch is tested with the
    new request in it, against its earliest deadline. Requests that would be late even alone are
    passed over.
    """
    soonest_ns = start_ns + profile.latency_ns(1)
    batch: list[Request] = []
    earliest_ns = 0
    for request in requests:
        if request.deadline_ns < soonest_ns:
            continue
        if not batch or request.deadline_ns < earliest_ns:
            earliest_ns = request.deadline_ns
        if start_ns + profile.latency_ns(len(batch) + 1) > earliest_ns:
            break
        batch.append(request)
        if len(batch) == max_batch_size:
            break
    return batch


def by_largest(
    start_ns: int, requests: Sequence[Request], profile: LatencyProfile, max_batch_size: int
) -> Sequence[Request]:
    """Return the largest possible batch, of the earliest requests that can be in it.

    The two-pass rule that the paper's author describes: find the size from the latest deadlines,
    then fill from the earliest. Requests that are passed over stay in the queue for another device.
    The highest priority decides; lower ones fill the batch up if they make no request late.
    """
    most = len(requests) if len(requests) < max_batch_size else max_batch_size
    is_one_class = most > 0 and requests[0].priority == requests[-1].priority
    if is_one_class and requests[0].deadline_ns >= start_ns + profile.latency_ns(most):
        return requests[:most]  # the usual case: time for the largest batch
    first_class = _first_class(requests)
    deadlines = [request.deadline_ns for request in first_class]
    size = _largest(start_ns, deadlines, profile, max_batch_size)
    first = bisect_left(deadlines, start_ns + profile.latency_ns(size)) if size else 0
    batch = first_class[first : first + size]
    others = requests[len(first_class) :]
    if others and batch:
        return _filled_up(start_ns, batch, others, profile, max_batch_size)
    if others:
        return by_largest(start_ns, others, profile, max_batch_size)
    return batch


def _first_class(requests: Sequence[Request]) -> Sequence[Request]:
    """Return the requests of the highest priority; their deadlines ascend."""
    if not requests or requests[-1].priority == requests[0].priority:
        return requests
    return [each for each in requests if each.priority == requests[0].priority]


def _filled_up(
    start_ns: int,
    batch: Sequence[Request],
    others: Sequence[Request],
    profile: LatencyProfile,
    max_batch_size: int,
) -> Sequence[Request]:
    """Add requests of lower priority that make no request late."""
    filled = list(batch)
    earliest_ns = filled[0].deadline_ns
    for request in others:
        if len(filled) == max_batch_size:
            break
        end_ns = start_ns + profile.latency_ns(len(filled) + 1)
        if end_ns > earliest_ns:
            break
        if request.deadline_ns >= end_ns:
            filled.append(request)
            earliest_ns = min(earliest_ns, request.deadline_ns)
    return filled


def _largest(
    start_ns: int, deadlines: Sequence[int], profile: LatencyProfile, max_batch_size: int
) -> int:
    """Return the largest size for which that many deadlines are at or after its end.

    A linear search: a larger batch may take less than a smaller one, so bisection could miss it.
    """
    count = len(deadlines)
    size = min(count, max_batch_size)
    while size and deadlines[count - size] < start_ns + profile.latency_ns(size):
        size -= 1
    return size
