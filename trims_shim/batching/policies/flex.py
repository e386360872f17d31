"""Flex (Shepherd, NSDI'23, section 5): several models on pooled devices, with preemption.

A free device gets the best batch that any model could run in time. When a request arrives and no
device is free, a running batch is preempted for one that is at least ``preemption_factor`` (lambda
in the paper) times as large. The preempted requests are queued again as if they had just arrived. A
batch can be preempted only at its exit points, between stages.

Until the device reaches the exit point, the new batch is reserved: no other device is preempted for
it, and another device takes it only if it has nothing else to do. The batch that really runs is
chosen anew when the device is free (late binding).

Two rules are not the paper's; :meth:`Flex.of_paper` turns them off. The paper's best batch is the
largest; here the models' deadlines count too
(:func:`~trims_shim.batching.policies.choice.by_need`). And the paper preempts even if the larger
batch could wait for the next device; here no batch is preempted for requests that all can wait.

Work conserving: no device idles while a request is queued that could be answered in time.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from trims_shim.batching.ordering import DeadlineQueue
from trims_shim.batching.policies.choice import Choice, Offer, by_need, by_size
from trims_shim.batching.policies.generation import Generation, by_earliest, by_largest
from trims_shim.batching.policies.preemptible import PreemptibleModel
from trims_shim.batching.protocol import (
    NEVER_NS,
    Action,
    Cancelled,
    Drop,
    DropReason,
    Event,
    Finished,
    Preempt,
    Preempted,
    Request,
    Run,
)

__all__ = ["PREEMPTION_FACTOR", "Flex"]

PREEMPTION_FACTOR = 3.03
"""The paper's lambda, which minimizes its bound against a clairvoyant schedule."""
_MOST_KEYS = 1024
"""The number of keys for which :class:`~trims_shim.batching.single.Batching` keeps idle rules."""


@dataclass(slots=True)
class _Running:
    key: Hashable
    batch: Sequence[Request]
    started_ns: int
    end_ns: int
    """By the profile."""
    worth: float
    """In requests, when it was chosen; infinite once it is being preempted."""


