"""Learn how long batches take, from every batch that runs.

:class:`LearnedProfile` turns durations into a
:class:`~trims_shim.batching.profiles.profile.LatencyProfile`. It keeps the last durations of each
batch size and promises their median, not a safe quantile: a request given up for safety is lost for
certain, and one that runs is only perhaps late. Margins for pauses are the policy's. It holds no
lock and no clock; its batcher's lock guards it.

Two errors would last for ever, because they keep batches from running. They are avoided:

- A size that is believed too slow is not tried. So a batch of up to twice the largest size that has
  run is expected to take no longer than that size, and the items of half the smallest size to cost
  less. The first batch of a size (which compiles, tunes, allocates) counts only if it is quick, or
  if the second one is no quicker. That items cost more in a larger batch is believed only of a size
  that has run several times recently.
- A profile by which nothing can be in time lets nothing run, so it is never corrected. (It may come
  from a busy machine, or from one batch that met a pause.) So a slow duration counts once a second
  one confirms it, and a quick one at once. :meth:`LearnedProfile.doubt` halves the whole profile
  when requests are given up soon after arrival although a device is free.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trims_shim.batching.profiles.lengths import LengthCurve
from trims_shim.batching.profiles.profile import LatencyProfile, between, without_noise

__all__ = ["LearnedProfile"]

_KEPT = 64
"""Durations kept of a size. Clockwork (OSDI'20) keeps 10, BentoML's dispatcher 50 of all sizes."""
_KEPT_BATCHES = 64
"""A size is forgotten when, since it last ran, this many batches have run for each duration kept of
it; after each forgetting, twice as many. What was learned of it on a busy machine must not keep it
from being tried."""
_MOST_DOUBLINGS = 8
_FIRM = 4
"""Durations after which a size is *firm*: it is believed even if its items cost more than those of
smaller sizes. Before, that is more likely noise, or a prior measured in noise: batches are made
because they make items cheaper."""
_INVITING_SMALLER = 0.85
"""Relative item cost promised of half the smallest firm size, so that it is tried. A queue that has
been long from the start leaves nothing smaller, and of two sizes whose items cost about the same, a
policy takes the larger."""
_PRIOR_WEIGHT = 2
"""Weight of the prior, or of the estimate from other sizes, as a number of durations."""
_DOUBT_AFTER = 2
"""Requests given up with no batch in between, before :meth:`LearnedProfile.doubt` halves it."""
_MOST_DOUBT = 2.0**-64
"""Leaves less than a nanosecond of any latency. Without a limit, halving would reach 0."""
_SURE = 64
"""After this many batches, a profile that is wrong was made wrong by a change of the device."""
_SLOWER, _SLOWER_BATCHES = 1.7, 10
"""Ratio to what is believed, and batches in a row beyond it: then the device has become slower."""
_QUICKER, _QUICKER_BATCHES = 1.4, 8
"""The same for quicker. Less is asked for: nothing makes a batch quicker by accident."""
_REFRESH = 16
_NEWS = 0.1
"""Batches between two profiles, unless a little-known size differs by more than ``_NEWS``."""
_CHEAP_SIZES = 64
_WORTH_NS = 500_000
"""Making a profile takes some microseconds for each size: no more than a hundredth of the time that
batches have run, and not after each batch if there are many sizes."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A profile and the state that it was made from."""

    max_batch_size: int
    count: int
    doubt: float
    version: int
    profile: LatencyProfile


class LearnedProfile:
    """Durations in, profiles out. Not safe for threads without a lock.

    ``prior`` is a profile that was measured, saved or given; its shape is trusted more than its
    speed. With ``batch_sizes``, only batches of these sizes run: others are padded to the next
    larger. ``curve`` is told of every batch, with items padded to ``length``, and gives estimates
    beyond the sizes of the prior.
    """

    def __init__(
        self,
        prior: LatencyProfile | None = None,
        *,
        batch_sizes: Sequence[int] | None = None,
        curve: LengthCurve | None = None,
        length: int = 0,
    ) -> None:
        self._prior = prior
        self._given = 0 if prior is None else prior.max_batch_size
        self._curve = curve
        self._length = length
        self._batch_sizes = None if batch_sizes is None else tuple(sorted(batch_sizes))
        self._durations: dict[int, deque[tuple[int, int]]] = {}
        self._own: dict[int, float] = {}
        self._begun: dict[int, int] = {}
        """By size: duration of a slow first batch that did not count, until the second batch tells
        whether it should have; 0 otherwise."""
        self._forgotten: Counter[int] = Counter()
        self._count = 0
        self._ran_ns = 0
        self._has_news = True
        self._changes: list[tuple[int, float]] = []
        """Number and ratio of the last batches that were all much slower, or all much quicker."""
        self._given_up = 0
        self._doubt = 1.0
        self._made: _Made | None = None

    @property
    def count(self) -> int:
        """Number of durations it was told."""
        return self._count

    def observe(self, size: int, duration_ns: int, part: int = 0) -> bool:
        """Record that a batch of ``size`` took ``duration_ns``.

        Not for the first batch of all, nor for one that failed. ``part`` is the stage, if there are
        stages. False if the duration says nothing about other batches.
        """
        self._count += 1
        self._given_up = 0
        duration_ns = max(1, duration_ns)
        self._ran_ns += duration_ns
        if self._curve is not None:
            self._curve.tell(size, self._length, duration_ns)
        believed_ns = self._believed_ns(size)
        if size not in self._begun:
            self._begun[size] = 0
            # The first of its size and slow: it may have compiled, tuned or allocated something.
            if believed_ns is not None and duration_ns > believed_ns:
                self._begun[size] = duration_ns
                return False
        self._doubt = 1.0
        if self._count > _SURE and self._is_firm(size) and believed_ns is not None:
            self._look_for_change(duration_ns / believed_ns)
        durations = self._durations.get(size)
        if durations is None:
            durations = deque(maxlen=_KEPT)
        first_ns, self._begun[size] = self._begun[size], 0
        is_new = not durations  # larger sizes may be tried now
        if 0 < first_ns <= duration_ns:
            durations.append((self._count, first_ns))  # it compiled nothing
        durations.append((self._count, duration_ns))
        self._durations[size] = durations  # now: a child that is forked here finds none empty
        self._own.pop(size, None)
        if is_new:
            self._has_news = True
        elif len(durations) <= _FIRM:
            is_close = believed_ns is not None and abs(duration_ns / believed_ns - 1) < _NEWS
            self._has_news = self._has_news or not is_close
        return True

    def _look_for_change(self, ratio: float) -> None:
        """Begin anew if all sizes have changed, as the last batches together show.

        A size by itself would notice after half of ``_KEPT`` durations. Until then, sizes that have
        not run would seem to be the quick ones.
        """
        changes = self._changes
        is_change = not 1 / _QUICKER < ratio < _SLOWER
        if not is_change or (changes and (changes[0][1] > 1) != (ratio > 1)):
            changes.clear()
        if is_change:
            changes.append((self._count, ratio))
        if len(changes) < (_SLOWER_BATCHES if ratio > 1 else _QUICKER_BATCHES):
            return
        since, factor = changes[0][0], statistics.median([each for _, each in changes])
        changes.clear()
        self._begin_anew(since, factor)

    def _is_told_of(self, size: int) -> bool:
        """Whether it has run, or the prior it began with or other lengths say what it takes."""
        return size in self._begun or size <= self._given or self._version > 0

    def _is_firm(self, size: int) -> bool:
        """Whether the latency believed of this size is no guess."""
        return self._has_run_often(size) or size <= self._largest_before

    def _has_run_often(self, size: int) -> bool:
        return len(self._durations.get(size, ())) >= _FIRM

    @property
    def _largest_before(self) -> int:
        """The largest size that the prior knows; 0 without one."""
        return 0 if self._prior is None else self._prior.max_batch_size

    def _begin_anew(self, since: int, factor: float) -> None:
        """Expect from now on what ran before batch ``since``, times ``factor``.

        It becomes the prior, not durations, so that sizes that do not run follow those that do,
        also when the change has passed. A size that has run since gets its last ``_FIRM`` scaled
        durations back, to stay firm.
        """
        assert self._made is not None
        before = _some(self._durations, lambda number: number < since)
        after = _some(self._durations, lambda number: number >= since)
        self._durations, self._own = before, {}
        if before and (self._prior is not None or self._curve is None):  # a curve adapts by itself
            known = self._known(self._found(self._made.max_batch_size))
            scaled = {size: max(1.0, factor * each) for size, each in known.items()}
            self._prior = self._profile_of(scaled, max(scaled))
        for size, durations in after.items():
            last = list(before.get(size, ()))[-_FIRM:]
            durations.extendleft((number, round(factor * each)) for number, each in reversed(last))
        self._durations, self._own = after, {}
        self._has_news = True

    def _believed_ns(self, size: int) -> float | None:
        """Return what the last profile says, without doubt; None if that was a guess."""
        made = self._made
        if made is None or not (self._prior or self._durations or made.version):
            return None
        largest = made.profile.max_batch_size
        return made.profile.latency_ns(size) / made.doubt if size <= largest else None

    def _typical_ns(self, size: int) -> float:
        own_ns = self._own.get(size)
        if own_ns is None:
            own_ns = statistics.median_low(each for _, each in self._durations[size])
            self._own[size] = own_ns
        return own_ns

    def doubt(self) -> bool:
        """Record that a request was given up as hopeless; return whether the profile has changed.

        Only for one given up soon after it arrived, while a device was free. If it lost its time to
        other batches or a late timer, that is not the profile's fault.
        """
        self._given_up += 1
        if self._given_up < _DOUBT_AFTER:
            return False
        self._given_up = 0
        self._doubt = max(_MOST_DOUBT, self._doubt / 2)
        return True

    @property
    def is_doubted(self) -> bool:
        """Whether :meth:`doubt` has changed the profile and nothing that counts has run since."""
        return self._doubt < 1

    def profile(self, max_batch_size: int) -> LatencyProfile:
        """Return what is known now: the same object as before while there is little news."""
        made = self._made
        if made is not None and not self.is_due(max_batch_size):
            return made.profile
        return self.renewed(max_batch_size)

    def is_due(self, max_batch_size: int) -> bool:
        """Whether enough news has come for another profile."""
        made = self._made
        if made is None or made.max_batch_size != max_batch_size or made.doubt != self._doubt:
            return True
        if made.version != self._version:
            return True
        news = self._count - made.count
        if self._has_news:
            return news > 0 and news * _CHEAP_SIZES >= max_batch_size
        return news >= _REFRESH and self._ran_ns >= _WORTH_NS * max_batch_size

    def renewed(self, max_batch_size: int) -> LatencyProfile:
        """Return a new profile of what is known now, however little the news."""
        profile = self._profile_of(self.latencies_ns(max_batch_size), max_batch_size)
        self._made = _Made(max_batch_size, self._count, self._doubt, self._version, profile)
        self._has_news, self._ran_ns = False, 0
        return profile

    def latencies_ns(self, max_batch_size: int) -> dict[int, float]:
        """Return the estimates that :meth:`profile` is made of, of the sizes that may run."""
        found = self._found(max_batch_size)
        if self._forget(found, max_batch_size):
            found = self._found(max_batch_size)
        firm = [size for size in found if self._has_run_often(size)]
        believed = {size: _believed(size, each, firm, found) for size, each in found.items()}
        smaller = firm[0] // 2 if firm else 0
        if smaller in found and not self._is_told_of(smaller):
            as_many_ns = found[firm[0]] * smaller / firm[0]
            believed[smaller] = min(believed[smaller], _INVITING_SMALLER * as_many_ns)
        return {size: max(1.0, self._doubt * each) for size, each in believed.items()}

    def known_latencies_ns(self, max_batch_size: int) -> dict[int, float]:
        """Return what was learned, without guesses, to save for another process.

        Empty while nothing is known. Without what is promised of some sizes so that they are tried,
        and without doubt, which ends with the next batch: neither says anything about the device.
        """
        return self._known(self._found(max_batch_size))

    @property
    def largest_sure(self) -> float:
        """The largest size that has run several times or was known before; beyond it is hope.

        Infinite if a curve of other lengths has estimates for larger sizes.
        """
        if self._version:
            return math.inf
        return max([self._largest_before, *filter(self._has_run_often, self._durations)])

    def _known(self, latencies_ns: Mapping[int, float]) -> dict[int, float]:
        largest = max([self._largest_before, *self._durations])
        return {size: each for size, each in latencies_ns.items() if size <= largest}

    @property
    def _version(self) -> int:
        """Version of the curve of other lengths; 0 without one, or while it knows nothing."""
        return 0 if self._curve is None else self._curve.version

    def _found(self, max_batch_size: int) -> dict[int, int]:
        """Return a typical latency of each size that may run."""
        own = {size: self._typical_ns(size) for size in self._durations}
        counts = {size: len(durations) for size, durations in self._durations.items()}
        sizes: Sequence[int] = self._batch_sizes or range(1, max_batch_size + 1)
        base = _base(self._expected_ns(sizes), own, counts)
        return {
            size: max(1, round(_estimate(base(size), own.get(size), counts.get(size, 0))))
            for size in sizes
        }

    def _expected_ns(self, sizes: Sequence[int]) -> dict[int, float]:
        """Return what the prior and the curve say, up to a common factor."""
        prior, curve, length = self._prior, self._curve, self._length
        last = 0 if prior is None else prior.max_batch_size
        found: dict[int, float] = {}
        if prior is not None:
            found = {size: prior.taken_ns(size) for size in range(1, last + 1)}
        if curve is None or not curve.version:
            return found
        # Beyond the last size of the prior, the curve, scaled to agree with the prior there.
        speed = found[last] / curve.expected_ns(last * length) if found else 1.0
        beyond = {size: speed * curve.expected_ns(size * length) for size in sizes if size > last}
        return found | beyond

    def _profile_of(self, latencies_ns: Mapping[int, float], max_batch_size: int) -> LatencyProfile:
        if self._batch_sizes is None:
            return LatencyProfile(without_noise(latencies_ns.values()))
        return LatencyProfile.measured(latencies_ns, max_batch_size=max_batch_size, pads=True)

    def _forget(self, found: Mapping[int, float], max_batch_size: int) -> bool:
        """Forget sizes that have not run for long, keeping their estimates as the prior.

        Return whether any was forgotten.
        """
        due = []
        for size, durations in self._durations.items():
            doublings = min(self._forgotten[size], _MOST_DOUBLINGS)
            if self._count - durations[-1][0] > _KEPT_BATCHES * len(durations) << doublings:
                due.append(size)
        if not due:
            return False
        if self._prior is not None or self._curve is None:  # a curve forgets by itself
            kept = self._known(found)
            self._prior = self._profile_of(kept, max(kept))
        for size in due:
            self._forgotten[size] += 1
            del self._durations[size]
            self._own.pop(size, None)
        return True


def _some(
    durations: Mapping[int, deque[tuple[int, int]]], is_wanted: Callable[[int], bool]
) -> dict[int, deque[tuple[int, int]]]:
    """Return the durations of batches whose number ``is_wanted``, by size."""
    found = {}
    for size, told in durations.items():
        wanted = [each for each in told if is_wanted(each[0])]
        if wanted:
            found[size] = deque(wanted, maxlen=_KEPT)
    return found


def _weight(count: int, own_ns: float, base_ns: float) -> int:
    """Return how many durations count: one less if slow; quick ones need no confirmation."""
    return count if own_ns <= base_ns else count - 1


def _estimate(base_ns: float, own_ns: float | None, count: int) -> float:
    if own_ns is None:
        return base_ns
    weight = _weight(count, own_ns, base_ns)
    return (weight * own_ns + _PRIOR_WEIGHT * base_ns) / (weight + _PRIOR_WEIGHT)


def _believed(
    size: int, latency_ns: float, firm: Sequence[int], found: Mapping[int, float]
) -> float:
    """Return ``latency_ns``, lowered if a size that is not firm seems to have dearer items.

    Its items then cost what firm sizes say: as in the next smaller one, or on the line from it to
    the next larger one. At equal cost it is tried by queues that are long enough; if it really was
    dearer, little was lost.
    """
    index = bisect_left(firm, size)
    if index == 0 or (index < len(firm) and firm[index] == size):
        return latency_ns
    below = firm[index - 1]
    item_ns = found[below] / below
    if index < len(firm):
        share = (size - below) / (firm[index] - below)
        item_ns += share * (found[firm[index]] / firm[index] - item_ns)
    # Rounded down: a policy takes the larger batch only if its items cost no more.
    return min(latency_ns, math.floor(item_ns * size))


def _base(
    expected: Mapping[int, float], own: Mapping[int, float], counts: Mapping[int, int]
) -> Callable[[float], float]:
    """Return a function of the size: its latency by prior and curve, else by the sizes that ran."""
    ratios = {size: each / expected[size] for size, each in own.items() if size in expected}
    speed = _speed(ratios, counts)
    scaled = {size: each * speed for size, each in expected.items()}
    firm = [size for size in sorted(own) if counts[size] >= _FIRM]
    # One batch that met a pause must not make all larger sizes seem slow.
    believed = {size: _believed(size, each, firm, own) for size, each in own.items()}
    return between({**believed, **scaled})


def _speed(ratios: Mapping[int, float], counts: Mapping[int, int]) -> float:
    """Return how much longer batches take than expected: a geometric mean over sizes."""
    weights = {size: _weight(counts[size], ratio, 1.0) for size, ratio in ratios.items()}
    total = sum(weights.values())
    if not total:
        return 1.0
    logarithm = sum(weights[size] * math.log(ratio) for size, ratio in ratios.items())
    return math.exp(logarithm / (total if logarithm < 0 else total + _PRIOR_WEIGHT))
