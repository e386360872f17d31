"""Batches that can be given up: what Flex's executor does beyond that of a single function.

:class:`~trims_shim.batching.protocol.Preempt` sets a flag at the job. The thread that runs it sees
the flag at its next exit point, and the requests go back into the queue. Besides the latency of
batches, the places of their exit points are learned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.drivers.learning import LateKey, Learning, plain_key
from trims_shim.batching.drivers.threads import ThreadDispatch
from trims_shim.batching.flex.exit_points import ExitPoints
from trims_shim.batching.flex.models import FlexFunctions
from trims_shim.batching.policies.flex import Flex
from trims_shim.batching.policies.immediate import Immediate
from trims_shim.batching.policies.preemptible import PreemptibleModel, even_exits
from trims_shim.batching.profiles.learning import LearnedProfile
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.protocol import Action, Event, Policy, Preempt, Preempted, Request

__all__ = ["FlexDispatch", "FlexJob", "FlexLearning"]

_NEWEST_WEIGHT = 0.2
"""Weight of the last batch in the running mean of exit points' places: about ten batches count."""
_EDGE = 1e-6
"""How far apart exit points are at least, as a share of a batch."""
_LAST = 4096
"""Preemptions over which percentiles are taken."""


class FlexJob(Job):
    """A batch that may be given up."""

    __slots__ = ("asked_ns", "is_given_up", "marks_ns")

    def __init__(self, device: int, requests: Sequence[Request], era: int) -> None:
        super().__init__(device, requests, era)
        self.asked_ns: int | None = None
        """When the policy wanted the device back; None if it does not."""
        self.is_given_up = False
        self.marks_ns: Sequence[int] = ()
        """When its exit points were passed."""

    def is_unwanted(self) -> bool:
        """Whether to stop at the next exit point."""
        return self.asked_ns is not None

    def give_up(self, now_ns: int) -> None:
        """Note that it has stopped."""
        self.is_given_up = True
        self.ended_ns = now_ns

    def deliver(self) -> None:
        """See :class:`Job`; hands nothing out if it was given up."""
        if not self.is_given_up:
            super().deliver()


class FlexLearning(Learning):
    """Profiles and exit points of each model, for a :class:`Flex`."""

    def __init__(
        self,
        make_flex: Callable[[], Flex],
        stages_of: Callable[[str], int],
        *,
        priors: Mapping[str, LatencyProfile | None],
        **others: Any,
    ) -> None:
        """``others`` are those of :class:`Learning`."""
        # First: the base class makes a policy, to see whether that can be done.
        self._make_flex = make_flex
        self._stages_of = stages_of
        self._priors = priors
        self._exits: dict[Hashable, tuple[float, ...]] = {}
        super().__init__(Immediate, **others)

    def make_policy(self) -> Policy:
        """See :class:`Learning`."""
        return self._make_flex()

    def model(self, key: Hashable) -> PreemptibleModel:
        """What is known of a key, which is a model and the shape of its inputs."""
        plain = plain_key(key)
        size = self.max_batch_size  # read once: another thread may change it
        return PreemptibleModel(self._profile(plain, size), size, self._exits_of(plain))

    def _learn(self, policy: Policy, job: Job) -> bool:
        if isinstance(job, FlexJob) and len(job.marks_ns):
            key = job.requests[0].key
            self._learn_exits(plain_key(key), job)
        return super()._learn(policy, job)

    def resize(self, policy: Policy) -> None:
        """See :class:`Learning`."""
        if isinstance(policy, Flex):
            for key in list(policy.models):
                policy.models[key] = self.model(key)

    def _prior_of(self, key: Hashable) -> LatencyProfile | None:
        given = self._priors.get(_model_of(key))
        return given or super()._prior_of(key)

    def _forget_key(self, key: Hashable) -> None:
        super()._forget_key(key)
        self._exits.pop(key, None)

    def _exits_of(self, key: Hashable) -> tuple[float, ...]:
        known = self._exits.get(key)
        if known is None:
            known = self._exits[key] = even_exits(self._stages_of(_model_of(key)))
        return known

    def _learn_exits(self, key: Hashable, job: FlexJob) -> None:
        taken_ns = max(1, job.ended_ns - job.started_ns)
        seen = [(mark_ns - job.started_ns) / taken_ns for mark_ns in job.marks_ns]
        known = self._exits_of(key)
        if len(known) == len(seen):
            seen = [
                old + _NEWEST_WEIGHT * (new - old) for old, new in zip(known, seen, strict=True)
            ]
        self._exits[key] = _ascending(seen)

    def _refresh(self, policy: Policy, key: Hashable, learned: LearnedProfile) -> None:
        if not isinstance(policy, Flex):
            return
        for each in (key, LateKey(key)):
            if each in policy.models:
                policy.models[each] = self.model(each)


