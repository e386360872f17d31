"""Profiles of a batcher's keys, learned while batches run; its policies decide by them.

There is one profile for each key, because inputs of other shapes take other times. It starts from
what the user gave or an earlier process saved, and is refreshed after every batch. The dispatches
of a batcher (one for each event loop) share one :class:`Learning`, under a lock of its own. A
thread that holds a dispatch's lock may take this one, but takes no other lock while holding it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import NamedTuple

from trims_shim.batching.buckets import bucket_in, family_of
from trims_shim.batching.collating.collates import padded_size
from trims_shim.batching.drivers.jobs import Job
from trims_shim.batching.policies.immediate import Immediate
from trims_shim.batching.policies.mixing import companions
from trims_shim.batching.profiles.learning import LearnedProfile
from trims_shim.batching.profiles.lengths import LengthCurve
from trims_shim.batching.profiles.profile import LatencyProfile
from trims_shim.batching.profiles.profile_json import LARGEST_SIZE
from trims_shim.batching.profiles.profile_store import ProfileStore, SavedProfile
from trims_shim.batching.profiles.profiling import sizes_to_measure
from trims_shim.batching.protocol import Drop, DropReason, Policy
from trims_shim.batching.rules import Rule, RuleMaker
from trims_shim.batching.single import Batching

__all__ = ["LateKey", "Learning", "Prior", "plain_key"]

_logger = logging.getLogger(__name__)

_WORTH_SAVING = 8
"""Least number of batches of a key: a script that calls a function once leaves no file."""
_MOST_LOOKED_UP = 64
"""Most keys whose saved profiles are looked for; reading one takes about 100 us."""
_AT_ONCE = 4
"""A request given up within this fraction of its time (1 / 4) was hopeless from the start."""
_MOST_ASKED = 16
"""Most lengths of a family that are checked for news after a batch."""
_MOST_KEYS = 1024
"""As many keys as :class:`~trims_shim.batching.single.Batching` keeps idle rules for."""


Prior = LatencyProfile | Callable[[Hashable], LatencyProfile]
"""Where a profile starts from: one profile for all keys, or a function of the key."""


class LateKey(NamedTuple):
    """Key of late requests that are served anyway, in batches of their own.

    A tuple, so that lengths are found in it.
    """

    key: Hashable
    mark: Hashable = Immediate
    """In no other key."""


class _Late(Immediate):
    """Rule of late requests: runs all of them, with companions of other lengths."""

    def companions(
        self, now_ns: int, size: int, others: Collection[Rule]
    ) -> Sequence[tuple[Rule, int]]:
        """See :class:`~trims_shim.batching.rules.Rule`."""
        return companions(now_ns, self, size, others)


class _Kin(NamedTuple):
    """Keys that differ in nothing but the length; usually one key."""

    curves: Sequence[LengthCurve]
    """One for the model, or one for each stage; none if there are no lengths."""
    keys: deque[Hashable]
    seen: set[int]
    """Parts (stages) that have run."""

    def observe(self, learned: LearnedProfile, size: int, duration_ns: int, part: int) -> bool:
        """Tell one key's profile what a batch took; False if that says nothing about others.

        The first batch of a part also compiles and allocates, so it is told nothing of that one.
        Of the first batch of each size, profiles and curves find that out by themselves.
        """
        if part in self.seen:
            return learned.observe(size, duration_ns, part)
        self.seen.add(part)
        return False


class Learning:
    """Makes policies and keeps the profiles of their rules fresh."""

    _parts = 1
    """How many parts (stages) are learned by themselves."""

    def __init__(
        self,
        maker: RuleMaker,
        *,
        name: str | None,
        max_batch_size: int,
        devices: int,
        store: Callable[[], ProfileStore | None],
        max_batch_weight: int | None = None,
        batch_sizes: Sequence[int] | None = None,
        prior: Prior | None = None,
        batching: Callable[..., Batching] = Batching,
    ) -> None:
        """``prior`` is the user's; without one, ``store()`` is asked for profiles of ``name``.

        ``batching`` makes policies of rules. Raises TypeError if ``maker`` makes no Rule.
        """
        self.name = name
        self.max_batch_size = max_batch_size
        self._maker = maker
        self._batching = batching
        self._max_batch_weight = max_batch_weight
        self._devices = devices
        self._batch_sizes = batch_sizes
        self._prior = prior
        self._open_store = store
        self._store: ProfileStore | None = None
        self._is_store_open = False
        self._learned: dict[Hashable, LearnedProfile] = {}
        self._families: dict[Hashable, _Kin] = {}
        """By the part of the key that its lengths have in common."""
        self._kin: dict[Hashable, _Kin] = {}
        self._measured: set[Hashable] = set()
        self._delivery_ns = 0
        self.forget()
        # A maker that makes no rule raises here, not at the first request.
        rule: object = maker(self._trial_profile(), max_batch_size=max_batch_size)
        if not isinstance(rule, Rule):
            raise TypeError(f"policy is {maker!r}, and what it makes is no Rule: {rule!r}")
        self.mixes_lengths = type(rule).companions is not Rule.companions
        """Whether the rules let requests of different lengths share a batch if that pays."""
        self.make_policy()

    def forget(self) -> None:
        """Make a new lock, in a forked child: the thread that held the old one is not there."""
        # Re-entrant: the garbage collector may run a finalizer that makes another dispatch learn.
        self._lock = threading.RLock()

    def make_policy(self) -> Policy:
        """Return a new policy that starts from what was learned."""
        return self._batching(
            self._make_rule, devices=self._devices, max_weight=self._max_batch_weight
        )

    def profile(self, key: Hashable = None) -> LatencyProfile:
        """Return the present profile of a key."""
        return self._profile(key, self.max_batch_size)

    def _profile(self, key: Hashable, max_batch_size: int) -> LatencyProfile:
        with self._lock:
            return self._learned_of(key).profile(max_batch_size)

    def first_profile(self) -> LatencyProfile:
        """Return the profile of the first known key, or what a new key would start from."""
        for key in self.keys():
            return self.profile(key)
        with self._lock:
            return self._new_learned(None, self._prior_of(None)).profile(self.max_batch_size)

    def keys(self) -> list[Hashable]:
        """Return the keys that have a profile."""
        return list(self._learned)

    def ran(self, policy: Policy, job: Job) -> bool:
        """Learn from a job; False if its duration says nothing about other batches."""
        if not job.is_typical:
            return False
        with self._lock:
            return self._learn(policy, job)

    def _learn(self, policy: Policy, job: Job) -> bool:
        """See :meth:`ran`."""
        key = plain_key(job.key)
        size = padded_size(job.size, self._batch_sizes)
        learned = self._learned_of(key)
        if len(self._learned) >= _MOST_KEYS:  # keys in use are forgotten last
            self._learned[key] = self._learned.pop(key)
        kin = self._kin_of(key)
        durations_ns = self._durations_ns(job, learned, size)
        is_typical = True
        for stage, duration_ns in enumerate(durations_ns, job.stage):
            is_typical &= kin.observe(learned, size, duration_ns, stage)
        self._refresh(policy, key, learned)
        if kin.curves:
            self._refresh_another(policy, kin)
        return is_typical

    def _durations_ns(self, job: Job, learned: LearnedProfile, size: int) -> Sequence[int]:
        """How long the job took, by stage."""
        return job.durations_ns

    def delivered(self, taken_ns: int) -> None:
        """Record how long answers took to reach an event loop and the callers that await them."""
        self._delivery_ns = max(self._delivery_ns, taken_ns)

    def take_delivery_ns(self) -> int:
        """Return the longest recorded delivery since the last call; 0 if there was none."""
        taken_ns, self._delivery_ns = self._delivery_ns, 0
        return taken_ns

    def gave_up(self, policy: Policy, drop: Drop, now_ns: int) -> None:
        """Doubt the profile of requests given up as hopeless soon after they arrived."""
        if drop.reason is not DropReason.HOPELESS:
            return
        for request in drop.requests:
            # Only a request that still had most of its time counts. If it lost its time to earlier
            # batches, to waiting or to a late timer, that is not the profile's fault.
            slack_ns = request.deadline_ns - request.arrival_ns
            if _AT_ONCE * (now_ns - request.arrival_ns) < slack_ns:
                with self._lock:
                    learned = self._learned_of(request.key)
                    if learned.doubt():
                        self._refresh(policy, request.key, learned)

    def check_size(self, max_batch_size: int) -> None:
        """Raise ValueError for a largest batch size below 1 or above ``batch_sizes``."""
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size is {max_batch_size}; it has to be 1 or more")
        padded_size(max_batch_size, self._batch_sizes)

    def resize(self, policy: Policy) -> None:
        """Apply a changed ``max_batch_size`` to the rules that ``policy`` already has."""
        size = self.max_batch_size  # read once: another thread may change it
        if isinstance(policy, Batching):
            for key, rule in policy.rules.items():
                rule.profile = self._profile(plain_key(key), size)
                rule.max_batch_size = size

    def sizes_to_measure(self) -> Sequence[int]:
        """Return the batch sizes to measure; the profile interpolates the others."""
        if self._batch_sizes is None:
            return sizes_to_measure(self.max_batch_size)
        return sorted(self._batch_sizes)

    def measured(self, key: Hashable, durations_ns: Mapping[int, float]) -> LatencyProfile:
        """Replace a key's profile by measurements; :meth:`refresh` tells the policies.

        Returns the new profile.
        """
        # Not extended beyond the largest measured size: larger ones are to be tried, not taken
        # to be known.
        prior = LatencyProfile.measured(durations_ns, pads=self._batch_sizes is not None)
        return self._start_anew(key, prior, [durations_ns])

    def _start_anew(
        self, key: Hashable, prior: LatencyProfile, durations_ns: Sequence[Mapping[int, float]]
    ) -> LatencyProfile:
        """``durations_ns`` has one mapping for each part."""
        with self._lock:
            if key not in self._learned:
                self._make_room()
            self._learned[key] = self._new_learned(key, prior)
            self._measured.add(key)
            kin, length = self._kin_of(key), bucket_in(key) or 0
            for part, sizes in enumerate(durations_ns):
                for size, duration_ns in sizes.items():
                    kin.seen.add(part)
                    if kin.curves:
                        kin.curves[part].tell(size, length, round(duration_ns))
            return self.profile(key)

    def refresh(self, policy: Policy, key: Hashable) -> None:
        """Give the rules of ``policy`` the present profile of a key."""
        with self._lock:
            self._refresh(policy, key, self._learned_of(key))

    def save(self) -> None:
        """Save what was learned for the next process. Reads and writes files."""
        if self._prior is not None or self.name is None:
            return
        with self._lock:
            found = [
                each
                for key, learned in self._learned.items()
                if learned.count >= _WORTH_SAVING or key in self._measured
                for each in self._kept(key, learned)
            ]
            store = self._opened_store() if found else None
        if store is None:
            return
        for key, latencies_ns in found:
            known = {size: each for size, each in latencies_ns.items() if size <= LARGEST_SIZE}
            if known:
                saved = SavedProfile(known, max(known), self._batch_sizes is not None)
                store.save(self.name, key, saved)

    def _kept(
        self, key: Hashable, learned: LearnedProfile
    ) -> list[tuple[Hashable, Mapping[int, float]]]:
        """Return what to save of a key: latencies, each under a key of its own."""
        return [(key, learned.known_latencies_ns(self.max_batch_size))]

    def _make_rule(self, key: Hashable) -> Rule:
        size = self.max_batch_size  # read once: another thread may change it
        profile = self._profile(plain_key(key), size)
        if isinstance(key, LateKey):
            late = _Late if self.mixes_lengths else Immediate
            return late(profile, max_batch_size=size)
        return self._maker(profile, max_batch_size=size)

    def _learned_of(self, key: Hashable) -> LearnedProfile:
        learned = self._learned.get(key)
        if learned is None:
            self._make_room()
            learned = self._learned[key] = self._new_learned(key, self._prior_of(key))
        return learned

    def _make_room(self) -> None:
        while len(self._learned) >= _MOST_KEYS:
            self._forget_key(next(iter(self._learned)))

    def _forget_key(self, key: Hashable) -> None:
        del self._learned[key]
        kin = self._kin.pop(key, None)
        if kin is not None and key in kin.keys:
            kin.keys.remove(key)
        self._measured.discard(key)

    def _new_learned(self, key: Hashable, prior: LatencyProfile | None) -> LearnedProfile:
        kin = self._kin_of(key)
        return self._make_learned(prior, kin.curves, bucket_in(key) or 0)

    def _kin_of(self, key: Hashable) -> _Kin:
        kin = self._kin.get(key)
        if kin is not None:
            return kin
        family = family_of(key)
        if family is None:
            kin = _Kin((), deque(), set())
        elif (kin := self._families.get(family.rest)) is None:
            while len(self._families) >= _MOST_KEYS:
                del self._families[next(iter(self._families))]
            keys: deque[Hashable] = deque()
            sizes = self.max_batch_size
            curves = [LengthCurve(keys, max_batch_size=sizes) for _ in range(self._parts)]
            kin = self._families[family.rest] = _Kin(curves, keys, set())
        kin.keys.append(key)
        self._kin[key] = kin
        return kin

    def _make_learned(
        self, prior: LatencyProfile | None, curves: Sequence[LengthCurve], length: int
    ) -> LearnedProfile:
        curve = curves[0] if curves else None
        return LearnedProfile(prior, batch_sizes=self._batch_sizes, curve=curve, length=length)

    def _trial_profile(self) -> LatencyProfile:
        """Return any profile of the right kind and size."""
        return LatencyProfile([1.0] * self.max_batch_size)

    def _prior_of(self, key: Hashable) -> LatencyProfile | None:
        if self._prior is not None:
            return self._prior(key) if callable(self._prior) else self._prior
        store = self._opened_store()
        # Reads a file under the lock, so only for a limited number of keys (inputs of any length
        # that are not bucketed make keys without end).
        if store is None or self.name is None or len(self._learned) >= _MOST_LOOKED_UP:
            return None
        return self._load(self.name, key, store)

    def _load(self, name: str, key: Hashable, store: ProfileStore) -> LatencyProfile | None:
        saved = store.load(name, key)
        return None if saved is None else saved.profile

    def _opened_store(self) -> ProfileStore | None:
        if not self._is_store_open and self.name is not None:
            self._store, self._is_store_open = self._open_store(), True
        return self._store

    def _refresh_another(self, policy: Policy, kin: _Kin) -> None:
        """Refresh one other length of a family whose curve has learned: all of them by turns."""
        for _ in range(min(len(kin.keys), _MOST_ASKED)):
            kin.keys.rotate()
            learned = self._learned.get(kin.keys[0])
            if learned is not None and learned.is_due(self.max_batch_size):
                self._refresh(policy, kin.keys[0], learned)
                return

    def _refresh(self, policy: Policy, key: Hashable, learned: LearnedProfile) -> None:
        if not isinstance(policy, Batching):
            return
        for each in (key, LateKey(key)):
            rule = policy.rules.get(each)
            if rule is not None:
                # Until resize() lowers its limit, a rule still asks for its larger sizes.
                rule.profile = learned.profile(max(self.max_batch_size, rule.max_batch_size))


def plain_key(key: Hashable) -> Hashable:
    """Return the key of a request without the mark of :class:`LateKey`."""
    return key.key if isinstance(key, LateKey) else key
