"""The queue of a policy: by priority, then by deadline, then in the order of arrival."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence

from trims_shim.batching.protocol import NEVER_NS, Request

__all__ = ["DeadlineQueue"]


def _order(request: Request) -> tuple[int, int, int]:
    return -request.priority, request.deadline_ns, request.number


def _deadline_ns(request: Request) -> int:
    return request.deadline_ns


def _descending_priority(request: Request) -> int:
    return -request.priority


class DeadlineQueue(list[Request]):
    """Requests in the order in which they should run; a list, which only these methods change.

    With deadlines at a constant distance from arrivals, which is the usual case, adding is an
    append; taking the first ones moves the rest, which is quick for any queue worth having.
    """

    __slots__ = ()

    def add(self, request: Request) -> None:
        """Insert ``request`` in order."""
        if self:
            last = self[-1]
            if (
                last.priority < request.priority
                or last.deadline_ns > request.deadline_ns
                or last.number > request.number
            ):
                insort(self, request, key=_order)
                return
        self.append(request)

    def add_all(self, others: Sequence[Request]) -> None:
        """Insert ``others``, which are sorted likewise, in order."""
        self[:] = self.merged(others)

    def merged(self, others: Sequence[Request]) -> list[Request]:
        """This queue and ``others``, which are sorted likewise, as one list; changes neither."""
        both = [*others, *self]
        if others and self and _order(others[-1]) > _order(self[0]):
            both.sort(key=_order)
        return both

    def take(self, count: int) -> list[Request]:
        """Remove the first ``count``, all of them if there are fewer."""
        if count >= len(self):
            taken = [*self]
            self.clear()
            return taken
        taken = self[:count]
        del self[:count]
        return taken

    def cut(self, start: int, stop: int) -> list[Request]:
        """Remove those from index ``start`` up to, not including, ``stop``."""
        taken = self[start:stop]
        del self[start:stop]
        return taken

    def take_due(self, before_ns: int) -> list[Request]:
        """Remove all whose deadline is earlier than ``before_ns``, of any priority."""
        if not self:
            return []
        if self[0].priority == self[-1].priority:
            if self[0].deadline_ns >= before_ns:
                return []
            return self.take(bisect_left(self, before_ns, key=_deadline_ns))
        due = [request for request in self if request.deadline_ns < before_ns]
        if due:
            self[:] = [each for each in self if each.deadline_ns >= before_ns]
        return due

    def discard(self, request: Request) -> bool:
        """Remove it; False if it is not here."""
        index = bisect_left(self, _order(request), key=_order)
        if index == len(self) or self[index] is not request:
            return False
        del self[index]
        return True

    def deadline_ns(self, count: int) -> int:
        """The earliest deadline of the first ``count``; NEVER_NS for none."""
        if count < 1 or not self:
            return NEVER_NS
        first = self[0]
        if count == 1:
            return first.deadline_ns
        last = self[count - 1] if count <= len(self) else self[-1]
        if first.priority == last.priority:
            return first.deadline_ns
        return min(request.deadline_ns for request in self[:count])

    def peers(self, index: int) -> int:
        """The index after the last request that has the priority of the one at ``index``."""
        priority = self[index].priority
        if self[-1].priority == priority:
            return len(self)
        return bisect_right(self, -priority, index, key=_descending_priority)

    def within_weight(self, count: int, max_weight: int, start: int = 0) -> int:
        """How many of ``count`` from ``start`` on weigh no more than ``max_weight``; at least 1."""
        weight = 0
        for index, request in enumerate(self[start : start + count]):
            weight += request.weight
            if weight > max_weight and index:
                return index
        return count