def _model_of(key: Hashable) -> str:
    # (model, signature), of FlexFunctions.key; None before the first request. The name as it is:
    # `str` makes another one of a member of an enum of strings.
    name: str = key[0] if isinstance(key, tuple) else ""
    return name


def _ascending(shares: Sequence[float]) -> tuple[float, ...]:
    """The shares, made to ascend between 0 and 1; those for which there is no room are left out."""
    found: list[float] = []
    low = _EDGE
    for share in shares:
        share = max(low, share)
        if share < 1 - _EDGE:
            found.append(share)
            low = share + _EDGE
    return tuple(found)


class FlexDispatch(ThreadDispatch):
    """Threads that run staged models under a :class:`Flex`."""

    _job_type = FlexJob
    # It has what a dispatch uses of a BatchFunction; subclassing would add nothing.
    function: FlexFunctions  # type: ignore[assignment]

    # --- a thread that runs a batch ---------------------------------------------------------------

    def _run(self, job: Job) -> None:
        assert isinstance(job, FlexJob)
        if job.is_given_up:
            return  # and then came an interrupt
        clock_ns = self.options.clock_ns
        entries = job.begin(clock_ns())
        if not entries:
            job.end(clock_ns(), [])
            return
        points = ExitPoints(job.is_unwanted, self.function.lanes[job.device], clock_ns)
        results = self.function.run_staged(entries, job.device, points)
        job.marks_ns = points.marks_ns
        if results is None:
            job.give_up(clock_ns())
        else:
            job.end(clock_ns(), results)

    # --- under the lock ---------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        if isinstance(action, Preempt):
            for each in self._jobs:
                if each.device == action.device and each.era == self._era:
                    assert isinstance(each, FlexJob)
                    each.asked_ns = self._now_ns
        else:
            super()._carry_out(action)

    def _end(self, now_ns: int, job: Job) -> None:
        assert isinstance(job, FlexJob)
        if not job.is_given_up or job not in self._jobs:
            super()._end(now_ns, job)
            return
        # Before it is forgotten: after an interrupt its requests are queued once more.
        gone = [each for each in job.requests if each not in (job.live or ())]
        self._settled(gone)
        for request in job.live or ():
            self._wait_again(request)
        self._jobs.discard(job)
        self._free_seat(job)
        self._note(job)
        self.record.cancelled += len(gone)
        self._launch_held()
        if job.era == self._era:
            self._tell(now_ns, Preempted(job.device, list(job.live or ()), job.chosen_ns))
        else:
            for request in job.live or ():
                self._tell(now_ns, request)

    def _tell(self, now_ns: int, event: Event) -> None:
        if isinstance(event, Request):
            policy, learning = self._policy, self.options.learning
            assert isinstance(policy, Flex)
            assert isinstance(learning, FlexLearning)
            if event.key not in policy.models:
                policy.add(event.key, learning.model(event.key))
        super()._tell(now_ns, event)

    def _note(self, job: FlexJob) -> None:
        assert job.asked_ns is not None
        self.preemptions += 1
        self.wasted_ns += job.ended_ns - job.started_ns
        self.stops_ns.append(job.ended_ns - job.asked_ns)
        self.record.add_batch([], job.started_ns, job.ended_ns)

    def _set_up(self) -> None:
        super()._set_up()
        self.preemptions = 0
        self.wasted_ns = 0
        self.stops_ns: deque[int] = deque(maxlen=_LAST)
        """From the decision to preempt to the free device."""
