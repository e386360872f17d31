"""A better allocation than the first one, by changing it step by step. Pure but for ``bench``.

:func:`bounded_greedy` is the paper's: of some random changes of one element of the matrix it takes
the best, as long as that is faster. It is made for a ``bench`` that runs the ensemble, which takes
seconds. :func:`optimise` asks :func:`~trims_shim.ensemble.estimate.throughput` instead, which takes
a fraction of a millisecond, and so can afford to search on from where the greedy search ends.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from trims_shim.checks import check_amount, check_limit, whole
from trims_shim.ensemble.allocation import Allocation, Problem, worst_fit_decreasing
from trims_shim.ensemble.estimate import throughput

__all__ = ["bounded_greedy", "neighbours", "optimise"]

_FASTER = 1 + 1e-9
_HARDLY = 0.005
"""Of the throughput: so little is given up for smaller batches and fewer workers."""
_SHAKEN = (2, 3, 4)
"""Elements that are changed at random before another local search."""
_MOVES = 0.25
_MOVED = (1, 2)
"""In place of that, so often, so many workers go to other devices."""
_PATIENCE = 8
"""For each element: so often nothing was changed before it is believed that nothing can be."""


def bounded_greedy(
    problem: Problem,
    bench: Callable[[Allocation], float],
    *,
    random: Random,
    start: Allocation | None = None,
    max_iter: int = 10,
    max_neighs: int = 100,
) -> Allocation:
    """Return the fastest allocation that it comes across.

    ``bench`` returns samples per second, and 0 for what turns out not to run; allocations that do
    not fit are not asked for. ``start`` is by default that of :func:`worst_fit_decreasing`.
    ``max_iter`` bounds the steps (more if so many devices have no worker at first), ``max_neighs``
    the neighbours that are tried in each.

    Source: Algorithm 2.
    """
    whole("max_iter", max_iter, least=0, most=math.inf)
    check_limit("max_neighs", max_neighs, least=0)
    best = _checked(problem, start)
    best_rate = bench(best)
    for _ in range(max(max_iter, len(problem.devices) - len(problem.members))):
        found = list(neighbours(problem, best))
        if len(found) > max_neighs:
            found = random.sample(found, max_neighs)
        rated = [(bench(each), each) for each in found]
        rate, fastest = max(rated, key=lambda each: each[0], default=(0.0, best))
        if rate <= best_rate:
            break
        best, best_rate = fastest, rate
    return best


def neighbours(problem: Problem, allocation: Allocation) -> Iterator[Allocation]:
    """The allocations that differ in one element, fit, and have a worker of each member."""
    for element in _elements(problem):
        if (changed := _changed(problem, allocation, element)) is not None:
            yield changed


@dataclass(frozen=True, slots=True)
class _Element:
    device: int
    member: int
    batch_size: int


def _elements(problem: Problem) -> list[_Element]:
    return [
        _Element(device, member, size)
        for device in range(len(problem.devices))
        for member in range(len(problem.members))
        for size in (0, *problem.batch_sizes)
    ]


def _changed(problem: Problem, allocation: Allocation, element: _Element) -> Allocation | None:
    """The allocation with this element; None if that is the same, lacks a member or has no room."""
    device, member, size = element.device, element.member, element.batch_size
    if allocation.batch_sizes[device][member] == size:
        return None
    changed = allocation.with_batch_size(device, member, size)
    is_complete = size or any(row[member] for row in changed.batch_sizes)
    return changed if is_complete and problem.fits_on(device, changed) else None


def optimise(
    problem: Problem,
    *,
    random: Random | None = None,
    start: Allocation | None = None,
    tries: int = 10_000,
) -> Allocation:
    """The best allocation by the members' latencies that ``tries`` estimates find.

    Iterated local search: from the first allocation, each change that is faster is made. Where
    there is none, some elements of the best one are changed at random, and it goes on from there.
    In the end, workers and parts of batches that gain next to nothing are left out. The same
    ``random`` (by default one of a fixed seed) gives the same allocation. Raises PlanningError if a
    member finds no room, or latencies are missing, and ValueError for a ``start`` that has none or
    lacks a member.
    """
    check_amount("tries", tries)
    return _Search(problem, random or Random(1), tries).run(_checked(problem, start))


def _checked(problem: Problem, start: Allocation | None) -> Allocation:
    """Where a search starts: all that it comes to differs from that by changes that fit."""
    if start is None:
        return worst_fit_decreasing(problem)
    start.check(len(problem.devices), len(problem.members))
    if not start.is_complete or not problem.fits(start):
        raise ValueError("the search has to start with an allocation of all members that fits")
    return start


class _Search:
    def __init__(self, problem: Problem, random: Random, tries: int) -> None:
        self._problem = problem
        self._random = random
        self._elements = _elements(problem)
        self._tries = tries

    def run(self, start: Allocation) -> Allocation:
        best, best_rate = start, 0.0
        current: Allocation | None = start
        while current is not None:
            found, rate = self._climbed(current)
            if rate > best_rate * _FASTER:
                best, best_rate = found, rate
            current = self._shaken(best)
        return self._trimmed(best, (1 - _HARDLY) * best_rate)

    def _climbed(self, current: Allocation) -> tuple[Allocation, float]:
        """Make changes that are faster until there is none, or no try left."""
        rate = self._rate(current)
        unchanged = 0
        self._random.shuffle(self._elements)
        while unchanged < len(self._elements):
            for element in self._elements:
                unchanged += 1
                changed = _changed(self._problem, current, element)
                if changed is None or unchanged > len(self._elements):
                    continue
                if self._tries <= 0:
                    return current, rate
                if (faster := self._rate(changed)) > rate * _FASTER:
                    current, rate, unchanged = changed, faster, 0
        return current, rate

    def _trimmed(self, best: Allocation, least_rate: float) -> Allocation:
        """The same with the smallest batches that are as fast as that, element by element."""
        for device, member, size in list(best.workers()):
            for smaller in sorted({0, *self._problem.batch_sizes}):
                if smaller >= size:
                    break
                changed = _changed(self._problem, best, _Element(device, member, smaller))
                if changed is not None and throughput(self._problem, changed) >= least_rate:
                    best = changed
                    break
        return best

    def _shaken(self, best: Allocation) -> Allocation | None:
        """Some random changes of ``best``; None when there are no tries left, or no other."""
        for _ in range(_PATIENCE * len(self._elements)):
            if self._tries <= 0:
                break
            changed = self._moved(best) if self._random.random() < _MOVES else self._altered(best)
            if changed != best:
                return changed
        return None

    def _altered(self, best: Allocation) -> Allocation:
        changed = best
        for element in self._random.choices(self._elements, k=self._random.choice(_SHAKEN)):
            changed = _changed(self._problem, changed, element) or changed
        return changed

    def _moved(self, best: Allocation) -> Allocation:
        """Where memory is full, workers can only move, or change places, all at once."""
        changed = best
        for _ in range(self._random.choice(_MOVED)):
            member = self._random.randrange(len(self._problem.members))
            one, other = self._random.choices(range(len(self._problem.devices)), k=2)
            sizes = changed.batch_sizes[one][member], changed.batch_sizes[other][member]
            changed = changed.with_batch_size(one, member, sizes[1])
            changed = changed.with_batch_size(other, member, sizes[0])
        return changed if self._problem.fits(changed) else best

    def _rate(self, allocation: Allocation) -> float:
        self._tries -= 1
        return throughput(self._problem, allocation)
