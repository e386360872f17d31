"""Mix lengths: one batch, padded to the longest, or one batch after the other.

Each length has a rule and a queue of its own, so a free device can choose between several batches.
The first one has ``n`` requests of length ``k`` and takes ``L_k(n)`` (``L``: latency of a batch).
The ``m`` requests in the queue of length ``j`` can run after it, for ``L_j(m)``, or with it, for
``T = L_max(k,j)(n + m)`` in total. The better way is that with more of the ``n + m`` expected to be
in time, or, if equal, the lower total wait. Together, the ``m`` and all other waiting requests are
answered sooner by the device time saved, ``L_k(n) + L_j(m) - T``, and the ``n`` later by
``T - L_k(n)``. If the sum is a gain, they run together. Lengths join one by one, the one that gains
most first. With ``d`` devices, all busy, the next one is free after ``L_k(n) / d``: the ``m`` save
less, and the time that a device saves is worth only a ``d``-th of it to the others.

Requests that would have been next wait for the ``m``. That is left out, as is the other side of it:
the device time saved also serves future arrivals.

So lengths that cost nearly the same are padded together, for example at low load on a wide device,
and lengths that pay for each token stay apart. Nothing has to be tuned, and no request waits for
it. docs/decisions/0014 compares with a batch for each length and with all lengths together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from trims_shim.batching.rules import Rule

__all__ = ["companions"]


def companions(
    now_ns: int, rule: Rule, size: int, others: Collection[Rule]
) -> list[tuple[Rule, int]]:
    """Return rules of the same family, each with how many of its first requests join.

    ``rule`` runs its first ``size`` now; ``others`` are all other rules with queued requests.
    """
    mates = [each for each in others if _may_join(each, rule)]
    if not mates:
        return []
    batch, found = _Batch.of(rule, size), []
    waiting = len(rule.queue) - size + sum(len(each.queue) for each in others)
    while mates:
        options = [_Option.of(batch, mate, waiting, now_ns) for mate in mates]
        best = max(range(len(mates)), key=lambda index: options[index].gain)
        option = options[best]
        if option.gain <= _NO_GAIN:
            break
        count = option.batch.size - batch.size
        found.append((mates.pop(best), count))
        batch = option.batch
        waiting -= count
    return found


def _may_join(mate: Rule, rule: Rule) -> bool:
    if mate.family is None or rule.family is None or mate.family.rest != rule.family.rest:
        return False
    # Lower priorities must not delay the batch, and higher ones have had their turn.
    return mate.queue[0].priority == rule.queue[0].priority


_NO_GAIN = (0, 0.0)


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch that could run."""

    longest: Rule
    size: int
    weight: int
    due_ns: int
    parts: Sequence[tuple[Rule, int]]
    """Rules, each with how many of its first requests."""

    @classmethod
    def of(cls, rule: Rule, size: int) -> _Batch:
        first, weight = rule.queue[:size], 0
        if rule.max_weight is not None:
            weight = sum([request.weight for request in first])
        return cls(rule, size, weight, rule.queue.deadline_ns(size), [(rule, size)])

    def with_(self, other: _Batch) -> _Batch:
        longest = self.longest if self.longest.length > other.longest.length else other.longest
        due_ns = self.due_ns if self.due_ns < other.due_ns else other.due_ns
        size, weight = self.size + other.size, self.weight + other.weight
        return _Batch(longest, size, weight, due_ns, [*self.parts, *other.parts])

    @property
    def latency_ns(self) -> int:
        return self.longest.profile.latency_ns(self.size)

    def room(self, mate: Rule) -> int:
        """Return how many of the first requests of ``mate`` it can hold."""
        most = min(self.longest.max_batch_size, mate.max_batch_size) - self.size
        count = max(0, min(mate.queue.peers(0), most))
        if mate.max_weight is None or not count:
            return count
        left = mate.max_weight - self.weight
        return mate.queue.within_weight(count, left) if mate.queue[0].weight <= left else 0

    def late(self, start_ns: int, latency_ns: float, stretches: Sequence[float]) -> int:
        """Return how many requests are late, summed over stretches of ``latency_ns``."""
        if start_ns + stretches[-1] * latency_ns <= self.due_ns:
            return 0
        ends_ns = [start_ns + each * latency_ns for each in stretches]
        return sum(
            request.deadline_ns < end_ns
            for rule, count in self.parts
            for request in rule.queue[:count]
            for end_ns in ends_ns
        )


class _Option(NamedTuple):
    """A batch with as many requests of another length as it has room for."""

    batch: _Batch
    """Includes them."""
    gain: tuple[int, float]
    """Over running after it: how many fewer are late, summed over stretches, and by how much less
    all requests wait in total."""

    @classmethod
    def of(cls, batch: _Batch, mate: Rule, waiting: int, now_ns: int) -> _Option:
        """``waiting``: the number of queued requests that are not in ``batch``."""
        count = batch.room(mate)
        if not count:
            return cls(batch, _NO_GAIN)
        joining = _Batch.of(mate, count)
        both = batch.with_(joining)
        before_ns, after_ns, together_ns = batch.latency_ns, joining.latency_ns, both.latency_ns
        saved_ns = before_ns + after_ns - together_ns
        if saved_ns <= 0:
            return cls(both, _NO_GAIN)
        longest = both.longest
        devices, stretches = longest.devices, longest.stretches
        start_ns = now_ns + longest.margin_ns
        fewer = (
            batch.late(start_ns, before_ns, stretches)
            + joining.late(start_ns, before_ns / devices + after_ns, stretches)
            - both.late(start_ns, together_ns, stretches)
        )
        sooner_ns = saved_ns - before_ns * (1 - 1 / devices)
        gained_ns = count * sooner_ns + (waiting - count) * saved_ns / devices
        return cls(both, (fewer, gained_ns - batch.size * (together_ns - before_ns)))
