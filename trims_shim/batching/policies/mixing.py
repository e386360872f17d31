"""Who of other lengths goes along: one batch, padded to the longest, or one after the other.

With buckets each length has a rule and a queue of its own, so a device that is free has several
batches to choose from. The one that goes first is ``n`` of bucket ``k``, and would take
``L_k(n)`` (``L``: latency of a batch). The ``m`` that wait in bucket ``j`` can run after it, for
``L_j(m)``, or with it, for ``T = L_max(k,j)(n + m)`` in all. Together, the ``m`` and all others who
wait are answered sooner by what the device saves, ``L_k(n) + L_j(m) - T``, and the ``n`` later by
``T - L_k(n)``. Where the sum of that is a gain, and nobody is late for it, they go together; then
the next bucket is asked, the one that gains most first. With ``d`` devices, all of them busy, the
next one is free after ``L_k(n) / d``, so that the ``m`` save less, and what a device saves is worth
a ``d``-th of it to the others.

That those who would have been next without the ``m`` wait for these is left out: what the device
saves is for those yet to come, too, who are not counted either.

So lengths that cost nearly the same are padded together, as at low load on a wide device, and those
that pay for each token keep to themselves. Nothing has to be tuned, and nobody waits for it
(docs/decisions/0014: against a batch for each length, and all lengths together).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from trims_shim.batching.rules import Rule

__all__ = ["companions"]


def companions(
    now_ns: int, rule: Rule, size: int, others: Collection[Rule]
) -> list[tuple[Rule, int]]:
    """Rules of the same family, each with how many of its first requests go along.

    ``rule`` runs its first ``size`` now; ``others`` are all other rules whose queues are not empty.
    """
    mates = [each for each in others if _may_join(each, rule)]
    if not mates:
        return []
    batch, found = _Batch.of(rule, size), []
    waiting = len(rule.queue) - size + sum(len(each.queue) for each in others)
    while mates:
        options = [batch.with_(mate) for mate in mates]
        gains_ns = [each.gain_ns(batch, waiting, now_ns) for each in options]
        best = max(range(len(mates)), key=gains_ns.__getitem__)
        if gains_ns[best] <= 0:
            break
        count = options[best].size - batch.size
        found.append((mates.pop(best), count))
        batch = options[best]
        waiting -= count
    return found


def _may_join(mate: Rule, rule: Rule) -> bool:
    if mate.family is None or rule.family is None or mate.family.rest != rule.family.rest:
        return False
    # Those of lower priority hold nobody up, and those of higher priority were asked before.
    return mate.queue[0].priority == rule.queue[0].priority


@dataclass(frozen=True, slots=True)
class _Batch:
    """What would run."""

    longest: Rule
    size: int
    weight: int
    due_ns: int
    apart_ns: int
    """How long it takes if the last ones that joined run after the others."""

    @classmethod
    def of(cls, rule: Rule, size: int) -> _Batch:
        weight = sum(request.weight for request in rule.queue[:size])
        return cls(rule, size, weight, rule.queue.deadline_ns(size), 0)

    @property
    def latency_ns(self) -> int:
        return self.longest.profile.latency_ns(self.size)

    def with_(self, mate: Rule) -> _Batch:
        """As many of them as there is room for."""
        longest = max(self.longest, mate, key=lambda rule: rule.length)
        count = self._room(mate)
        weight = sum(request.weight for request in mate.queue[:count])
        apart_ns = self.latency_ns + (mate.profile.latency_ns(count) if count else 0)
        due_ns = min(self.due_ns, mate.queue.deadline_ns(count))
        return _Batch(longest, self.size + count, self.weight + weight, due_ns, apart_ns)

    def _room(self, mate: Rule) -> int:
        most = min(self.longest.max_batch_size, mate.max_batch_size) - self.size
        count = max(0, min(mate.queue.peers(0), most))
        if mate.max_weight is None or not count:
            return count
        left = mate.max_weight - self.weight
        return mate.queue.within_weight(count, left) if mate.queue[0].weight <= left else 0

    def gain_ns(self, batch: _Batch, waiting: int, now_ns: int) -> float:
        """By how much less all wait than if those that have joined ``batch`` run after it.

        0 where they cannot go together. ``waiting``: all that are not in ``batch``.
        """
        count, longest = self.size - batch.size, self.longest
        before_ns, together_ns = batch.latency_ns, self.latency_ns
        saved_ns = self.apart_ns - together_ns
        if not count or saved_ns <= 0:
            return 0.0
        if not longest.is_in_time(self.size, self.due_ns - now_ns - longest.margin_ns):
            return 0.0
        devices = longest.devices
        sooner_ns = saved_ns - before_ns * (1 - 1 / devices)
        gained_ns = count * sooner_ns + (waiting - count) * saved_ns / devices
        return gained_ns - batch.size * (together_ns - before_ns)
