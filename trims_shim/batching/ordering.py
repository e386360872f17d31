"""The queue of a policy: by priority, then by deadline, then in the order of arrival."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator

from trims_shim.batching.protocol import NEVER_NS, Request

__all__ = ["DeadlineQueue"]


def _order(request: Request) -> tuple[int, int, int]:
    return -request.priority, request.deadline_ns, request.number


def _deadline_ns(request: Request) -> int:
    return request.deadline_ns


def _descending_priority(request: Request) -> int:
    return -request.priority


class DeadlineQueue:
    """Requests in the order in which they should run.

    With deadlines at a constant distance from arrivals, which is the usual case, adding is an
    append; taking the first ones moves the rest, which is quick for any queue worth having.
    """

    __slots__ = ("_requests",)

    def __init__(self) -> None:
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        """Put it in its place."""
        requests = self._requests
        if requests:
            last = requests[-1]
            if (
                last.priority < request.priority
                or last.deadline_ns > request.deadline_ns
                or last.number > request.number
            ):
                insort(requests, request, key=_order)
                return
        requests.append(request)

    def take(self, count: int) -> list[Request]:
        """Remove the first ``count``, all of them if there are fewer."""
        requests = self._requests
        taken = requests[:count]
        del requests[:count]
        return taken

    def cut(self, start: int, stop: int) -> list[Request]:
        """Remove those from index ``start`` up to, not including, ``stop``."""
        taken = self._requests[start:stop]
        del self._requests[start:stop]
        return taken

    def take_due(self, before_ns: int) -> list[Request]:
        """Remove all whose deadline is earlier than ``before_ns``, of any priority."""
        requests = self._requests
        if not requests:
            return []
        if requests[0].priority == requests[-1].priority:
            if requests[0].deadline_ns >= before_ns:
                return []
            return self.take(bisect_left(requests, before_ns, key=_deadline_ns))
        due = [request for request in requests if request.deadline_ns < before_ns]
        if due:
            self._requests = [each for each in requests if each.deadline_ns >= before_ns]
        return due

    def discard(self, request: Request) -> bool:
        """Remove it; False if it is not here."""
        index = bisect_left(self._requests, _order(request), key=_order)
        if index == len(self._requests) or self._requests[index] is not request:
            return False
        del self._requests[index]
        return True

    def deadline_ns(self, count: int) -> int:
        """The earliest deadline of the first ``count``; NEVER_NS for none."""
        requests = self._requests
        count = min(count, len(requests))
        if count < 1:
            return NEVER_NS
        if requests[0].priority == requests[count - 1].priority:
            return requests[0].deadline_ns
        return min(request.deadline_ns for request in requests[:count])

    def peers(self, index: int) -> int:
        """The index after the last that has the priority of the one at ``index``."""
        requests = self._requests
        priority = requests[index].priority
        if requests[-1].priority == priority:
            return len(requests)
        return bisect_right(requests, -priority, index, key=_descending_priority)

    def within_weight(self, count: int, max_weight: int) -> int:
        """How many of the first ``count`` weigh no more than this together; at least 1."""
        weight = 0
        for index, request in enumerate(self._requests[:count]):
            weight += request.weight
            if weight > max_weight and index:
                return index
        return count