class Flex:
    """A :class:`~trims_shim.batching.protocol.Policy`; the key of a request names its model.

    ``generation`` chooses the requests of a model that could run, ``choice`` the model. A batch
    whose first request has a higher priority always goes first.

    ``preemption_factor`` None never preempts. With ``preemption_gain``, preempting must also save,
    compared with waiting for the next device, at least that many times the worth of the preempted
    batch. ``margin_ns`` is kept free between the predicted end of a batch and every deadline.

    Raises ValueError for no devices, or a factor that is not above 1: two batches could then
    preempt each other forever.
    """

    def __init__(
        self,
        models: Mapping[Hashable, PreemptibleModel],
        *,
        devices: int = 1,
        preemption_factor: float | None = PREEMPTION_FACTOR,
        preemption_gain: float = 1.0,
        generation: Generation = by_largest,
        choice: Choice = by_need,
        margin_ns: int = 0,
    ) -> None:
        if devices < 1:
            raise ValueError(f"devices is {devices}; at least one is needed")
        if preemption_factor is not None and preemption_factor <= 1:
            raise ValueError(f"preemption_factor is {preemption_factor}; it must be above 1")
        self.models = dict(models)
        """By key. Replace a model here when its profile has changed."""
        self.margin_ns = margin_ns
        self._factor = inf if preemption_factor is None else preemption_factor
        self._gain = preemption_gain
        self._generation = generation
        self._choice = choice
        self._queues = {key: DeadlineQueue() for key in models}
        self._free = list(range(devices - 1, -1, -1))
        self._running: dict[int, _Running] = {}
        self._reserved: dict[int, list[Request]] = {}
        """By device: requests that were taken out of their queue until the device has stopped."""
        # Computed on demand, and forgotten when the running batches change.
        self._least_queued: dict[Hashable, float] = {}
        self._soonest_end_ns: int | None = None

    @classmethod
    def of_paper(
        cls,
        models: Mapping[Hashable, PreemptibleModel],
        *,
        devices: int = 1,
        preemption_factor: float | None = PREEMPTION_FACTOR,
        generation: Generation = by_earliest,
    ) -> Flex:
        """Make the published policy: the largest batch first, and preemption by size alone."""
        return cls(
            models,
            devices=devices,
            preemption_factor=preemption_factor,
            preemption_gain=0.0,
            generation=generation,
            choice=by_size,
        )

    @property
    def queues(self) -> Mapping[Hashable, DeadlineQueue]:
        """By key, for statistics. Reserved requests are in none of them."""
        return self._queues

    def add(self, key: Hashable, model: PreemptibleModel) -> None:
        """Accept requests of this key from now on; forget idle keys if there are very many."""
        self.models[key] = model
        self._queues.setdefault(key, DeadlineQueue())
        if len(self._queues) > _MOST_KEYS:
            self._forget_idle(key)

    def _forget_idle(self, new: Hashable) -> None:
        busy = {running.key for running in self._running.values()}
        busy |= {each.key for requests in self._reserved.values() for each in requests}
        for key in [key for key, queue in self._queues.items() if not queue]:
            if key != new and key not in busy:
                del self._queues[key], self.models[key]

    def on_event(self, now_ns: int, event: Event) -> Sequence[Action]:
        """See :class:`~trims_shim.batching.protocol.Policy`; ValueError for unknown models."""
        actions: list[Action] = []
        if isinstance(event, Request):
            self._queue_of(event.key).add(event)
            if not self._free:
                self._preempt_for(event.key, now_ns, actions)
                return actions
        elif isinstance(event, Finished):
            self._release(event.device)
        elif isinstance(event, Preempted):
            self._requeue(event, now_ns, actions)
            return actions
        elif isinstance(event, Cancelled):
            self._cancel(event.request)
        self._fill(now_ns, actions)
        return actions

    def next_deadline_ns(self) -> int | None:
        """None: the policy needs no timers."""
        return None

    # --- a device is free -------------------------------------------------------------------------

    def _fill(self, now_ns: int, actions: list[Action]) -> None:
        while self._free:
            candidates = []
            for key, queue in self._queues.items():
                if queue:
                    batch = self._candidate(now_ns, key, actions)
                    if batch:
                        candidates.append(batch)
            if len(candidates) == 1:  # as on every arrival that finds several devices free
                self._start(now_ns, candidates[0], float(len(candidates[0])), actions)
            elif candidates:
                self._start(now_ns, *self._best(now_ns, candidates), actions)
            elif not self._unreserve():
                return

    def _start(
        self, now_ns: int, batch: Sequence[Request], worth: float, actions: list[Action]
    ) -> None:
        key = batch[0].key
        _remove(self._queues[key], batch)
        device = self._free.pop()
        end_ns = now_ns + self.models[key].profile.latency_ns(len(batch))
        self._running[device] = _Running(key, batch, now_ns, end_ns, worth)
        self._forget_running()
        actions.append(Run(device, batch))

    def _best(
        self, now_ns: int, candidates: Sequence[Sequence[Request]]
    ) -> tuple[Sequence[Request], float]:
        """Return the batch that should run now, and its worth."""
        highest = max([each[0].priority for each in candidates])
        offers = [self._offer(each) for each in candidates if each[0].priority == highest]
        ends_ns = [now_ns] * (len(self._free) - 1)
        for each in self._running.values():
            ends_ns.append(each.end_ns if each.end_ns > now_ns else now_ns)
        best, worth = self._choice(now_ns, offers, ends_ns)
        return best.batch, worth

    def _candidate(self, now_ns: int, key: Hashable, actions: list[Action]) -> Sequence[Request]:
        """Drop a model's hopeless requests; return the batch it could run now, maybe empty."""
        queue = self._queues[key]
        soonest_ns = now_ns + self.margin_ns + self.models[key].profile.latency_ns(1)
        hopeless = queue.take_due(soonest_ns)
        if hopeless:
            actions.append(Drop(hopeless, DropReason.HOPELESS))
            if not queue:
                return ()
        return self._generate(key, now_ns, queue)

    def _offer(self, batch: Sequence[Request]) -> Offer:
        key, size = batch[0].key, len(batch)
        queue = self._queues[key]
        latency_ns = self.models[key].profile.latency_ns(size)
        spent_ns = latency_ns + self.margin_ns
        due_ns = [batch[0].deadline_ns - spent_ns]
        if size < len(queue):
            due_ns += [each.deadline_ns - spent_ns for each in queue[size::size]]
        return Offer(
            batch,
            latency_ns,
            due_ns,
            lambda start_ns: len(self._generate(key, start_ns, queue)),
        )

    # --- no device is free ------------------------------------------------------------------------

    def _preempt_for(self, key: Hashable, now_ns: int, actions: list[Action]) -> None:
        """Preempt the least valuable batch for one of this model, if that is worth it.

        Only the model with the new request is considered. By the paper's rules, candidates of other
        models were too small when the running batches started, and only shrink with time.
        """
        if len(self._queues[key]) < self._fewest_queued(key):
            return
        found = self._preemption(key, now_ns)
        if found is None:
            return
        device, batch = found
        running = self._running[device]
        running.worth = inf
        self._forget_running()
        reserved = [each for each in batch if each not in running.batch]
        _remove(self._queues[key], reserved)
        self._reserved[device] = reserved
        actions.append(Preempt(device))

    def _preemption(self, key: Hashable, now_ns: int) -> tuple[int, Sequence[Request]] | None:
        """Return (device, the batch to run instead); None if no preemption is worth it."""
        factor, gain, queue = self._factor, self._gain, self._queues[key]
        next_ns = self._next_free_ns()
        # How many requests can just as well wait for the next device.
        waiting = len(self._generate(key, next_ns, queue)) if gain else 0
        queued, most = len(queue), self.models[key].max_batch_size
        if waiting == queued:
            return None  # merging with a running batch of their model would save none either
        possible = []
        for device, running in self._running.items():
            instead = queued + len(running.batch) if running.key == key else queued
            worth = running.worth
            least = max(factor * worth, waiting + gain * worth)
            if least <= instead and least <= most:
                possible.append((worth, device, least))
        for _, device, least in sorted(possible):
            batch = self._instead(self._running[device], key, now_ns, next_ns)
            if len(batch) >= least:
                return device, batch
        return None

    def _fewest_queued(self, key: Hashable) -> float:
        """Return the number of queued requests below which this model can preempt no batch."""
        least = self._least_queued.get(key)
        if least is None:
            least, most = inf, self.models[key].max_batch_size
            for each in self._running.values():
                needed = self._factor * each.worth
                if needed <= most:
                    if each.key == key:
                        needed -= len(each.batch)
                    if needed < least:
                        least = needed
            self._least_queued[key] = least
        return least

    def _instead(
        self, running: _Running, key: Hashable, now_ns: int, next_ns: int
    ) -> Sequence[Request]:
        """Return the batch a model could run from the next exit point on; empty if it may not."""
        passed_ns = now_ns - running.started_ns
        exit_ns = self.models[running.key].next_exit_ns(len(running.batch), passed_ns)
        queue, start_ns = self._queues[key], running.started_ns + exit_ns
        if exit_ns == NEVER_NS or running.batch[0].priority > queue[0].priority:
            return ()
        if self._gain and next_ns <= start_ns:
            return ()
        requests = queue.merged(running.batch) if running.key == key else queue
        return self._generate(key, start_ns, requests)

    # --- bookkeeping ------------------------------------------------------------------------------

    def _generate(
        self, key: Hashable, start_ns: int, requests: Sequence[Request]
    ) -> Sequence[Request]:
        model = self.models[key]
        start_ns += self.margin_ns
        return self._generation(start_ns, requests, model.profile, model.max_batch_size)

    def _next_free_ns(self) -> int:
        """Return when the next device should be free; in the past if its batch is overdue."""
        found = self._soonest_end_ns
        if found is None:
            found = min([each.end_ns for each in self._running.values()], default=NEVER_NS)
            self._soonest_end_ns = found
        return found

    def _forget_running(self) -> None:
        """Forget what depends on the running batches or their worth."""
        self._least_queued.clear()
        self._soonest_end_ns = None

    def _queue_of(self, key: Hashable) -> DeadlineQueue:
        try:
            return self._queues[key]
        except KeyError:
            known = ", ".join(map(str, self._queues))
            raise ValueError(f"no model {key!r}; there are {known}") from None

    def _release(self, device: int) -> None:
        """Free a device that has stopped; queue again the requests reserved for it."""
        del self._running[device]
        self._forget_running()
        self._free.append(device)
        if device in self._reserved:
            self._queue_again(self._reserved.pop(device))

    def _unreserve(self) -> bool:
        """Queue reserved requests again for a device that would idle; False if there are none."""
        if not self._reserved:
            return False
        reserved = [each for each in self._reserved.values() if each]
        self._reserved.clear()
        for requests in reserved:
            self._queue_again(requests)
        return bool(reserved)

    def _queue_again(self, requests: Sequence[Request]) -> None:
        """Queue requests of one model again; they are in queue order."""
        if requests:
            self._queues[requests[0].key].add_all(requests)

    def _requeue(self, event: Preempted, now_ns: int, actions: list[Action]) -> None:
        """Queue a preempted batch again, as if it had just arrived."""
        self._release(event.device)
        self._queue_again(event.batch)
        self._fill(now_ns, actions)
        if event.batch and not self._free and self._queues[event.batch[0].key]:
            self._preempt_for(event.batch[0].key, now_ns, actions)

    def _cancel(self, request: Request) -> None:
        queue = self._queues.get(request.key)
        if queue is None or queue.discard(request):
            return  # or it was never told of it, as after an interrupt
        for reserved in self._reserved.values():
            if request in reserved:
                reserved.remove(request)


def _remove(queue: DeadlineQueue, requests: Sequence[Request]) -> None:
    count = len(requests)
    if not count:
        return
    if count <= len(queue) and queue[0] is requests[0] and queue[count - 1] is requests[-1]:
        queue.take(count)  # same order in both, so these are the first ones
        return
    for request in requests:
        queue.discard(request)
