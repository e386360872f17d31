"""The state machine of a batcher: devices of one kind, one queue for each key.

Late binding: a batch is formed only when a device is free. The key's
:class:`~trims_shim.batching.rules.Rule` decides what goes into it. Of several keys, the one whose
first request has the higher priority, then the earlier deadline, then the longer wait, is asked
first. Its batch may take in requests of other keys of its family; those padded least come first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from trims_shim.batching.buckets import family_of
from trims_shim.batching.protocol import (
    FLUSH,
    TIMER,
    Action,
    Cancelled,
    Event,
    Finished,
    Preempted,
    Request,
    Run,
)
from trims_shim.batching.rules import Rule

__all__ = ["Batching", "urgency"]

# What a rule has learned is worth keeping, as its key may come again. Rules of keys that never
# repeat (inputs of any length, not bucketed) must not add up: about 15 KiB each.
_MOST_IDLE_RULES = 1024


class Batching:
    """A :class:`~trims_shim.batching.protocol.Policy` that asks one rule for each key.

    ``make_rule(key)`` is called at the first request of a key, and again after many other keys.
    ``devices`` may run one batch each. No batch of more than one request weighs more than
    ``max_weight``.
    """

    def __init__(
        self,
        make_rule: Callable[[Hashable], Rule],
        *,
        devices: int = 1,
        max_weight: int | None = None,
    ) -> None:
        if devices < 1:
            raise ValueError(f"devices is {devices}; at least one is needed")
        if max_weight is not None and max_weight < 1:
            raise ValueError(f"max_batch_weight is {max_weight}; it has to be 1 or more")
        self._make_rule = make_rule
        self._max_weight = max_weight
        self._rules: dict[Hashable, Rule] = {}
        self._waiting: dict[Hashable, Rule] = {}
        """The rules whose queues are not empty."""
        self._devices = devices
        self._free = list(range(devices))
        self._wake_ns: int | None = None
        self._is_flushing = False

    @property
    def rules(self) -> dict[Hashable, Rule]:
        """The rules by key, for statistics and for replacing their profiles."""
        return self._rules

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """As :class:`~trims_shim.batching.protocol.Policy` has it; Preempted never comes."""
        if isinstance(event, Request):
            self._arrived(now_ns, event)
        elif isinstance(event, Finished):
            self._finished(now_ns, event)
        elif event is TIMER:
            self._report_lateness(now_ns)
        elif isinstance(event, Cancelled):
            self._cancelled(event.request)
        elif event is FLUSH:
            self._is_flushing = True
        elif isinstance(event, Preempted):
            raise ValueError("this policy preempts nothing")
        self._wake_ns = None
        return self._decide(now_ns) if self._free else ()

    def next_deadline_ns(self) -> int | None:
        """The earliest time for which a rule waits while a device is free."""
        return self._wake_ns

    # --- events -----------------------------------------------------------------------------------

    def _arrived(self, now_ns: int, request: Request) -> None:
        rule = self._rules.get(request.key)
        if rule is None:
            rule = self._new_rule(request.key)
        elif len(self._rules) >= _MOST_IDLE_RULES:
            self._rules[request.key] = self._rules.pop(request.key)
        if not rule.queue:
            self._waiting[request.key] = rule
        self._is_flushing = False
        rule.queue.add(request)
        rule.on_arrival(now_ns, request)

    def _new_rule(self, key: Hashable) -> Rule:
        if len(self._rules) >= _MOST_IDLE_RULES + len(self._waiting):
            del self._rules[next(each for each in self._rules if each not in self._waiting)]
        rule = self._rules[key] = self._make_rule(key)
        rule.max_weight, rule.devices = self._max_weight, self._devices
        rule.key, rule.family = key, family_of(key)
        return rule

    def _finished(self, now_ns: int, finished: Finished) -> None:
        self._free.append(finished.device)
        rule = self._rules.get(finished.batch[0].key) if finished.batch else None
        if rule is not None:
            rule.on_finished(now_ns, finished)

    def _cancelled(self, request: Request) -> None:
        rule = self._rules.get(request.key)
        if rule is not None and rule.queue.discard(request) and not rule.queue:
            del self._waiting[request.key]

    def _report_lateness(self, now_ns: int) -> None:
        wake_ns = self._wake_ns
        if wake_ns is None or now_ns < wake_ns:
            return
        for rule in self._waiting.values():
            if rule.wake_ns == wake_ns:
                rule.on_wake(now_ns - wake_ns)

    # --- actions ----------------------------------------------------------------------------------

    def _decide(self, now_ns: int) -> Sequence[Action]:
        """Ask the rules until no device is free, or all rules wait."""
        if not self._waiting:
            return ()
        actions: list[Action] = []
        if len(self._waiting) == 1:  # the usual case, and nothing to choose between
            (key,) = self._waiting
            rule = self._waiting[key]
            rule.has_rivals = False
            while self._free and self._starts(key, rule, now_ns, actions):
                pass
        else:
            self._decide_between(now_ns, actions)
        if self._free and self._waiting:
            self._set_wake()
        return actions

    def _decide_between(self, now_ns: int, actions: list[Action]) -> None:
        asking = list(self._waiting.items())
        while self._free and asking:
            asking.sort(key=urgency)
            key, rule = asking[0]
            rule.has_rivals = len(self._waiting) > 1
            may_start_more = self._starts(key, rule, now_ns, actions)
            asking = [each for each in asking[not may_start_more :] if each[1].queue]

    def _starts(self, key: Hashable, rule: Rule, now_ns: int, actions: list[Action]) -> bool:
        """Ask a rule; True if it has started a batch and may start another one."""
        size = self._ask(rule, now_ns, actions)
        if size:
            device = self._free.pop()
            actions.append(Run(device, self._take(rule, size, now_ns, is_last=not self._free)))
        if rule.queue:
            return bool(size)
        del self._waiting[key]
        return False

    def _take(
        self, rule: Rule, size: int, now_ns: int, *, is_last: bool, most: int | None = None
    ) -> list[Request]:
        """Take a batch: the first ``size`` of the rule's queue, and its companions.

        Companions join only if the device is the last free one (``is_last``), and only if the whole
        batch is at most ``most``. The rule's queue may be empty afterwards.
        """
        if not is_last or len(self._waiting) == 1 or rule.family is None:
            return rule.queue.take(size)
        others = [each for each in self._waiting.values() if each is not rule]
        going = [(rule, size), *rule.companions(now_ns, size, others)]
        if most is not None and sum(count for _, count in going) > most:
            return rule.queue.take(size)
        going.sort(key=lambda each: each[0].length, reverse=True)
        batch = [request for each, count in going for request in each.queue.take(count)]
        for each, _ in going:
            if not each.queue and each is not rule:
                del self._waiting[each.key]
        return batch

    def _set_wake(self) -> None:
        """Set the time to wake, None so far, to the earliest of all waiting rules."""
        for rule in self._waiting.values():
            wake_ns = rule.wake_ns
            if wake_ns is not None and (self._wake_ns is None or wake_ns < self._wake_ns):
                self._wake_ns = wake_ns

    def _ask(self, rule: Rule, now_ns: int, actions: list[Action]) -> int:
        rule.wake_ns = None
        size = rule.choose(now_ns)
        if rule.drops:
            actions += rule.take_drops()
        if self._is_flushing and not size:
            return rule.room()
        if rule.max_weight is None or size < 2:
            return size
        return rule.queue.within_weight(size, rule.max_weight)


def urgency(waiting: tuple[Hashable, Rule]) -> tuple[int, int, int]:
    """Sort keys and their rules by the order of their first requests."""
    first = waiting[1].queue[0]
    return -first.priority, first.deadline_ns, first.number
